"""min, max, select and widening that take plain Python integers and in-kernel values alike.

The index rules (lengths, block ranges, masks) are written with these, so that the same Python runs inside a kernel and
in host tests against brute force.
"""

from __future__ import annotations


def _is_plain(a, b=0) -> bool:
    return isinstance(a, int) and isinstance(b, int)


def select(condition, a, b):
    """`a` where the condition holds, else `b`."""
    if _is_plain(condition):
        return a if condition else b
    import cutlass  # here, so that planning on plain integers does not load the DSL

    a, b = (cutlass.Int32(v) if _is_plain(v) else v for v in (a, b))
    return cutlass.select_(condition, a, b)


def minimum(a, b):
    return min(a, b) if _is_plain(a, b) else select(a < b, a, b)


def maximum(a, b):
    return max(a, b) if _is_plain(a, b) else select(a > b, a, b)


def wide(value):
    """The value in 64 bits."""
    if _is_plain(value):
        return value
    import cutlass

    return cutlass.Int64(value)
