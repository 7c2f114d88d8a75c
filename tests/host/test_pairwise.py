"""The cases of tests/gpu/test_pairwise.py are complete, few, and all served."""

from cudnn_frost_sm120.admission import decline_reason
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.target import Target
from tests.gpu import pairwise
from tests.gpu.cases import facts_of

SM120 = Target("sm_120", "sm_120a", None, 188)
MOST_CASES = 60


def test_every_possible_pair_occurs():
    rows = pairwise.cover()
    assert all(row.keys() == pairwise.AXES.keys() for row in rows)
    occurring = set().union(*map(pairwise.pairs_of, rows))
    assert occurring == pairwise.possible_pairs()
    assert len(rows) <= MOST_CASES  # each compiles a chain of its own
    assert rows == pairwise.cover()


def test_every_case_is_served_by_a_plan():
    cases = pairwise.cases()
    assert len({case.id for case in cases}) == len(cases)
    for case in cases:
        facts = facts_of(case)
        assert decline_reason(facts, SM120) is None
        assert [make_plan(facts, knobs, SM120) for knobs in ranked_knobs(facts, SM120)]
