"""The additive bias of a score tile, read from global memory as the softmax is recomputed.

Any broadcast is a stride of 0. Values are finite or -inf; they are scaled to log2 units and kept above `LOWEST`, so
that a row of finfo.min stays finite against its own LSE (preprocess bounds that the same way).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .copy import gmem_ptr
from .select import minimum

LOG2_E = 1.4426950408889634
LOWEST = -3.0e38


@dataclass(frozen=True)
class Bias:
    """A (batch, head, query, key) tensor; strides in elements, 0 where it is broadcast."""

    dtype: Any
    address: Any
    stride_b: Any
    stride_h: Any
    stride_q: Any
    stride_k: Any
    seqlen_q: Any
    seqlen_k: Any

    def tile(self, batch, head, query, key):
        """Pointer to the score at (query, key), the origin of a tile."""
        offset = Int64(batch) * self.stride_b + Int64(head) * self.stride_h
        return gmem_ptr(self.address, self.dtype) + (offset + Int64(query) * self.stride_q + Int64(key) * self.stride_k)

    def query_offset(self, query, row: int):
        """Offset of row `row` of a tile at `query`, in 32 bits (admission bounds the stride).

        A row outside the tensor reads its last one: the mask drops those scores.
        """
        return (minimum(query + row, self.seqlen_q - 1) - query) * Int32(self.stride_q)

    def key_offset(self, key, column):
        """`query_offset` for a key."""
        return (minimum(key + column, self.seqlen_k - 1) - key) * Int32(self.stride_k)

    def log2(self, ptr):
        """A value in log2 units."""
        return cute.arch.fmax(Float32(ptr.load()) * Float32(LOG2_E), Float32(LOWEST))
