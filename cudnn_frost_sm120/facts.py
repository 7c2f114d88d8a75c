"""What an sdpa_backward graph asks for, as frozen records; describes, never judges.

``facts_from_graph`` (graph_facts.py) reads a ``cudnn.pygraph``; the wrapper builds the same records from torch
tensors. No cudnn type appears in a record, so everything below this file (admission, plan, launch, the oracle) runs
without cudnn-frontend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MISSING = "missing"  # dtype of an operand that the graph does not have
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "int32": 4, "int64": 8}
"""Bytes of one element, for the dtypes that some operand of a served graph may have."""


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of the graph. ``dim`` and ``stride`` are in elements, in the graph's order: (B, H, S, D)."""

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # "fp16" | "bf16" | "fp32" | "int32" | ...
    uid: int | None = None
    ragged: bool = False  # carries a ragged offset
    virtual: bool = False  # an intermediate of the graph: nobody passes a buffer for it
    by_value: bool = False  # a host scalar, passed at execute

    @property
    def required_bytes(self) -> int:
        """Bytes from the first element to the end of the last one that the declaration reaches."""
        last = sum((extent - 1) * abs(stride) for extent, stride in zip(self.dim, self.stride, strict=True))
        return (last + 1) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class MaskFacts:
    """Which (q, k) pairs are kept: ``k > q + diag - left_bound`` and ``k <= q + diag + right_bound``."""

    bottom_right: bool = False  # diag = len_k - len_q instead of 0
    left_bound: int | None = None  # the graph's L: a wrapper window W is L = W + 1
    right_bound: int | None = None  # the graph's R; 0 is causal
    padding: bool = False  # lengths come from seq_len_q and seq_len_kv


@dataclass(frozen=True)
class BwdFacts:
    """One sdpa_backward node: q (B, Hq, Sq, Dqk), k (B, Hk, Sk, Dqk), v (B, Hv, Sk, Dv), o and do (B, Hq, Sq, Dv)."""

    q: TensorFacts
    k: TensorFacts
    v: TensorFacts
    o: TensorFacts
    do: TensorFacts
    stats: TensorFacts  # (B, Hq, Sq, 1), natural-log LSE
    dq: TensorFacts
    dk: TensorFacts
    dv: TensorFacts
    mask: MaskFacts = MaskFacts()
    scale: float | None = 1.0  # resolved; None when scale_tensor holds it
    deterministic: bool = False
    seq_len_q: TensorFacts | None = None
    seq_len_kv: TensorFacts | None = None
    bias: TensorFacts | None = None
    dbias: TensorFacts | None = None
    sink: TensorFacts | None = None
    dsink: TensorFacts | None = None
    scale_tensor: TensorFacts | None = None

    # What else such a graph can carry. Described here so that admission can decline it in words.
    kind: str = "sdpa_backward"  # or "sdpa_fp8_backward", "sdpa_mxfp8_backward"
    other_nodes: tuple[str, ...] = ()  # node types beside this one
    dropout: str | None = None  # "philox" (probability, seed, offset), "mask" (mask, scale, scale_inv), "malformed"
    dropout_probability: float | None = None  # of "philox"
    rng_dump: bool = False
    alibi: bool = False
    score_mod: bool = False  # score_mod or score_mod_bprop
    paged: bool = False
    block_mask: bool = False
    score_max: bool = False
    score_sum_exp: bool = False
    unfuse_fma: bool = False
    softmax_precision: str | None = None
    scale_prefolded: bool = False
    cu_seq_len: bool = False  # prefix sums instead of lengths
    max_total_seq_len_q: int | None = None  # of a ragged graph
    max_total_seq_len_kv: int | None = None
    side_outputs: tuple[str, ...] = ()  # amax_dQ and the like, where asked for
    unknown: tuple[str, ...] = ()  # ports and attributes that this version has no name for
    shape_overrides: bool = False  # the graph will be executed with other shapes than it declares
    dynamic_shapes: bool = False
    cuda_graph_replay: bool = False  # execute is captured once and replayed
    compute_dtype: str | None = None  # what the graph asks; we always accumulate in fp32

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def batch(self) -> int:
        return self.q.dim[0]

    @property
    def heads_q(self) -> int:
        return self.q.dim[1]

    @property
    def heads_k(self) -> int:
        return self.k.dim[1]

    @property
    def heads_v(self) -> int:
        return self.v.dim[1]

    @property
    def seqlen_q(self) -> int:
        return self.q.dim[2]

    @property
    def seqlen_k(self) -> int:
        return self.k.dim[2]

    @property
    def headdim_qk(self) -> int:
        return self.q.dim[3]

    @property
    def headdim_v(self) -> int:
        return self.v.dim[3]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads_q // self.heads_k

    def io(self) -> tuple[TensorFacts, ...]:
        """The eight tensors of the io dtype: q, k, v, o, do, dq, dk, dv."""
        return (self.q, self.k, self.v, self.o, self.do, self.dq, self.dk, self.dv)

    def inputs(self) -> Iterator[TensorFacts]:
        """Every tensor that is read, in a fixed order."""
        optional = (self.seq_len_q, self.seq_len_kv, self.bias, self.sink, self.scale_tensor)
        yield from (self.q, self.k, self.v, self.o, self.do, self.stats)
        yield from (tensor for tensor in optional if tensor is not None)

    def outputs(self) -> Iterator[TensorFacts]:
        """Every tensor that is written, in a fixed order."""
        yield from (self.dq, self.dk, self.dv)
        yield from (tensor for tensor in (self.dbias, self.dsink) if tensor is not None)


def effective_bounds(facts: BwdFacts) -> tuple[int | None, int | None]:
    """(left, right) bounds of the mask; None where the bound cannot cut anything at these lengths, unless others may
    follow."""
    left, right = facts.mask.left_bound, facts.mask.right_bound
    if facts.shape_overrides:
        return left, right
    reach = facts.seqlen_q + facts.seqlen_k
    return (None if left is None or left >= reach else left, None if right is None or right >= reach else right)


def facts_from_graph(graph: Any) -> BwdFacts:
    """The facts of ``graph``, a ``cudnn.pygraph`` with an sdpa_backward node of any flavour.

    Raises ValueError if there is no such node, and nothing else on a graph that cudnn-frontend can build.
    """
    from .graph_facts import read

    return read(graph)
