"""Why a graph gets the plans it gets: the target, the facts, every rule's verdict, and what each engine says.

``explain(graph)`` reports on any ``cudnn.pygraph`` with an sdpa_backward node, planned or not, and leaves it as it is;
``save`` and ``load`` write and read a graph as JSON (graph_json.py has the form). From a shell:
``python -m cudnn_frost_sm120 explain GRAPH.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .facts import BwdFacts, MaskFacts, TensorFacts
from .graph_json import load, save
from .register import ENGINE_NAME
from .target import Target
from .tuning_file import winner_for

__all__ = ["PlanLine", "Report", "RuleLine", "explain", "load", "save"]

_FLAG = "CUDNN_FRONTEND_ENABLE_FROST_ENGINES"


@dataclass(frozen=True)
class PlanLine:
    """One plan of the ranked list; ``workspace_bytes`` is None where only building the plan would tell."""

    name: str
    workspace_bytes: int | None


@dataclass(frozen=True)
class RuleLine:
    """A rule's verdict: "pass", "declines", or "not reached", since a rule may rely on those before it."""

    name: str
    verdict: str
    change: str  # what would have to change for a graph that the rule declines
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What ``explain`` found; ``str()`` of it is for people, ``to_json`` for programs."""

    facts: BwdFacts
    target: Target | None
    target_reason: str  # why there is no target, or ""
    planned: bool  # whether `plans` is the graph's own ranked list, with every engine's plans, or ours alone
    plans: tuple[PlanLine, ...]
    rules: tuple[RuleLine, ...]
    others: dict[str, str] = field(default_factory=dict)  # engine -> why it declines, "" where it accepts
    notes: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """Whether our engine admits the graph."""
        return self.target is not None and all(rule.verdict == "pass" for rule in self.rules)

    @property
    def reason(self) -> str:
        """Why it does not, or ""."""
        return self.target_reason or next((rule.reason for rule in self.rules if rule.verdict == "declines"), "")

    def to_json(self) -> str:
        return json.dumps({"served": self.served, "reason": self.reason, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        lines = ["target", f"  {_target_text(self.target) if self.target is not None else self.target_reason}", "facts"]
        lines += [f"  {line}" for line in _facts_lines(self.facts)]
        lines.append("plans, best first" if self.planned else "plans of this engine, best first (graph not planned)")
        lines += [f"  [{i}] {_plan_text(plan)}" for i, plan in enumerate(self.plans)] or ["  none"]
        lines.append(f"{ENGINE_NAME}: " + ("admits the graph" if self.served else f"declines: {self.reason}"))
        lines += [f"  {line}" for line in _table(("rule", "verdict", "to pass"), [_rule_row(r) for r in self.rules])]
        lines.append("other engines")
        others = [(name, "declines" if reason else "accepts", reason) for name, reason in self.others.items()]
        lines += [f"  {line}" for line in _table(("engine", "verdict", "why"), others)] if others else ["  none"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def explain(graph: Any) -> Report:
    """Report on ``graph``. Raises ValueError if it has no sdpa_backward node."""
    from .engine import analyze, other_verdicts

    request = graph._facts_for(analyze)  # of a planned graph: the record that planning used
    facts, target = request.facts, request.target
    if facts is None:
        raise ValueError(request.declined)
    target_reason = request.declined if target is None else ""
    rules = _rule_lines(facts, target)
    served = target is not None and all(rule.verdict == "pass" for rule in rules)
    planned = bool(graph.plans)
    notes = []
    winner = winner_for(facts, target) if target is not None else None
    if winner is not None:
        notes.append(
            f"measured fastest for such graphs on {winner.tuned}: {next(iter(winner.milliseconds), winner.engine)}"
        )
    if not _flag_is_set():
        notes.append(f"{_FLAG} is not set, so opt-in engines, this one among them, make no plans")
    return Report(
        facts=facts,
        target=target,
        target_reason=target_reason,
        planned=planned,
        plans=_ranked_list(graph, facts, target) if planned else _own_plans(facts, target, served),
        rules=rules,
        others=other_verdicts(graph),
        notes=tuple(notes),
    )


def _rule_lines(facts: BwdFacts, target: Target | None) -> tuple[RuleLine, ...]:
    from .admission import RULES

    lines: list[RuleLine] = []
    stopped = False
    for rule in RULES:
        if stopped or target is None:
            lines.append(RuleLine(rule.name, "not reached", rule.change))
        elif rule.predicate(facts, target):
            lines.append(RuleLine(rule.name, "declines", rule.change, rule.reason(facts, target)))
            stopped = True
        else:
            lines.append(RuleLine(rule.name, "pass", rule.change))
    return tuple(lines)


def _rule_row(rule: RuleLine) -> tuple[str, str, str]:
    return rule.name, rule.verdict, "" if rule.verdict == "pass" else rule.change


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines of columns; the last is as wide as it likes."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header) - 1)]
    for row in [header, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, " ".join(row[-1].split())]).rstrip()


def _workspace(facts: BwdFacts, knobs: Any, target: Target) -> int:
    from .plan import make_plan

    return make_plan(facts, knobs, target).workspace_bytes


def _own_plans(facts: BwdFacts, target: Target | None, served: bool) -> tuple[PlanLine, ...]:
    from .ranking import plans_for

    if not served or target is None:
        return ()
    ranked = plans_for(facts, target)
    return tuple(PlanLine(f"{ENGINE_NAME}[{knobs}]", _workspace(facts, knobs, target)) for knobs in ranked)


def _ranked_list(graph: Any, facts: BwdFacts, target: Target | None) -> tuple[PlanLine, ...]:
    from .register import ENGINE_ID

    lines = []
    for index, config in enumerate(graph.plans):
        ours = config.engine_id == ENGINE_ID and config.knobs is not None and target is not None
        nbytes = _workspace(facts, config.knobs, target) if ours and target is not None else None
        lines.append(PlanLine(graph.get_plan_name_at_index(index), nbytes))
    return tuple(lines)


def _flag_is_set() -> bool:
    return os.environ.get(_FLAG, "0").strip().lower() in ("1", "true", "yes", "on")


def _target_text(target: Target) -> str:
    where = "no device" if target.device is None else f"cuda:{target.device}"
    return f"{target.name} (compiled for {target.arch}, {target.sm_count} SMs, {where})"


def _plan_text(plan: PlanLine) -> str:
    return plan.name if plan.workspace_bytes is None else f"{plan.name}, workspace {plan.workspace_bytes:,} bytes"


def _facts_lines(facts: BwdFacts) -> list[str]:
    tensors = [*facts.inputs(), *facts.outputs()]
    lines = [_tensor_text(tensor) for tensor in tensors]
    scale = "a tensor" if facts.scale is None else f"{facts.scale:g}"
    lines.append(
        f"scale {scale}; mask: {_mask_text(facts.mask)}; deterministic: {'yes' if facts.deterministic else 'no'}"
    )
    shown = {"scale", "mask", "deterministic", "compute_dtype", "dynamic_shapes", "cuda_graph_replay"}
    for record in fields(facts):
        value = getattr(facts, record.name)
        if record.name not in shown and not isinstance(value, TensorFacts) and value != record.default:
            lines.append(f"{record.name}: {value}")
    return lines


def _tensor_text(tensor: TensorFacts) -> str:
    marks = [mark for mark in ("ragged", "virtual", "by_value") if getattr(tensor, mark)]
    return " ".join([f"{tensor.name:<10} {tensor.dtype:<5} {tensor.dim} strides {tensor.stride}", *marks])


def _mask_text(mask: MaskFacts) -> str:
    parts = []
    if mask.right_bound is not None:
        parts.append("causal" if mask.right_bound == 0 else f"right bound {mask.right_bound}")
    if mask.left_bound is not None:
        parts.append(f"left bound {mask.left_bound}")
    if parts:
        parts.append("bottom-right" if mask.bottom_right else "top-left")
    if mask.padding:
        parts.append("padding")
    return ", ".join(parts) or "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", metavar="GRAPH.json", help="a graph as written by cudnn_frost_sm120.explain.save")
    parser.add_argument("--target", help="plan for this target (sm_120, sm_121), not for the current device")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(options: argparse.Namespace) -> int:
    """The explain command: 0 where our engine admits the graph, 1 where it declines, 2 where there is no such graph."""
    import cudnn

    from . import register

    os.environ[_FLAG] = "1"
    if options.target:
        os.environ["CUDNN_FROST_SM120_TARGET"] = options.target
    notes = []
    try:
        graph = load(options.graph)
    except (OSError, ValueError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    register()
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans()
    except (cudnn.cudnnGraphNotSupportedError, ValueError) as error:
        notes.append(f"planning stops: {error}")
    report = explain(graph)
    print(report.to_json() if options.json else report)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0 if report.served else 1
