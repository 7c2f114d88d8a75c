"""Which query tiles a key tile visits, and the reverse. The same Python runs on plain integers and in a kernel."""

from __future__ import annotations

from .mask import Mask
from .select import maximum, minimum, select
from .seqlen import SeqlenInfo


def query_tiles(n_block, tile_m: int, tile_n: int, seqlen: SeqlenInfo, mask: Mask):
    """Half-open range of query tiles in which any pair with a key of tile `n_block` may be kept.

    Empty ranges have end == begin. Shifts, not divisions: they round down for negative values in a kernel too.
    """
    shift = tile_m.bit_length() - 1
    first_key = n_block * tile_n
    first_query, end_query = 0, seqlen.len_q
    if mask.kinds.right:
        first_query = maximum(first_key - mask.right_reach, 0)
    if mask.kinds.left:
        last_key = minimum(first_key + tile_n, seqlen.len_k) - 1
        end_query = minimum(end_query, last_key + mask.left_reach)
    begin = first_query >> shift
    end = (end_query + tile_m - 1) >> shift
    nothing = (first_key >= seqlen.len_k) | (end_query <= first_query)
    return begin, select(nothing, begin, maximum(begin, end))


def key_tiles(m_block, tile_m: int, tile_n: int, seqlen: SeqlenInfo, mask: Mask):
    """Half-open range of key tiles in which any pair with a query of tile `m_block` may be kept."""
    shift = tile_n.bit_length() - 1
    first_query = m_block * tile_m
    first_key, end_key = 0, seqlen.len_k
    if mask.kinds.left:
        first_key = maximum(first_query - mask.left_reach + 1, 0)
    if mask.kinds.right:
        last_query = minimum(first_query + tile_m, seqlen.len_q) - 1
        end_key = minimum(end_key, last_query + mask.right_reach + 1)
    begin = first_key >> shift
    end = (end_key + tile_n - 1) >> shift
    nothing = (first_query >= seqlen.len_q) | (end_key <= first_key)
    return begin, select(nothing, begin, maximum(begin, end))
