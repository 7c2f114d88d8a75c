"""The ordered relay: CTAs add to a shared tile in one fixed order, without ever waiting for one that may not run.

Work is handed out by ticket (a counter), not by block index: whoever holds ticket t runs after every lower ticket was
taken by a CTA that is resident or has finished. A CTA waits only for lower tickets, so some CTA can always go on,
whatever order the hardware starts blocks in. Turns of a tile count up from 0; the counters start at 0.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as prims


def take_ticket(counter):
    """The next ticket; called by one thread."""
    return prims.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[counter]
    )


def peek(counter):
    """The counter as it stands, without order; read early, so that its latency is hidden."""
    return prims.inline_ptx(
        "ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[counter]
    )


def fence() -> None:
    """Orders what this CTA's threads did before it, as far as the caller has synchronised with them, before what they
    do behind it: after a `peek` that saw the turn, an acquire; before `pass_turn`, a release. One serves both."""
    prims.inline_ptx("fence.acq_rel.gpu;")


@cute.jit
def wait_turn(counter, turn, seen, lane):
    """Return once it is this warp's turn, as lane 0 judges; `seen` is what a `peek` before the last `fence` saw."""
    if lane == 0:
        if seen != turn:
            prims.inline_ptx(
                "{ .reg .pred P; .reg .u32 v; W: ld.acquire.gpu.global.u32 v, [{$r0}]; "
                "setp.eq.u32 P, v, {$r1}; @P bra D; bra W; D: }",
                read_only_args=[counter, Int32(turn)],
            )
    cute.arch.sync_warp()


@cute.jit
def pass_turn(counter, lane):
    """Hand the turn on; a `fence` came before."""
    if lane == 0:
        prims.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[counter])
