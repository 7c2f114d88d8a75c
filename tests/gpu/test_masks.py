"""Windows, bands, both alignments, lengths with NaN behind them, shared key heads, and all of them together."""

import pytest

from cudnn_frost_sm120.facts import MaskFacts

from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MIXED, Case, each

WINDOWS = [
    MaskFacts(left_bound=1, right_bound=0),  # the key of each row is the row itself
    MaskFacts(left_bound=64, right_bound=0),
    MaskFacts(left_bound=129, right_bound=0, bottom_right=True),
    MaskFacts(left_bound=17, right_bound=40),
    MaskFacts(right_bound=3),
    MaskFacts(right_bound=100, bottom_right=True),
    MaskFacts(left_bound=100),
    MaskFacts(left_bound=33, bottom_right=True),
    MaskFacts(left_bound=10_000, right_bound=10_000),  # bounds that cut nothing
]
SQUARES = [(300, 300), (129, 400), (400, 129), (1, 65)]
SOME, ONE_EMPTY = ((300, 77, 129), (400, 130, 64)), ((300, 0, 1), (0, 400, 1))
LENGTHS = [
    SOME,
    ONE_EMPTY,
    ((0, 0, 0), (0, 0, 0)),
    ((300, 200, 128), (5, 64, 127)),  # more queries than keys
    ((64, 32, 63), (128, 127, 129)),  # at tile edges
    ((1000, -5, 300), (401, 2**31 - 1, -(2**31))),  # outside [0, S]
    ((300, 300, 300), (400, 400, 400)),
    (None, (400, 3, 200)),  # keys only
]
SIZES = {"batch": 3, "seqlen_q": 300, "seqlen_k": 400}
NATIVE = [(32, 32), (64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]


def padded(lengths, headdim, *more, **sizes):
    return Case(*headdim, *more, len_q=lengths[0], len_k=lengths[1], **{**SIZES, **sizes})


@each(Case(d, seqlen_q=sq, seqlen_k=sk, mask=m) for d in (64, 128, 192) for m in WINDOWS for sq, sk in SQUARES)
def test_windows(check, case):
    """Sliding windows and bands, either side or both, both alignments, S_q below, at and above S_k"""
    check(case)


@each(
    Case(d, dtype=dtype, batch=1, seqlen_q=2500, mask=mask)
    for d, dtype in ((64, "bf16"), (128, "fp16"))
    for mask in (WINDOWS[1], WINDOWS[2], WINDOWS[3])
)
def test_long_windows(check, case):
    """Windows that are narrow for the sequence"""
    check(case)


@each(
    padded(lengths, (d,), mask=mask)
    for d in (64, 128)
    for lengths in LENGTHS
    for mask in (FULL, CAUSAL, CAUSAL_BOTTOM_RIGHT, WINDOWS[2], WINDOWS[5])
)
def test_lengths(check, case):
    """Per-batch lengths, empty batches included, NaN past every length, lengths outside [0, S] clamped"""
    check(case)


@each(
    padded(lengths, headdim, "fp16", mask=mask, layouts=MIXED)
    for headdim in [(40, 72), *NATIVE]
    for lengths in (SOME, ONE_EMPTY)
    for mask in (FULL, CAUSAL_BOTTOM_RIGHT)
)
def test_lengths_at_every_native_head_dim(check, case):
    """Lengths at every native pair of head dims, mixed layouts"""
    check(case)


@each(
    Case(d, batch=2, heads_q=hq, heads_k=hk, seqlen_q=190, seqlen_k=270, mask=mask, layouts=MIXED)
    for d in (64, 128)
    for hq, hk in ((2, 1), (8, 2), (6, 2), (71, 1), (5, 5))
    for mask in (FULL, CAUSAL, WINDOWS[2])
)
def test_shared_key_heads(check, case):
    """GQA and MQA, 71 to 1 included; every offered plan"""
    check(case)


@each(
    padded(lengths, headdim, "fp16", batch=3, heads_q=6, heads_k=2, mask=CAUSAL)
    for headdim in NATIVE
    for lengths in ((None, None), SOME)
)
def test_shared_key_heads_at_every_native_head_dim(check, case):
    """GQA at every native pair of head dims, with and without lengths; every offered plan"""
    check(case)


@pytest.mark.parametrize("via", ["launcher", "graph", "wrapper"])
@each(
    padded(lengths, (d,), heads_q=6, heads_k=2, mask=WINDOWS[2], layouts=MIXED)
    for d in (64, 128, 256)
    for lengths in (SOME, ONE_EMPTY)
)
def test_all_at_once(check, case, via):
    """Window, bottom-right, lengths, GQA and mixed layouts at once, by all three ways in"""
    check(case, via=via)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@each(padded(lengths, (64,), mask=CAUSAL) for lengths in LENGTHS)
def test_lengths_through_the_front(check, case, via):
    """Lengths through a graph and through the wrapper"""
    check(case, via=via)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@each(Case(64, batch=1, heads_q=4, heads_k=2, seqlen_q=200, seqlen_k=260, mask=mask) for mask in WINDOWS[:6])
def test_windows_through_the_front(check, case, via):
    """Windows through a graph and through the wrapper: the same bounds in either spelling"""
    check(case, via=via)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@each(
    [
        Case(64, seqlen_q=300, seqlen_k=100, mask=CAUSAL_BOTTOM_RIGHT),
        Case(64, seqlen_q=300, seqlen_k=100, mask=MaskFacts(left_bound=50, right_bound=0)),
        Case(64, seqlen_q=1, seqlen_k=1),
        Case(64, seqlen_q=1, seqlen_k=1, mask=CAUSAL),
    ]
)
def test_what_the_original_validator_refuses(check, case, via):
    """Bottom-right and windows with S_q > S_k, and S_q = S_k = 1, through a graph and the wrapper"""
    check(case, via=via)
