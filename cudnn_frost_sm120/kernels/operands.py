"""What the host hands to the chain: device addresses, and one block of host memory with the geometry.

Everything is run-time: a chain compiles once for all shapes. The block exists because unpacking forty scalars per call
would cost more host time than a kernel launch; the host function reads it with plain loads.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

TENSORS = ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")
"""Strided operands that every launch has, in the chain's order."""


class Extents(NamedTuple):
    batch: Any
    heads_q: Any
    heads_k: Any
    seqlen_q: Any
    seqlen_k: Any
    headdim_qk: Any
    headdim_v: Any
    heads_per_cta: Any  # query heads of a group that one CTA of the main kernel walks

    @property
    def group_splits(self):
        """CTAs that share a key tile: each walks a part of the query heads of its group."""
        return self.heads_q // (self.heads_k * self.heads_per_cta)


class Band(NamedTuple):
    """Run-time part of the mask: bounds as in the design, bounded by the host so that 32-bit sums cannot wrap."""

    bottom_right: Any
    left_bound: Any
    right_bound: Any


class Strided(NamedTuple):
    """A (batch, head, sequence, head dim) tensor in global memory; strides in elements, the head dim contiguous."""

    address: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any

    def row(self, batch, head, row):
        """Element offset of a row, in 64 bits."""
        from cutlass import Int64

        return Int64(batch) * self.stride_b + Int64(head) * self.stride_h + Int64(row) * self.stride_s


class BiasOperand(NamedTuple):
    """A (batch, head, query, key) tensor; strides in elements, 0 where it is broadcast."""

    address: Any
    stride_b: Any
    stride_h: Any
    stride_q: Any
    stride_k: Any


class Lengths(NamedTuple):
    """Addresses of int32 lengths per batch entry, one element apart."""

    seqlens_q: Any
    seqlens_k: Any


class Scratch(NamedTuple):
    """Addresses of the workspace regions."""

    lse: Any  # fp32 [batch * heads_q][padded seqlen_q], in log2 units, +inf where P must be 0
    delta: Any  # fp32 [batch * heads_q][padded seqlen_q]
    dq_accum: Any  # fp32 accumulator, device/accumulator.py
    dk_partial: Any  # fp32 accumulators of the group splits; not there where one CTA walks a whole group
    dv_partial: Any
    turns: Any  # int32 counters of the relay, [batch * heads_q][query tile][warp pair]
    ticket: Any  # int32, one
    ds: Any  # 16-bit dS, device/ds_store.py; only where a GEMM of its own computes dQ


class Common(NamedTuple):
    """What every kernel is told that works on the score matrix."""

    scratch: Scratch
    extents: Extents
    band: Band
    lengths: Lengths | None
    bias: BiasOperand | None
    scale: Any  # fp32, where there is no scale_address
    scale_address: Any  # of one fp32 in device memory; or None
    head_group: Any  # (batch, head) whose tiles are worked on together (device/scheduler.py)


class Geometry(NamedTuple):
    """Contents of the block, in order; every value is one 64-bit word."""

    strides: Any  # (batch, head, sequence) of each of TENSORS
    bias_strides: Any  # (batch, head, query, key), 0 where broadcast or absent
    dbias_strides: Any
    dbias_extents: Any  # (batch, head): 1 where dBias is summed over that dim
    extents: Extents
    band: Band
    head_group: Any
    key_group: Any
    slots_per_launch: Any  # (batch, walked heads) that the main kernel works on at a time, where dS is stored
    scale: Any  # fp32, in the low half of its word
    regions: Any  # byte offsets of the Scratch fields from the workspace base, 0 for absent ones


WORDS = 3 * len(TENSORS) + 10 + len(Extents._fields) + len(Band._fields) + 4 + len(Scratch._fields)


def pack_geometry(g: Geometry) -> bytes:
    """The block for plain Python numbers."""
    strides = (stride for triple in g.strides for stride in triple)
    words = [
        *strides,
        *g.bias_strides,
        *g.dbias_strides,
        *g.dbias_extents,
        *g.extents,
        *g.band,
        g.head_group,
        g.key_group,
        g.slots_per_launch,
    ]
    bits = struct.unpack("<I", struct.pack("<f", g.scale))[0]
    return struct.pack(f"<{WORDS}q", *words, bits, *g.regions)


def read_geometry(block) -> Geometry:
    """Load the block in the traced host function; `block` is its host address."""
    import cutlass
    from cutlass import Float32, Int32, Int64
    from cutlass._mlir.dialects import llvm

    base = llvm.inttoptr(llvm.PointerType.get(0), Int64(block).ir_value())
    words = cutlass.Pointer(base, dtype=Int64)
    at = iter(range(WORDS))

    def take(count: int):
        return [(words + next(at)).load() for _ in range(count)]

    strides = [take(3) for _ in TENSORS]
    bias_strides, dbias_strides, dbias_extents = take(4), take(4), take(2)
    extents = Extents(*(Int32(word) for word in take(len(Extents._fields))))
    band = Band(*(Int32(word) for word in take(len(Band._fields))))
    schedule = (Int32(word) for word in take(3))
    scale = cutlass.Pointer(base, dtype=Float32) + 2 * next(at)
    regions = take(len(Scratch._fields))
    dbias_extents = [Int32(word) for word in dbias_extents]
    broadcasts = (bias_strides, dbias_strides, dbias_extents)
    return Geometry(strides, *broadcasts, extents, band, *schedule, scale.load(), regions)
