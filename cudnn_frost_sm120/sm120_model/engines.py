"""The two engines that the model compares: their main loops, compiled with no GPU, and the bytes of their chains."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ..config.tiles import TileConfig
from ..cubin import compile_cubin, disassemble, functions
from ..facts import BwdFacts
from ..heuristics import ranked_knobs
from ..knobs import ReductionMode
from ..plan import BwdPlan, ChainKey, make_plan
from ..target import Target
from ..traffic import Traffic, main_kernel, outside_main, size
from .loops import TileWork, count, passes_for_five_products
from .sass import main_loops

Masks = tuple[bool, bool]  # (right bound, left bound)


def plain_key(tile: TileConfig, masks: Masks = (False, False), throttled: bool = False) -> ChainKey:
    """The bf16 chain of a configuration without any other feature."""
    right, left = masks
    return ChainKey(
        "bf16",
        tile,
        mask_right=right,
        mask_left=left,
        grouped=False,
        padded=False,
        dsink=False,
        reduction=ReductionMode.ATOMIC,
        throttled=throttled,
    )


class Ours:
    """This package's engine, by the first plan that sums dQ as it comes."""

    name = "ours"

    def __init__(self, throttled: bool = False):
        self._throttled = throttled

    def plan(self, facts: BwdFacts, target: Target) -> BwdPlan:
        plans = (make_plan(facts, knobs, target) for knobs in ranked_knobs(facts, target))
        return next(plan for plan in plans if plan.key.reduction is ReductionMode.ATOMIC)

    def tile(self, facts: BwdFacts, target: Target) -> TileConfig:
        return self.plan(facts, target).key.tile

    def heads_per_cta(self, facts: BwdFacts, target: Target) -> int:
        return self.plan(facts, target).knobs.heads_per_cta

    def work(self, tile: TileConfig, masks: Masks, target: Target, masked: bool = False) -> TileWork:
        """Of a query tile; `masked`: of one that the mask cuts."""
        sass = _our_sass(plain_key(tile, masks, self._throttled), target)
        return count(main_loops(sass, rare_blocks=masked), tile)

    def main_traffic(self, facts: BwdFacts, target: Target) -> Traffic:
        return main_kernel(self.plan(facts, target))

    def around(self, facts: BwdFacts, target: Target) -> dict[str, Traffic]:
        """By kernel, without the main one."""
        return outside_main(self.plan(facts, target))


class Baseline:
    """cudnn-frontend's `sdpa_bwd_sm120` with its default tiles, not deterministic: dot, main, cvt and, for grouped
    heads, reduce."""

    name = "baseline"
    ROUNDED_ROWS = 128

    def tile(self, facts: BwdFacts, target: Target) -> TileConfig:
        from cudnn.sdpa.bwd.config_sm120 import DEFAULT_TILES, padded_head_dims

        headdim_qk, headdim_v = padded_head_dims(facts.headdim_qk, facts.headdim_v)
        tile_m, tile_n = DEFAULT_TILES[headdim_qk]
        return TileConfig(headdim_qk, headdim_v, tile_m, tile_n // 64, 1, 1, 1, 1)

    def heads_per_cta(self, facts: BwdFacts, target: Target) -> int:
        return 1

    def work(self, tile: TileConfig, masks: Masks, target: Target, masked: bool = False) -> TileWork:
        loops = main_loops(_baseline_sass(tile.headdim_qk, tile.headdim_v, masks, target.arch), rare_blocks=masked)
        return count(loops, tile, passes_for_five_products(loops, tile))

    def main_traffic(self, facts: BwdFacts, target: Target) -> Traffic:
        """As of ours, but for the parts of dK and dV: bf16, one for each query head."""
        read = sum(size(tensor) for tensor in (facts.q, facts.k, facts.v, facts.do, facts.stats))
        sums, written = self._dq_sums(facts), facts.group * (size(facts.dk) + size(facts.dv))
        return Traffic(read + self._rows(facts) * 4 + sums, sums + written)

    def around(self, facts: BwdFacts, target: Target) -> dict[str, Traffic]:
        found = {
            "dot": Traffic(size(facts.o) + size(facts.do), 4 * self._rows(facts) + self._dq_sums(facts)),
            "cvt": Traffic(self._dq_sums(facts), size(facts.dq)),
        }
        if facts.group > 1:
            results = size(facts.dk) + size(facts.dv)
            found["reduce"] = Traffic(facts.group * results, results)
        if facts.sink is not None:
            found["dsink"] = Traffic(size(facts.stats) + 4 * self._rows(facts), 4 * facts.heads_q)
        return found

    def _rows(self, facts: BwdFacts) -> int:
        return facts.batch * facts.heads_q * -(-facts.seqlen_q // self.ROUNDED_ROWS) * self.ROUNDED_ROWS

    def _dq_sums(self, facts: BwdFacts) -> int:
        return 4 * self._rows(facts) * facts.headdim_qk


Engine = Ours | Baseline


@cache
def _our_sass(key: ChainKey, target: Target) -> str:
    return compile_cubin(key, target).main_sass()


@cache
def _baseline_sass(headdim_qk: int, headdim_v: int, masks: Masks, arch: str) -> str:
    """Its main kernel for any shape, as the shape only moves constants: bf16, top-left diagonal."""
    from cudnn.frost.tile_dsl.constants import DTYPE_BF16
    from cudnn.sdpa.bwd import api_dsl
    from cudnn.sdpa.bwd.config_sm120 import TemplateParams

    right, left = masks
    window = {"window_size_left": 127} if left else {}
    module = api_dsl._load_sm120_kernel_module(
        TemplateParams(dtype_qkv=DTYPE_BF16, is_causal=right, causal_top_left=right, **window)
    )
    with _kept_cubins(arch) as images:
        # Not through the module's memo, which would hold on to what is compiled here for another target.
        module.compile.__wrapped__((12, 0), b=2, qh=16, sq=4096, skv=4096, d_qk=headdim_qk, d_v=headdim_v)
    return next(text for symbol, text in functions(disassemble(images[0])) if "FusedMultiHeadAttention" in symbol)


@contextmanager
def _kept_cubins(arch: str) -> Iterator[list[bytes]]:
    """What the baseline's chain compiles to meanwhile, for `arch`; nothing is cached or loaded."""
    import cutlass.cute as cute
    from cudnn.sdpa.bwd.kernels.sm120 import prepared_host

    images: list[bytes] = []

    def compile_for_arch(function: Any, *arguments: Any, cache_key: str, symbol: str, options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            kept = f"{options} --gpu-arch {arch} --keep-cubin --dump-dir {folder}"
            image = cute.compile(function, *arguments, options=kept).artifacts.CUBIN
            images.append(image if isinstance(image, bytes) else Path(image).read_bytes())

    original = prepared_host.compile_cached
    prepared_host.compile_cached = compile_for_arch
    try:
        yield images
    finally:
        prepared_host.compile_cached = original
