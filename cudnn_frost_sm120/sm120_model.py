"""A static model of the main loop on SM120: cycles a query tile takes on each pipe, counted in the compiled SASS.

Each SM sub-partition runs one warp of either group, so a tile costs it one pass of either loop. The pipe that needs
most cycles is the bound; what the loop really takes is more, as waits and latencies are not in it. It tells a choice
that the Hopper stand-in flatters (faster tensor pipe, relatively slower shared memory) from one that helps SM120. No
GPU is needed, only the CUDA binary tools (cubin.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .config.smem import SmemLayout
from .config.tiles import TABLE, TileConfig
from .cubin import compile_cubin
from .knobs import ReductionMode
from .plan import ChainKey
from .target import Target

SUB_PARTITIONS = 4
SHARED_BYTES_PER_CYCLE = 128
MUFU_CYCLES = 8  # a warp's instruction on 4 lanes a cycle
HMMA_FLOPS = 4096  # m16n8k16


@dataclass(frozen=True)
class Gpu:
    """`hmma_cycles`: of m16n8k16 with fp32 accumulation on a sub-partition; the clock is what gives the dense peak."""

    name: str
    sms: int
    hmma_cycles: int
    peak_tflops: float

    @property
    def clock_hz(self) -> float:
        return self.peak_tflops * 1e12 * self.hmma_cycles / (HMMA_FLOPS * SUB_PARTITIONS * self.sms)


GPUS = (Gpu("RTX PRO 6000", 188, 16, 466), Gpu("RTX 5090", 170, 32, 209.5))

Instruction = tuple[str, str]  # opcode with modifiers, operands
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_SHARED_BYTES = {"LDSM": 128, "STSM": 128, "LDS": 128, "STS": 128}  # of a warp, for one 32-bit register a lane
_FP32 = {"FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP"}


@dataclass(frozen=True)
class Pipes:
    """Cycles of one query tile, on a sub-partition or (shared) on the SM."""

    tensor: int
    shared: int
    mufu: int
    fp32: int
    issue: int

    @property
    def bound(self) -> tuple[str, int]:
        name = max(vars(self), key=lambda pipe: getattr(self, pipe))
        return name, getattr(self, name)


def main_loops(sass: str) -> list[list[Instruction]]:
    """Bodies of the loops of a kernel that hold HMMAs, innermost, in order; blocks that a branch inside the loop skips
    and that do no matrix or exponential work (masking) are left out, as most tiles skip them."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        label, instruction = _LABEL.match(line), _LINE.match(line)
        if label:
            labels[label.group(1)] = len(code)
        elif instruction:
            code.append((instruction.group(1), instruction.group(2)))
    jumps = [(at, target) for at, target in _branches(code, labels)]
    loops: list[tuple[int, int]] = []
    for at, target in sorted(jumps, key=lambda jump: jump[0] - jump[1]):
        body = code[target : at + 1]
        inner = any(target <= first and last <= at for first, last in loops)
        if target < at and not inner and _has(body, "HMMA") and not _has(body, "EXIT"):
            loops.append((target, at))
    return [_without_rare_blocks(code, first, last, jumps) for first, last in sorted(loops)]


def _branches(code: list[Instruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    for at, (opcode, operands) in enumerate(code):
        named = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
        if named and named.group(0) in labels:
            yield at, labels[named.group(0)]


def _has(body: list[Instruction], *opcodes: str) -> bool:
    return any(opcode.split(".")[0] in opcodes for opcode, _ in body)


def _without_rare_blocks(
    code: list[Instruction], first: int, last: int, jumps: list[tuple[int, int]]
) -> list[Instruction]:
    skipped: set[int] = set()
    for at, target in jumps:
        if first <= at < target <= last + 1 and not _has(code[at + 1 : target], "HMMA", "MUFU", "UTMALDG"):
            skipped |= set(range(at + 1, target))
    return [code[i] for i in range(first, last + 1) if i not in skipped]


def count_pipes(loops: list[list[Instruction]], tile: TileConfig, hmma_cycles: int) -> Pipes:
    """Cycles of one query tile: one pass of each loop on every sub-partition."""
    counts = Counter(opcode.split(".")[0] for body in loops for opcode, _ in body)
    layout = SmemLayout(tile)
    loaded = layout.q_bytes + layout.do_bytes + 2 * layout.row_bytes  # what TMA writes
    moved = SUB_PARTITIONS * sum(_shared_bytes(opcode) for body in loops for opcode, _ in body)
    return Pipes(
        tensor=counts["HMMA"] * hmma_cycles,
        shared=-(-(moved + loaded) // SHARED_BYTES_PER_CYCLE),
        mufu=counts["MUFU"] * MUFU_CYCLES,
        fp32=sum(counts[opcode] for opcode in _FP32),
        issue=sum(counts.values()),
    )


def _shared_bytes(opcode: str) -> int:
    """Bytes that one warp's instruction moves: 4 registers a lane for .4 and .128, 2 for .2 and .64."""
    name, *modifiers = opcode.split(".")
    registers = 4 if {"4", "128"} & set(modifiers) else 2 if {"2", "64"} & set(modifiers) else 1
    return _SHARED_BYTES.get(name, 0) * registers


def plain_key(tile: TileConfig) -> ChainKey:
    """The bf16 chain of a configuration without any feature."""
    return ChainKey(
        "bf16",
        tile,
        mask_right=False,
        mask_left=False,
        grouped=False,
        padded=False,
        dsink=False,
        reduction=ReductionMode.ATOMIC,
    )


def tile_flops(tile: TileConfig) -> int:
    return 2 * tile.tile_m * tile.tile_n * (3 * tile.headdim_qk + 2 * tile.headdim_v)


def report(target: Target) -> list[str]:
    """A Markdown table: every tile configuration, bf16, without a mask; cycles by pipe, bound and the rate at it."""
    gpu_columns = [f"bound on {gpu.name}" for gpu in GPUS] + [f"at most, TFLOP/s, {gpu.name}" for gpu in GPUS]
    columns = ["head dims", "tile", "tensor (16 / 32)", "shared", "MUFU", "FP32", "issue", *gpu_columns]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " --- |" * (len(columns) - 1)]
    for tile in TABLE:
        loops = main_loops(compile_cubin(plain_key(tile), target).main_sass())
        pipes = {gpu: count_pipes(loops, tile, gpu.hmma_cycles) for gpu in GPUS}
        some = pipes[GPUS[0]]
        row = [f"{tile.headdim_qk}/{tile.headdim_v}", f"{tile.tile_m}x{tile.tile_n}"]
        row += [" / ".join(str(pipes[gpu].tensor) for gpu in GPUS), *map(str, (some.shared, some.mufu, some.fp32))]
        row += [str(some.issue), *("{} {}".format(*pipes[gpu].bound) for gpu in GPUS)]
        row += [f"{tile_flops(tile) * gpu.sms * gpu.clock_hz / pipes[gpu].bound[1] / 1e12:.0f}" for gpu in GPUS]
        lines.append("| " + " | ".join(row) + " |")
    return lines
