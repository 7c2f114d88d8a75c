"""Boards by their data sheets: what the cost model and the static model take rates from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Board:
    name: str
    sms: int
    tensor_flops: float  # a second, dense, bf16 with fp32 sums
    memory_bytes: float  # a second


RTX_PRO_6000 = Board("RTX PRO 6000", 188, 466e12, 1.79e12)
RTX_5090 = Board("RTX 5090", 170, 209.5e12, 1.79e12)  # GeForce boards sum in fp32 at half the rate
H200 = Board("H200 (stand-in)", 132, 989e12, 4.8e12)
GB10 = Board("GB10 (DGX Spark)", 48, 48 / 188 * 466e12, 0.27e12)  # the tensor rate of as many SMs of an RTX PRO 6000
