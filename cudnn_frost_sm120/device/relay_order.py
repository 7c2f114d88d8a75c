"""The order in which the relay works on key tiles, and whose turn it is. The same Python runs on plain
integers and in a kernel.

Key tiles come in groups of about as many as run at a time: the groups from the first on (a causal mask makes those the
heaviest), each from its last tile to its first. So under a causal mask a CTA starts on its diagonal, where nobody of
its group comes before it, and every tile that it meets later was left by the others some time ago.
"""

from __future__ import annotations

from .mask import Mask
from .select import maximum, minimum


def ordered_key_tile(position, n_blocks, group):
    """The key tile at a position of this order. `group` is a power of two."""
    first = position & ~(group - 1)
    return first + minimum(first + group, n_blocks) - 1 - position


def key_turn(n_block, m_block, tile_m: int, tile_n: int, mask: Mask, group):
    """How many key tiles that visit query tile `m_block` come before `n_block`, which visits it (`query_tiles`)."""
    shift = tile_n.bit_length() - 1
    group_first = n_block & ~(group - 1)
    last = (mask.len_k - 1) >> shift
    if mask.kinds.right:
        end_query = minimum((m_block + 1) * tile_m, mask.len_q)
        last = minimum(last, (end_query + mask.right_reach - 1) >> shift)
    before = minimum(last, group_first + group - 1) - n_block
    first = 0
    if mask.kinds.left:
        first = maximum((m_block * tile_m + 1 - mask.left_reach) >> shift, 0)
    return before + maximum(group_first - first, 0)
