"""Cases in which every two choices meet: each pair of values of each two axes occurs in at least one case."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from cudnn_frost_sm120.facts import MaskFacts

from .cases import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MIXED, Case

BATCH, HEADS_K = 4, 2

AXES: dict[str, dict[str, Any]] = {
    "mask": {
        "none": FULL,
        "causal": CAUSAL,
        "causal br": CAUSAL_BOTTOM_RIGHT,
        "window": MaskFacts(left_bound=40, right_bound=0),
        "window br": MaskFacts(left_bound=40, right_bound=0, bottom_right=True),
        "band": MaskFacts(left_bound=17, right_bound=30),
    },
    "lengths": {"none": False, "some": True},
    "group": {"1": 1, "2": 2, "7": 7},
    "sink": {"no": False, "yes": True},
    "bias": {
        "none": None,
        "full": (1, 1, 1, 1),
        "any batch": (0, 1, 1, 1),
        "any head": (1, 0, 1, 1),
        "one row": (1, 1, 0, 1),
        "one column": (1, 1, 1, 0),
    },
    "dbias": {"no": False, "yes": True},
    "bias dtype": {"fp32": "fp32", "io": "io"},
    "dtype": {"fp16": "fp16", "bf16": "bf16"},
    "head dims": {str(dims): dims for dims in ((32, 32), (64, 64), (128, 128), (192, 128), (256, 256), (40, 72))},
    "layouts": {"contiguous": ("bhsd",), "mixed": MIXED, "gaps": ("gaps",)},
    "deterministic": {"no": False, "yes": True},
    "sizes": {"more keys": (90, 150), "more queries": (150, 70), "one query": (1, 100)},
}
"""Axis -> name of a value -> the value."""

IMPOSSIBLE = {(("bias", "none"), ("dbias", "yes")), (("bias", "none"), ("bias dtype", "io"))}
"""Pairs that no graph has."""

Choice = tuple[str, str]  # axis, name of the value


def choices(axis: str) -> list[Choice]:
    return [(axis, value) for value in AXES[axis]]


def pair(one: Choice, other: Choice) -> tuple[Choice, Choice]:
    """The two in the order of the axes."""
    order = list(AXES)
    return (one, other) if order.index(one[0]) < order.index(other[0]) else (other, one)


def possible_pairs() -> set[tuple[Choice, Choice]]:
    pairs = {(a, b) for x, y in combinations(AXES, 2) for a in choices(x) for b in choices(y)}
    return pairs - IMPOSSIBLE


def cover(seed: int = 0, tries: int = 40) -> list[dict[str, str]]:
    """Rows, axis -> name of a value, that hold every possible pair.

    Greedy: of a few candidates, each grown from a pair that is still missing by the values that add the most missing
    pairs, the one that covers most becomes the next row.
    """
    rng = random.Random(seed)
    missing = possible_pairs()
    rows = []
    while missing:
        ordered = sorted(missing)
        candidates = [_grown(rng.choice(ordered), missing, rng) for _ in range(tries)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def pairs_of(row: Mapping[str, str]) -> set[tuple[Choice, Choice]]:
    return {pair(*two) for two in combinations(row.items(), 2)}


def _grown(start: tuple[Choice, Choice], missing: set[tuple[Choice, Choice]], rng: random.Random) -> dict[str, str]:
    row = dict(start)
    rest = [axis for axis in AXES if axis not in row]
    rng.shuffle(rest)
    for axis in rest:
        allowed = [c for c in choices(axis) if not any(pair(c, held) in IMPOSSIBLE for held in row.items())]
        rng.shuffle(allowed)
        axis, value = max(allowed, key=lambda c: sum(pair(c, held) in missing for held in row.items()))
        row[axis] = value
    return row


def case_of(row: Mapping[str, str], seed: int) -> Case:
    value = {axis: AXES[axis][name] for axis, name in row.items()}
    seqlen_q, seqlen_k = value["sizes"]
    lengths = {}
    if value["lengths"]:  # of every kind: all, none, inside a tile, out of range
        lengths = {"len_q": (seqlen_q, 0, 37, 2**31 - 1), "len_k": (seqlen_k // 3, 20, 0, seqlen_k + 5)}
        if seed % 2:
            lengths = {"len_q": (seqlen_q + 5, 33, seqlen_q, -3), "len_k": (64, seqlen_k, -(2**31), 1)}
    return Case(
        *value["head dims"],
        value["dtype"],
        batch=BATCH,
        heads_q=HEADS_K * value["group"],
        heads_k=HEADS_K,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask=value["mask"],
        layouts=value["layouts"],
        sink=value["sink"],
        bias=value["bias"],
        bias_dtype=value["bias dtype"],
        dbias=value["dbias"],
        deterministic=value["deterministic"],
        seed=seed,
        **lengths,
    )


def cases() -> list[Case]:
    return [case_of(row, seed) for seed, row in enumerate(cover())]
