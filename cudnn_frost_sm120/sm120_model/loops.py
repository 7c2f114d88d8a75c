"""What one query tile asks of each pipe, counted in the loops of a compiled main kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..config.smem import ELEMENT_BYTES
from ..config.tiles import TileConfig
from .gpus import HMMA_FLOPS, MUFU_CYCLES, SHARED_BYTES_PER_CYCLE, SUB_PARTITIONS, Gpu
from .sass import Body

_SHARED_BYTES = {"LDSM": 128, "STSM": 128, "LDS": 128, "STS": 128}  # of a warp, for one 32-bit register a lane
_FP32 = ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP")
ROWS_OF_FP32 = 2
"""LSE and delta."""


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
class TileWork:
    """Of one query tile: instructions that a sub-partition issues, bytes that the SM's shared memory moves."""

    tile: TileConfig
    hmma: int
    mufu: int
    fp32: int
    issue: int
    shared_bytes: int

    def pipes(self, gpu: Gpu) -> Pipes:
        shared = self.shared_bytes / SHARED_BYTES_PER_CYCLE
        return Pipes(self.hmma * gpu.hmma_cycles, shared, self.mufu * MUFU_CYCLES, self.fp32, self.issue)


def tile_flops(tile: TileConfig) -> int:
    return 2 * tile.tile_m * tile.tile_n * (3 * tile.headdim_qk + 2 * tile.headdim_v)


def count(loops: list[Body], tile: TileConfig, passes: int = 1) -> TileWork:
    """`passes` of every loop by a sub-partition for a query tile: how many of its warps run that loop."""
    opcodes = [opcode for body in loops for opcode, _ in body]
    names = Counter(opcode.split(".")[0] for opcode in opcodes)
    moved = SUB_PARTITIONS * sum(_shared_bytes(opcode) for opcode in opcodes)
    return TileWork(
        tile,
        hmma=passes * names["HMMA"],
        mufu=passes * names["MUFU"],
        fp32=passes * sum(names[name] for name in _FP32),
        issue=passes * len(opcodes),
        shared_bytes=passes * moved + loaded_bytes(tile),
    )


def passes_for_five_products(loops: list[Body], tile: TileConfig) -> int:
    """How often a sub-partition runs the loops for a query tile. Raises ValueError if they are not the five GEMMs."""
    hmmas = sum(opcode.startswith("HMMA") for body in loops for opcode, _ in body)
    passes, rest = divmod(tile_flops(tile), max(1, hmmas * HMMA_FLOPS * SUB_PARTITIONS))
    if rest or not hmmas:
        raise ValueError(f"{hmmas} HMMAs in {len(loops)} loops are no whole part of the five GEMMs of {tile}")
    return passes


def loaded_bytes(tile: TileConfig) -> int:
    """What comes to shared memory with a query tile: Q, dO and their fp32 rows."""
    return tile.tile_m * ((tile.headdim_qk + tile.headdim_v) * ELEMENT_BYTES + ROWS_OF_FP32 * 4)


def _shared_bytes(opcode: str) -> int:
    """Bytes that one warp's instruction moves: 4 registers a lane for .4 and .128, 2 for .2 and .64."""
    name, *modifiers = opcode.split(".")
    registers = 4 if {"4", "128"} & set(modifiers) else 2 if {"2", "64"} & set(modifiers) else 1
    return _SHARED_BYTES.get(name, 0) * registers
