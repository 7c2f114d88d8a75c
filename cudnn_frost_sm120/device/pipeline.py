"""mbarriers and pipeline stages.

Memory order: a TMA load completes on its `full` barrier, so a waiter sees its bytes. Ordinary shared stores of a warp
become visible to a waiter of `arrive`: the lanes meet at a warp barrier, then lane 0 arrives (release), and the waiter
acquires. An `empty` barrier counts one arrival per reading warp, after that warp's last read of the stage.

A TMA write is ordered behind no load that is still on its way to registers, whatever barrier lies between (seen: a tile
read by `ldmatrix` overwritten before the data had left, when the memory pipe was held up). So a stage that TMA fills is
freed only behind instructions that took in all that was read of it: results stored, a branch behind the products, or
`once_read`. cubin.reads_under_way checks it in the machine code.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental import primitives as prims

from .copy import smem_ptr


@cute.jit
def wait(bar, phase):
    """Spin until the phase with this parity has completed.

    One asm block: a DSL loop over the test form splits basic blocks (D64: 255 registers instead of 214, 7 % slower),
    and the library's forms with a time limit add a sleep (D128 3 %, D64 9 % slower).
    """
    prims.inline_ptx(
        "{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{$r0}], {$r1}; @P bra D; bra W; D: }",
        read_only_args=[Int32(bar), Int32(phase)],
    )


@cute.jit
def arrive(lane, every_lane: cutlass.Constexpr[bool], *bars):
    """One arrival for the whole warp on each barrier; with `every_lane`, one of each lane (MainConfig)."""
    cute.arch.sync_warp()
    if cutlass.const_expr(every_lane):
        for bar in cutlass.range_constexpr(len(bars)):
            prims.mbarrier_arrive(smem_ptr(bars[bar], Int64))
    elif lane == 0:
        for bar in cutlass.range_constexpr(len(bars)):
            prims.mbarrier_arrive(smem_ptr(bars[bar], Int64))


def once_read(bar, registers):
    """`bar`, as an address that is known only once `registers` hold what was loaded into them."""
    _, _, zero = cute.arch.block_idx()  # grids have one layer, which the compiler does not know
    return bar + (reduce(or_, registers) & zero)


def expect_bytes(bar, nbytes: int) -> None:
    """Arrive and tell the barrier how many bytes its current phase waits for."""
    prims.mbarrier_arrive_expect_tx(smem_ptr(bar, Int64), nbytes)


def next_stage(stage, phase, stages: int):
    """The stage after this one and its phase parity."""
    if stages == 1:
        return stage, phase ^ 1
    if stages == 2:
        return stage ^ 1, phase ^ stage
    last = stage == stages - 1
    return cutlass.select_(last, Int32(0), stage + 1), cutlass.select_(last, phase ^ 1, phase)
