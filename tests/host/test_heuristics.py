"""The first plan of problems whose ways to sum dQ were timed against each other on the stand-in (performance page)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudnn_frost_sm120.bench.cells import (
    D64,
    D64_GROUPED,
    D128,
    D128_GROUPED,
    D192,
    D192_128,
    D256,
    D256_GROUPED,
    Cell,
)
from cudnn_frost_sm120.cost import bytes_per_second, rates_of
from cudnn_frost_sm120.heuristics import ranked_knobs
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.target import Target

STAND_IN = Target("sm_90", "sm_90a", 0, 132)
ATOMIC, STORED, RELAY = ReductionMode.ATOMIC, ReductionMode.DS_STORE, ReductionMode.RELAY
TIMED = [  # (cell, the faster of atomic adds and stored dS, time of stored dS over that of atomic adds)
    (Cell(64, 64, 2, 32, 32, 4096, False), ATOMIC, 1.11),
    (Cell(64, 64, 2, 32, 32, 4096), ATOMIC, 1.12),
    (Cell(64, 64, 1, 64, 8, 8192, False), ATOMIC, 1.07),
    (Cell(64, 64, 8, 16, 16, 512, False), ATOMIC, 1.14),
    (Cell(*D128, 2048, False), STORED, 0.95),
    (Cell(*D128, 4096, False), STORED, 0.96),
    (Cell(*D128, 8192, False), STORED, 0.96),
    (Cell(*D128, 16384, False), STORED, 0.93),
    (Cell(*D128, 4096), STORED, 0.90),
    (Cell(*D128, 8192), STORED, 0.90),
    (Cell(*D128, 16384), STORED, 0.90),
    (Cell(*D128_GROUPED, 2048, False), STORED, 0.92),
    (Cell(*D128_GROUPED, 4096), STORED, 0.97),
    (Cell(*D128_GROUPED, 8192), STORED, 0.99),
    (Cell(*D192_128, 4096, False), STORED, 0.84),
    (Cell(*D192_128, 4096), STORED, 0.85),
    (Cell(*D192_128, 16384), STORED, 0.88),
    (Cell(*D192, 4096, False), STORED, 0.91),
    (Cell(*D192, 16384), STORED, 0.88),
    (Cell(*D256, 2048, False), STORED, 0.82),
    (Cell(*D256, 16384, False), STORED, 0.83),
    (Cell(*D256, 8192), STORED, 0.84),
    (Cell(*D256_GROUPED, 4096, False), STORED, 0.74),
    (Cell(64, 64, 2, 64, 8, 4096, window=1024), STORED, 0.95),
    (Cell(128, 128, 2, 64, 8, 4096, window=1024), STORED, 0.95),
    (Cell(64, 64, 1, 8, 8, 1024), ATOMIC, 1.38),
    (Cell(64, 64, 1, 16, 16, 2048, False), ATOMIC, 1.09),
    (Cell(128, 128, 1, 8, 8, 1024), ATOMIC, 1.18),
    (Cell(128, 128, 1, 4, 4, 2048, False), ATOMIC, 1.27),
]

TILES = [  # (cell, keys of the faster tile, time of the other tile over its own, both with atomic adds)
    (Cell(64, 64, 1, 8, 8, 1024, False), 64, 1.34),
    (Cell(64, 64, 1, 8, 8, 1024), 64, 1.38),
    (Cell(64, 64, 1, 16, 16, 1024), 64, 1.22),
    (Cell(64, 64, 1, 4, 4, 2048), 64, 1.46),
    (Cell(64, 64, 1, 16, 16, 1024, False), 128, 1.24),
    (Cell(64, 64, 1, 16, 16, 2048), 128, 1.20),
    (Cell(64, 64, 2, 32, 32, 4096), 128, 1.26),
    (Cell(128, 128, 1, 8, 8, 1024, False), 64, 1.41),
    (Cell(128, 128, 1, 16, 16, 1024), 64, 1.29),
    (Cell(128, 128, 1, 4, 4, 2048), 64, 1.48),
    (Cell(128, 128, 1, 16, 16, 512), 64, 1.38),
    (Cell(128, 128, 1, 16, 16, 1024, False), 128, 1.23),
    (Cell(128, 128, 8, 16, 16, 512), 128, 1.06),
    (Cell(128, 128, 1, 64, 8, 2048, False), 128, 1.23),
]


@pytest.mark.parametrize(("cell", "faster", "ratio"), TIMED, ids=lambda value: getattr(value, "name", None))
def test_the_faster_way_ranks_first(cell: Cell, faster: ReductionMode, ratio: float) -> None:
    ranked = [knobs.reduction_mode for knobs in ranked_knobs(cell.facts(), STAND_IN)]
    assert ranked[0] is faster, f"{cell.name}: stored dS took {ratio} of the time of atomic adds"
    assert {ATOMIC, STORED} <= set(ranked)


DETERMINISTIC = [  # (cell, the faster of stored dS and the relay, time of stored dS over that of the relay)
    (Cell(*D64, 4096, False), STORED, 1.00),
    (Cell(*D64, 4096), STORED, 0.96),
    (Cell(*D64, 8192, False), STORED, 0.98),
    (Cell(*D64, 16384, False), STORED, 0.90),
    (Cell(*D64, 16384), STORED, 0.94),
    (Cell(*D64_GROUPED, 2048), STORED, 0.87),
    (Cell(*D64_GROUPED, 4096, False), RELAY, 1.06),
    (Cell(*D64_GROUPED, 8192, False), RELAY, 1.09),
    (Cell(*D64_GROUPED, 16384, False), RELAY, 1.04),
]


@pytest.mark.parametrize(("cell", "faster", "ratio"), DETERMINISTIC, ids=lambda value: getattr(value, "name", None))
def test_the_faster_deterministic_way_ranks_first(cell: Cell, faster: ReductionMode, ratio: float) -> None:
    first = ranked_knobs(replace(cell, deterministic=True).facts(), STAND_IN)[0]
    assert first.reduction_mode is faster, f"{cell.name}: stored dS took {ratio} of the time of the relay"


WALKS = [  # (cell, query heads of a group that a CTA walks in the fastest plan, time of the longest walk over its own)
    (Cell(64, 64, 2, 64, 8, 4096, window=1024), 4, 1.03),
    (Cell(128, 128, 2, 64, 8, 4096, window=1024), 4, 1.05),
    (Cell(128, 128, 1, 64, 8, 4096, window=1024), 2, 1.03),
    (Cell(64, 64, 2, 64, 8, 4096, window=128), 8, 1.00),
    (Cell(128, 128, 2, 64, 8, 4096, window=128), 8, 1.00),
    (Cell(*D64_GROUPED, 2048), 4, 1.52),
    (Cell(*D64_GROUPED, 16384, False), 8, 1.00),
    (Cell(*D128_GROUPED, 4096, False), 8, 1.00),
    (Cell(*D256_GROUPED, 2048), 2, 3.43),
    (Cell(*D256_GROUPED, 4096, False), 8, 1.00),
]


@pytest.mark.parametrize(("cell", "heads", "ratio"), WALKS, ids=lambda value: getattr(value, "name", None))
def test_the_faster_walk_ranks_first(cell: Cell, heads: int, ratio: float) -> None:
    first = ranked_knobs(cell.facts(), STAND_IN)[0]
    assert first.heads_per_cta == heads, f"{cell.name}: the longest walk took {ratio} of the time"


def test_the_relay_is_not_first_where_a_head_has_the_gpu_to_itself() -> None:
    """Its CTAs would all wait for the first query tile in turn; in long grids that is nothing"""
    for seqlen, heads, relay in ((1024, 8, False), (16384, 128, True)):
        facts = Cell(64, 64, 1, heads, heads, seqlen, False, deterministic=True).facts()
        first = ranked_knobs(facts, Target("sm_120", "sm_120a", 0, 188))[0]
        assert (first.reduction_mode is ReductionMode.RELAY) is relay, first


def test_every_board_has_rates() -> None:
    """Products take twice as long on a GeForce board, and memory what so many SMs of a board have of it"""
    cell = Cell(*D128, 4096, deterministic=True).facts()
    boards = [Target("sm_120", "sm_120a", 0, 188), Target("sm_120", "sm_120a", 0, 170, half_tensor_rate=True)]
    boards += [Target("sm_121", "sm_121a", 0, 48), STAND_IN]
    assert all(ranked_knobs(cell, board) for board in boards)
    loops = [rates_of(board).flops_per_sm for board in boards]
    assert loops[1] == pytest.approx(loops[0] / 2, rel=0.01)
    assert loops[2] == loops[0]
    assert bytes_per_second(replace(boards[0], sm_count=94)) == bytes_per_second(boards[0]) / 2


@pytest.mark.parametrize(("cell", "keys", "ratio"), TILES, ids=lambda value: getattr(value, "name", None))
def test_the_faster_tile_ranks_first(cell: Cell, keys: int, ratio: float) -> None:
    ranked = [knobs.tile_n for knobs in ranked_knobs(cell.facts(), STAND_IN)]
    assert ranked[0] == keys, f"{cell.name}: the other tile took {ratio} of the time"
    assert set(ranked) == {64, 128}
