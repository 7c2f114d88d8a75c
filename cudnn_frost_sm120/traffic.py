"""Bytes that the kernels of a chain move, from the plan: what they must read and write, once each.

Each function is one kernel of the chain (kernels/chain.py). A plan without that kernel moves nothing there. Memory is
counted, whether or not a cache holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from .cost import stored_scores
from .facts import ITEMSIZE, TensorFacts
from .knobs import ReductionMode
from .plan import BwdPlan


@dataclass(frozen=True)
class Traffic:
    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        return self.read + self.written


def preprocess(plan: BwdPlan) -> Traffic:
    """Reads O, dO and LSE; writes LSE and delta for the padded rows, and zeros for sums and counters."""
    if plan.key.reduction is ReductionMode.RECOMPUTE:
        return Traffic()
    facts = plan.facts
    zeros = sum(_region(plan, name) for name in ("dq_accum", "turns", "ticket"))
    return Traffic(size(facts.o) + size(facts.do) + size(facts.stats), _statistics(plan) + zeros)


def dq_recompute(plan: BwdPlan) -> Traffic:
    """Where dQ has a pass of its own over the keys, in place of preprocess: reads Q, K, V, O, dO and LSE; writes LSE
    and delta for the padded rows, and dQ."""
    if plan.key.reduction is not ReductionMode.RECOMPUTE:
        return Traffic()
    facts = plan.facts
    read = sum(size(tensor) for tensor in (facts.q, facts.k, facts.v, facts.o, facts.do, facts.stats))
    return Traffic(read, _statistics(plan) + size(facts.dq))


def dq_gemm(plan: BwdPlan) -> Traffic:
    """Where dS is stored: reads it, and K; writes dQ."""
    if plan.key.reduction is not ReductionMode.DS_STORE:
        return Traffic()
    return Traffic(_stored_ds(plan) + size(plan.facts.k), size(plan.facts.dq))


def convert_dq(plan: BwdPlan) -> Traffic:
    """Reads the fp32 sums of dQ, writes dQ."""
    sums = _region(plan, "dq_accum")
    return Traffic(sums, size(plan.facts.dq)) if sums else Traffic()


def sum_parts(plan: BwdPlan) -> Traffic:
    """Where a group's heads are split over CTAs: reads the fp32 parts of dK and dV, writes dK and dV."""
    parts = _region(plan, "dk_partial") + _region(plan, "dv_partial")
    return Traffic(parts, size(plan.facts.dk) + size(plan.facts.dv)) if parts else Traffic()


def dsink(plan: BwdPlan) -> Traffic:
    """Reads LSE and delta of every row, and the sinks; writes dSink."""
    facts = plan.facts
    if facts.sink is None or facts.dsink is None:
        return Traffic()
    return Traffic(_statistics(plan) + size(facts.sink), size(facts.dsink))


def main_kernel(plan: BwdPlan) -> Traffic:
    """Not counted among those around it: reads Q, K, V, dO, LSE and delta, reads and writes the sums of dQ, writes dS
    where it is stored, and dK and dV or their parts."""
    facts = plan.facts
    inputs = sum(size(tensor) for tensor in (facts.q, facts.k, facts.v, facts.do))
    sums = _region(plan, "dq_accum")
    parts = _region(plan, "dk_partial") + _region(plan, "dv_partial")
    read = inputs + _statistics(plan) + sums
    return Traffic(read, sums + _stored_ds(plan) + (parts or size(facts.dk) + size(facts.dv)))


STAGES: tuple[Callable[[BwdPlan], Traffic], ...] = (preprocess, dq_recompute, dq_gemm, convert_dq, sum_parts, dsink)


def outside_main(plan: BwdPlan) -> dict[str, Traffic]:
    """By stage, those that the plan has."""
    found = {stage.__name__: stage(plan) for stage in STAGES}
    return {name: traffic for name, traffic in found.items() if traffic.total}


def outside_bytes(plan: BwdPlan) -> int:
    return sum(traffic.total for traffic in outside_main(plan).values())


def _statistics(plan: BwdPlan) -> int:
    """LSE and delta of the padded rows."""
    return _region(plan, "lse") + _region(plan, "delta")


def _stored_ds(plan: BwdPlan) -> int:
    stored = plan.key.reduction is ReductionMode.DS_STORE
    return 2 * stored_scores(plan.facts, plan.key.tile) if stored else 0


def _region(plan: BwdPlan, name: str) -> int:
    return next((region.nbytes for region in plan.workspace.regions if region.name == name), 0)


def size(tensor: TensorFacts) -> int:
    """Bytes of all elements."""
    return prod(tensor.dim) * ITEMSIZE[tensor.dtype]
