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

FORBIDDEN_SASS = (r"[A-Z]GMMA", "WARPGROUP", "UTC", "LDTM", "STTM", "LDT", "STT", "UCGABAR", "MAPA", r"\S*\.MULTICAST")
"""Patterns of opcodes that SM120 lacks: warpgroup MMA, tcgen05 and tensor memory, clusters, multicast."""
SPILL_SASS = ("LDL", "STL", "CALL")
"""Local memory, and calls, which need it."""
