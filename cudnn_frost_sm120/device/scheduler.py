"""Which (key tile, head, batch) a CTA works on: a 1-D grid, so that no extent meets a grid limit but their product."""

from __future__ import annotations

from .select import minimum


def key_tile_of(block, n_blocks, heads, batches, head_group):
    """(n_block, head, batch) of a CTA. Neighbours share a key tile index over `head_group` heads, then step along keys.

    A group of 1 keeps one head's query tiles in L2; larger groups start the heavy key tiles of a causal mask first.
    """
    per_group = n_blocks * head_group
    group = block // per_group
    within = block - group * per_group
    first = group * head_group
    size = minimum(heads * batches - first, head_group)
    n_block = within // size
    batch_head = first + within - n_block * size
    batch = batch_head // heads
    return n_block, batch_head - batch * heads, batch
