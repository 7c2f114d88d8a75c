"""Who is measured on a problem: plans of one graph, ours and the peers', and torch's flash backward.

The baseline lists one plan for a graph, with its default tiles, and chooses by itself how it sums a deterministic dQ:
dS in workspace and a GEMM where it has that for the head dims, the tensors are stored as (B, S, H, D), there is no
window and no length, and the workspace fits in memory; else its relay. Should it list more plans, each is measured and
the fastest counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .. import target as targets
from ..heuristics import ranked_knobs
from ..knobs import PUBLIC_NAMES, BwdKnobs, ReductionMode
from ..plan import BwdPlan, make_plan
from ..register import ENGINE_NAME
from ..target import Target
from .cell_graph import graph_of
from .problem import Problem
from .result import ATOMIC, OURS, THROTTLED

BASELINE = "sdpa_bwd_sm120"


@dataclass(frozen=True)
class Candidate:
    name: str
    run: Callable[[], None]  # enqueues the whole chain
    plan: BwdPlan | None = None  # of ours
    build_seconds: float = 0.0


class Declined(Exception):
    """A peer does not serve the cell, or is not there; the message says which."""


class Lineup:
    """The candidates of one problem. Building one raises `Declined`, or whatever its engine raises."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.graph, self._buffers = _planned_graph(problem)
        count = self.graph.get_execution_plan_count()
        self._names = [self.graph.get_plan_name_at_index(index) for index in range(count)]
        self._mine = [index for index, name in enumerate(self._names) if name.startswith(ENGINE_NAME)]

    def ours(self, every_plan: bool) -> Iterator[tuple[str, Callable[[], Candidate]]]:
        """(name, how to build it) of our first plan, or of all that are listed."""
        if not self._mine:
            yield OURS, _declining("our engine lists no plan")
        first: BwdKnobs | None = None
        for index in self._mine if every_plan else self._mine[:1]:
            knobs = self.graph.plans[index].knobs
            name = OURS if first is None else f"{OURS}, {knob_changes(first, knobs)}"
            first = first or knobs
            yield name, self._graph_plan(name, index, self._plan(knobs))

    def throttled(self) -> Candidate:
        """Our first plan in its throttled build, launched without the graph, which cannot ask for that."""
        if not self._mine:
            raise Declined("our engine lists no plan")
        made = self._plan(self.graph.plans[self._mine[0]].knobs)
        return self._launched(THROTTLED, replace(made, key=replace(made.key, throttled=True)))

    def atomic(self) -> Candidate:
        """Beside a deterministic plan: the best one with atomic adds, launched without the graph, which bars it."""
        facts, target = replace(self.problem.cell, deterministic=False).facts(), _current_target()
        knobs = next(k for k in ranked_knobs(facts, target) if k.reduction_mode is ReductionMode.ATOMIC)
        return self._launched(ATOMIC, make_plan(facts, knobs, target))

    def _launched(self, name: str, plan: BwdPlan) -> Candidate:
        from ..compile import compile_chain
        from ..launch import Launcher

        started = time.perf_counter()
        launcher = Launcher(plan, compile_chain(plan.key, plan.target))
        seconds = time.perf_counter() - started
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        addresses = {name: tensor.data_ptr() for name, tensor in self.problem.tensors.items()}
        stream = torch.cuda.current_stream().cuda_stream

        def run() -> None:
            launcher.run(addresses, workspace.data_ptr(), workspace.numel(), stream)

        return Candidate(name, run, plan, seconds)

    def peer(self, peer: str) -> Iterator[tuple[str, Callable[[], Candidate]]]:
        """As `ours`, for one of the names in `bench.PEERS`; a second plan of a peer has a number behind its name."""
        if peer == "fa2":
            yield peer, lambda: Candidate(peer, _flash_backward(self.problem))
            return
        is_backend = peer == "cudnn"
        theirs = [i for i, name in enumerate(self._names) if _owner_is(name, is_backend)]
        if is_backend:
            theirs = theirs[:1]  # its own first choice; it may list hundreds
        if not theirs:
            yield peer, _declining("lists no plan")
        for place, index in enumerate(theirs):
            name = peer if place == 0 else f"{peer} {place + 1}"
            yield name, self._graph_plan(name, index, None)

    def _plan(self, knobs: BwdKnobs) -> BwdPlan:
        return make_plan(self.problem.cell.facts(), knobs, _current_target())

    def _graph_plan(self, name: str, index: int, plan: BwdPlan | None) -> Callable[[], Candidate]:
        def build() -> Candidate:
            started = time.perf_counter()
            self.graph.build_plan_at_index(index)
            seconds = time.perf_counter() - started
            nbytes = self.graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cuda")
            handle = _handle()
            graph, buffers = self.graph, self._buffers

            def run() -> None:
                graph.execute_plan_at_index(buffers, workspace, index=index, handle=handle)

            return Candidate(name, run, plan, seconds)

        return build


def _current_target() -> Target:
    return targets.for_device(torch.cuda.current_device())


def knob_changes(first: BwdKnobs, other: BwdKnobs) -> str:
    """The knobs of `other` that differ from those of `first`."""
    changed = [f.name for f in fields(BwdKnobs) if getattr(first, f.name) != getattr(other, f.name)]
    return " ".join(f"{PUBLIC_NAMES[name]}={int(getattr(other, name))}" for name in changed)


def _owner_is(name: str, backend: bool) -> bool:
    python_engine = "sdpa_bwd_sm" in name or ENGINE_NAME in name
    return not python_engine if backend else BASELINE in name


def _declining(reason: str) -> Callable[[], Candidate]:
    def build() -> Candidate:
        raise Declined(reason)

    return build


def _planned_graph(problem: Problem) -> tuple[Any, dict[Any, torch.Tensor]]:
    """The graph of the cell, planned, and the problem's tensors by those of the graph."""
    import cudnn

    from .. import register

    register()
    graph = graph_of(problem.cell, "bf16")
    (node,) = graph.nodes
    buffers = {port: problem.tensors[port.name] for port in (*node.inputs.values(), *node.outputs.values())}
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, buffers


def _handle() -> Any:
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return handle


def _flash_backward(problem: Problem) -> Callable[[], None]:
    cell, tensors = problem.cell, problem.tensors
    if cell.headdim_qk != cell.headdim_v or cell.window is not None or cell.deterministic or cell.sink:
        raise Declined("torch's flash backward does not serve this cell")
    group = cell.heads_q // cell.heads_k
    # aten's flash backward has no grouped heads: keys are repeated, which favours it (it does not sum the groups).
    k, v = (tensors[name].repeat_interleave(group, dim=1) if group > 1 else tensors[name] for name in ("k", "v"))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = flash(
        tensors["q"], k, v, 0.0, cell.causal, False, scale=cell.scale
    )
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (cum_q, cum_k, max_q, max_k)
    arguments = (tensors["do"], tensors["q"], k, v, o, lse, *lengths, 0.0, cell.causal, seed, offset)

    def run() -> None:
        backward(*arguments, scale=cell.scale)

    return run


@contextmanager
def baseline_on_stand_in() -> Iterator[None]:
    """Let cudnn-frontend's own SM120 engine onto the Hopper stand-in, where it otherwise declines.

    Its kernels use what sm_90a has too. Elsewhere, and without the stand-in's flag, nothing is changed.
    """
    if torch.cuda.get_device_capability() != (9, 0) or os.environ.get(targets.STAND_IN_ENV) != "1":
        yield
        return
    from cudnn.sdpa.bwd import engines
    from cudnn.sdpa.bwd.api_dsl import SdpaBwdDslSm120

    (spec,) = (spec for spec in engines.ENGINE_SPECS if spec.name == BASELINE)
    capabilities, check_support = spec.capabilities, SdpaBwdDslSm120.check_support
    real_capability = torch.cuda.get_device_capability

    def admitting(adapter: Any) -> Any:
        torch.cuda.get_device_capability = lambda *_, **__: (12, 0)
        try:
            return check_support(adapter)
        finally:
            torch.cuda.get_device_capability = real_capability

    lowest = capabilities.sm_lo
    object.__setattr__(capabilities, "sm_lo", 90)  # frozen, and shared with the engines that were made already
    SdpaBwdDslSm120.check_support = admitting
    try:
        yield
    finally:
        object.__setattr__(capabilities, "sm_lo", lowest)
        SdpaBwdDslSm120.check_support = check_support
