"""The two engines that the model compares: their main loops, compiled with no GPU, and the bytes of their chains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..config.recompute import recompute_tile
from ..config.tiles import TileConfig
from ..cubin import Cubin, compile_cubin, disassemble, functions
from ..facts import BwdFacts, effective_bounds
from ..heuristics import ranked_knobs
from ..knobs import BwdKnobs, ReductionMode
from ..plan import BwdPlan, ChainKey, make_plan
from ..sass import main_loops
from ..target import Target
from ..traffic import Traffic, dq_gemm, dq_recompute, main_kernel, outside_main, size
from .loops import Tile, TileWork, count, gemm_tile, key_tile, query_tile

Masks = tuple[bool, bool]  # (right bound, left bound)
MAIN_KERNELS = {
    ReductionMode.ATOMIC: "main",
    ReductionMode.DS_STORE: "main storing dS",
    ReductionMode.RECOMPUTE: "main without dQ",
}
"""Names of the main kernel by what becomes of dQ."""
DQ_KERNELS: dict[ReductionMode, tuple[Callable[[BwdPlan], Traffic], Callable[[TileConfig], Tile]]] = {
    ReductionMode.DS_STORE: (dq_gemm, lambda tile: gemm_tile(tile.headdim_qk)),
    ReductionMode.RECOMPUTE: (dq_recompute, lambda tile: key_tile(recompute_tile(tile.headdim_qk, tile.headdim_v))),
}
"""Where a kernel of its own computes dQ: its bytes, and its tile."""


@dataclass(frozen=True)
class TiledKernel:
    """A kernel whose CTAs walk tiles of the score matrix: one side of a tile stays, the other streams past it."""

    name: str  # the name to fit stalls for
    measured_as: str  # the name in a run's stages
    whole: TileWork
    cut: TileWork  # of a tile that the mask cuts
    by_query: bool  # the query rows stay, else the key rows
    heads_per_cta: int
    traffic: Traffic


@dataclass(frozen=True)
class Ours:
    """This package's engine: the plan with these knobs, or the first that the model knows the loops of."""

    knobs: BwdKnobs | None = None
    throttled: bool = False
    name = "ours"

    def plan(self, facts: BwdFacts, target: Target) -> BwdPlan:
        knobs = self.knobs or next(k for k in ranked_knobs(facts, target) if k.reduction_mode in MODELLED)
        return make_plan(facts, knobs, target)

    def tiled_kernels(self, facts: BwdFacts, target: Target) -> tuple[TiledKernel, ...]:
        """Raises NotImplementedError for knobs whose loops are not modelled."""
        plan = self.plan(facts, target)
        mode, config = plan.key.reduction, plan.key.tile
        if mode not in MODELLED:
            raise NotImplementedError(f"the model does not know the loops of REDUCTION_MODE {mode.name}")
        key = plain_key(config, masks_of(facts), mode, self.throttled)
        kernels = [
            TiledKernel(
                MAIN_KERNELS[mode],
                "main",
                *self._work(key, "main", target, query_tile(config, 3 if mode.dq_in_main else 2)),
                by_query=False,
                heads_per_cta=plan.knobs.heads_per_cta,
                traffic=main_kernel(plan),
            )
        ]
        if mode in DQ_KERNELS:
            stage, tile_of = DQ_KERNELS[mode]
            name = stage.__name__
            work = self._work(key, name, target, tile_of(config))
            kernels.append(TiledKernel(name, name, *work, True, 1, stage(plan)))
        return tuple(kernels)

    def around(self, facts: BwdFacts, target: Target) -> dict[str, Traffic]:
        """By kernel, without the tiled ones."""
        tiled = {stage.__name__ for stage, _ in DQ_KERNELS.values()}
        return {name: some for name, some in outside_main(self.plan(facts, target)).items() if name not in tiled}

    def _work(self, key: ChainKey, kernel: str, target: Target, tile: Tile) -> tuple[TileWork, TileWork]:
        sass = _our_sass(key, kernel, target)
        times = 2 if self.throttled else 1
        whole, cut = (count(main_loops(sass, rare), tile, times) for rare in (False, True))
        return whole, cut


MODELLED = tuple(MAIN_KERNELS)


@dataclass(frozen=True)
class Baseline:
    """cudnn-frontend's `sdpa_bwd_sm120` with its default tiles, not deterministic: dot, main, cvt and, for grouped
    heads, reduce."""

    name = "baseline"

    def tiled_kernels(self, facts: BwdFacts, target: Target) -> tuple[TiledKernel, ...]:
        from cudnn.sdpa.bwd.config_sm120 import DEFAULT_TILES, padded_head_dims

        headdim_qk, headdim_v = padded_head_dims(facts.headdim_qk, facts.headdim_v)
        tile_m, tile_n = DEFAULT_TILES[headdim_qk]
        tile = query_tile(TileConfig(headdim_qk, headdim_v, tile_m, tile_n // 64, 1, 1, 1, 1))
        sass = _baseline_sass(headdim_qk, headdim_v, masks_of(facts), target.arch)
        whole, cut = (count(main_loops(sass, rare), tile) for rare in (False, True))
        # As ours, but for the parts of dK and dV: bf16, one for each query head.
        read = sum(size(tensor) for tensor in (facts.q, facts.k, facts.v, facts.do, facts.stats))
        sums, written = self._dq_sums(facts), facts.group * (size(facts.dk) + size(facts.dv))
        traffic = Traffic(read + self._rows(facts) * 4 + sums, sums + written)
        return (TiledKernel("main", "main", whole, cut, False, 1, traffic),)

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
        """It pads rows as far as we do, or to the next 128."""
        return facts.batch * facts.heads_q * -(-facts.seqlen_q // 128) * 128

    def _dq_sums(self, facts: BwdFacts) -> int:
        return 4 * self._rows(facts) * facts.headdim_qk


Engine = Ours | Baseline


def masks_of(facts: BwdFacts) -> Masks:
    left, right = effective_bounds(facts)
    return right is not None, left is not None


def plain_key(
    tile: TileConfig,
    masks: Masks = (False, False),
    reduction: ReductionMode = ReductionMode.ATOMIC,
    throttled: bool = False,
) -> ChainKey:
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
        reduction=reduction,
        throttled=throttled,
    )


@cache
def _our_sass(key: ChainKey, kernel: str, target: Target) -> str:
    return _our_cubin(key, target).kernel_sass(kernel)


@cache
def _our_cubin(key: ChainKey, target: Target) -> Cubin:
    return compile_cubin(key, target)


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
