"""Every configuration of the main kernel, its warps run in random order (protocol.py): nobody waits for ever, nothing
is overwritten while it is needed, every tile is summed once."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import pytest

from cudnn_frost_sm120.config.roles import WARPS, DqWarps
from cudnn_frost_sm120.config.tiles import TABLE, TileConfig
from cudnn_frost_sm120.device.mask import MaskKinds
from cudnn_frost_sm120.knobs import ReductionMode
from cudnn_frost_sm120.plan import fitted, knobs_of
from tests.gpu.cases import Case, facts_of
from tests.host.protocol import Fault, Simulation, install, main_setup

FULL = {"seqlen_q": 500, "seqlen_k": 384, "len_q": None, "len_k": None, "left": None, "right": None, "heads": 1}
PROBLEMS = {
    "full": FULL,
    "one tile": {**FULL, "seqlen_q": 20},
    "causal, groups": {**FULL, "right": 0, "heads": 3},
    "window": {**FULL, "right": 0, "left": 90, "heads": 2},
    "lengths, groups": {**FULL, "len_q": 333, "len_k": 200, "heads": 3},
    "lengths, causal": {**FULL, "len_q": 301, "len_k": 300, "right": 0, "heads": 2},
    "no queries": {**FULL, "len_q": 0, "heads": 2},
}
SEED = 0


def simulation(row: TileConfig, mode: ReductionMode, problem: dict, seed: int) -> Simulation:
    lengths = {"len_q": (3, 4), "len_k": (3, 4)} if problem["len_q"] is not None else {}
    facts = facts_of(Case(row.headdim_qk, row.headdim_v, **lengths))
    tile = fitted(row, facts, knobs_of(row, 1, mode))
    kinds = MaskKinds(right=problem["right"] is not None, left=problem["left"] is not None)
    config = main_setup.MainConfig(cutlass.BFloat16, tile, kinds, problem["heads"] > 1, bool(lengths), mode)
    return Simulation(config, 1, SimpleNamespace(**problem), seed)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("mode", ReductionMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.headdim_qk}x{row.headdim_v}x{row.tile_n}")
def test_every_tile_is_summed_once(row, mode, problem, monkeypatch):
    run = simulation(row, mode, PROBLEMS[problem], SEED)
    install(run, monkeypatch)
    run.run()
    config, tile, mask = run.config, run.config.tile, run.mask
    for query in run.tiles:
        for warp in range(WARPS):
            key = run.first_key + warp % 4 * config.warp_keys
            skipped = config.warps_skip and mask.drops_tile(query[0] * tile.tile_m, tile.tile_m, key, config.warp_keys)
            assert run.done["sums", warp, query] == (not skipped), (SEED, warp, query)
        if tile.dq is not DqWarps.NONE:
            assert all(run.done["dq", warp, query] == 1 for warp in range(tile.dq_warps)), (SEED, query)
        if config.relay:
            assert all(run.passed[(*query, warp)] == 1 for warp in range(4)), (SEED, query)
    assert sum(run.done.values()) <= len(run.tiles) * (WARPS + tile.dq_warps)


@pytest.mark.parametrize("mode", ReductionMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_order_of_a_walk(mode, problem, monkeypatch):
    """Head by head and up; under a causal mask alone, but for the relay, down and each tile for all heads."""
    run = simulation(TABLE[-1], mode, PROBLEMS[problem], SEED)
    install(run, monkeypatch)
    config, cta = run.config, run.cta(0)
    down = (
        mode is not ReductionMode.RELAY and PROBLEMS[problem]["right"] is not None and PROBLEMS[problem]["left"] is None
    )
    place, order = main_setup.first_tile(config, cta), []
    for _ in run.tiles:
        order.append(place)
        place = main_setup.next_tile(config, cta, *place)
    assert order == (sorted(run.tiles, key=lambda tile: (-tile[0], tile[1])) if down else run.tiles)


@pytest.mark.parametrize("freed", ["q_empty", "do_empty", "ds_empty"])
@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("row", [TABLE[2], TABLE[4]], ids=lambda row: f"{row.headdim_qk}x{row.headdim_v}x{row.tile_n}")
def test_a_stage_that_is_freed_by_the_wrong_number_of_warps_is_seen(row, more, freed, monkeypatch):
    """One arrival too few is waited for, or one too many."""
    run = simulation(row, ReductionMode.ATOMIC, PROBLEMS["full"], SEED)
    install(run, monkeypatch)
    first, count, _ = next(entry for entry in run.config.smem.barriers() if entry[0] == getattr(run.config.smem, freed))
    for stage in range(count):
        run.barriers[first + 8 * stage].count += more
    with pytest.raises(Fault):
        run.run()
