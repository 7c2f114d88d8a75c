"""The launcher refuses what it cannot run before anything is launched."""

from __future__ import annotations

import ctypes
import gc

import pytest

from cudnn_frost_sm120.facts import TensorFacts
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.launch import Launcher, canonical_strides
from cudnn_frost_sm120.plan import make_plan
from cudnn_frost_sm120.remembered import Remembered
from cudnn_frost_sm120.target import Target
from tests.gpu.cases import Case, facts_of

SM120 = Target("sm_120", "sm_120a", None, 188)
WORKSPACE, STREAM = 1 << 40, 7
PLAIN, PADDED = Case(64), Case(64, len_q=(3, 4), len_k=(5, 6))


class FakeChain:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *arguments) -> None:
        self.calls.append(arguments)


def launcher(case: Case):
    facts = facts_of(case)
    plan = make_plan(facts, ranked_knobs(facts, SM120)[0], SM120)
    chain = FakeChain()
    addresses = {t.name: 4096 * (i + 1) for i, t in enumerate((*facts.inputs(), *facts.outputs()))}
    return Launcher(plan, chain), chain, addresses, plan.workspace_bytes


@pytest.mark.parametrize("case", [PLAIN, PADDED], ids=["plain", "padded"])
def test_addresses_reach_the_chain(case):
    run, chain, addresses, nbytes = launcher(case)
    run.run(addresses, WORKSPACE, nbytes, STREAM)
    run.run(addresses, WORKSPACE, None, STREAM)  # a bare address tells no size
    run.run(addresses, WORKSPACE, nbytes + 1, STREAM)
    assert len(chain.calls) == 3
    assert chain.calls[0] == chain.calls[1] == chain.calls[2]
    (arguments,) = {call[:9] for call in chain.calls}
    assert list(arguments) == [addresses[n] for n in ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")]
    assert chain.calls[0][-1] == STREAM
    assert WORKSPACE in chain.calls[0]
    lengths = [addresses[name] for name in ("seq_len_q", "seq_len_kv") if name in addresses]
    assert list(chain.calls[0][9:11]) == (lengths or [None, None])


@pytest.mark.parametrize("case", [PLAIN, PADDED], ids=["plain", "padded"])
def test_bad_addresses_are_refused(case):
    run, chain, addresses, nbytes = launcher(case)
    for name in addresses:
        absent = {other: address for other, address in addresses.items() if other != name}
        for bad in (absent, {**addresses, name: 0}):
            with pytest.raises(ValueError, match=f"no buffer was passed for {name}"):
                run.run(bad, WORKSPACE, nbytes, STREAM)
        unaligned = addresses[name] + (2 if name in ("stats", "seq_len_q", "seq_len_kv") else 8)
        with pytest.raises(ValueError, match=f"the buffer of {name} must be aligned"):
            run.run({**addresses, name: unaligned}, WORKSPACE, nbytes, STREAM)
    assert chain.calls == []


def test_stats_need_only_their_own_alignment():
    run, chain, addresses, nbytes = launcher(PLAIN)
    run.run({**addresses, "stats": addresses["stats"] + 4}, WORKSPACE, nbytes, STREAM)
    assert len(chain.calls) == 1


@pytest.mark.parametrize(
    ("workspace", "short", "sentence"),
    [
        (0, 0, "none was passed"),
        (WORKSPACE, 1, "not"),
        (WORKSPACE, 10**12, "not"),
        (WORKSPACE + 8, 0, "must be aligned to 16 bytes"),
        (WORKSPACE + 1, 0, "must be aligned"),
    ],
)
def test_bad_workspaces_are_refused_on_every_call(workspace, short, sentence):
    run, chain, addresses, nbytes = launcher(PADDED)
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            run.run(addresses, workspace, max(nbytes - short, 0), STREAM)
    assert chain.calls == []


def test_an_aligned_workspace_is_enough():
    run, chain, addresses, nbytes = launcher(PLAIN)
    run.run(addresses, WORKSPACE + 16, nbytes, STREAM)
    assert len(chain.calls) == 1


def test_strides_of_size_1_dims_are_replaced():
    odd = TensorFacts("q", (1, 4, 1, 40), (13, 80, 2**33 + 3, 1), "bf16")
    batch, head, sequence = canonical_strides(odd)
    assert head == 80
    assert batch % 8 == sequence % 8 == 0
    assert batch * 2 < 2**40


def test_a_bound_launch_outlives_its_launcher():
    """The geometry that it hands over is still there"""
    run, chain, addresses, nbytes = launcher(PLAIN)
    contents = run._block.raw
    bound = run.bind(addresses, WORKSPACE, nbytes)
    del run
    gc.collect()
    filler = [bytes(len(contents)) for _ in range(1000)]
    bound(STREAM)
    assert ctypes.string_at(chain.calls[0][-2], len(contents)) == contents
    assert filler


def test_what_is_forgotten_first():
    held = Remembered(2)
    for key in "abac":
        held.keep(key, key)
    assert list(held) == ["b", "c"]
