"""What a plan checks at execute, before anything is launched, and that it compiles with no device at all.

There is no device here, so the variant pack is a stand-in with the native pack's interface, over invented addresses.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from seam_graphs import make_graph, on_gpu, plan

from cudnn_frost_sm120 import engine as engine_module
from cudnn_frost_sm120.engine import Sm120BwdPlan, analyze
from cudnn_frost_sm120.facts import BwdFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.launch import BOUND_LAUNCHES
from cudnn_frost_sm120.plan import BwdPlan, make_plan
from cudnn_frost_sm120.register import ENGINE_NAME
from cudnn_frost_sm120.target import Target

pytestmark = pytest.mark.usefixtures("opted_in")

HOST = SimpleNamespace(type="cpu", index=None)
CODES = {"bf16": (4, 16), "fp16": (2, 16), "fp32": (2, 32)}


class Buffer:
    """One operand as the native pack describes it."""

    def __init__(self, tensor: Any, address: int) -> None:
        self.address: int | None = address
        self.nbytes = tensor.required_bytes
        self.device = (2, 0)
        self.dtype = CODES[tensor.dtype]
        self.shape = list(tensor.dim)
        self.stride = list(tensor.stride)


class Native:
    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers

    @property
    def address(self) -> int:
        pointers = (ctypes.c_void_p * len(self._buffers))(*(buffer.address for buffer in self._buffers))
        self._pointers = pointers  # kept alive
        return ctypes.addressof(pointers)

    def pointer(self, slot: int) -> int:
        return self._buffers[slot].address or 0

    def observed_bytes(self, slot: int) -> int:
        return self._buffers[slot].nbytes

    def observed_device(self, slot: int) -> tuple[int, int]:
        return self._buffers[slot].device

    def dtype(self, slot: int) -> tuple[int, int]:
        return self._buffers[slot].dtype

    def shape(self, slot: int) -> list[int]:
        return self._buffers[slot].shape

    def stride(self, slot: int) -> list[int]:
        return self._buffers[slot].stride


class Launches(list[Any]):
    """Stands where the launcher does; ``bound`` counts the sets of buffers that it was given."""

    bound = 0

    def bind(self, addresses: dict[str, int], workspace: int, workspace_bytes: int | None) -> Any:
        self.bound += 1
        return lambda stream: self.append((dict(addresses), workspace, workspace_bytes, stream))


class Run:
    """A plan of a small graph, buffers for it, and one execute of it."""

    def __init__(self, facts: BwdFacts, made: BwdPlan) -> None:
        tensors = [*facts.inputs(), *facts.outputs()]
        self.buffers = {t.name: Buffer(t, 0x10_0000 * (i + 1)) for i, t in enumerate(tensors)}
        self.uids = tuple(t.uid for t in tensors)
        self.launches = Launches()
        self.plan = Sm120BwdPlan(made, self.launches)  # type: ignore[arg-type]
        self.pack = SimpleNamespace(
            uids=self.uids,
            index_of_uid={uid: slot for slot, uid in enumerate(self.uids)},
            native=Native(list(self.buffers.values())),
            device=0,
            overridden=(),
            workspace=0x4000_0000,
            workspace_bytes=made.workspace_bytes,
        )
        self.workspace: Any = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))

    def execute(self, stream: int | None = 7) -> None:
        self.plan.execute(None, self.pack, SimpleNamespace(workspace=self.workspace, stream=stream))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    on_gpu(monkeypatch)
    request = analyze(make_graph())
    assert request.facts is not None
    assert request.target is not None
    knobs = ranked_knobs(request.facts, request.target)[0]
    return Run(request.facts, make_plan(request.facts, knobs, request.target))


def refused(run: Run, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        run.execute()
    assert str(error.value).startswith(f"{ENGINE_NAME}: ")
    assert not run.launches


def test_good_buffers_are_launched(run: Run) -> None:
    run.execute()
    run.execute(stream=9)
    addresses, workspace, nbytes, stream = run.launches[0]
    assert addresses == {name: buffer.address for name, buffer in run.buffers.items()}
    assert (workspace, nbytes, stream) == (0x4000_0000, run.plan.get_workspace_size(), 7)
    assert run.launches[1][3] == 9
    assert run.plan.takes_variant_pack


def test_buffers_are_judged_once(run: Run) -> None:
    for _ in range(3):
        run.execute()
    assert (run.launches.bound, len(run.launches)) == (1, 3)
    run.buffers["q"].address = 0x7000_0000
    run.execute()
    run.buffers["q"].address = run.launches[0][0]["q"]
    run.execute()
    assert (run.launches.bound, len(run.launches)) == (2, 5)
    assert run.launches[4] == run.launches[0] != run.launches[3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: setattr(run.buffers["k"], "nbytes", 8), "buffer of k holds 8 bytes"),
        (lambda run: setattr(run.buffers["v"], "dtype", CODES["fp32"]), "buffer of v has another dtype"),
        (lambda run: setattr(run.buffers["stats"], "address", None), "no buffer was passed for stats"),
        (lambda run: setattr(run, "workspace", SimpleNamespace(device=HOST)), "the workspace is on"),
        (lambda run: setattr(run.pack, "device", 1), "not on cuda:1"),
    ],
)
def test_accepted_buffers_that_change_are_judged_again(run: Run, change: Any, says: str) -> None:
    run.execute()
    run.launches.clear()
    for _ in range(2):
        change(run)
        refused(run, says)


def test_what_is_remembered_is_bounded(run: Run) -> None:
    for step in range(2 * BOUND_LAUNCHES):
        run.buffers["q"].address = 0x7000_0000 + 16 * step
        run.execute()
    assert len(run.plan._declared._accepted) == BOUND_LAUNCHES


def test_another_operand_order(run: Run) -> None:
    run.execute()
    run.pack.uids = run.uids[::-1]
    run.pack.index_of_uid = {uid: slot for slot, uid in enumerate(run.pack.uids)}
    run.pack.native = Native(list(run.buffers.values())[::-1])
    run.execute()
    assert run.launches[0] == run.launches[1]


def test_the_same_addresses_for_other_operands(run: Run) -> None:
    run.execute()
    names = list(run.buffers)
    uids, q, dq = list(run.uids), names.index("q"), names.index("dq")
    uids[q], uids[dq] = uids[dq], uids[q]
    run.pack.uids = tuple(uids)
    run.pack.index_of_uid = {uid: slot for slot, uid in enumerate(uids)}
    run.execute()
    first, second = run.launches[0][0], run.launches[1][0]
    assert (second["q"], second["dq"]) == (first["dq"], first["q"]) != (first["q"], first["dq"])


def test_bare_addresses_are_taken_at_their_word(run: Run) -> None:
    for buffer in run.buffers.values():
        buffer.nbytes, buffer.device = -1, (-1, -1)
    run.workspace, run.pack.workspace_bytes = 0x4000_0000, 0
    run.execute()
    assert run.launches[0][2] is None, "the size of a bare workspace address is not known"


@pytest.mark.parametrize("name", ["q", "stats", "dv"])
def test_missing_buffer(run: Run, name: str) -> None:
    run.buffers[name].address = None
    refused(run, f"no buffer was passed for {name}")


def test_buffer_absent_from_the_pack(run: Run) -> None:
    run.pack.uids = run.uids[1:]
    run.pack.index_of_uid = {uid: slot for slot, uid in enumerate(run.pack.uids)}
    refused(run, "no buffer was passed for q")


@pytest.mark.parametrize("name", ["k", "stats", "dq"])
def test_short_buffer(run: Run, name: str) -> None:
    run.buffers[name].nbytes -= 1
    refused(run, f"buffer of {name} holds {run.buffers[name].nbytes} bytes; this call needs")


@pytest.mark.parametrize("device", [(1, 0), (2, 1)])
def test_buffer_on_another_device(run: Run, device: tuple[int, int]) -> None:
    run.buffers["do"].device = device
    refused(run, "buffer of do is not on cuda:0")


def test_buffer_of_another_dtype(run: Run) -> None:
    run.buffers["v"].dtype = CODES["fp32"]
    refused(run, "buffer of v has another dtype")


@pytest.mark.parametrize("other", ["q", "dk", "stats"])
def test_output_on_another_operand(run: Run, other: str) -> None:
    run.buffers["dq"].address = run.buffers[other].address
    refused(run, "lies on another operand's buffer")


def test_inputs_may_share_a_buffer(run: Run) -> None:
    run.buffers["k"].address = run.buffers["v"].address
    run.execute()
    assert run.launches


def test_overrides_are_refused_where_the_pack_does_not_name_them(run: Run) -> None:
    del run.pack.overridden
    run.buffers["q"].shape = [2, 128, 4, 64]  # the caller's own order of axes
    run.execute()
    run.launches.clear()
    run.buffers["q"].shape = [2, 4, 100, 64]
    refused(run, "overrides from 1.31 on")


def test_workspace_on_another_device(run: Run) -> None:
    for device in (SimpleNamespace(type="cpu", index=None), SimpleNamespace(type="cuda", index=1)):
        run.workspace = SimpleNamespace(device=device)
        refused(run, "the workspace is on")


def test_another_gpu_than_compiled_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (12, 1))
    refused(run, "compiled for sm_120a, and cuda:0 is SM121")


def test_another_device_than_built_for(run: Run) -> None:
    run.plan.plan = replace(run.plan.plan, target=replace(run.plan.plan.target, device=1))
    refused(run, "built for cuda:1, and this runs on cuda:0")
    run.plan.plan = replace(run.plan.plan, target=replace(run.plan.plan.target, device=0))
    run.execute()
    assert run.launches


def test_managed_memory(run: Run) -> None:
    run.buffers["q"].device = (13, 0)
    run.execute()
    assert run.launches


def test_a_build_follows_the_callers_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {1: (12, 0), 2: (12, 1)}
    monkeypatch.setattr(
        "cudnn._device.device_info",
        lambda ordinal: SimpleNamespace(compute_capability=info[ordinal], sm_count=70, device_name="a board"),
    )
    engine = engine_module.Sm120BwdEngine(0)
    planned = Target("sm_120", "sm_120a", 0, 188)

    def context(ordinal: int) -> Any:
        return SimpleNamespace(handle=SimpleNamespace(device=SimpleNamespace(ordinal=ordinal)))

    assert engine._on_callers_device(planned, None) is planned
    assert engine._on_callers_device(planned, SimpleNamespace(handle=None)) is planned
    assert engine._on_callers_device(planned, context(0)) is planned
    assert engine._on_callers_device(planned, context(1)) == Target("sm_120", "sm_120a", 1, 70)
    with pytest.raises(NotImplementedError, match="planned for sm_120, and the handle's GPU is sm_121"):
        engine._on_callers_device(planned, context(2))


def test_no_pack(run: Run) -> None:
    run.pack = None
    refused(run, "could not read the variant pack")


def test_stream_of_a_caller_without_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(
        cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=40 + device)), _C=object()
    )
    monkeypatch.setattr(engine_module, "sys", SimpleNamespace(modules={"torch": torch}))
    run.execute(stream=None)
    monkeypatch.setattr(engine_module, "sys", SimpleNamespace(modules={}))
    run.execute(stream=None)
    assert [launch[3] for launch in run.launches] == [40, 0]


# cudnn-frontend's own variant pack.


def packed(buffers: Any) -> tuple[Sm120BwdPlan, Any, Launches]:
    """A plan, and the pack that cudnn-frontend makes of ``buffers(tensor)`` for each of its tensors."""
    graph = plan(make_graph())
    request = graph._facts_for(analyze)
    made = make_plan(request.facts, graph.plans[0].knobs, request.target)
    launches = Launches()
    tensors = [*request.facts.inputs(), *request.facts.outputs()]
    pack = graph._normalize({tensor.uid: buffers(tensor) for tensor in tensors}, 0x9000)
    pack._device = 0  # what it would ask the driver for
    return Sm120BwdPlan(made, launches), pack, launches  # type: ignore[arg-type]


@pytest.fixture
def _sm120_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch)


CONTEXT = SimpleNamespace(workspace=0x9000, stream=3)


@pytest.mark.planning
@pytest.mark.usefixtures("_sm120_device")
def test_real_pack_of_addresses() -> None:
    compiled, pack, launches = packed(lambda tensor: 0x1000 * tensor.uid)
    compiled.execute(None, pack, CONTEXT)
    addresses, workspace, nbytes, stream = launches[0]
    assert (addresses["q"], addresses["dv"]) == (0x1000, 0x9000)
    assert (workspace, nbytes, stream) == (0x9000, None, 3)


@pytest.mark.planning
@pytest.mark.usefixtures("_sm120_device")
def test_real_pack_of_host_tensors() -> None:
    torch = pytest.importorskip("torch")
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    compiled, pack, launches = packed(lambda tensor: torch.zeros(tensor.dim, dtype=dtypes[tensor.dtype]))
    with pytest.raises(ValueError, match="buffer of q is not on cuda:0"):
        compiled.execute(None, pack, CONTEXT)
    compiled, pack, launches = packed(lambda tensor: torch.zeros(tensor.dim[1:], dtype=dtypes[tensor.dtype]))
    with pytest.raises(ValueError, match="buffer of q holds 65536 bytes; this call needs 131072"):
        compiled.execute(None, pack, CONTEXT)
    assert not launches


@pytest.mark.compile
def test_serialize_and_deserialize() -> None:
    graph = plan(make_graph()).select_plan(0)
    if not hasattr(graph, "_plan_kernel_entries"):
        pytest.skip("this release does not serialize plans of Python engines")
    graph.build_plans()
    blob = graph.serialize(as_bytes=True)
    import cudnn

    loaded = cudnn.pygraph()
    loaded.deserialize(blob)
    assert loaded.get_engine_and_knobs_at_index(0) == graph.get_engine_and_knobs_at_index(0)
    assert loaded.get_workspace_size() == graph.get_workspace_size()


@pytest.mark.compile
def test_build_with_no_device_at_all() -> None:
    """validate, plan, pin, compile for sm_120a: the whole of planning works ahead of time."""
    graph = plan(make_graph(use_causal_mask=True)).select_plan(0)
    graph.check_support()
    graph.build_plans()
    compiled = graph._compiled_plans[0]
    assert isinstance(compiled, Sm120BwdPlan)
    assert graph.get_workspace_size() == compiled.plan.workspace_bytes > 0
    assert compiled.plan.target.device is None
    assert compiled.plan.knobs == graph.plans[0].knobs
