"""20,000 random problems through the rules and planning: a reason in one line, or a complete plan; never an exception.

The same generator that `make fuzz` runs on a GPU; test_random_graphs.py does it through cudnn.pygraph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from cudnn_frost_sm120.admission import RULES, decline_reason
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.launch import Launcher
from cudnn_frost_sm120.plan import ChainKey, make_plan
from cudnn_frost_sm120.target import Target
from tests.gpu.draw import ODDITIES, draw

TARGETS = (Target("sm_120", "sm_120a", None, 188), Target("sm_121", "sm_121a", None, 48))
BLOCKS, PER_BLOCK = 20, 1000


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_problems(block: int) -> None:
    declined: Counter[str] = Counter()
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        facts, target = draw(seed).facts, TARGETS[seed % 2]
        try:
            reason = decline_reason(facts, target)
            if reason is not None:
                assert "\n" not in reason
                declined[reason.rpartition("[")[2].rstrip("]")] += 1
                continue
            ranked = ranked_knobs(facts, target)
            assert len(set(ranked)) == len(ranked) > 0
            for knobs in ranked:
                assert decline_reason(facts, target, knobs) is None
                plan = make_plan(facts, knobs, target)
                assert 0 < plan.workspace_bytes < 2**36
                Launcher(plan, lambda *_: None)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {draw(seed)}") from error
    assert set(declined) <= {rule.name for rule in RULES}
    assert sum(declined.values()) < 0.7 * PER_BLOCK, "the generator makes too few problems that are served"


def test_the_generator_is_a_function_of_its_seed() -> None:
    assert repr(draw(17)) == repr(draw(17))


def test_most_oddities_are_declined() -> None:
    """An oddity may leave a problem fine (a stride of a size-1 dim), but not most of the time."""
    met: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for seed in range(4000):
        drawn = draw(seed)
        if len(drawn.oddities) == 1 and not drawn.attributes:
            met[drawn.oddities[0]] += 1
            served[drawn.oddities[0]] += decline_reason(drawn.facts, TARGETS[0]) is None
    assert set(met) == set(ODDITIES)
    assert {name for name in met if served[name] > 0.7 * met[name]} <= {"deterministic"}


def test_a_key_has_no_shape() -> None:
    """Two problems that differ in extents, strides, scale and widths alone share their chain."""
    names = {field.name for field in fields(ChainKey)}
    assert not names & {"batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "scale", "left_bound", "right_bound"}
