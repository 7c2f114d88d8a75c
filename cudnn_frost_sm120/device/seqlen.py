"""Lengths of one batch entry, read once, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .select import maximum, minimum, select


@dataclass(frozen=True)
class SeqlenInfo:
    """`seqlen_*` are the tensors' extents, `len_*` the rows that count (clamped to [0, seqlen])."""

    seqlen_q: Any
    seqlen_k: Any
    len_q: Any
    len_k: Any

    @classmethod
    def create(cls, seqlen_q, seqlen_k, len_q=None, len_k=None) -> SeqlenInfo:
        """`len_*` None: every row counts."""
        return cls(
            seqlen_q,
            seqlen_k,
            seqlen_q if len_q is None else minimum(maximum(len_q, 0), seqlen_q),
            seqlen_k if len_k is None else minimum(maximum(len_k, 0), seqlen_k),
        )

    def diagonal(self, bottom_right):
        """The k that aligns with q = 0: 0 (top-left) or len_k - len_q (bottom-right)."""
        return select(bottom_right, self.len_k - self.len_q, 0)
