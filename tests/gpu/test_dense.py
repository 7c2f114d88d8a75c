"""The dense grid: head dims, dtypes, lengths, the plain masks, and a layout of its own for every tensor."""

import pytest

from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MIXED, Case, each

HEADDIMS = [(d, d) for d in (8, 40, 64, 72, 96, 128, 160, 192, 256)] + [(192, 128)]
SEQLENS = [(1, 128), (63, 63), (65, 65), (129, 129), (257, 257), (1000, 1000), (4096, 4096)]
MASKS = [FULL, CAUSAL, CAUSAL_BOTTOM_RIGHT]
DTYPES = ["bf16", "fp16"]


def grid(headdims, seqlens, dtypes=DTYPES):
    return [
        Case(d, dv, dtype, seqlen_q=sq, seqlen_k=sk, mask=mask, layouts=MIXED, seed=sq + d + dv)
        for d, dv in headdims
        for dtype in dtypes
        for mask in MASKS
        for sq, sk in seqlens
    ]


@each(grid(HEADDIMS, SEQLENS))
def test_grid(check, case):
    """Dense grid: 10 pairs of head dims, S 1x128 to 4096, no mask, causal, causal bottom-right, mixed layouts"""
    check(case)


@each(grid([(64, 64), (96, 96), (192, 128), (256, 256)], [(1, 128), (129, 129), (1000, 1000)], ["bf16"]))
def test_through_a_graph(check, case):
    """The same through cudnn.pygraph, our plan selected"""
    check(case, via="graph")


@each(grid([(40, 40), (128, 128)], [(257, 257)], ["fp16"]))
def test_fp16_through_a_graph(check, case):
    """The same through cudnn.pygraph in fp16"""
    check(case, via="graph")


@each(grid([(64, 64), (96, 96), (192, 128)], [(65, 65), (1000, 1000)]))
def test_through_the_wrapper(check, case):
    """The same through sdpa_bwd_wrapper_dsl_sm120"""
    check(case, via="wrapper")


RECTANGLES = [(1, 1), (2, 1), (64, 1), (1, 500), (300, 100), (100, 300), (513, 64)]


@each(Case(d, seqlen_q=sq, seqlen_k=sk, mask=m) for d in (64, 128) for sq, sk in RECTANGLES for m in MASKS)
def test_rectangles(check, case):
    """S_q other than S_k, down to one row and one key"""
    check(case)


@pytest.mark.parametrize("d", range(8, 257, 8))
def test_every_head_dim(check, d):
    """Every head dim from 8 to 256, and each with a narrow and a wide d_v"""
    for dv in (d, 8, 256 if d > 128 else 128):
        check(Case(d, dv, seqlen_q=100, seqlen_k=130, layouts=("gaps", "bhsd"), seed=d))
