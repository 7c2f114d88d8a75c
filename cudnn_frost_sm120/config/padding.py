"""How far rows are padded in the workspace; the host's sizes and the kernels' addresses use the same rules."""

from typing import Any

QUERY_PADDING = 64
"""A multiple of every tile_m."""
KEY_PADDING = 128
"""A multiple of every tile_n."""


def padded_queries(seqlen_q: Any) -> Any:
    """Query rows per (batch, head) in the workspace. Takes plain integers and in-kernel values."""
    return (seqlen_q + (QUERY_PADDING - 1)) // QUERY_PADDING * QUERY_PADDING


def padded_keys(seqlen_k: Any) -> Any:
    """Key rows per (batch, head, part) in the workspace."""
    return (seqlen_k + (KEY_PADDING - 1)) // KEY_PADDING * KEY_PADDING
