"""The GPUs of the model: rates of the pipes, and of memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..boards import H200, RTX_5090, RTX_PRO_6000, Board

SUB_PARTITIONS = 4
SHARED_BYTES_PER_CYCLE = 128
MUFU_CYCLES = 8  # a warp's instruction on 4 lanes a cycle
HMMA_FLOPS = 4096  # m16n8k16
REACHABLE_BANDWIDTH = 0.85
"""Of a memory's peak, in a kernel that streams."""


@dataclass(frozen=True)
class Gpu:
    """`hmma_cycles`: of m16n8k16 with fp32 accumulation on a sub-partition."""

    name: str
    sms: int
    hmma_cycles: float
    clock_hz: float
    memory_bytes_per_second: float  # the data sheet's

    @property
    def half_tensor_rate(self) -> bool:
        return self.hmma_cycles > FULL_RATE_CYCLES

    @property
    def peak_tflops(self) -> float:
        return HMMA_FLOPS * SUB_PARTITIONS * self.sms * self.clock_hz / self.hmma_cycles / 1e12


def of_board(board: Board, hmma_cycles: float) -> Gpu:
    """The clock is what gives the dense peak."""
    clock_hz = board.tensor_flops * hmma_cycles / (HMMA_FLOPS * SUB_PARTITIONS * board.sms)
    return Gpu(board.name, board.sms, hmma_cycles, clock_hz, board.memory_bytes)


FULL_RATE_CYCLES = 16
GPUS = (of_board(RTX_PRO_6000, FULL_RATE_CYCLES), of_board(RTX_5090, 2 * FULL_RATE_CYCLES))


def stand_in(ceiling_tflops: float, clock_hz: float, sms: int = H200.sms) -> Gpu:
    """An H200, whose rate of HMMAs is what was measured."""
    hmma_cycles = HMMA_FLOPS * SUB_PARTITIONS * sms * clock_hz / (ceiling_tflops * 1e12)
    return Gpu(H200.name, sms, hmma_cycles, clock_hz, H200.memory_bytes)
