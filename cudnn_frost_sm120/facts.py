"""What an sdpa_backward graph asks for, as frozen records; describes, never judges.

``facts_from_graph`` reads a ``cudnn.pygraph``; the wrapper builds the same records from torch tensors. No cudnn type
appears in a record, so everything below this file (admission, plan, launch, the oracle) runs without cudnn-frontend.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of the graph. ``dim`` and ``stride`` are in elements, in the graph's order: (B, H, S, D)."""

    name: str
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # "fp16" | "bf16" | "fp32" | "int32" | ...
    uid: int | None = None
    ragged: bool = False  # carries a ragged offset


@dataclass(frozen=True)
class MaskFacts:
    """Which (q, k) pairs are kept; design rule: keep ``k > q + diag - left_bound`` and ``k <= q + diag + right_bound``."""

    bottom_right: bool = False  # diag = len_k - len_q instead of 0
    left_bound: int | None = None  # the graph's L: a wrapper window W is L = W + 1
    right_bound: int | None = None  # the graph's R; 0 is causal
    padding: bool = False  # lengths come from seq_len_q and seq_len_kv


@dataclass(frozen=True)
class BwdFacts:
    """One sdpa_backward node: q (B, Hq, Sq, Dqk), k (B, Hk, Sk, Dqk), v (B, Hv, Sk, Dv), o/do as (B, Hq, Sq, Dv)."""

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


def facts_from_graph(graph) -> BwdFacts:
    """The facts of a single-node sdpa_backward graph."""
    raise NotImplementedError("facts_from_graph is not written yet")
