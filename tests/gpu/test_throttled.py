"""The throttled build, which only the benchmark has: its idle products change no value."""

import torch

from . import harness
from .cases import CAUSAL, Case, each


@each([Case(64, mask=CAUSAL), Case(128, heads_q=4, heads_k=2), Case(256)])
def test_idle_products_change_no_value(judge, case):
    """dK and dV keep their bits"""
    problem = harness.Problem(case)
    kept = {}
    for throttled in (False, True):
        problem.wipe_outputs()
        _, _, run = harness.make_launch(problem, throttled=throttled)
        run()
        torch.cuda.synchronize()
        judge(problem, problem.outputs)
        now = {name: problem.outputs[name].clone() for name in ("dk", "dv")}
        for name, tensor in kept.items():
            assert torch.equal(tensor, now[name]), name
        kept = now
