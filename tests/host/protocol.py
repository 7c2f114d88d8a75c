"""The barriers of the main kernel, run: its own Python, warp by warp, on one CTA of plain integers.

Warps are threads of which one runs at a time, chosen at random, as are the TMA loads that are on their way. Shared
memory holds, in place of numbers, which query tile they belong to; arithmetic on numbers of different tiles is a fault,
and so is a read during which somebody writes, a write to what is being read, a second arrival of a warp in a phase, and
a state in which nobody can go on. Lane 0 stands for its warp. Proxies and registers on their way are not modelled:
cubin.reads_under_way looks at those.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import cutlass

from cudnn_frost_sm120.config.roles import WARPS, WARPS_PER_GROUP, DqWarps
from cudnn_frost_sm120.device.block_range import query_tiles
from cudnn_frost_sm120.device.mask import Mask, MaskKinds
from cudnn_frost_sm120.device.seqlen import SeqlenInfo


def plain(names: list[str]) -> list[ModuleType]:
    """Those modules of the package, imported once more with decorators that leave functions alone: the DSL rewrites
    what it has compiled."""
    names = [f"cudnn_frost_sm120.{name}" for name in names]
    kept = {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]
    try:
        with mock.patch.object(cutlass.cute, "jit", lambda function: function):
            return [importlib.import_module(name) for name in names]
    finally:
        for name, module in kept.items():
            package, _, attribute = name.rpartition(".")
            setattr(sys.modules[package], attribute, module)
            sys.modules[name] = module


GROUPS = ["main_scores_group", "main_gradient_group", "main_dq_group"]
MODULES = plain(
    ["device.pipeline", *(f"kernels.{name}" for name in ("main_setup", "main_cleaning", "main_dq", *GROUPS))]
)
pipeline, main_setup, main_cleaning, main_dq, main_scores_group, main_gradient_group, main_dq_group = MODULES
KEYS = "K and V"
PADDED_ROWS = 1 << 20  # of a head
Query = tuple[int, int]  # (query tile, query head)


class Fault(AssertionError):
    pass


class Scheduler:
    """Threads that run one at a time: who pauses chooses who goes on."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.turns: list[threading.Semaphore] = []
        self.waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.loads: list[Callable[[], None]] = []
        self.fault: BaseException | None = None
        self.works: list[Callable[[], None]] = []
        self.ended = threading.Semaphore(0)
        self.warp = 0

    def spawn(self, work: Callable[[], None]) -> None:
        self.waiting[len(self.works)] = ("start", lambda: True)
        self.turns.append(threading.Semaphore(0))
        self.works.append(work)

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._body, args=(number,), daemon=True) for number in range(len(self.works))
        ]
        for thread in threads:
            thread.start()
        self._hand_on()
        self.ended.acquire()
        if self.fault:
            raise self.fault

    def _body(self, number: int) -> None:
        self.turns[number].acquire()
        try:
            if not self.fault:
                self.works[number]()
        except BaseException as fault:
            self.fault = self.fault or fault
        self._hand_on()

    def pause(self, at: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run; come back once `ready`."""
        own = self.warp
        self.waiting[own] = (at, ready)
        if self._hand_on() != own:
            self.turns[own].acquire()
        if self.fault:
            raise Fault("stopped")

    def _hand_on(self) -> int | None:
        """Choose who goes on, a load among them; a fault wakes everyone, to stop."""
        chosen = self._choose() if not self.fault else None
        if chosen is None:
            for turn in self.turns:
                turn.release()
            self.ended.release()
            return None
        if chosen != self.warp or self.waiting[chosen][0] == "start":
            self.turns[chosen].release()
        self.waiting.pop(chosen)
        own, self.warp = self.warp, chosen
        return chosen if chosen == own else None

    def _choose(self) -> int | None:
        try:
            while self.waiting or self.loads:
                able: list[Any] = [number for number, (_, ready) in self.waiting.items() if ready()]
                if not able and not self.loads:
                    where = {f"warp {number}": at for number, (at, _) in self.waiting.items()}
                    raise Fault(f"nobody can go on: {where}")
                chosen = self.random.choice(able + self.loads)
                if not callable(chosen):
                    return chosen
                self.loads.remove(chosen)
                chosen()
        except Fault as fault:
            self.fault = fault
        return None


@dataclass
class Barrier:
    name: str
    count: int
    phase: int = 0
    missing_bytes: int = 0
    arrived: list[int] = field(default_factory=list)

    def arrive(self, warp: int) -> None:
        if warp in self.arrived:
            raise Fault(f"warp {warp} arrives twice in one phase of {self.name}")
        self.arrived.append(warp)
        self._turn()

    def complete(self, nbytes: int) -> None:
        self.missing_bytes -= nbytes
        self._turn()

    def _turn(self) -> None:
        if len(self.arrived) == self.count and self.missing_bytes == 0:
            self.phase, self.arrived = self.phase + 1, []


@dataclass
class Region:
    start: int
    end: int
    holds: Any
    readers: int = 0


class Memory:
    def __init__(self) -> None:
        self.regions: list[Region] = []

    def write(self, start: int, nbytes: int, holds: Any) -> None:
        over = [region for region in self.regions if region.start < start + nbytes and start < region.end]
        for region in over:
            if region.readers:
                raise Fault(f"{holds} is written over {region.holds}, which is being read")
            self.regions.remove(region)
        self.regions.append(Region(start, start + nbytes, holds))

    def at(self, address: int) -> Region:
        found = [region for region in self.regions if region.start <= address < region.end]
        if not found:
            raise Fault(f"nothing is at {address}: it was never written, or written over")
        return found[0]


@dataclass(frozen=True)
class Value:
    """A number of a query tile, whatever is computed of it."""

    of: Any

    def _with(self, other: Any) -> Value:
        if isinstance(other, Value) and other.of != self.of:
            raise Fault(f"{self.of} meets {other.of}")
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __ror__ = _with


def same(values: list) -> Value:
    """The tile that all values are of."""
    first = values[0]
    for value in values:
        first._with(value)
    return first


@dataclass(frozen=True)
class Pointer:
    simulation: Simulation
    address: int

    def __add__(self, words: int) -> Pointer:
        return Pointer(self.simulation, self.address + 4 * words)

    def load(self, count: int, alignment: int) -> list[Value]:
        return [self.simulation.read(self.address)] * count

    def store(self, values: list[Value], alignment: int) -> None:
        self.simulation.memory.write(self.address, alignment, same(list(values)).of)


class Simulation:
    """One CTA: the kernel's classes with everything under them replaced (`install`), and a record of what they did."""

    def __init__(self, config, key_tile: int, extents: SimpleNamespace, seed: int):
        self.config = config
        self.scheduler, self.memory = Scheduler(seed), Memory()
        tile, smem = config.tile, config.smem
        seqlen = SeqlenInfo.create(extents.seqlen_q, extents.seqlen_k, extents.len_q, extents.len_k)
        kinds: MaskKinds = config.mask
        self.mask = Mask.create(kinds, seqlen.len_q, seqlen.len_k, 0, extents.left or 0, extents.right or 0)
        self.begin, self.end = query_tiles(key_tile, tile.tile_m, tile.tile_n, seqlen, self.mask)
        self.first_key, self.heads = key_tile * tile.tile_n, extents.heads
        self.barriers = {
            first + 8 * i: Barrier(f"barrier {first} [{i}]", max(1, warps))
            for first, count, warps in smem.barriers()
            for i in range(count)
        }
        self.memory.write(smem.k, smem.k_bytes, KEYS)
        self.memory.write(smem.v, smem.v_bytes, KEYS)
        self.cleaned: Counter[tuple[str, Query]] = Counter()
        self.done: Counter[tuple[str, int, Any]] = Counter()  # (product, warp, tile)
        self.passed: Counter[tuple[int, int, int]] = Counter()  # turns of the relay

    @property
    def tiles(self) -> list[Query]:
        return [(m_block, head) for head in range(self.heads) for m_block in range(self.begin, self.end)]

    def cta(self, warp: int) -> Any:
        unused = dict.fromkeys(
            ("batch", "head_k", "part", "first_head_q", "key_group", "dq_accum", "dq_head_stride"), 0
        )
        return main_setup.Cta(
            smem=0,
            lane=0,
            warp=warp,
            end_head_q=self.heads,
            first_key=self.first_key,
            begin=self.begin,
            end=self.end,
            tiles=len(self.tiles),
            mask=self.mask,
            bias=None,
            turns=0,
            head_turns=0,
            ds=None,
            **unused,
        )

    def run(self) -> None:
        for warp in range(self.config.tile.warps):
            self.scheduler.spawn(lambda warp=warp: self._warp(warp))
        self.scheduler.run()

    def _warp(self, warp: int) -> None:
        cta = self.cta(warp)
        if warp < WARPS_PER_GROUP:
            main_scores_group.ScoresGroup(self.config).run(cta, Value(None))
        elif warp < WARPS:
            sources = main_gradient_group.QuerySources(None, None, 0, 0, 0, PADDED_ROWS)
            main_gradient_group.GradientGroup(self.config).run(cta, sources)
        else:
            main_dq_group.DqGroup(self.config).run(cta)

    def read(self, address: int) -> Value:
        region = self.memory.at(address)
        self._check_clean(region)
        region.readers += 1
        self.scheduler.pause("reading")
        region.readers -= 1
        return Value(None if region.holds == KEYS else region.holds)

    def _check_clean(self, region: Region) -> None:
        tile, smem = self.config.tile, self.config.smem
        if not self.config.padded or region.holds == KEYS:
            return
        operand = "q" if smem.q <= region.start < smem.do else "do" if smem.do <= region.start < smem.ds else None
        if operand and self.mask.len_q - region.holds[0] * tile.tile_m < tile.tile_m:
            if self.cleaned[operand, region.holds] % WARPS:
                raise Fault(f"{region.holds} is read before all warps have cleaned it")

    # What stands for the functions that the groups are written with.

    def wait(self, bar: int, parity: int) -> None:
        barrier = self.barriers[bar]
        self.scheduler.pause(f"{barrier.name}, phase {barrier.phase}", lambda: barrier.phase & 1 != parity & 1)

    def arrive(self, lane: int, every_lane: bool, *bars: int) -> None:
        for bar in bars:
            self.scheduler.pause("arriving")
            self.barriers[bar].arrive(self.scheduler.warp)

    def expect_bytes(self, bar: int, nbytes: int) -> None:
        self.barriers[bar].missing_bytes += nbytes
        self.barriers[bar].arrive(self.scheduler.warp)

    def tma_load_tile(self, tma, dst: int, bar: int, row: int, head: int, batch: int, rows: int, columns: int) -> None:
        self._load(dst, rows * 128 * columns, (row // rows, head), bar)

    def bulk_load(self, dst: int, source: int, nbytes: int, bar: int) -> None:
        head, row = divmod(source, PADDED_ROWS)
        self._load(dst, nbytes, (row // self.config.tile.tile_m, head), bar)

    def _load(self, dst: int, nbytes: int, holds: Query, bar: int) -> None:
        def arrives() -> None:
            self.memory.write(dst, nbytes, holds)
            self.barriers[bar].complete(nbytes)

        self.scheduler.loads.append(arrives)

    def zero_rows(self, tile: int, row: int, rows: int, columns: int, tid: int, threads: int) -> None:
        region = self.memory.at(tile)
        if region.readers:
            raise Fault(f"{region.holds} is cleaned while it is read")
        self.cleaned["q" if tile < self.config.smem.do else "do", region.holds] += 1

    def ldmatrix(self, address: int, offset: int = 0, transpose: bool = False) -> list[Value]:
        return [self.read(address + offset)] * 4

    def key_fragments(self, config, base: int, lane: int, headdim: int, in_registers: bool) -> Callable:
        blocks = [self.ldmatrix(base)] * config.tile.key_blocks
        return lambda k: blocks if in_registers else [self.ldmatrix(base)] * len(blocks)

    def stmatrix(self, address: int, offset: int, registers: list[Value]) -> None:
        self.memory.write(address + offset, 16, same(registers).of)

    def gemm_scores(self, frags_of, base: int, headdim: int, rows: int, dtype) -> list:
        value = self.read(base)
        return [[[value] * 4 for _ in range(rows // 8)] for _ in frags_of(0)]

    def gemm_accumulate(self, acc, frags: list, base: int, headdim: int, rows: int, dtype) -> None:
        value = same([self.read(base), *(register for block in frags for step in block for register in step)])
        self.done["sums", self.scheduler.warp, value.of] += 1

    def log2_probabilities(self, acc_s, lse: Pointer, bias, *rest) -> list[Value]:
        key_blocks, tile_m = rest[-2:]
        return [acc_s[0][0][0] - lse.load(2, 8)[0]] * (key_blocks * tile_m // 2)

    def reduce(self, tile, cta, dq_warp: int, m_block: int, head: int, acc_dq: list) -> None:
        value = same([x for row in acc_dq for column in row for x in column])
        if value.of != (m_block, head):
            raise Fault(f"dS of {value.of} is added to dQ of {(m_block, head)}")
        counters = [dq_warp] if self._own_turns else range(WARPS_PER_GROUP)
        if any(self.passed[m_block, head, counter] for counter in counters):
            raise Fault(f"an add to {(m_block, head)} behind the turn")
        self.done["dq", dq_warp, value.of] += 1

    @property
    def _own_turns(self) -> bool:
        """In the relay a dQ warp has a counter to itself, else each of the four speaks for all adds to the tile."""
        return self.config.tile.dq is DqWarps.DQ_GROUP

    def pass_turn(self, counter: tuple[int, int, int], lane: int) -> None:
        m_block, head, warp = counter
        adders = [warp] if self._own_turns else range(self.config.tile.dq_warps)
        if any(not self.done["dq", adder, (m_block, head)] for adder in adders):
            raise Fault(f"the turn of {(m_block, head)} is handed on ahead of its adds")
        self.passed[counter] += 1

    def pointer(self, address: int, dtype: Any = None) -> Pointer:
        return Pointer(self, address)


def install(simulation: Simulation, monkeypatch) -> None:
    """Replace what the kernel's modules are written with; their own functions stay."""
    s = simulation

    def keep(value: Any, *rest: Any, **options: Any) -> Any:
        return value

    def nothing(*args: Any, **options: Any) -> None:
        pass

    fakes = {
        "cutlass": SimpleNamespace(
            Array=lambda dtype, count, alignment=4: [None] * count,
            Vector=SimpleNamespace(from_elements=lambda values, dtype: list(values)),
            const_expr=keep,
            range=lambda first, end, unroll: range(first, end),
            range_constexpr=range,
            select_=lambda condition, yes, no: yes if condition else no,
        ),
        "cute": SimpleNamespace(arch=SimpleNamespace(sync_warp=nothing), math=SimpleNamespace(exp2=keep)),
        "prims": SimpleNamespace(elect_sync=lambda: True),
        "Int32": int,
        "Int64": int,
        "Float32": lambda value: None,
        "wait": s.wait,
        "arrive": s.arrive,
        "once_read": keep,
        "smem_ptr": s.pointer,
        "zero_rows": s.zero_rows,
        "ldmatrix_x4": s.ldmatrix,
        "stmatrix_x4": s.stmatrix,
        "zeros": lambda count: [None] * count,
        "gemm_scores": s.gemm_scores,
        "gemm_accumulate": s.gemm_accumulate,
        "registers_of": lambda frags_of, headdim: [],
        "log2_probabilities": s.log2_probabilities,
        "mask_log2": nothing,
        "mask_packed": nothing,
        "mma": lambda c, a, b0, b1, dtype: [same([x for x in (*(c or ()), *a) if x is not None])] * 4,
        "pack_pair": lambda low, high, dtype: low._with(high),
        "unpack_pair": lambda pair, dtype: (pair, pair),
        "key_fragments": s.key_fragments,
        "turn_counter": lambda config, cta, m_block, head: (m_block, head, cta.warp_in_group),
        "key_turn_of": lambda config, cta, m_block: 0,
        "peek": lambda counter: s.passed[counter],
        "fence": nothing,
        "wait_turn": lambda counter, turn, seen, lane: s.scheduler.pause("turn", lambda: s.passed[counter] == turn),
        "pass_turn": s.pass_turn,
        "expect_bytes": s.expect_bytes,
        "tma_load_tile": s.tma_load_tile,
        "bulk_load": s.bulk_load,
    }
    for module in MODULES:
        for name, fake in fakes.items():
            if hasattr(module, name) and not (module is pipeline and name in ("wait", "arrive", "once_read")):
                monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(main_dq.DqTile, "reduce", lambda tile, *args: s.reduce(tile, *args))
    for name in ("place_of_ds", "keep_ds"):
        monkeypatch.setattr(main_gradient_group.GradientGroup, name, nothing)
