"""Host time of one attention step in eager mode, forward and backward: ours beside torch's own function.

    python -m tests.gpu.host_cost

The problem is so small that the GPU always waits for the host. Candidates take turns; medians in microseconds.
"""

import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import cudnn_frost_sm120.torch as ours

ROUNDS, STEPS = 15, 100


def main() -> None:
    q, k, v = (
        torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    grad_out = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def ours_strictly(q, k, v):
        return ours.scaled_dot_product_attention(q, k, v, is_causal=True, strict=True)

    def theirs(q, k, v):
        return torch_sdpa(q, k, v, is_causal=True)

    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
    for _ in range(ROUNDS):
        for name, attention in (("ours", ours_strictly), ("torch", theirs)):
            for counted in (False, True):
                torch.cuda.synchronize()
                forward = backward = 0.0
                for _ in range(STEPS):
                    start = time.perf_counter()
                    out = attention(q, k, v)
                    middle = time.perf_counter()
                    torch.autograd.grad(out, (q, k, v), grad_out)
                    end = time.perf_counter()
                    forward, backward = forward + middle - start, backward + end - middle
                if counted:
                    taken[name].append((forward / STEPS * 1e6, backward / STEPS * 1e6))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds of host time per call")
    for name, rounds in taken.items():
        forward, backward = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:<6} forward {forward:6.1f}  backward {backward:6.1f}  both {forward + backward:6.1f}")


if __name__ == "__main__":
    main()
