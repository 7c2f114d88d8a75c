"""The benchmark: our first plan against peers on the same graph, interleaved in one process.

    python -m cudnn_frost_sm120 bench --grid main --against baseline,fa2,cudnn
    python -m cudnn_frost_sm120 bench --model

Every cell is checked against the fp64 oracle on one key head before its times count. Times are medians of CUDA-event
intervals over the whole chain, the candidates taken in turn (A B A B), on random inputs. A peer that does not serve a
cell, or is not there, is left out of it, with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bench_cells import GRIDS, Cell
from .register import ENGINE_NAME

PEERS = {"baseline": "sdpa_bwd_sm120", "fa2": "torch's FlashAttention-2", "cudnn": "the cuDNN library"}
TOLERANCE = 6e-3  # bf16, relative to the fp64 oracle


@dataclass
class Result:
    cell: Cell
    errors: dict[str, float]
    milliseconds: dict[str, float] = field(default_factory=dict)  # medians
    spread: dict[str, float] = field(default_factory=dict)  # (max - min) / median
    missing: dict[str, str] = field(default_factory=dict)

    def tflops(self, who: str) -> float:
        return self.cell.flops / self.milliseconds[who] / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grid", choices=GRIDS, default="main")
    parser.add_argument("--against", default="baseline,fa2", help=f"comma-separated, of {', '.join(PEERS)}")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of every candidate")
    parser.add_argument("--model", action="store_true", help="the static model of SM120 instead; needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """0 if every cell was right and timed, 2 if nothing could be measured."""
    if options.model:
        from . import sm120_model, target

        print("\n".join(sm120_model.report(target.named("sm_120"))))
        return 0
    import torch

    peers = [peer for peer in options.against.split(",") if peer]
    unknown = [peer for peer in peers if peer not in PEERS]
    if unknown:
        print(f"--against knows {', '.join(PEERS)}, not {', '.join(unknown)}", file=sys.stderr)
        return 2

    if not torch.cuda.is_available():
        print("bench needs a CUDA device", file=sys.stderr)
        return 2
    results = []
    for cell in _progress(GRIDS[options.grid]):
        result = measure(cell, peers, options.repeats)
        results.append(result)
        print(_line(result), flush=True)
    header = _environment(torch)
    text = "\n".join([header, "", *_table(results, peers)])
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.json:
        rows = [asdict(result) for result in results]
        options.json.write_text(json.dumps({"environment": header, "results": rows}, indent=1), encoding="utf-8")
    if options.plot:
        _plot(results, peers, options.plot)
    return 0


def measure(cell: Cell, peers: list[str], repeats: int) -> Result:
    """Check our gradients on one key head, then time everybody. Raises AssertionError for a wrong gradient."""
    import torch

    problem = Problem(cell)
    candidates, missing = problem.candidates(peers)
    candidates["ours"]()
    errors = problem.errors()
    assert max(errors.values()) < TOLERANCE, f"{cell.name}: {errors}"
    result = Result(cell, errors, missing=missing)
    events: dict[str, list[tuple[Any, Any]]] = {who: [] for who in candidates}
    for _ in range(repeats + 2):  # two rounds of warm-up
        for who, run in candidates.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            events[who].append((begin, end))
    torch.cuda.synchronize()  # once: after every run it would add the host's time to submit the next one
    for who, pairs in events.items():
        kept = [begin.elapsed_time(end) for begin, end in pairs[2:]]
        result.milliseconds[who] = statistics.median(kept)
        result.spread[who] = (max(kept) - min(kept)) / result.milliseconds[who]
    return result


class Problem:
    """Tensors of a cell (B, H, S, D), bf16; O and LSE from an fp32 forward."""

    def __init__(self, cell: Cell):
        import torch

        from .facts import MaskFacts
        from .reference import keep_mask

        self.cell, self.scale = cell, 1 / math.sqrt(cell.headdim_qk)
        torch.manual_seed(0)

        def random(heads: int, headdim: int) -> Any:
            return torch.randn(cell.batch, heads, cell.seqlen, headdim, device="cuda", dtype=torch.bfloat16)

        self.q, self.k = random(cell.heads_q, cell.headdim_qk), random(cell.heads_k, cell.headdim_qk)
        self.v, self.do = random(cell.heads_k, cell.headdim_v), random(cell.heads_q, cell.headdim_v)
        self.o = torch.empty_like(self.do)
        self.stats = torch.empty(cell.batch, cell.heads_q, cell.seqlen, 1, device="cuda")
        self.dq, self.dk, self.dv = torch.empty_like(self.q), torch.empty_like(self.k), torch.empty_like(self.v)
        self.mask = MaskFacts(left_bound=cell.window, right_bound=0 if cell.causal else None)
        row, full = torch.arange(cell.seqlen, device="cuda"), torch.tensor(cell.seqlen, device="cuda")
        dropped = ~keep_mask(self.mask, row[:, None], row[None], full, full)
        group = cell.heads_q // cell.heads_k
        for b in range(cell.batch):
            for h in range(cell.heads_q):
                scores = (self.q[b, h].float() @ self.k[b, h // group].float().T) * self.scale
                scores.masked_fill_(dropped, float("-inf"))
                self.stats[b, h, :, 0] = scores.logsumexp(-1)
                self.o[b, h] = (scores.softmax(-1) @ self.v[b, h // group].float()).to(torch.bfloat16)

    def errors(self) -> dict[str, float]:
        """Errors of the first key head and the first of its query heads, against the fp64 oracle."""
        from .reference import relative_error, sdpa_backward

        group = self.cell.heads_q // self.cell.heads_k
        q, o, do, stats = (t[:1, :group].double() for t in (self.q, self.o, self.do, self.stats))
        k, v = self.k[:1, :1].double(), self.v[:1, :1].double()
        expected = sdpa_backward(q, k, v, o, do, stats, scale=self.scale, mask=self.mask)
        got = {"dq": self.dq[:1, :group], "dk": self.dk[:1, :1], "dv": self.dv[:1, :1]}
        return {name: relative_error(tensor, getattr(expected, name)) for name, tensor in got.items()}

    def candidates(self, peers: list[str]) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
        """(run by name, why by the name of a missing peer); "ours" is always there, or this raises."""
        graph, pack = self._graph()
        names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
        runs: dict[str, Callable[[], None]] = {"ours": self._plan(graph, pack, names, lambda n: ENGINE_NAME in n)}
        missing: dict[str, str] = {}
        finders = {
            "baseline": lambda: self._plan(graph, pack, names, lambda n: PEERS["baseline"] in n),
            "cudnn": lambda: self._plan(graph, pack, names, lambda n: "sm120" not in n and "sdpa_bwd_sm" not in n),
            "fa2": self._flash,
        }
        for peer in peers:
            try:
                runs[peer] = finders[peer]()
            except (NotImplementedError, RuntimeError) as error:
                missing[peer] = str(error).splitlines()[0]
        return runs, missing

    def _graph(self) -> tuple[Any, dict[Any, Any]]:
        import cudnn

        bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32)
        buffers = {"q": self.q, "k": self.k, "v": self.v, "o": self.o, "dO": self.do, "stats": self.stats}
        ports = {
            name: graph.tensor(
                name=name, dim=list(t.shape), stride=list(t.stride()), data_type=fp32 if name == "stats" else bf16
            )
            for name, t in buffers.items()
        }
        attributes: dict[str, Any] = {"use_deterministic_algorithm": self.cell.deterministic}
        if self.cell.window is not None:
            attributes["sliding_window_length"] = self.cell.window
        outputs = graph.sdpa_backward(**ports, attn_scale=self.scale, use_causal_mask=self.cell.causal, **attributes)
        pack = {ports[name]: tensor for name, tensor in buffers.items()}
        for port, tensor in zip(outputs, (self.dq, self.dk, self.dv), strict=True):
            port.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride())).set_data_type(bf16)
            pack[port] = tensor
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        return graph, pack

    def _plan(
        self, graph: Any, pack: dict[Any, Any], names: list[str], wanted: Callable[[str], bool]
    ) -> Callable[[], None]:
        import cudnn
        import torch

        index = next((i for i, name in enumerate(names) if wanted(name)), None)
        if index is None:
            raise NotImplementedError("no plan of it is listed")
        graph.build_plan_at_index(index)
        nbytes = graph.get_workspace_size_plan_at_index(index)
        workspace = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cuda")
        handle = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        return lambda: graph.execute_plan_at_index(pack, workspace, index=index, handle=handle)

    def _flash(self) -> Callable[[], None]:
        import torch

        cell = self.cell
        if cell.headdim_qk != cell.headdim_v or cell.window is not None or cell.deterministic:
            raise NotImplementedError("torch's flash backward does not serve this cell")
        group = cell.heads_q // cell.heads_k
        # aten's flash backward has no grouped heads: keys are repeated, which favours it (it does not sum the groups).
        k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (self.k, self.v))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = flash(
            self.q, k, v, 0.0, cell.causal, False, scale=self.scale
        )
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        arguments = (self.do, self.q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, cell.causal, seed, offset)

        def run() -> None:
            backward(*arguments, scale=self.scale)

        return run


def _line(result: Result) -> str:
    times = ", ".join(f"{who} {result.tflops(who):.0f} TFLOP/s" for who in result.milliseconds)
    gone = "".join(f"; no {who}: {why}" for who, why in result.missing.items())
    return f"{result.cell.name}: {times}{gone}"


def _table(results: list[Result], peers: list[str]) -> Iterator[str]:
    columns = ["cell", "ours, ms", "ours, TFLOP/s", "spread", *(f"{peer}, TFLOP/s" for peer in peers)]
    columns += [*(f"ours / {peer}" for peer in peers), "worst error"]
    yield "| " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * (len(columns) - 1)
    for r in results:
        row = [r.cell.name, f"{r.milliseconds['ours']:.3f}", f"{r.tflops('ours'):.0f}", f"{r.spread['ours']:.1%}"]
        row += [f"{r.tflops(peer):.0f}" if peer in r.milliseconds else "-" for peer in peers]
        ours = r.milliseconds["ours"]
        row += [f"{r.milliseconds[peer] / ours:.2f}" if peer in r.milliseconds else "-" for peer in peers]
        yield "| " + " | ".join([*row, f"{max(r.errors.values()):.1e}"]) + " |"


def _environment(torch: Any) -> str:
    """One line: GPU, date, versions; says so where the GPU is only the stand-in."""
    import datetime
    from importlib.metadata import PackageNotFoundError, version

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "?"

    major, minor = torch.cuda.get_device_capability()
    stand_in = "" if major == 12 else ", Hopper stand-in, not SM120"
    packages = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")
    versions = ", ".join(f"{package} {of(package)}" for package in packages)
    gpu = f"{torch.cuda.get_device_name()} (SM{major}{minor}{stand_in})"
    return f"{gpu}, {datetime.date.today()}, torch {torch.__version__}, {versions}; bf16, whole chain, medians."


def _plot(results: list[Result], peers: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(results) + 1.5))
    for offset, who in enumerate(["ours", *peers]):
        at = [i + offset * 0.8 / (len(peers) + 1) for i, r in enumerate(results) if who in r.milliseconds]
        values = [r.tflops(who) for r in results if who in r.milliseconds]
        axes.barh(at, values, height=0.8 / (len(peers) + 1), label=who)
    axes.set_yticks([i + 0.3 for i in range(len(results))], [r.cell.name for r in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s, whole chain")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _progress(cells: list[Cell]) -> Iterable[Cell]:
    try:
        from tqdm import tqdm
    except ImportError:
        return cells
    return tqdm(cells, unit="cell", disable=not sys.stderr.isatty())
