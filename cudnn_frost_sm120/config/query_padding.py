"""How far query rows are padded in the workspace; the host's sizes and the kernels' addresses use the same rule."""

from typing import Any

QUERY_PADDING = 64
"""A multiple of every tile_m."""


def padded_queries(seqlen_q: Any) -> Any:
    """Query rows per (batch, head) in the workspace. Takes plain integers and in-kernel values."""
    return (seqlen_q + (QUERY_PADDING - 1)) // QUERY_PADDING * QUERY_PADDING
