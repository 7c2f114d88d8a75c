"""Execute-time overrides: how they are read, what they change, and what they cannot change."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cudnn.engines.base import VariantPack
from seam_graphs import bshd, make_graph, on_gpu, plan

from cudnn_frost_sm120.engine import Sm120BwdPlan, analyze
from cudnn_frost_sm120.facts import BwdFacts, TensorFacts
from cudnn_frost_sm120.launch import Launcher
from cudnn_frost_sm120.overrides import in_graph_order, row_major, with_shapes
from cudnn_frost_sm120.plan import BwdPlan, make_plan
from cudnn_frost_sm120.register import ENGINE_NAME

pytestmark = pytest.mark.usefixtures("opted_in")
through_a_plan = pytest.mark.skipif(
    not hasattr(VariantPack, "overridden"), reason="cudnn-frontend 1.30 does not tell engines of overrides"
)

BSHD = TensorFacts("q", (2, 4, 256, 64), tuple(bshd(2, 4, 256, 64)), "bf16")
BHSD = TensorFacts("q", (2, 4, 256, 64), row_major((2, 4, 256, 64)), "bf16")
SBHD = TensorFacts("q", (2, 4, 256, 64), (256, 64, 512, 1), "bf16")


def permuted(dim: tuple[int, ...], stride: tuple[int, ...], axes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return [dim[a] for a in axes], [stride[a] for a in axes]


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize(
    ("tensor", "dim", "stride"),
    [
        (BSHD, (2, 4, 64, 64), tuple(bshd(2, 4, 64, 64))),
        (BSHD, (3, 4, 64, 64), tuple(bshd(3, 4, 64, 64))),
        (BSHD, (2, 4, 64, 64), row_major((2, 4, 64, 64))),  # no strides passed
        (BSHD, (2, 4, 2, 64), tuple(bshd(2, 4, 2, 64))),  # a length that equals the batch
        (BSHD, (2, 4, 1, 64), tuple(bshd(2, 4, 1, 64))),
        (BSHD, (1, 4, 64, 64), tuple(bshd(1, 4, 64, 64))),
        (BHSD, (2, 4, 4, 64), row_major((2, 4, 4, 64))),  # a length that equals the heads
        (BHSD, (2, 4, 64, 64), (4 * 80 * 64, 80 * 64, 64, 1)),
        (SBHD, (2, 4, 64, 64), (256, 64, 512, 1)),
        (TensorFacts("stats", (2, 4, 256, 1), (1024, 256, 1, 1), "fp32"), (2, 4, 64, 1), (256, 64, 1, 1)),
    ],
)
def test_axes_are_told_apart(tensor: TensorFacts, dim: tuple, stride: tuple, axes: tuple) -> None:
    read_dim, read_stride = in_graph_order(tensor, 2, *permuted(dim, stride, axes))
    assert read_dim == dim
    assert [s for s, n in zip(read_stride, dim, strict=True) if n > 1] == [
        s for s, n in zip(stride, dim, strict=True) if n > 1
    ]


@pytest.mark.parametrize(
    ("tensor", "dim", "stride", "says"),
    [
        (BSHD, (2, 4, 4, 64), tuple(bshd(2, 4, 4, 64)), "more than one way"),  # BSHD, or row-major with axes swapped
        (BSHD, (64, 4, 2, 64), tuple(bshd(64, 4, 2, 64)), "more than one way"),  # or batch 2 with axes swapped
        (BSHD, (2, 8, 64, 64), tuple(bshd(2, 8, 64, 64)), "heads or head dim"),
        (BSHD, (2, 4, 64, 32), tuple(bshd(2, 4, 64, 32)), "heads or head dim"),
        (BSHD, (2, 4, 64), (256, 64, 1), "3 dims"),
    ],
)
def test_an_override_that_cannot_be_read(tensor: TensorFacts, dim: tuple, stride: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        in_graph_order(tensor, 2, dim, stride)


def test_other_shapes_of_the_same_facts() -> None:
    facts = analyze(make_graph()).facts
    changed = with_shapes(facts, {"q": (2, 4, 32, 64)})
    assert changed.q.dim == (2, 4, 32, 64)
    assert changed.q.stride == row_major((2, 4, 32, 64))
    assert changed.k is facts.k


# Through a plan, with cudnn-frontend's own pack over invented addresses.


class Chain:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Overridden:
    """A plan of a graph that enables overrides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, enabled: bool = True, **graph: Any) -> None:
        on_gpu(monkeypatch)
        options = {"is_override_shape_enabled": True} if enabled else {}
        self.graph = plan(make_graph(graph=options, **graph))
        request = self.graph._facts_for(analyze)
        assert request.declined is None
        self.facts: BwdFacts = request.facts
        self.made: BwdPlan = make_plan(self.facts, self.graph.plans[0].knobs, request.target)
        self.chain = Chain()
        self.plan = Sm120BwdPlan(self.made, Launcher(self.made, self.chain))
        self.tensors = [*self.facts.inputs(), *self.facts.outputs()]
        self.uids = [tensor.uid for tensor in self.tensors]

    def shapes(self, batch: int, sq: int, sk: int) -> list[list[int]]:
        lengths = dict.fromkeys(("k", "v", "dk", "dv"), sk)
        return [[batch, t.dim[1], lengths.get(t.name, sq), t.dim[3]] for t in self.tensors]

    @staticmethod
    def stride_of(shape: list[int]) -> list[int]:
        """As make_graph lays tensors out."""
        return list(row_major(shape)) if shape[3] == 1 else bshd(*shape)

    def execute(self, shapes: list[list[int]], strides: list[list[int]] | None = None, workspace: Any = 0x9000) -> None:
        buffers = {uid: 0x100_0000 * (i + 1) for i, uid in enumerate(self.uids)}
        strides = [self.stride_of(shape) for shape in shapes] if strides is None else strides
        pack = self.graph._normalize(buffers, workspace, self.uids, shapes, strides)
        pack._device = 0
        self.plan.execute(self.graph, pack, SimpleNamespace(workspace=workspace, stream=3))

    def words(self, call: int = -1) -> bytes:
        """The geometry block of a call; its address comes before the stream."""
        import ctypes

        from cudnn_frost_sm120.kernels.operands import WORDS

        return ctypes.string_at(self.chain.calls[call][-2], 8 * WORDS)


def block_of(facts: BwdFacts, like: BwdPlan) -> bytes:
    """The geometry block of a plan made for these facts to begin with."""
    launcher = Launcher(make_plan(facts, like.knobs, like.target), lambda *_: None)
    return bytes(launcher._block.raw)


@pytest.mark.parametrize("lengths", [(2, 64, 64), (2, 1024, 1024), (5, 96, 160), (1, 64, 32)])
@through_a_plan
def test_an_override_is_what_a_graph_of_that_shape_would_be(monkeypatch: pytest.MonkeyPatch, lengths: Any) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256, use_causal_mask=True)
    shapes = run.shapes(*lengths)
    run.execute(shapes)
    named = {t.name: tuple(shape) for t, shape in zip(run.tensors, shapes, strict=True)}
    strides = {name: tuple(run.stride_of(list(dim))) for name, dim in named.items()}
    alone = with_shapes(run.facts, named, strides)
    assert run.words() == block_of(alone, run.made)
    assert run.plan.get_workspace_size_for_shapes(run.uids, shapes) == (
        make_plan(alone, run.made.knobs, run.made.target).workspace_bytes
    )


@through_a_plan
def test_the_declared_shape_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256)
    declared = [list(t.dim) for t in run.tensors]
    run.execute(declared)
    run.execute(run.shapes(2, 64, 64))
    run.execute(declared)
    assert run.words(0) == run.words(2) != run.words(1)
    assert len(run.plan._overridden) == 2


@through_a_plan
def test_one_shape_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256)
    for _ in range(3):
        run.execute(run.shapes(2, 64, 64))
    assert len(run.plan._overridden) == 1
    assert run.chain.calls[0] == run.chain.calls[1] == run.chain.calls[2]


@through_a_plan
def test_a_window_that_begins_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of a graph that enables overrides tests its bounds, whether or not they cut the declared shape"""
    window = {"diagonal_band_left_bound": 300, "diagonal_band_right_bound": 0}
    run = Overridden(monkeypatch, sq=64, sk=64, **window)
    assert run.made.key.mask_left
    run.execute(run.shapes(2, 1024, 1024))
    assert run.chain.calls
    small = Overridden(monkeypatch, enabled=False, sq=64, sk=64, **window)
    assert not small.made.key.mask_left
    small.execute(small.shapes(2, 80, 80))  # it still cuts nothing
    refused(small, "other kernels", small.shapes(2, 1024, 1024))


def refused(run: Overridden, says: str, shapes: list[list[int]], **more: Any) -> None:
    run.chain.calls.clear()
    with pytest.raises(ValueError, match=says) as error:
        run.execute(shapes, **more)
    assert str(error.value).startswith(f"{ENGINE_NAME}: ")
    assert not run.chain.calls


@through_a_plan
def test_overrides_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256)
    shapes = run.shapes(2, 64, 64)
    shapes[1][2] = 128  # k alone
    refused(run, r"where q, k and v imply .* \[shapes\]", shapes)
    with pytest.raises(ValueError, match=r"\[shapes\]"):
        run.plan.get_workspace_size_for_shapes(run.uids, shapes)


@through_a_plan
def test_overrides_that_no_graph_would_be_served_with(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256)
    shapes = run.shapes(2, 64, 64)
    strides = [run.stride_of(shape) for shape in shapes]
    strides[0][2] += 4
    refused(run, r"\[stride_multiple\]", shapes, strides=strides)


@through_a_plan
def test_a_workspace_of_the_declared_shape_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    run = Overridden(monkeypatch, sq=256, sk=256)
    monkeypatch.setattr("cudnn_frost_sm120.executable._check_workspace_device", lambda *_: None)
    workspace = torch.empty(run.made.workspace_bytes + 16, dtype=torch.uint8)
    aligned = workspace[-workspace.data_ptr() % 16 :]
    refused(run, "needs a workspace of", run.shapes(2, 1024, 1024), workspace=aligned)


@through_a_plan
def test_short_buffers_for_the_overridden_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    run = Overridden(monkeypatch, sq=256, sk=256)
    monkeypatch.setattr("cudnn_frost_sm120.executable._CUDA", 1)  # host tensors stand for those of the device
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    buffers = {t.uid: torch.zeros(t.dim, dtype=types[t.dtype]) for t in run.tensors}
    shapes = run.shapes(2, 1024, 1024)
    strides = [run.stride_of(shape) for shape in shapes]
    pack = run.graph._normalize(buffers, 0x9000, run.uids, shapes, strides)
    pack._device = 0
    with pytest.raises(ValueError, match="the buffer of q holds 262144 bytes; this call needs 1048576"):
        run.plan.execute(run.graph, pack, SimpleNamespace(workspace=0x9000, stream=3))


def test_a_frontend_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudnn_frost_sm120.engine.VariantPack", object)
    request = analyze(make_graph(graph={"is_override_shape_enabled": True}))
    assert request.declined is not None
    assert "from 1.31 on" in request.declined
    assert analyze(make_graph()).declined is None


@through_a_plan
def test_knobs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Overridden(monkeypatch, sq=256, sk=256)
    facts = replace(run.facts, shape_overrides=False)
    assert run.plan._replanned(facts).knobs == run.made.knobs
