"""The engine that cudnn-frontend's planner talks to, and the plan that it executes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn import behavior_note
from cudnn.engines.base import BaseEngine, CompiledPlan, PlanConfig, decline_types
from cudnn.engines.manifest import engines_for

from . import target as targets
from .admission import decline_reason
from .facts import BwdFacts, facts_from_graph
from .heuristics import ranked_knobs
from .knobs import BwdKnobs
from .register import ENGINE_NAME
from .target import Target

if TYPE_CHECKING:
    from .launch import Launcher
    from .plan import BwdPlan

_COMPILER_PACKAGES = ("cutlass", "tvm_ffi")
_CPU, _CUDA, _CUDA_MANAGED = 1, 2, 13  # DLPack's device types
_UNKNOWN_DEVICE, _UNKNOWN_DTYPE = (-1, -1), (0, 0)  # what the native pack says where the caller's object does not
_DLPACK_DTYPE = {"fp16": (2, 16), "bf16": (4, 16), "fp32": (2, 32), "int32": (0, 32)}  # (type code, bits)


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
        return ranked_knobs(self.facts, self.target)


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
    return Request(facts, target, _missing_package() or decline_reason(facts, target))


def _missing_package() -> str | None:
    """Why no kernel can be compiled here, said before a plan is listed rather than when it is built."""
    missing = [name for name in _COMPILER_PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} cannot be imported here, and compiling kernels needs it" if missing else None


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
        knobs = self._typed_knobs(plan.knobs if plan is not None else None) or ranked_knobs(facts, target)[0]
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
        self._launcher = launcher
        facts = plan.facts
        inputs, outputs = list(facts.inputs()), list(facts.outputs())
        self._tensors = [*inputs, *outputs]
        self._needs = [(t.name, t.required_bytes, _DLPACK_DTYPE[t.dtype], t.by_value) for t in self._tensors]
        self._input_count = len(inputs)
        self._slots: tuple[Any, list[int]] = ((), [])
        self._served_devices: set[int] = set()

    def get_workspace_size(self) -> int:
        return self.plan.workspace_bytes

    def execute(self, graph: Any, pack: Any, ctx: Any) -> None:
        """Enqueue the kernels. Raises ValueError, with every output untouched, for a buffer that is missing, too
        small, of another dtype or on another device, for one that is both read and written, for a workspace that is
        missing or too small, and for execute-time overrides: the plan's geometry is the graph's."""
        if pack is None:
            raise ValueError(f"{ENGINE_NAME}: cudnn-frontend could not read the variant pack")
        device = pack.device
        self._check_device(device)
        addresses = self._addresses(pack, device)
        self._check_overrides(pack)
        workspace = ctx.workspace
        self._check_workspace_device(workspace, device)
        # A bare address tells no size; some releases report that as None, others as 0.
        size = None if type(workspace) is int else pack.workspace_bytes
        stream = ctx.stream if ctx.stream is not None else _current_stream(device)
        self._launcher.run(addresses, pack.workspace, size, stream)

    def _addresses(self, pack: Any, device: int) -> dict[str, int]:
        native, here = pack.native, (_CUDA, device)
        addresses: dict[str, int] = {}
        for slot, (name, needed, dtype, by_value) in zip(self._slots_of(pack), self._needs, strict=True):
            address = native.pointer(slot)
            if not address:  # nothing passed, or a null address
                raise ValueError(f"{ENGINE_NAME}: no buffer was passed for {name}")
            held = native.observed_bytes(slot)
            if 0 <= held < needed:
                raise ValueError(f"{ENGINE_NAME}: the buffer of {name} holds {held} bytes; the graph declares {needed}")
            where = native.observed_device(slot)
            if by_value:  # read by the host: an address that does not say where it points would be taken on trust
                if where[0] != _CPU:
                    raise ValueError(f"{ENGINE_NAME}: {name} is passed by value, and takes a buffer in host memory")
            elif where != here and where not in (_UNKNOWN_DEVICE, (_CUDA_MANAGED, device)):
                raise ValueError(f"{ENGINE_NAME}: the buffer of {name} is not on cuda:{device}, where this runs")
            given = native.dtype(slot)
            if given != dtype and given != _UNKNOWN_DTYPE:
                raise ValueError(f"{ENGINE_NAME}: the buffer of {name} has another dtype than the graph declares")
            addresses[name] = address
        in_order = list(addresses.values())
        read, written = set(in_order[: self._input_count]), set(in_order[self._input_count :])
        if len(written) < len(in_order) - self._input_count or read & written:
            raise ValueError(f"{ENGINE_NAME}: an output lies on another operand's buffer; each needs its own")
        return addresses

    def _slots_of(self, pack: Any) -> list[int]:
        uids, slots = self._slots
        if uids != pack.uids:
            slots = []
            for tensor in self._tensors:
                if tensor.uid not in pack.index_of_uid:
                    raise ValueError(f"{ENGINE_NAME}: no buffer was passed for {tensor.name}")
                slots.append(pack.index_of_uid[tensor.uid])
            self._slots = (pack.uids, slots)
        return slots

    def _check_device(self, device: int) -> None:
        target = self.plan.target
        if device == target.device or device in self._served_devices:
            return
        if target.device is not None:  # kernels are loaded, and their limits set, per device
            raise ValueError(
                f"{ENGINE_NAME}: the plan was built for cuda:{target.device}, and this runs on cuda:{device}"
            )
        from cudnn._device import device_info

        major, minor = device_info(device).compute_capability
        if f"sm_{major}{minor}a" != target.arch:
            raise ValueError(
                f"{ENGINE_NAME}: the plan was compiled for {target.arch}, and cuda:{device} is SM{major}{minor}"
            )
        self._served_devices.add(device)

    def _check_overrides(self, pack: Any) -> None:
        overridden = getattr(pack, "overridden", None)
        if overridden is None:  # cudnn-frontend 1.30 does not say; an overridden slot has other extents
            overridden = [
                slot
                for tensor, slot in zip(self._tensors, self._slots_of(pack), strict=True)
                if not _same_extents(pack.native.shape(slot), tensor.dim)
            ]
        if overridden:
            raise ValueError(
                f"{ENGINE_NAME}: execute-time shape and stride overrides are not served; plan a graph of that shape"
            )

    @staticmethod
    def _check_workspace_device(workspace: Any, device: int) -> None:
        where = getattr(workspace, "device", None)
        kind, index = getattr(where, "type", None), getattr(where, "index", None)
        if kind is not None and (kind != "cuda" or index not in (None, device)):
            raise ValueError(f"{ENGINE_NAME}: the workspace is on {where}, and this runs on cuda:{device}")


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


def _same_extents(given: Any, declared: tuple[int, ...]) -> bool:
    """Whether two shapes have the same extents, in any order: a caller's view may have its axes permuted."""
    return sorted(e for e in given if e != 1) == sorted(e for e in declared if e != 1)


def _current_stream(device: int) -> int:
    """The stream of a caller whose handle has none: torch's current one where torch is loaded, else the default."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_stream(device).cuda_stream if torch is not None else 0
