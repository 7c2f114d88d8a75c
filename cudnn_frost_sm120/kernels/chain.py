"""The launch chain as one host function: preprocess, main, dq_convert on the caller's stream."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from .dq_convert import DqConvertKernel
from .main import MainKernel
from .main_setup import MainConfig
from .operands import Band, Extents, Lengths, Scratch, Strided
from .preprocess import PreprocessKernel


class BackwardChain:
    def __init__(self, config: MainConfig):
        tile = config.tile
        self.preprocess = PreprocessKernel(config.dtype, tile.headdim_qk, tile.headdim_v, config.padded)
        self.main = MainKernel(config)
        self.dq_convert = DqConvertKernel(config.dtype, tile.headdim_qk)

    @cute.jit
    def __call__(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        o: Strided,
        do: Strided,
        lse: Strided,
        dq: Strided,
        dk: Strided,
        dv: Strided,
        scratch: Scratch,
        extents: Extents,
        band: Band,
        lengths: Lengths | None,
        scale: Float32,
        head_group: Int32,
        stream,
    ):
        self.preprocess.launch(o, do, lse, scratch, extents, lengths, stream)
        self.main.launch(q, k, v, do, dk, dv, scratch, extents, band, lengths, scale, head_group, stream)
        self.dq_convert.launch(dq, scratch, extents, scale, stream)
