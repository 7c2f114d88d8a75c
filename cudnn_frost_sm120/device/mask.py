"""Which (query, key) pairs are kept. The same Python runs on plain integers and inside a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .select import minimum, select

NOTHING = 2**31 - 1


@dataclass(frozen=True)
class MaskKinds:
    """Compile-time part: which bounds exist. Widths and lengths are run-time values."""

    right: bool = False  # keep k <= q + diag + R
    left: bool = False  # keep k >  q + diag - L
    rows: bool = False  # test q < len_q too: only with a bias, whose padded rows may hold NaN


@dataclass(frozen=True)
class Mask:
    """Run-time part, seen from a key: k keeps the queries of `[k - right_reach, k + left_reach)`, if k < len_k.

    `right_reach = diag + R` and `left_reach = L - diag`. Queries past the query length need no test without a bias:
    their LSE is +inf (preprocess) and their scores are finite, so that P is 0.
    """

    kinds: MaskKinds
    len_k: Any
    right_reach: Any
    left_reach: Any
    len_q: Any

    @classmethod
    def create(cls, kinds: MaskKinds, len_q, len_k, diagonal, left_bound, right_bound) -> Mask:
        return cls(kinds, len_k, diagonal + right_bound, left_bound - diagonal, len_q)

    def first_query(self, key):
        """First query that the key keeps; NOTHING for a key past the length."""
        first = key - self.right_reach if self.kinds.right else 0
        return select(key < self.len_k, first, NOTHING)

    def end_query(self, key):
        """One past the last query that the key keeps; None when no bound is tested."""
        end = key + self.left_reach if self.kinds.left else None
        if self.kinds.rows:
            end = self.len_q if end is None else minimum(end, self.len_q)
        return end

    def first_key(self, query):
        """First key that the query keeps; None when no bound is tested."""
        return query - self.left_reach + 1 if self.kinds.left else None

    def end_key(self, query):
        """One past the last key that the query keeps; 0 for a query past the length, where that is tested."""
        end = minimum(self.len_k, query + self.right_reach + 1) if self.kinds.right else self.len_k
        return select(query < self.len_q, end, 0) if self.kinds.rows else end

    def drops_tile(self, query, queries: int, key, keys: int):
        """Whether every pair of the tile at (query, key) is masked, but for the query length."""
        drops = key >= self.len_k
        if self.kinds.right:
            drops = drops | (query + queries <= key - self.right_reach)
        if self.kinds.left:
            drops = drops | (query >= key + (keys - 1) + self.left_reach)
        return drops

    def cuts_tile(self, query, queries: int, key, keys: int):
        """Whether any pair of the tile at (query, key) is masked."""
        cut = key + keys > self.len_k
        if self.kinds.right:
            cut = cut | (query < key + (keys - 1) - self.right_reach)
        if self.kinds.left:
            cut = cut | (query + queries > key + self.left_reach)
        if self.kinds.rows:
            cut = cut | (query + queries > self.len_q)
        return cut
