"""Windows, bands, both alignments, lengths with NaN behind them, shared key heads, and all of them together."""

import pytest

from cudnn_frost_sm120.facts import MaskFacts

from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MIXED, Case

WINDOWS = [
    MaskFacts(left_bound=1, right_bound=0),  # the key of each row is the row itself
    MaskFacts(left_bound=64, right_bound=0),
    MaskFacts(left_bound=129, right_bound=0, bottom_right=True),
    MaskFacts(left_bound=17, right_bound=40),
    MaskFacts(left_bound=100),
    MaskFacts(left_bound=33, bottom_right=True),
    MaskFacts(right_bound=3),
    MaskFacts(right_bound=100, bottom_right=True),
    MaskFacts(left_bound=10_000, right_bound=10_000),  # bounds that cut nothing
]
LENGTHS = {
    "some": ((300, 77, 129), (400, 130, 64)),
    "one empty": ((300, 0, 1), (0, 400, 1)),
    "all empty": ((0, 0, 0), (0, 0, 0)),
    "queries longer": ((300, 200, 128), (5, 64, 127)),
    "tile edges": ((64, 32, 63), (128, 127, 129)),
    "outside [0, S]": ((1000, -5, 300), (401, 2**31 - 1, -(2**31))),
    "full": ((300, 300, 300), (400, 400, 400)),
}


def wide(mask):
    return "br" * mask.bottom_right + f"L{mask.left_bound}R{mask.right_bound}"


@pytest.mark.parametrize("mask", WINDOWS, ids=wide)
@pytest.mark.parametrize("headdim", [64, 128, 192])
def test_windows(check, mask, headdim):
    """Sliding windows and bands, either side or both, both alignments, S_q below, at and above S_k"""
    for sq, sk in ((300, 300), (129, 400), (400, 129), (1, 65)):
        check(Case(headdim, seqlen_q=sq, seqlen_k=sk, mask=mask, seed=sq))


@pytest.mark.parametrize("mask", [WINDOWS[1], WINDOWS[2], WINDOWS[3]], ids=wide)
def test_long_windows(check, mask):
    """Windows that are narrow for the sequence"""
    check(Case(64, batch=1, seqlen_q=2500, mask=mask))
    check(Case(128, dtype="fp16", batch=1, seqlen_q=2500, mask=mask))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, CAUSAL_BOTTOM_RIGHT, WINDOWS[2], WINDOWS[7]], ids=wide)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("headdim", [64, 128])
def test_lengths(check, mask, lengths, headdim):
    """Per-batch lengths, empty batches included, NaN past every length, lengths outside [0, S] clamped"""
    check(Case(headdim, batch=3, seqlen_q=300, seqlen_k=400, mask=mask, len_q=lengths[0], len_k=lengths[1]))


@pytest.mark.parametrize(("headdim", "headdim_v"), [(32, 32), (40, 72), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("lengths", [LENGTHS["some"], LENGTHS["one empty"]], ids=["some", "one empty"])
def test_lengths_at_other_head_dims(check, headdim, headdim_v, lengths):
    """Lengths at the other native head dims, fp16, layouts with gaps"""
    for mask in (FULL, CAUSAL_BOTTOM_RIGHT):
        more = {"batch": 3, "seqlen_q": 300, "seqlen_k": 400, "len_q": lengths[0], "len_k": lengths[1]}
        check(Case(headdim, headdim_v, "fp16", mask=mask, layouts=MIXED, **more))


def test_key_lengths_alone(check):
    """Key lengths alone"""
    check(Case(64, batch=3, seqlen_q=300, seqlen_k=400, len_k=(400, 3, 200), mask=CAUSAL))
    check(Case(64, batch=3, seqlen_q=300, seqlen_k=400, len_k=(400, 3, 200), mask=CAUSAL), via="wrapper")


@pytest.mark.parametrize(("heads_q", "heads_k"), [(2, 1), (8, 2), (6, 2), (71, 1), (5, 5)])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOWS[2]], ids=wide)
def test_shared_key_heads(check, heads_q, heads_k, mask):
    """GQA and MQA, 71 to 1 included"""
    for headdim in (64, 128):
        sizes = {"batch": 2, "heads_q": heads_q, "heads_k": heads_k, "seqlen_q": 190, "seqlen_k": 270}
        check(Case(headdim, mask=mask, layouts=MIXED, **sizes))


@pytest.mark.parametrize("headdim", [(32, 32), (192, 128), (192, 192), (256, 256)], ids=str)
def test_shared_key_heads_at_other_head_dims(check, headdim):
    """GQA at the other native head dims, with and without lengths"""
    more = {"batch": 2, "heads_q": 6, "heads_k": 2, "seqlen_q": 190, "seqlen_k": 270, "mask": CAUSAL}
    check(Case(*headdim, "fp16", **more))
    check(Case(*headdim, "fp16", len_q=(190, 50), len_k=(100, 270), **more))


@pytest.mark.parametrize("via", ["launcher", "graph", "wrapper"])
@pytest.mark.parametrize("headdim", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_all_at_once(check, via, headdim):
    """Window, bottom-right, lengths, GQA and mixed layouts at once, by all three ways in"""
    mask = MaskFacts(left_bound=150, right_bound=0, bottom_right=True)
    sizes = {"batch": 3, "heads_q": 6, "heads_k": 2, "seqlen_q": 300, "seqlen_k": 400}
    lengths = {"len_q": (300, 77, 0), "len_k": (390, 130, 5)}
    check(Case(*headdim, mask=mask, layouts=MIXED, **sizes, **lengths), via=via)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
@pytest.mark.parametrize("mask", [m for m in WINDOWS[:8] if m.right_bound is not None], ids=wide)
def test_windows_through_the_front(check, via, mask):
    """Windows through a graph and through the wrapper: the same bounds in either spelling"""
    check(Case(64, batch=1, heads_q=4, heads_k=2, seqlen_q=200, seqlen_k=260, mask=mask), via=via)


@pytest.mark.parametrize("via", ["graph", "wrapper"])
def test_more_queries_than_keys(check, via):
    """Bottom-right and windows with S_q > S_k, which cudnn-frontend's validator refuses unless we serve them"""
    check(Case(64, seqlen_q=300, seqlen_k=100, mask=CAUSAL_BOTTOM_RIGHT), via=via)
    check(Case(64, seqlen_q=300, seqlen_k=100, mask=MaskFacts(left_bound=50, right_bound=0)), via=via)
    check(Case(64, seqlen_q=1, seqlen_k=1), via=via)
