"""What the host hands to the chain: one record per kind of value, all run-time, in a fixed order.

Addresses and strides are 64-bit; strides count elements and come in the order batch, head, sequence (the head dim is
contiguous). `None` for an absent operand, which folds its code away at compile time.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Extents(NamedTuple):
    batch: Any
    heads_q: Any
    heads_k: Any
    seqlen_q: Any
    seqlen_k: Any
    headdim_qk: Any
    headdim_v: Any


class Strided(NamedTuple):
    """A (batch, head, sequence, head dim) tensor in global memory."""

    address: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any

    def row(self, batch, head, row):
        """Element offset of a row, in 64 bits."""
        from cutlass import Int64

        return Int64(batch) * self.stride_b + Int64(head) * self.stride_h + Int64(row) * self.stride_s


class Band(NamedTuple):
    """Run-time part of the mask: bounds as in the design, clamped by the host so that 32-bit sums cannot wrap."""

    bottom_right: Any
    left_bound: Any
    right_bound: Any


class Lengths(NamedTuple):
    """Addresses of int32 lengths per batch entry, one element apart."""

    seqlens_q: Any
    seqlens_k: Any


class Scratch(NamedTuple):
    """Addresses of the workspace regions."""

    lse: Any  # fp32 [batch * heads_q][padded seqlen_q], in log2 units, +inf where P must be 0
    delta: Any  # fp32 [batch * heads_q][padded seqlen_q]
    dq_accum: Any  # fp32, device/dq_accum.py
