"""Limits of the SM120 line (SM120, SM121) that every kernel is held to, on the stand-in too."""

WARP_SIZE = 32
SMEM_CAPACITY = 101_376
"""Bytes of shared memory one CTA may use (99 KB)."""
REGISTERS_PER_SM = 65_536
MAX_REGISTERS_PER_THREAD = 255
MAX_GRID_X = 2**31 - 1
TMA_ALIGNMENT = 16
"""Bytes: base addresses and all strides of a tensor that TMA reads are multiples of this."""
TMA_MAX_STRIDE = 2**40
"""Bytes: strides of a tensor map are below this."""

FORBIDDEN_SASS = ("WGMMA", "HGMMA", "UTCMMA", "UTCHMMA", "UTMALDG.MULTICAST", "UCGABAR", "TCGEN05", "LDTM", "STTM")
"""Instruction prefixes that SM120 lacks (warpgroup MMA, clusters, multicast, tensor memory)."""
