"""The GPUs of the model: rates of the pipes, and of memory."""

from __future__ import annotations

from dataclasses import dataclass

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
    def peak_tflops(self) -> float:
        return HMMA_FLOPS * SUB_PARTITIONS * self.sms * self.clock_hz / self.hmma_cycles / 1e12


def with_peak(name: str, sms: int, hmma_cycles: float, peak_tflops: float, memory: float) -> Gpu:
    """The clock is what gives the dense peak."""
    return Gpu(name, sms, hmma_cycles, peak_tflops * 1e12 * hmma_cycles / (HMMA_FLOPS * SUB_PARTITIONS * sms), memory)


GPUS = (with_peak("RTX PRO 6000", 188, 16, 466, 1.79e12), with_peak("RTX 5090", 170, 32, 209.5, 1.79e12))


def stand_in(ceiling_tflops: float, clock_hz: float, sms: int = 132) -> Gpu:
    """An H200, whose rate of HMMAs is what was measured."""
    hmma_cycles = HMMA_FLOPS * SUB_PARTITIONS * sms * clock_hz / (ceiling_tflops * 1e12)
    return Gpu("H200 (stand-in)", sms, hmma_cycles, clock_hz, 4.8e12)
