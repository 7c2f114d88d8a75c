"""What one tile asks of each pipe, counted in the loops of a compiled kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..config import gemm
from ..config.recompute import TILE_M, RecomputeTile
from ..config.smem import ELEMENT_BYTES
from ..config.tiles import TileConfig
from ..sass import Body
from .gpus import HMMA_FLOPS, MUFU_CYCLES, SHARED_BYTES_PER_CYCLE, SUB_PARTITIONS, Gpu

_SHARED_BYTES = {"LDSM": 128, "STSM": 128, "LDS": 128, "STS": 128}  # of a warp, for one 32-bit register a lane
_FP32 = ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP")


@dataclass(frozen=True)
class Pipes:
    """Cycles, on a sub-partition or (shared) on the SM."""

    tensor: float
    shared: float
    mufu: float
    fp32: float
    issue: float

    @property
    def bound(self) -> tuple[str, float]:
        """The pipe that needs most cycles, and how many."""
        name = max(vars(self), key=lambda pipe: getattr(self, pipe))
        return name, getattr(self, name)

    def cycles(self, exposed: float) -> float:
        """The bound, and the share `exposed` of what the other pipes do that the bound does not hide."""
        return self.bound[1] + exposed * (sum(vars(self).values()) - self.bound[1])

    def scaled(self, factor: float) -> Pipes:
        return Pipes(*(factor * cycles for cycles in vars(self).values()))


@dataclass(frozen=True)
class Tile:
    """Query rows times key rows that a CTA works on at a time, and which products it does."""

    rows: int
    keys: int
    flops: int
    loaded_bytes: int  # that come to shared memory with it


@dataclass(frozen=True)
class TileWork:
    """Of one tile: instructions that a sub-partition issues, bytes that the SM's shared memory moves."""

    tile: Tile
    hmma: int
    mufu: int
    fp32: int
    issue: int
    shared_bytes: int

    def pipes(self, gpu: Gpu) -> Pipes:
        shared = self.shared_bytes / SHARED_BYTES_PER_CYCLE
        return Pipes(self.hmma * gpu.hmma_cycles, shared, self.mufu * MUFU_CYCLES, self.fp32, self.issue)


def query_tile(config: TileConfig, products_qk: int = 3) -> Tile:
    """Of a main kernel: dP, dV, and of d_qk wide products S, dK and, unless another kernel has it, dQ. Loaded are Q, dO
    and their rows of LSE and delta."""
    columns = products_qk * config.headdim_qk + 2 * config.headdim_v
    loaded = config.tile_m * ((config.headdim_qk + config.headdim_v) * ELEMENT_BYTES + 2 * 4)
    return Tile(config.tile_m, config.tile_n, 2 * config.tile_m * config.tile_n * columns, loaded)


def key_tile(config: RecomputeTile) -> Tile:
    """Of the kernel that recomputes the scores: S, dP and dQ. Loaded are K and V."""
    columns = 2 * config.headdim_qk + config.headdim_v
    loaded = config.tile_n * (config.headdim_qk + config.headdim_v) * ELEMENT_BYTES
    return Tile(TILE_M, config.tile_n, 2 * TILE_M * config.tile_n * columns, loaded)


def gemm_tile(headdim: int) -> Tile:
    """Of the kernel that multiplies stored dS by K. Loaded is K; dS comes straight into registers."""
    flops = 2 * gemm.TILE_M * gemm.TILE_N * headdim
    return Tile(gemm.TILE_M, gemm.TILE_N, flops, gemm.TILE_N * headdim * ELEMENT_BYTES)


def count(loops: list[Body], tile: Tile, hmmas_per_product: int = 1) -> TileWork:
    """Raises ValueError where the loops are not the products of the tile: then they are not the loops it is for.

    A sub-partition passes through the loops once for each of its warps that has them.
    """
    opcodes = [opcode for body in loops for opcode, _ in body]
    names = Counter(opcode.split(".")[0] for opcode in opcodes)
    needed = tile.flops * hmmas_per_product // (HMMA_FLOPS * SUB_PARTITIONS)
    if not names["HMMA"] or needed % names["HMMA"]:
        raise ValueError(f"{names['HMMA']} HMMAs in {len(loops)} loops, and a sub-partition needs {needed} for {tile}")
    passes = needed // names["HMMA"]
    moved = SUB_PARTITIONS * sum(_shared_bytes(opcode) for opcode in opcodes)
    return TileWork(
        tile,
        hmma=passes * names["HMMA"],
        mufu=passes * names["MUFU"],
        fp32=passes * sum(names[name] for name in _FP32),
        issue=passes * len(opcodes),
        shared_bytes=passes * moved + tile.loaded_bytes,
    )


def _shared_bytes(opcode: str) -> int:
    """Bytes that one warp's instruction moves: 4 registers a lane for .4 and .128, 2 for .2 and .64."""
    name, *modifiers = opcode.split(".")
    registers = 4 if {"4", "128"} & set(modifiers) else 2 if {"2", "64"} & set(modifiers) else 1
    return _SHARED_BYTES.get(name, 0) * registers
