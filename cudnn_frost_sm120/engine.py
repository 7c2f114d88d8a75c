"""The engine that cudnn-frontend's planner talks to, and the plan that it executes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cudnn import behavior_note
from cudnn.engines.base import BaseEngine, CompiledPlan, PlanConfig, VariantPack, decline_types
from cudnn.engines.heuristics import BACKEND
from cudnn.engines.manifest import engines_for

from . import driver
from . import target as targets
from .admission import decline_reason
from .executable import Executable
from .facts import BwdFacts, facts_from_graph
from .knobs import BwdKnobs
from .overrides import in_graph_order, with_shapes
from .ranking import plans_for
from .register import ENGINE_NAME
from .remembered import Remembered
from .target import Target
from .tuning_file import BACKEND_NAME, winner_for

__all__ = [
    "BACKEND",
    "PlanConfig",
    "Request",
    "Sm120BwdEngine",
    "Sm120BwdPlan",
    "analyze",
    "engine_name",
    "other_verdicts",
]

if TYPE_CHECKING:
    from .launch import Launcher
    from .plan import BwdPlan

_COMPILER_PACKAGES = ("cutlass", "tvm_ffi")
_OVERRIDES_KEPT = 4096  # shapes per plan; one is a few kilobytes, and all share the kernels
_NO_OVERRIDES = "cudnn-frontend tells engines of execute-time shape overrides from 1.31 on; plan a graph of that shape"


@dataclass(frozen=True)
class Request:
    """A graph as this engine sees it. ``declined`` says why it is not served, or is None."""

    facts: BwdFacts | None
    target: Target | None
    declined: str | None

    def knobs(self) -> tuple[BwdKnobs, ...]:
        """The plans to offer, best first; none where the graph is declined."""
        if self.declined is not None or self.facts is None or self.target is None:
            return ()
        return plans_for(self.facts, self.target)

    def measured_winner(self) -> str | None:
        """The engine that a tuner measured fastest for such graphs on this GPU; None where none was measured."""
        winner = winner_for(self.facts, self.target) if self.facts is not None and self.target is not None else None
        return winner.engine if winner is not None else None


def analyze(graph: Any) -> Request:
    """The request that ``graph`` makes now; pass it to ``graph._facts_for`` to have it kept once the graph is frozen.

    The target is part of it, so that an environment variable changed after planning does not half apply.
    """
    try:
        facts = facts_from_graph(graph)
    except ValueError as error:
        return Request(None, None, str(error))
    try:
        target = targets.resolve(graph)
    except NotImplementedError as error:
        return Request(facts, None, str(error))
    return Request(facts, target, _missing_package() or _unseen_overrides(facts) or decline_reason(facts, target))


def _missing_package() -> str | None:
    """Why no kernel can be compiled here, said before a plan is listed rather than when it is built."""
    missing = [name for name in _COMPILER_PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} cannot be imported here, and compiling kernels needs it" if missing else None


def _unseen_overrides(facts: BwdFacts) -> str | None:
    """Why a graph that is to be executed with other shapes is not served with this cudnn-frontend."""
    return _NO_OVERRIDES if facts.shape_overrides and not hasattr(VariantPack, "overridden") else None


class Sm120BwdEngine(BaseEngine):
    """Attention backward on the SM120 line. One instance serves any number of graphs and threads."""

    name = ENGINE_NAME
    behavior_notes = (behavior_note.RUNTIME_COMPILATION,)

    def __init__(self, engine_id: int) -> None:
        super().__init__()
        self.engine_id = engine_id

    def check_support(self, graph: Any) -> None:
        """Raises NotImplementedError, in one sentence, unless the graph is served."""
        self._served(graph)

    def build_plan(self, graph: Any, plan: PlanConfig | None, ctx: Any = None) -> CompiledPlan:
        """Compile the kernels of ``plan``, or of our best plan if it has no knobs. Raises NotImplementedError where
        the graph or the knobs are not served: a recorded plan comes here without check_support."""
        from .compile import compile_chain
        from .launch import Launcher
        from .plan import make_plan

        facts, target = self._served(graph)
        target = self._on_callers_device(target, ctx)
        knobs = self._typed_knobs(plan.knobs if plan is not None else None) or plans_for(facts, target)[0]
        reason = decline_reason(facts, target, knobs)
        if reason is not None:
            raise NotImplementedError(f"{self.name}: {reason}")
        made = make_plan(facts, knobs, target)
        return Sm120BwdPlan(made, Launcher(made, compile_chain(made.key, target)))

    def knobs_to_public(self, knobs: BwdKnobs | dict[Any, int] | None) -> dict[Any, int]:
        if knobs is None:
            return {}
        return knobs.to_public() if isinstance(knobs, BwdKnobs) else dict(knobs)

    def knobs_from_public(self, public: dict[Any, int] | None) -> BwdKnobs | None:
        """None for no knobs, which is our best plan. Raises ValueError for anything but a complete assignment."""
        return BwdKnobs.from_public(public) if public else None

    def _served(self, graph: Any) -> tuple[BwdFacts, Target]:
        request: Request = graph._facts_for(analyze)
        if request.declined is not None or request.facts is None or request.target is None:
            raise NotImplementedError(f"{self.name}: {request.declined}")
        return request.facts, request.target

    def _on_callers_device(self, target: Target, ctx: Any) -> Target:
        """The target with the device of the handle that the caller builds or executes with, if that is another one."""
        handle = getattr(ctx, "handle", None)
        if handle is None or target.device is None or handle.device.ordinal == target.device:
            return target
        there = targets.for_device(handle.device.ordinal)
        if there.name != target.name:
            raise NotImplementedError(f"{self.name}: planned for {target.name}, and the handle's GPU is {there.name}")
        return there

    def _typed_knobs(self, knobs: Any) -> BwdKnobs | None:
        if knobs is None or isinstance(knobs, BwdKnobs):
            return knobs
        if not isinstance(knobs, dict):
            raise NotImplementedError(f"{self.name}: knobs of type {type(knobs).__name__} belong to another engine")
        try:
            return self.knobs_from_public(knobs)
        except ValueError as error:
            raise NotImplementedError(f"{self.name}: {error}") from error


class Sm120BwdPlan(CompiledPlan):
    """A compiled plan: checks each buffer against the graph's declaration, then launches on the caller's stream."""

    takes_variant_pack = True

    def __init__(self, plan: BwdPlan, launcher: Launcher) -> None:
        self.plan = plan
        self._declared = Executable(plan, launcher)
        self._overridden: Remembered[Any, Executable] = Remembered(_OVERRIDES_KEPT)
        self._launcher = launcher
        self._served_devices: set[int] = set()

    def get_workspace_size(self) -> int:
        return self.plan.workspace_bytes

    def get_workspace_size_for_shapes(self, uids: Any, shapes: Any) -> int:
        """Workspace bytes for an execute with these shapes, in the graph's order of axes, for the tensors of these
        uids. Raises ValueError where the plan cannot serve them."""
        name_of = {tensor.uid: tensor.name for tensor in self._declared.tensors}
        try:
            named = {name_of[uid]: tuple(shape) for uid, shape in zip(uids, shapes, strict=True) if uid in name_of}
            return self._replanned(with_shapes(self.plan.facts, named)).workspace_bytes
        except ValueError as error:
            raise ValueError(f"{ENGINE_NAME}: {error}") from None

    def execute(self, graph: Any, pack: Any, ctx: Any) -> None:
        """Enqueue the kernels. Raises ValueError, with every output untouched, for a buffer that is missing, too
        small, of another dtype or on another device, for one that is both read and written, for a workspace that is
        missing or too small, and for overrides of shapes that would need other kernels than the plan's."""
        try:
            if pack is None:
                raise ValueError("cudnn-frontend could not read the variant pack")
            device = driver.current_device()
            if device is None:
                device = pack.device
            if device != self.plan.target.device and device not in self._served_devices:
                self._check_device(device)
            stream = ctx.stream if ctx.stream is not None else _current_stream(device)
            overridden = getattr(pack, "overridden", None)
            executable = self._declared if overridden == () else self._executable_for(pack, overridden)
            executable.run(pack, device, ctx.workspace, stream)
        except ValueError as error:
            raise ValueError(f"{ENGINE_NAME}: {error}") from None

    def _executable_for(self, pack: Any, overridden: Any) -> Executable:
        """The executable of the shapes that ``pack`` overrides; it is kept."""
        if overridden is None:
            _refuse_other_extents(pack, self._declared)
            return self._declared
        slots = dict(zip(self._declared.slots_of(pack), self._declared.tensors, strict=True))
        given = {s: (*pack.native.shape(s), *pack.native.stride(s)) for s in overridden if s in slots}
        key = tuple((slots[slot].name, geometry) for slot, geometry in sorted(given.items()))
        executable = self._overridden.get(key)
        if executable is None:
            shapes, strides, batch = {}, {}, self.plan.facts.batch
            for name, geometry in key:
                tensor, rank = getattr(self.plan.facts, name), len(geometry) // 2
                shapes[name], strides[name] = in_graph_order(tensor, batch, geometry[:rank], geometry[rank:])
            plan = self._replanned(with_shapes(self.plan.facts, shapes, strides))
            executable = Executable(plan, self._launcher.for_plan(plan))
            self._overridden.keep(key, executable)
        return executable

    def _replanned(self, facts: BwdFacts) -> BwdPlan:
        """The plan's kernels on other shapes. Raises ValueError where they do not serve them."""
        from .plan import make_plan

        reason = decline_reason(facts, self.plan.target, self.plan.knobs)
        if reason is not None:
            raise ValueError(f"the overridden shapes are not served: {reason}")
        for any_shape in (True, False):  # kernels that test every bound, or those that cut at these shapes
            plan = make_plan(replace(facts, shape_overrides=any_shape), self.plan.knobs, self.plan.target)
            if plan.key == self.plan.key:
                return plan
        raise ValueError("the overridden shapes need other kernels than the plan's; plan a graph of those shapes")

    def _check_device(self, device: int) -> None:
        target = self.plan.target
        if target.device is not None:  # kernels are loaded, and their limits set, per device
            raise ValueError(f"the plan was built for cuda:{target.device}, and this runs on cuda:{device}")
        from cudnn._device import device_info

        major, minor = device_info(device).compute_capability
        if f"sm_{major}{minor}a" != target.arch:
            raise ValueError(f"the plan was compiled for {target.arch}, and cuda:{device} is SM{major}{minor}")
        self._served_devices.add(device)


def engine_name(graph: Any, index: int) -> str:
    """The name of the Python engine of a plan; BACKEND_NAME for a plan of the cuDNN library."""
    names = {engine.engine_id: engine.name for engine in engines_for(graph)}
    return names.get(graph.plans[index].engine_id, BACKEND_NAME)


def other_verdicts(graph: Any) -> dict[str, str]:
    """What each other engine that cudnn-frontend offers for ``graph`` says: why it declines, or "" if it accepts.

    The cuDNN library comes last, where planning has asked it and it declined.
    """
    verdicts: dict[str, str] = {}
    for engine in engines_for(graph):
        if engine.name == ENGINE_NAME:
            continue
        try:
            engine.check_support(graph)
            verdicts[engine.name] = ""
        except decline_types() as error:
            verdicts[engine.name] = str(error).removeprefix(f"{engine.name}: ")
    declined = getattr(graph, "_backend_declined", None)
    if declined is not None:
        verdicts["cuDNN library"] = str(declined).strip()
    return verdicts


def _refuse_other_extents(pack: Any, executable: Executable) -> None:
    """cudnn-frontend 1.30 does not say which slots are overridden; they have other extents than the graph's."""
    for tensor, slot in zip(executable.tensors, executable.slots_of(pack), strict=True):
        if 0 <= pack.native.observed_bytes(slot) < tensor.required_bytes:
            continue  # a buffer that is too small, which is said of it in its turn
        given = pack.native.shape(slot)
        if sorted(e for e in given if e != 1) != sorted(e for e in tensor.dim if e != 1):  # axes may be permuted
            raise ValueError(_NO_OVERRIDES)


def _current_stream(device: int) -> int:
    """The stream of a caller whose handle has none: torch's current one where torch is loaded, else the default."""
    torch = sys.modules.get("torch")
    if torch is None:
        return 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # current_stream() takes microseconds for an object
    return raw(device) if raw is not None else torch.cuda.current_stream(device).cuda_stream
