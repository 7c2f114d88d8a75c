"""Pose a case on the GPU, run it through the launcher, a graph or the wrapper, and judge the gradients.

Inputs have NaN wherever they are not read: between rows of a layout with gaps and past the lengths. Outputs start as
NaN everywhere, the workspace as 0xFF; behind the workspace and around the outputs lie guards that must survive. The
oracle is reference.py in fp64 on the same rounded inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cudnn_frost_sm120 import reference, target
from cudnn_frost_sm120.compile import compile_chain
from cudnn_frost_sm120.facts import BwdFacts, TensorFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import BwdKnobs
from cudnn_frost_sm120.launch import Launcher
from cudnn_frost_sm120.plan import BwdPlan, make_plan
from cudnn_frost_sm120.register import ENGINE_NAME, register

from .cases import Case, facts_of

TORCH_DTYPE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}
TOLERANCE = {"bf16": 6e-3, "fp16": 1e-3}
"""Largest `reference.relative_error` of any gradient; its floor is what the terms of the sums add up to."""
YARDSTICK_ROWS = 64
"""Non-zero rows of a gradient from which on its error is an average, and may be compared with torch's own error."""
YARDSTICK_PAIRS = 1 << 22
"""Query-key pairs up to which the same gradients in plain torch are computed too."""
GUARD = 64
"""Elements before and after every tensor, bytes * 4 behind the workspace."""


def allocate(record: TensorFacts, device: str, fill: float) -> torch.Tensor:
    """A view with the dims and strides of `record` over storage that holds nothing else but two guards."""
    stepped = [(extent - 1) * stride for extent, stride in zip(record.dim, record.stride, strict=True) if extent > 1]
    count = sum(stepped) + 1 + 2 * GUARD
    storage = torch.full((count,), fill, dtype=TORCH_DTYPE[record.dtype], device=device)
    # No torch tensor has a negative stride; one of a dim of size 1 means nothing, and is served.
    return storage.as_strided(record.dim, [max(stride, 0) for stride in record.stride], GUARD)


def storage_of(view: torch.Tensor) -> torch.Tensor:
    """Everything that `allocate` made for the view, in one dimension."""
    count = view.untyped_storage().nbytes() // view.element_size()
    return view.as_strided((count,), (1,), 0)


@dataclass(frozen=True)
class Workspace:
    """A plan's workspace, filled with 0xFF, with a guard behind it."""

    buffer: torch.Tensor
    nbytes: int
    shift: int

    @classmethod
    def create(cls, nbytes: int, device: str, shift: int = 0) -> Workspace:
        """`shift` bytes off a generous alignment; a multiple of 16 is allowed."""
        buffer = torch.full((shift + nbytes + 4 * GUARD,), 0xFF, dtype=torch.uint8, device=device)
        return cls(buffer, nbytes, shift)

    @property
    def view(self) -> torch.Tensor:
        return self.buffer[self.shift : self.shift + self.nbytes]

    @property
    def intact(self) -> bool:
        guards = (self.buffer[: self.shift], self.buffer[self.shift + self.nbytes :])
        return all(bool((guard == 0xFF).all()) for guard in guards)


class Problem:
    """The tensors of a case, keyed by port name as in a launch."""

    def __init__(self, case: Case, device: str = "cuda", facts: BwdFacts | None = None):
        self.case, self.device = case, device
        self.facts = facts_of(case) if facts is None else facts
        self.tensors: dict[str, torch.Tensor] = {}
        for record in self.facts.inputs():
            where = "cpu" if record.by_value else device
            self.tensors[record.name] = allocate(record, where, 0 if record.dtype == "int32" else math.nan)
        for record in self.facts.outputs():
            self.tensors[record.name] = allocate(record, device, math.nan)
        if self.facts.scale_tensor is not None:
            self.tensors["scale_tensor"].fill_(case.scale_value)
        for name, values in case.lengths.items():
            self.tensors[name].copy_(torch.tensor(values, dtype=torch.int32).reshape(-1, 1, 1, 1))
        self.refill(case.seed)

    def refill(self, seed: int) -> None:
        """New contents, in place: inputs from the seed, o and stats by the oracle, outputs NaN."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self.__dict__.pop("expected", None)
        centre = {}
        if self.case.values == "very_negative_lse":
            centre = {"q": 8.0, "k": -8.0, "sink": -64.0 * self.facts.headdim_qk * self.scale}
        for name in ("q", "k", "v", "do", "bias", "sink"):
            if name in self.tensors:
                tensor = self.tensors[name]
                noise = torch.randn(tensor.shape, generator=generator, device=self.device)
                tensor.copy_(noise + centre.get(name, 0.0))
        self._poison("q", "k", "v", "do")
        self._poison_bias()
        o, lse = reference.sdpa_forward(*(self.tensors[n] for n in ("q", "k", "v")), **self.features)
        self.tensors["o"].copy_(o)
        self.tensors["stats"].copy_(lse)
        self._poison("o", "stats")
        self.wipe_outputs()

    def wipe_outputs(self) -> None:
        for record in self.facts.outputs():
            storage_of(self.tensors[record.name]).fill_(math.nan)

    def _poison(self, *names: str) -> None:
        """NaN in the rows past the lengths."""
        for name in names:
            lengths = self.tensors.get("seq_len_kv" if name in ("k", "v") else "seq_len_q")
            if lengths is not None:
                row = torch.arange(self.tensors[name].shape[2], device=self.device)
                self.tensors[name].masked_fill_(row[None, None, :, None] >= lengths, math.nan)

    def _poison_bias(self) -> None:
        """NaN in the elements of bias that no batch's lengths reach."""
        if self.facts.bias is None or not self.facts.mask.padding:
            return
        row = torch.arange(self.facts.seqlen_q, device=self.device)[:, None]
        key = torch.arange(self.facts.seqlen_k, device=self.device)
        used = (row < self.tensors["seq_len_q"]) & (key < self.tensors["seq_len_kv"])
        used = used.expand(-1, self.facts.heads_q, -1, -1)
        for axis, extent in enumerate(self.facts.bias.dim):
            if extent == 1:
                used = used.any(axis, keepdim=True)
        self.tensors["bias"].masked_fill_(~used, math.nan)

    @property
    def scale(self) -> float:
        """What the scores are multiplied by, as the kernels read it."""
        return self.tensors["scale_tensor"].item() if self.facts.scale is None else self.facts.scale

    @property
    def features(self) -> dict:
        """The keyword arguments of the oracle."""
        optional = ("seq_len_q", "seq_len_kv", "bias", "sink")
        return {
            "scale": self.scale,
            "mask": self.facts.mask,
            **{name: self.tensors.get(name) for name in optional},
        }

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        return {record.name: self.tensors[record.name] for record in self.facts.outputs()}

    @cached_property
    def expected(self) -> reference.Gradients:
        inputs = [self.tensors[name] for name in ("q", "k", "v", "o", "do", "stats")]
        dims = None if self.facts.dbias is None else self.facts.dbias.dim
        return reference.sdpa_backward(*inputs, **self.features, want_dbias_dims=dims)

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.tensors.items()}

    def errors(self, got: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return self.expected.errors({name: got[name] for name in self.outputs})

    def dead(self) -> dict[str, torch.Tensor]:
        """Per gradient, what gets no contribution at all, and so must be exact zero: a bool tensor of its shape."""
        facts = self.facts
        lengths = []
        for name, full in (("seq_len_q", facts.seqlen_q), ("seq_len_kv", facts.seqlen_k)):
            given = self.tensors.get(name, torch.full((facts.batch,), full, device=self.device))
            lengths.append(given.reshape(-1, 1, 1).clamp(0, full))
        row = torch.arange(facts.seqlen_q, device=self.device)[None, :, None]
        key = torch.arange(facts.seqlen_k, device=self.device)[None, None, :]
        keep = reference.keep_mask(facts.mask, row, key, *lengths)[:, None]
        rows, keys = ~keep.any(3)[..., None], ~keep.any(2)[..., None]
        unscaled = self.scale == 0
        dead = {"dq": rows | unscaled, "dk": keys | unscaled, "dv": keys}
        if facts.dbias is not None:
            for axis, extent in enumerate(facts.dbias.dim):
                keep = keep.any(axis, keepdim=True) if extent == 1 else keep
            dead["dbias"] = ~keep
        return {name: flags.expand(self.tensors[name].shape) for name, flags in dead.items()}

    def score_noise(self) -> float:
        """Relative error of P that fp32 scores of this size imply; 0 but for values drawn to be extreme.

        A score is summed in fp32, D / 16 steps of an MMA that truncates: each loses half a unit in the last place of
        the sum so far on average, up to 2^-24 of the largest score, always towards zero. LSE does not share the error.
        """
        if self.case.values == "normal":
            return 0.0
        longest = [self.tensors[name].double().norm(dim=-1).nan_to_num().max().item() for name in ("q", "k")]
        return abs(self.scale) * math.prod(longest) * 2**-24 * self.facts.headdim_qk / 16

    def yardstick(self) -> dict[str, float] | None:
        """Errors of plain torch in the same dtype, where that is cheap and every input is finite."""
        pairs = self.facts.batch * self.facts.heads_q * self.facts.seqlen_q * self.facts.seqlen_k
        if self.case.padded or self.case.values != "normal" or pairs > YARDSTICK_PAIRS:
            return None
        features = {name: value for name, value in self.features.items() if not name.startswith("seq_len")}
        near = reference.same_dtype_gradients(*(self.tensors[n] for n in ("q", "k", "v", "do")), **features)
        return self.expected.errors({name: near[name] for name in ("dq", "dk", "dv")})


def make_launch(
    problem: Problem,
    knobs: BwdKnobs | None = None,
    workspace: Workspace | None = None,
    every_lane: bool = False,
    throttled: bool = False,
) -> tuple[BwdPlan, Workspace, Callable[[], None]]:
    """(plan, workspace, run): `run` enqueues on torch's current stream; what it needs stays alive with it."""
    resolved = target.for_device(torch.cuda.current_device())
    plan = make_plan(problem.facts, knobs or ranked_knobs(problem.facts, resolved)[0], resolved)
    key = replace(plan.key, every_lane_arrives=every_lane, throttled=throttled)
    launcher = Launcher(plan, compile_chain(key, resolved))
    held = workspace or Workspace.create(plan.workspace_bytes, problem.device)
    addresses = problem.addresses()

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        launcher.run(addresses, held.view.data_ptr(), held.nbytes, stream)

    return plan, held, run


def offered(problem: Problem) -> tuple[BwdKnobs, ...]:
    """Every assignment of knobs that the heuristics offer for the problem, best first."""
    return ranked_knobs(problem.facts, target.for_device(torch.cuda.current_device()))


def launch_once(problem: Problem, knobs: BwdKnobs, shift: int = 0) -> dict[str, torch.Tensor]:
    """Run one plan to its end, its workspace `shift` bytes off a generous alignment."""
    plan, workspace, run = make_launch(problem, knobs)
    if shift:
        shifted = Workspace.create(plan.workspace_bytes, problem.device, shift)
        plan, workspace, run = make_launch(problem, knobs, shifted)
    run()
    torch.cuda.synchronize()
    assert workspace.intact, f"{plan.key.name} wrote past its workspace"
    return problem.outputs


def run_launcher(problem: Problem) -> Iterator[dict[str, torch.Tensor]]:
    """Every offered plan in turn."""
    for knobs in offered(problem):
        problem.wipe_outputs()
        yield launch_once(problem, knobs)


def declare_graph(facts: BwdFacts, options: Mapping[str, object] | None = None, **more):
    """(graph, uid by port name) of a cudnn.pygraph with these facts, not yet validated; `options` goes to the graph,
    `more` to the node."""
    import cudnn

    register()
    kinds = {"fp16": "HALF", "bf16": "BFLOAT16", "fp32": "FLOAT", "int32": "INT32"}
    kinds = {name: getattr(cudnn.data_type, member) for name, member in kinds.items()}
    graph = cudnn.pygraph(
        io_data_type=kinds[facts.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **(options or {}),
    )

    def declare(record: TensorFacts):
        shape = {"dim": list(record.dim), "stride": list(record.stride), "data_type": kinds[record.dtype]}
        return graph.tensor(**shape, name=record.name, is_pass_by_value=record.by_value)

    ports = {"do": "dO", "sink": "sink_token", "scale_tensor": "attn_scale", "dbias": "dBias", "dsink": "dSink_token"}
    declared = {r.name: declare(r) for r in (*facts.inputs(), facts.dbias, facts.dsink) if r is not None}
    arguments = {"attn_scale": facts.scale} | {ports.get(name, name): tensor for name, tensor in declared.items()}
    mask = facts.mask
    alignment = cudnn.diagonal_alignment.BOTTOM_RIGHT if mask.bottom_right else cudnn.diagonal_alignment.TOP_LEFT
    options = {"diagonal_band_left_bound": mask.left_bound, "diagonal_band_right_bound": mask.right_bound}
    options = {name: value for name, value in options.items() if value is not None}
    gradients = graph.sdpa_backward(
        **arguments,
        use_padding_mask=mask.padding,
        use_deterministic_algorithm=facts.deterministic,
        diagonal_alignment=alignment,
        **options,
        **more,
    )
    for record, gradient in zip((facts.dq, facts.dk, facts.dv), gradients, strict=True):
        gradient.set_output(True).set_data_type(kinds[record.dtype])
        gradient.set_dim(list(record.dim)).set_stride(list(record.stride))
        declared[record.name] = gradient
    for name in ("dbias", "dsink"):
        if name in declared:
            declared[name].set_output(True)
    return graph, {name: tensor.get_uid() for name, tensor in declared.items()}


def build_graph(problem: Problem, **more):
    """(graph, buffers by uid) of the problem."""
    graph, uids = declare_graph(problem.facts, **more)
    return graph, {uid: problem.tensors[name] for name, uid in uids.items()}


def plan_graph(graph) -> list[int]:
    """Validate and plan; the indices of our plans, best first."""
    import cudnn

    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    count = graph.get_execution_plan_count()
    return [i for i in range(count) if graph.get_plan_name_at_index(i).startswith(ENGINE_NAME)]


def select_ours(graph) -> None:
    """Plan the graph and select our first plan; fails where there is none."""
    ours = plan_graph(graph)
    assert ours, "our engine proposed no plan for this graph"
    graph.select_plan(ours[0])
    graph.check_support()
    graph.build_plans()


def run_graph(problem: Problem) -> Iterator[dict[str, torch.Tensor]]:
    graph, buffers = build_graph(problem)
    select_ours(graph)
    workspace = Workspace.create(graph.get_workspace_size(), problem.device)
    graph.execute(buffers, workspace.view)
    torch.cuda.synchronize()
    assert workspace.intact, "something wrote past the workspace"
    yield problem.outputs


def wrapper_arguments(problem: Problem) -> dict:
    """What `sdpa_bwd_wrapper_dsl_sm120` is to be called with."""
    facts, tensors = problem.facts, problem.tensors
    mask = facts.mask
    assert mask.right_bound is not None or not mask.bottom_right, "the wrapper has no such mask"
    arguments = {f"{name}_tensor": tensors[name] for name in ("q", "k", "v", "o", "do", "stats")}
    return arguments | {
        "is_causal": mask.right_bound is not None,
        "causal_bottom_right": mask.bottom_right,
        "window_size_left": None if mask.left_bound is None else mask.left_bound - 1,
        "window_size_right": mask.right_bound or None,
        "deterministic": facts.deterministic,
        "scale_softmax": facts.scale,
        "seq_q_lens": tensors.get("seq_len_q"),
        "seq_kv_lens": tensors.get("seq_len_kv"),
        "sink_token": tensors.get("sink"),
        "bias_tensor": tensors.get("bias"),
    }


def run_wrapper(problem: Problem) -> Iterator[dict[str, torch.Tensor]]:
    from cudnn_frost_sm120 import sdpa_bwd_wrapper_dsl_sm120

    results = sdpa_bwd_wrapper_dsl_sm120(**wrapper_arguments(problem))
    torch.cuda.synchronize()
    yield {name: results[f"{name}_tensor"] for name in problem.outputs}


RUNNERS = {"launcher": run_launcher, "graph": run_graph, "wrapper": run_wrapper}


@dataclass(frozen=True)
class Outcome:
    case: Case
    errors: dict[str, float]
    tolerance: float


def judge(problem: Problem, got: Mapping[str, torch.Tensor]) -> Outcome:
    """Compare with the oracle. Raises AssertionError, naming the case and its seed, for anything that is not right.

    Right is: within the tolerance (plus `score_noise` for extreme values), exact zeros, every element written and no
    other, and at most twice torch's error for gradients of YARDSTICK_ROWS non-zero rows and more.
    """
    case, where = problem.case, f"{problem.case.id} (seed {problem.case.seed})"
    tolerance = TOLERANCE[problem.facts.dtype] + problem.score_noise()
    errors = problem.errors(got)
    shown = ", ".join(f"{name} {error:.2e}" for name, error in errors.items())
    assert max(errors.values()) <= tolerance, f"{where}: {shown}, and {tolerance:.1e} is allowed"
    for name, dead in problem.dead().items():
        assert not got[name][dead].any(), f"{where}: {name} is not exactly zero where nothing contributes"
    for name, tensor in problem.outputs.items():
        if got[name] is tensor:
            storage = storage_of(tensor)
            written = int(storage.numel() - storage.isnan().sum())
            assert written == tensor.numel(), f"{where}: {written} elements of {name} written, not {tensor.numel()}"
    near = problem.yardstick()
    for name, error in (near or {}).items():
        if int(getattr(problem.expected, name).any(-1).sum()) < YARDSTICK_ROWS:
            continue
        limit = 2 * error + tolerance / 10
        assert errors[name] <= limit, f"{where}: {name} {errors[name]:.2e}, and torch in {case.dtype} has {error:.2e}"
    return Outcome(case, errors, tolerance)


def check(case: Case, via: str = "launcher") -> list[Outcome]:
    """Pose, run and judge one case: every offered plan through the launcher, the first one through the front."""
    problem = Problem(case)
    return [judge(problem, got) for got in RUNNERS[via](problem)]
