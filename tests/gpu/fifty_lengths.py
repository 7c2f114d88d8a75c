"""Run by test_compiles.py: 50 lengths through one process; its compiles, and whether it imported cutlass, as JSON."""

import json
import sys

import torch

from cudnn_frost_sm120.compile import compile_count

from . import harness
from .cases import CAUSAL, Case

for index in range(50):
    length = 40 + 17 * index
    case = Case(
        64, batch=1 + index % 3, heads_q=1 + index % 2, seqlen_q=length, seqlen_k=length + index % 5, mask=CAUSAL
    )
    problem = harness.Problem(case)
    harness.judge(problem, next(harness.run_wrapper(problem)))
torch.cuda.synchronize()
print(json.dumps({"compiles": compile_count(), "cutlass": "cutlass" in sys.modules}))
