"""A test case in plain words, and the facts that a graph of that shape would give. Needs no GPU and no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from cudnn_frost_sm120.facts import BwdFacts, MaskFacts, TensorFacts
from cudnn_frost_sm120.support import FEATURES

IO_PORTS = ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")
MIXED = ("bshd", "sbhd", "bhsd", "gaps", "sbhd", "gaps", "bhsd", "bshd", "sbhd")
"""A different layout for most ports, dealt in the order of IO_PORTS."""

FULL = MaskFacts()
CAUSAL = MaskFacts(right_bound=0)
CAUSAL_BOTTOM_RIGHT = MaskFacts(right_bound=0, bottom_right=True)


@dataclass(frozen=True)
class Case:
    """One problem. `None` for a second extent means "as the first"; layouts are dealt in turn to the ports."""

    headdim: int = 64
    headdim_v: int | None = None
    dtype: str = "bf16"
    batch: int = 2
    heads_q: int = 2
    heads_k: int | None = None
    seqlen_q: int = 200
    seqlen_k: int | None = None
    mask: MaskFacts = FULL  # padding follows from the lengths
    len_q: tuple[int, ...] | None = None
    len_k: tuple[int, ...] | None = None
    layouts: tuple[str, ...] = ("bshd",)
    scale: float | None = None  # None: 1 / sqrt(headdim)
    scale_tensor: bool = False  # the scale lies in device memory
    deterministic: bool = False
    sink: bool = False
    bias: tuple[int, int, int, int] | None = None  # 1 where the dim is kept, 0 where bias broadcasts
    bias_dtype: str = "fp32"  # or "io"
    dbias: bool = False
    values: str = "normal"  # or "very_negative_lse"
    seed: int = 0

    @property
    def id(self) -> str:
        """What differs from the defaults, for test names and messages."""
        return (
            "-".join(f"{f.name}={_short(getattr(self, f.name))}" for f in fields(self) if self._is_set(f)) or "default"
        )

    def _is_set(self, field) -> bool:
        return getattr(self, field.name) != field.default

    @property
    def scale_value(self) -> float:
        return 1 / math.sqrt(self.headdim) if self.scale is None else self.scale

    @property
    def padded(self) -> bool:
        return self.len_q is not None or self.len_k is not None

    @property
    def lengths(self) -> dict[str, tuple[int, ...]]:
        """Both lengths of a padded case, as given; none for other cases."""
        if not self.padded:
            return {}
        full_k = self.seqlen_q if self.seqlen_k is None else self.seqlen_k
        return {
            "seq_len_q": (self.seqlen_q,) * self.batch if self.len_q is None else self.len_q,
            "seq_len_kv": (full_k,) * self.batch if self.len_k is None else self.len_k,
        }


def _short(value) -> str:
    if isinstance(value, MaskFacts):
        bounds = [f"L{value.left_bound}" if value.left_bound is not None else ""]
        bounds.append(f"R{value.right_bound}" if value.right_bound is not None else "")
        return "".join([*bounds, "br" if value.bottom_right else ""]) or "full"
    if isinstance(value, tuple):
        return "mixed" if value == MIXED else ",".join(map(str, value[:5]))
    return str(value)


def strides(dim: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Element strides of a (B, H, S, D) tensor.

    "gaps" leaves unused elements behind every row, head and batch; "odd_ones" is (B, H, S, D) order where every dim of
    extent 1 has a stride that no alignment rule would take.
    """
    b, h, s, d = dim
    if layout == "bshd":
        return (s * h * d, d, h * d, 1)
    if layout == "sbhd":
        return (h * d, d, b * h * d, 1)
    if layout == "gaps":
        row = d + 8
        return (h * (s + 1) * row + 16, (s + 1) * row, row, 1)
    dense = (h * s * d, s * d, d, 1)
    if layout == "odd_ones":
        return (*((2**33 + 3 if extent == 1 else stride) for extent, stride in zip(dim[:3], dense[:3], strict=True)), 1)
    if layout == "bhsd":
        return dense
    raise ValueError(f"no layout is called {layout}")


def facts_of(case: Case) -> BwdFacts:
    """The facts of the graph that poses this case."""
    b, hq, sq, d = case.batch, case.heads_q, case.seqlen_q, case.headdim
    hk = hq if case.heads_k is None else case.heads_k
    sk = sq if case.seqlen_k is None else case.seqlen_k
    dv = d if case.headdim_v is None else case.headdim_v
    q, k, v, o, stats = (b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, dv), (b, hq, sq, dv), (b, hq, sq, 1)
    dims = {"q": q, "k": k, "v": v, "o": o, "do": o, "stats": stats, "dq": q, "dk": k, "dv": v}
    records = {}
    for i, (name, dim) in enumerate(dims.items()):
        layout = case.layouts[i % len(case.layouts)]
        records[name] = TensorFacts(name, dim, strides(dim, layout), "fp32" if name == "stats" else case.dtype)
    for name in case.lengths:
        records[name] = TensorFacts(name, (b, 1, 1, 1), (1, 1, 1, 1), "int32")
    if case.bias is not None:
        dim = tuple(full if kept else 1 for full, kept in zip((b, hq, sq, sk), case.bias, strict=True))
        dtype = case.dtype if case.bias_dtype == "io" else case.bias_dtype
        for name in ("bias", "dbias") if case.dbias else ("bias",):
            records[name] = TensorFacts(name, dim, strides(dim, "bhsd"), dtype)
    if case.sink:
        for name in ("sink", "dsink"):
            records[name] = TensorFacts(name, (1, hq, 1, 1), (hq, 1, 1, 1), "fp32")
    scale = case.scale_value
    if case.scale_tensor:
        scale, records["scale_tensor"] = None, TensorFacts("scale_tensor", (1, 1, 1, 1), (1, 1, 1, 1), "fp32")
    return BwdFacts(
        **records,
        mask=replace(case.mask, padding=case.padded),
        scale=scale,
        deterministic=case.deterministic,
    )


def unserved(case: Case) -> list[str]:
    """Features of the case that support.py says admission declines."""
    facts = facts_of(case)
    return [feature.name for feature in FEATURES if not feature.served and feature.asked(facts)]


def each(cases):
    """Parametrize a test over cases; conftest.py compiles their chains beforehand, all at once."""
    import pytest

    listed = list(cases)
    return pytest.mark.parametrize("case", listed, ids=[case.id for case in listed])
