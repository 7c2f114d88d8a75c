"""Every two features together."""

from .cases import each
from .pairwise import cases


@each(cases())
def test_every_pair(check, case):
    """Every two of: masks, lengths, groups, sinks, biases, dtypes, head dims, layouts, routes, sizes"""
    check(case)
