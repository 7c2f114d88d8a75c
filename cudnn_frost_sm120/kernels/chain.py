"""The launch chain as one host function, on the caller's stream: preprocess, main, conversion of dQ; with dS stored,
preprocess, main, dq_gemm; with the scores recomputed for dQ, dq_recompute, main. Then what else was asked for.

Consecutive kernels overlap by programmatic dependent launch: each one's set-up runs while its predecessor drains, and
what the predecessor wrote is read only behind `griddepcontrol.wait`. The first kernel is launched the ordinary way, so
that it starts after all earlier work of the stream.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from ..config.padding import padded_keys, padded_queries
from ..device import ds_store
from ..device.select import minimum
from .accumulator_convert import AccumulatorConvertKernel
from .dbias import DbiasConfig, DbiasKernel
from .dq_gemm import DqGemmKernel
from .dq_recompute import DqRecomputeKernel
from .dsink import DsinkKernel
from .main import MainKernel
from .main_setup import MainConfig
from .operands import BiasOperand, Common, Extents, Lengths, Scratch, Strided, read_geometry
from .preprocess import PreprocessKernel


class BackwardChain:
    def __init__(self, config: MainConfig, dbias: DbiasConfig | None):
        tile = config.tile
        self.dbias = None if dbias is None else DbiasKernel(config, dbias)
        self.config = config
        self.preprocess = PreprocessKernel(config)
        self.dq_recompute = DqRecomputeKernel(config)
        self.main = MainKernel(config)
        self.dq_gemm = DqGemmKernel(config)
        self.convert_qk = AccumulatorConvertKernel(config.dtype, tile.headdim_qk)
        self.convert_v = AccumulatorConvertKernel(config.dtype, tile.headdim_v)

    @cute.jit
    def __call__(
        self,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        do: Int64,
        lse: Int64,
        dq: Int64,
        dk: Int64,
        dv: Int64,
        seqlens_q: Int64 | None,
        seqlens_k: Int64 | None,
        sink: Int64 | None,
        dsink: Int64 | None,
        bias: Int64 | None,
        dbias: Int64 | None,
        scale: Int64 | None,
        workspace: Int64,
        geometry: Int64,
        stream,
    ):
        """Device addresses of the operands (None: absent), and the host address of `operands.pack_geometry`'s block."""
        g = read_geometry(geometry)
        e = g.extents
        addresses = (q, k, v, o, do, lse, dq, dk, dv)
        q, k, v, o, do, lse, dq, dk, dv = (Strided(a, *s) for a, s in zip(addresses, g.strides, strict=True))
        scratch = Scratch(*(workspace + offset for offset in g.regions))
        bias = None if bias is None else BiasOperand(bias, *g.bias_strides)
        lengths = Lengths(seqlens_q, seqlens_k) if self.config.padded else None

        common = Common(scratch, e, g.band, lengths, bias, g.scale, scale, g.head_group)
        if cutlass.const_expr(self.config.recomputes):
            self.dq_recompute.launch(q, k, v, o, do, lse, dq, common, stream)
        else:
            self.preprocess.launch(o, do, lse, scratch, e, lengths, stream)
        slots = e.batch * (e.heads_q // e.heads_per_cta)
        if cutlass.const_expr(self.config.stores_ds):
            for first in cutlass.range(0, slots, g.slots_per_launch, unroll=1):
                count = minimum(g.slots_per_launch, slots - first)
                self.store_ds(q, k, v, do, dq, dk, dv, common, g.key_group, first, count, stream)
        else:
            self.main.launch(q, k, v, do, dk, dv, common, g.key_group, None, slots, stream)
        rows_q, rows_k = padded_queries(e.seqlen_q), padded_keys(e.seqlen_k)
        if cutlass.const_expr(self.config.dq_in_main):
            self.convert_qk.launch(
                dq, scratch.dq_accum, e.batch, e.heads_q, e.seqlen_q, rows_q, e.headdim_qk, 1, g.scale, scale, stream
            )
        if cutlass.const_expr(self.config.grouped):
            if e.group_splits > 1:
                self.sum_parts(dk, dv, scratch, e, rows_k, g.scale, scale, stream)
        if cutlass.const_expr(self.dbias is not None):
            dbias_out = BiasOperand(dbias, *g.dbias_strides)
            self.dbias.launch(q, k, v, do, dbias_out, *g.dbias_extents, common, stream)
        if cutlass.const_expr(dsink is not None):
            DsinkKernel().launch(sink, dsink, scratch, e, stream)

    @cute.jit
    def store_ds(
        self,
        q: Strided,
        k: Strided,
        v: Strided,
        do: Strided,
        dq: Strided,
        dk: Strided,
        dv: Strided,
        common: Common,
        key_group,
        first,
        count,
        stream,
    ):
        """The main kernel and dQ for `count` slots from `first` on; their dS takes the place of the last ones'."""
        e, band, scratch = common.extents, common.band, common.scratch
        first_head = first * e.heads_per_cta
        keys = ds_store.strip_keys(e.seqlen_k, self.config.mask, band.left_bound, band.right_bound)
        before = ds_store.ds_bytes(Int64(first_head), e.seqlen_q, keys)
        common = common._replace(scratch=scratch._replace(ds=scratch.ds - before))
        self.main.launch(q, k, v, do, dk, dv, common, key_group, first, count, stream)
        self.dq_gemm.launch(k, dq, common, first_head, count * e.heads_per_cta, stream)

    @cute.jit
    def sum_parts(self, dk: Strided, dv: Strided, scratch: Scratch, e: Extents, rows_k, scale, scale_address, stream):
        """dK and dV from the parts that the CTAs of a split group left."""
        keys = (e.batch, e.heads_k, e.seqlen_k, rows_k)
        self.convert_qk.launch(
            dk, scratch.dk_partial, *keys, e.headdim_qk, e.group_splits, scale, scale_address, stream
        )
        self.convert_v.launch(dv, scratch.dv_partial, *keys, e.headdim_v, e.group_splits, Float32(1.0), None, stream)
