"""The oracle: attention forward and backward from explicit formulas in fp64, on CPU or GPU.

Per query row q and key k, with lengths clamped to [0, S]:

    s      = scale * (q . k) + bias
    keep   = k < len_k  and  q < len_q  and  k <= q + diag + R  and  k > q + diag - L      (R, L where given)
    diag   = len_k - len_q with bottom-right alignment, else 0
    P      = exp(s - LSE) where kept, else 0               LSE: natural log, includes the sink where there is one
    delta  = rowsum(dO * O)
    dS     = P * (dO . v - delta)
    dV     = P^T dO      dK = scale * dS^T Q      dQ = scale * dS K
    dBias  = dS summed over the dims that bias broadcasts
    dSink  = -sum over batch and real rows of exp(sink - LSE) * delta

A row that keeps nothing gives exact zeros, whatever O, dO and LSE hold there. Storage past a length is never read into
a product, so NaN in it cannot leak. Work is cut into pieces of a few heads and rows, so that memory stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .facts import BwdFacts, MaskFacts

NO_MASK = MaskFacts()

# Scores held at once, in elements; about six fp64 arrays of this size are alive.
_PIECE_CPU = 1 << 22
_PIECE_GPU = 1 << 25

# What fp32 arithmetic may leave behind where dO.v - delta cancels, relative to the size of its terms. Rounding leaves
# about 2**-24; with 2**-12 that noise counts as 2**-12 of the floor, far under any tolerance, while the floor stays
# under one percent of the gradient wherever nothing cancels.
_CANCELLED = 2.0**-12


@dataclass
class Gradients:
    """fp64 gradients in the inputs' shapes; ``floors`` holds, per gradient, the floor of ``relative_error``."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dbias: torch.Tensor | None = None
    dsink: torch.Tensor | None = None
    floors: dict[str, float] = field(default_factory=dict)

    def errors(self, got: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """``relative_error`` of each gradient in ``got``, which is keyed dq, dk, dv, dbias, dsink."""
        return {name: relative_error(tensor, getattr(self, name), self.floors[name]) for name, tensor in got.items()}


def relative_error(got: torch.Tensor, ref: torch.Tensor, floor: float | None = None) -> float:
    """``||got - ref|| / max(||ref||, floor)`` in Frobenius norms; inf when ``got`` holds a NaN or infinity.

    The floor keeps cancellation from counting as a fault. A gradient is a sum of products, and independent roundings
    of the terms leave noise that is proportional to the root of the sum of their squares, not to the sum, so that root
    is the floor: ``|scale| * sqrt(sum over q, k of W^2 ||k||^2)`` for dQ, the same with ``||q||^2`` for dK,
    ``sqrt(sum of P^2 ||dO||^2)`` for dV and ``sqrt(sum of W^2)`` for dBias, with
    ``W^2 = dS^2 + (2^-12 * P * ||dO|| * (||v|| + ||O||))^2`` (the second term is what fp32 may leave where the
    difference in dS cancels); for dSink the same from ``exp(sink - LSE) * delta``. Where nothing cancels the floor is
    about ``||ref||``. ``sdpa_backward`` returns the floors.
    """
    got64, ref64 = got.detach().to(torch.float64), ref.to(torch.float64)
    if not torch.isfinite(got64).all():
        return math.inf
    difference = torch.linalg.vector_norm(got64 - ref64.to(got64.device)).item()
    size = max(torch.linalg.vector_norm(ref64).item(), floor or 0.0)
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


@dataclass(frozen=True)
class _Piece:
    """A few (batch, head) pairs, a range of query rows, all keys; fp64 tensors (n, rows, ...) or (n, Sk, ...)."""

    batch: torch.Tensor  # (n,) index
    head: torch.Tensor  # (n,) index of the query head
    rows: slice
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keep: torch.Tensor  # (n, rows, Sk) bool
    scores: torch.Tensor  # (n, rows, Sk), finite wherever kept
    real: torch.Tensor  # (n, rows) bool: rows below len_q


class _Problem:
    """The shared operands of forward and backward, handed out piece by piece."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        mask: MaskFacts,
        seq_len_q: torch.Tensor | None,
        seq_len_kv: torch.Tensor | None,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
    ) -> None:
        if q.shape[1] % k.shape[1] or q.shape[1] % v.shape[1]:
            raise ValueError(
                f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key and {v.shape[1]} value heads"
            )
        self.q, self.k, self.v, self.scale, self.mask, self.bias = q, k, v, float(scale), mask, bias
        self.batch, self.heads, self.rows, _ = q.shape
        self.keys = k.shape[2]
        self.device = q.device
        self.len_q = self._lengths(seq_len_q, self.rows)
        self.len_k = self._lengths(seq_len_kv, self.keys)
        self.sink = None if sink is None else sink.to(self.device, torch.float64).reshape(self.heads)

    def _lengths(self, lengths: torch.Tensor | None, full: int) -> torch.Tensor:
        if lengths is None:
            return torch.full((self.batch,), full, dtype=torch.int64, device=self.device)
        return lengths.to(self.device, torch.int64).reshape(self.batch).clamp(0, full)

    def pieces(self) -> Iterator[_Piece]:
        budget = _PIECE_GPU if self.device.type == "cuda" else _PIECE_CPU
        rows = max(1, min(self.rows, budget // self.keys))
        pairs = max(1, budget // (rows * self.keys))
        for first in range(0, self.batch * self.heads, pairs):
            pair = torch.arange(first, min(first + pairs, self.batch * self.heads), device=self.device)
            batch, head = pair // self.heads, pair % self.heads
            key = torch.arange(self.keys, device=self.device)
            k = self._upcast(self.k, batch, head // (self.heads // self.k.shape[1]), slice(None), self.len_k[batch])
            v = self._upcast(self.v, batch, head // (self.heads // self.v.shape[1]), slice(None), self.len_k[batch])
            for row in range(0, self.rows, rows):
                yield self._piece(batch, head, slice(row, min(row + rows, self.rows)), k, v, key)

    def _piece(
        self, batch: torch.Tensor, head: torch.Tensor, rows: slice, k: torch.Tensor, v: torch.Tensor, key: torch.Tensor
    ) -> _Piece:
        len_q, len_k = self.len_q[batch, None, None], self.len_k[batch, None, None]
        row = torch.arange(rows.start, rows.stop, device=self.device)[None, :, None]
        keep = keep_mask(self.mask, row, key[None, None, :], len_q, len_k)
        q = self._upcast(self.q, batch, head, rows, self.len_q[batch])
        scores = self.scale * (q @ k.mT)
        if self.bias is not None:
            whole = self.bias.expand(self.batch, self.heads, self.rows, self.keys)
            bias = whole[batch, head, rows].to(torch.float64)
            scores = scores + torch.where(keep, bias, 0.0)
            keep = keep & (scores != -math.inf)  # a bias of -inf masks; its terms are zeros, not 0 * inf
        return _Piece(batch, head, rows, q, k, v, keep, scores, (row < len_q)[:, :, 0])

    def _upcast(
        self, tensor: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, rows: slice, length: torch.Tensor
    ) -> torch.Tensor:
        """(n, rows, D) in fp64 with zeros for the storage past ``length``, which may hold anything."""
        part = tensor[batch, head, rows].to(torch.float64)
        position = torch.arange(tensor.shape[2], device=self.device)[rows]
        return torch.where(position[None, :, None] < length[:, None, None], part, 0.0)


def keep_mask(
    mask: MaskFacts, row: torch.Tensor, key: torch.Tensor, len_q: torch.Tensor, len_k: torch.Tensor
) -> torch.Tensor:
    """Which (row, key) pairs take part; the arguments are integer tensors that broadcast against each other."""
    centre = row + (len_k - len_q) if mask.bottom_right else row
    keep = (key < len_k) & (row < len_q)
    if mask.right_bound is not None:
        keep = keep & (key <= centre + mask.right_bound)
    if mask.left_bound is not None:
        keep = keep & (key > centre - mask.left_bound)
    return keep


def sdpa_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: MaskFacts = NO_MASK,
    seq_len_q: torch.Tensor | None = None,
    seq_len_kv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 ``o`` (B, Hq, Sq, Dv) and natural-log ``lse`` (B, Hq, Sq, 1).

    q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hv, Sk, Dv), Hq a multiple of Hk and of Hv; seq_len_* hold B integers,
    bias broadcasts to (B, Hq, Sq, Sk), sink holds Hq logits. Rows that keep nothing: o = 0, lse = sink or -inf.
    """
    problem = _Problem(q, k, v, scale, mask, seq_len_q, seq_len_kv, bias, sink)
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full((*q.shape[:3], 1), -math.inf, dtype=torch.float64, device=q.device)
    for piece in problem.pieces():
        scores = torch.where(piece.keep, piece.scores, -math.inf)
        row_lse = torch.logsumexp(scores, -1, keepdim=True)
        if problem.sink is not None:
            sink_logit = torch.where(piece.real, problem.sink[piece.head, None], -math.inf)[..., None]
            row_lse = torch.logaddexp(row_lse, sink_logit)
        o[piece.batch, piece.head, piece.rows] = _probabilities(piece, row_lse) @ piece.v
        lse[piece.batch, piece.head, piece.rows] = row_lse
    return o, lse


def sdpa_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    mask: MaskFacts = NO_MASK,
    seq_len_q: torch.Tensor | None = None,
    seq_len_kv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    want_dbias_dims: Sequence[int] | None = None,
) -> Gradients:
    """fp64 gradients from the operands as given: ``o`` and ``lse`` are used, not recomputed.

    Shapes as in ``sdpa_forward``, ``do`` like ``o``. With ``bias``, dbias has ``want_dbias_dims`` (each dim 1 or
    full; default: the dims of bias); with ``sink``, dsink has the shape of sink.
    """
    problem = _Problem(q, k, v, scale, mask, seq_len_q, seq_len_kv, bias, sink)
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    dbias = None if bias is None else _zeros_for_dbias(problem, bias, want_dbias_dims)
    dsink = None if sink is None else dq.new_zeros(problem.heads)
    squares = dq.new_zeros(5)  # the squared floors of dq, dk, dv, dbias, dsink

    for piece in problem.pieces():
        at = (piece.batch, piece.head, piece.rows)
        row_lse = lse[at].to(torch.float64)
        kept = piece.keep & (row_lse != -math.inf)
        # A row that keeps nothing has O = 0 by definition, whatever its storage holds.
        row_kept = kept.any(-1, keepdim=True)
        row_o = torch.where(row_kept, o[at].to(torch.float64), 0.0)
        row_do = torch.where(row_kept, do[at].to(torch.float64), 0.0)
        delta = (row_o * row_do).sum(-1, keepdim=True)
        p = _probabilities(piece, row_lse)
        ds = torch.where(kept, p * (row_do @ piece.v.mT - delta), 0.0)

        dq[at] = problem.scale * (ds @ piece.k)
        _add_heads(dk, piece, problem, problem.scale * (ds.mT @ piece.q))
        _add_heads(dv, piece, problem, p.mT @ row_do)
        if dbias is not None:
            _add_dbias(dbias, piece, ds)
        do_norm, o_norm, v_norm = (t.square().sum(-1).sqrt() for t in (row_do, row_o, piece.v))
        w2 = ds.square() + (_CANCELLED * p * do_norm[..., None] * (v_norm[:, None, :] + o_norm[..., None])).square()
        squares[0] += problem.scale**2 * (w2 * piece.k.square().sum(-1)[:, None, :]).sum()
        squares[1] += problem.scale**2 * (w2 * piece.q.square().sum(-1)[..., None]).sum()
        squares[2] += (p.square() * do_norm.square()[..., None]).sum()
        squares[3] += w2.sum()
        if dsink is not None and problem.sink is not None:
            logit = problem.sink[piece.head, None, None]
            live = row_kept & (logit != -math.inf)  # in any other row delta is 0, and LSE may be anything
            weight = torch.where(live, torch.exp(logit - row_lse), 0.0)
            dsink.index_add_(0, piece.head, -(weight * delta).sum((1, 2)))
            noise = (_CANCELLED * do_norm * o_norm)[..., None]
            squares[4] += (weight.square() * (delta.square() + noise.square())).sum()

    floors = dict(zip(("dq", "dk", "dv", "dbias", "dsink"), squares.sqrt().tolist(), strict=True))
    return Gradients(dq, dk, dv, dbias, None if dsink is None or sink is None else dsink.reshape(sink.shape), floors)


def _probabilities(piece: _Piece, row_lse: torch.Tensor) -> torch.Tensor:
    kept = piece.keep & (row_lse != -math.inf)
    return torch.where(kept, torch.exp(torch.where(kept, piece.scores - row_lse, 0.0)), 0.0)


def _add_heads(total: torch.Tensor, piece: _Piece, problem: _Problem, part: torch.Tensor) -> None:
    """Add (n, Sk, D) of query heads to the key or value heads that they share; ``total`` is (B, H, Sk, D)."""
    heads = total.shape[1]
    total.view(-1, *total.shape[2:]).index_add_(0, piece.batch * heads + piece.head // (problem.heads // heads), part)


def _zeros_for_dbias(problem: _Problem, bias: torch.Tensor, dims: Sequence[int] | None) -> torch.Tensor:
    full = (problem.batch, problem.heads, problem.rows, problem.keys)
    wanted = tuple(bias.shape if dims is None else dims)
    if len(wanted) != 4 or any(size not in (1, whole) for size, whole in zip(wanted, full, strict=True)):
        raise ValueError(f"dbias dims must each be 1 or those of the scores {full}, got {wanted}")
    return torch.zeros(wanted, dtype=torch.float64, device=problem.device)


def _add_dbias(dbias: torch.Tensor, piece: _Piece, ds: torch.Tensor) -> None:
    batches, heads, rows, keys = dbias.shape
    if keys == 1:
        ds = ds.sum(2, keepdim=True)
    if rows == 1:
        ds = ds.sum(1, keepdim=True)
    where = (piece.batch if batches > 1 else 0 * piece.batch) * heads + (piece.head if heads > 1 else 0)
    dbias.view(-1, rows, keys)[:, piece.rows if rows > 1 else slice(0, 1)].index_add_(0, where, ds)


def same_dtype_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    scale: float,
    mask: MaskFacts = NO_MASK,
    seq_len_q: torch.Tensor | None = None,
    seq_len_kv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What plain torch operations and autograd give in the inputs' own dtype: dq, dk, dv [, dbias, dsink].

    The yardstick for "never worse than twice the error of torch in the same dtype". It holds all scores at once, and
    expects finite storage everywhere, so it is for ordinary shapes.
    """
    inputs = {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsink": sink}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items() if t is not None}
    batch, heads, rows, _ = q.shape
    key_heads, value_heads, keys = k.shape[1], v.shape[1], k.shape[2]
    problem = _Problem(q, k, v, scale, mask, seq_len_q, seq_len_kv, bias, sink)
    row = torch.arange(rows, device=q.device)[None, :, None]
    key = torch.arange(keys, device=q.device)[None, None, :]
    keep = keep_mask(mask, row, key, problem.len_q[:, None, None], problem.len_k[:, None, None])[:, None]

    wide_k = leaves["dk"].repeat_interleave(heads // key_heads, 1)
    wide_v = leaves["dv"].repeat_interleave(heads // value_heads, 1)
    scores = (leaves["dq"] @ wide_k.mT) * scale
    if bias is not None:
        scores = scores + leaves["dbias"]
    # A finite stand-in for -inf: softmax of an all-masked row stays finite, and the multiplication below zeroes it.
    scores = torch.where(keep, scores, torch.finfo(scores.dtype).min)
    if sink is not None:
        logits = leaves["dsink"].reshape(1, heads, 1, 1).expand(batch, heads, rows, 1).to(scores.dtype)
        scores = torch.cat([scores, logits], -1)
    p = torch.softmax(scores, -1)[..., :keys] * keep
    (p.to(v.dtype) @ wide_v).backward(torch.where(row[:, None] < problem.len_q[:, None, None, None], do, 0))
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def run_graph(facts: BwdFacts, tensors: Mapping[str, torch.Tensor]) -> None:
    """Run the graph that ``facts`` describes on ``tensors`` and fill its outputs, rounded once to their dtypes.

    ``tensors`` is keyed like the launch addresses: q k v o do stats dq dk dv, and, where the facts have them,
    seq_len_q seq_len_kv bias dbias sink dsink scale_tensor. Raises ValueError for a missing or misshapen tensor.
    """
    optional = ("seq_len_q", "seq_len_kv", "bias", "dbias", "sink", "dsink", "scale_tensor")
    names = ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv", *(n for n in optional if getattr(facts, n)))
    for name in names:
        if name not in tensors:
            raise ValueError(f"the graph has a tensor {name}, and none was given")
        wanted, given = getattr(facts, name).dim, tuple(tensors[name].shape)
        if wanted != given:
            raise ValueError(f"{name} is declared as {wanted}, and {given} was given")
    scale = tensors["scale_tensor"].item() if facts.scale is None else facts.scale
    present = {name: tensors[name] for name in ("seq_len_q", "seq_len_kv", "bias", "sink") if name in names}
    gradients = sdpa_backward(
        *(tensors[name] for name in ("q", "k", "v", "o", "do", "stats")),
        scale=scale,
        mask=facts.mask,
        want_dbias_dims=facts.dbias.dim if facts.dbias else None,
        **present,
    )
    for name in names:
        result = getattr(gradients, name, None)
        if result is not None:
            tensors[name].copy_(result)
