"""Random problems from a seed: three in four are meant to be served, the rest are odd in one respect or two."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cudnn_frost_sm120.facts import BwdFacts, MaskFacts, TensorFacts

from .cases import Case, facts_of, unserved

LAYOUTS = ("bshd", "bhsd", "sbhd", "gaps", "odd_ones")
EDGES = (1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
NATIVE = (32, 64, 128, 192, 256)
BIASES = ((1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1))


@dataclass(frozen=True)
class Drawn:
    """One problem: the case it started as, the facts it became, and graph attributes that no fact record holds."""

    seed: int
    case: Case
    facts: BwdFacts
    oddities: tuple[str, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


STRUCTURES = 250
"""What a chain is compiled for recurs after so many seeds: a compile takes seconds, a run milliseconds."""


def draw(seed: int) -> Drawn:
    rng = random.Random(seed)
    case = random_case(random.Random(seed % STRUCTURES), rng, seed)
    drawn = Drawn(seed, case, facts_of(case))
    if rng.random() < 0.75:
        return drawn
    known = ODDITIES | GRAPH_ODDITIES
    for name in rng.sample(sorted(known), rng.choice((1, 1, 2))):
        drawn = replace(known[name](drawn, rng), oddities=(*drawn.oddities, name))
    return drawn


def random_case(structure: random.Random, rng: random.Random, seed: int) -> Case:
    """A case that should be served, but for features that support.py does not list yet.

    `structure` decides what may select a kernel, `rng` every extent, width and value.
    """
    d = _headdim(structure)
    dv = d if structure.random() < 0.6 else _headdim(structure)
    dtype, grouped = structure.choice(("bf16", "fp16")), structure.random() < 0.5
    mask, padded, sink = _mask_kinds(structure), structure.random() < 0.3, structure.random() < 0.2
    bias = structure.choice(BIASES) if structure.random() < 0.2 else None
    bias_dtype, dbias = structure.choice(("fp32", "io")), bias is not None and structure.random() < 0.5
    deterministic, scale_tensor = structure.random() < 0.1, structure.random() < 0.1

    heads_k, group = rng.choice((1, 1, 2, 3)), rng.choice((2, 3, 4, 7)) if grouped else 1
    batch, sq, sk = rng.choice((1, 2, 3)), _seqlen(rng), _seqlen(rng)
    if rng.random() < 0.3:
        sk = sq
    case = Case(
        headdim=d,
        headdim_v=dv,
        dtype=dtype,
        batch=batch,
        heads_q=heads_k * group,
        heads_k=heads_k,
        seqlen_q=sq,
        seqlen_k=sk,
        mask=_mask(mask, rng, sq, sk),
        layouts=tuple(rng.choice(LAYOUTS) for _ in range(9)),
        scale=rng.choice((None, None, None, None, 0.3, -0.125, 0.0)),
        scale_tensor=scale_tensor,
        deterministic=deterministic,
        sink=sink,
        bias=bias,
        bias_dtype=bias_dtype,
        dbias=dbias,
        values="very_negative_lse" if rng.random() < 0.03 else "normal",
        seed=seed,
    )
    if case.values != "normal":
        case = replace(case, scale=None)  # a larger one leaves fp32 too few bits for the exponent
    if padded:
        lengths = [tuple(_length(rng, full) for _ in range(batch)) for full in (sq, sk)]
        case = replace(case, len_q=lengths[0] if rng.random() < 0.8 else None, len_k=lengths[1])
    # Features to come are drawn now and then, so that their decline is tested too.
    if unserved(case) and rng.random() < 0.8:
        case = replace(case, sink=False, bias=None, dbias=False, deterministic=False, scale_tensor=False)
    return case


def _seqlen(rng: random.Random) -> int:
    return rng.choice(EDGES) if rng.random() < 0.5 else rng.randint(1, 320)


def _headdim(rng: random.Random) -> int:
    return rng.choice(NATIVE) if rng.random() < 0.5 else 8 * rng.randint(1, 32)


def _length(rng: random.Random, full: int) -> int:
    return rng.choice((0, 1, full - 1, full, full + 5, -3, rng.randint(0, full), rng.randint(0, full)))


def _mask_kinds(rng: random.Random) -> tuple[bool, bool]:
    """Whether there is a left and a right bound."""
    return rng.choice(((False, False), (False, True), (False, True), (True, True), (True, True), (True, False)))


def _mask(kinds: tuple[bool, bool], rng: random.Random, sq: int, sk: int) -> MaskFacts:
    left = rng.randint(1, sq + sk - 1) if kinds[0] else None
    right = rng.choice((0, 0, rng.randint(0, sq + sk - 1))) if kinds[1] else None
    if rng.random() < 0.05:  # bounds that cut nothing
        left, right = left and 10**6, right and 10**6
    return MaskFacts(any(kinds) and rng.random() < 0.5, left, right)


def _tensor(name: str, change: Callable[[TensorFacts, random.Random], TensorFacts]):
    """An oddity of one tensor of the facts."""

    def apply(drawn: Drawn, rng: random.Random) -> Drawn:
        tensor = getattr(drawn.facts, name)
        if tensor is None:
            return drawn
        return replace(drawn, facts=replace(drawn.facts, **{name: change(tensor, rng)}))

    return apply


def _stride(tensor: TensorFacts, axis: int, stride: int) -> TensorFacts:
    return replace(tensor, stride=tuple(stride if i == axis else s for i, s in enumerate(tensor.stride)))


def _facts(**changes):
    return lambda drawn, rng: replace(drawn, facts=replace(drawn.facts, **changes))


def _mask_of(**changes):
    return lambda drawn, rng: replace(drawn, facts=replace(drawn.facts, mask=replace(drawn.facts.mask, **changes)))


def _attribute(**attributes):
    return lambda drawn, rng: replace(drawn, attributes={**drawn.attributes, **attributes})


def _case(**changes):
    def apply(drawn: Drawn, rng: random.Random) -> Drawn:
        case = replace(drawn.case, **changes)
        return replace(drawn, case=case, facts=facts_of(case))

    return apply


def _extent(axis: int):
    return lambda t, rng: replace(t, dim=tuple(e + (i == axis) for i, e in enumerate(t.dim)))


# What the records can say, and what only a graph can: attributes of sdpa_backward.
ODDITIES: dict[str, Callable[[Drawn, random.Random], Drawn]] = {
    "head dim 12": _case(headdim=12),
    "head dim 264": _case(headdim=264),
    "d_v 4": _case(headdim_v=4),
    "heads that do not divide": _case(heads_q=5, heads_k=3, sink=False, bias=None, dbias=False),
    "q in fp32": _tensor("q", lambda t, rng: replace(t, dtype="fp32")),
    "v in the other dtype": _tensor("v", lambda t, rng: replace(t, dtype="fp16" if t.dtype == "bf16" else "bf16")),
    "stats in bf16": _tensor("stats", lambda t, rng: replace(t, dtype="bf16")),
    "expanded do": _tensor("do", lambda t, rng: replace(t, stride=(0, 0, 0, 1))),
    "expanded stats": _tensor("stats", lambda t, rng: replace(t, stride=(0, 0, 1, 1))),
    "odd row stride": _tensor("k", lambda t, rng: _stride(t, 2, t.dim[3] + 3)),
    "reversed rows": _tensor("q", lambda t, rng: _stride(t, 2, -t.dim[3])),
    "head dim not contiguous": _tensor("v", lambda t, rng: _stride(t, 3, 2)),
    "rows of dq on one address": _tensor("dq", lambda t, rng: _stride(t, 2, 0)),
    "heads of dk overlap": _tensor("dk", lambda t, rng: _stride(t, 1, 8)),
    "a huge stride": _tensor("o", lambda t, rng: _stride(t, 0, 2**40)),
    "one more row in do": _tensor("do", _extent(2)),
    "one more key in v": _tensor("v", _extent(2)),
    "one more batch in k": _tensor("k", _extent(0)),
    "left bound 0": _mask_of(left_bound=0),
    "left bound below 0": _mask_of(left_bound=-5),
    "right bound below 0": _mask_of(right_bound=-1),
    "padding without lengths": _facts(seq_len_q=None, seq_len_kv=None, mask=MaskFacts(padding=True)),
    "scale is NaN": _facts(scale=math.nan, scale_tensor=None),
    "scale is infinite": _facts(scale=math.inf, scale_tensor=None),
    "deterministic": _facts(deterministic=True),
}
GRAPH_ODDITIES: dict[str, Callable[[Drawn, random.Random], Drawn]] = {
    "ALiBi": _attribute(use_alibi_mask=True),
    "dropout": _attribute(dropout=(0.1, None, None)),
    "max_total_seq_len": _attribute(max_total_seq_len_q=100),
    "unfused": _attribute(unfuse_fma=True),
    "prefolded scale": _attribute(attn_scale_prefolded=True),
    "unknown attribute": _attribute(made_up=3),
}
