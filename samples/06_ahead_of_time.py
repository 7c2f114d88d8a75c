"""Compile on a machine with no GPU, as a container build does, and let a machine with one compile nothing.

    python samples/06_ahead_of_time.py [--target sm_120] [--store DIRECTORY]

Saves a graph, compiles its kernels with `python -m cudnn_frost_sm120 warm`, and, where there is an SM12x GPU, builds a
plan of another batch and length from them, with compiling refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")  # cudnn-frontend's switch for opt-in engines

import cudnn
import torch

from cudnn_frost_sm120 import explain, target

logging.getLogger("cudnn").setLevel(logging.ERROR)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--target", default="sm_120")
    options.add_argument("--store", help="where the kernels go; by default a directory that is removed at the end")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(given.store or folder) / "kernels"

        # 1. The graph that will be run, as JSON. Its batch, lengths, strides and scale are no part of its kernels.
        explain.save(causal_graph(batch=1, seqlen=128), Path(folder) / "graph.json")

        # 2. In the container build. `--grid headline --dtype bf16 fp16` would warm a set of usual shapes.
        command = [sys.executable, "-m", "cudnn_frost_sm120", "warm", "--target", given.target, "--first"]
        subprocess.run([*command, "--output", str(store), str(Path(folder) / "graph.json")], check=True)
        for entry in sorted(store.iterdir()):
            print(f"  {entry.name}: {(entry / 'kernel.o').stat().st_size:,} bytes")

        # 3. On the machine with the GPU, which finds the store by the environment.
        os.environ["CUDNN_FROST_SM120_KERNELS"] = str(store)
        return build_without_compiling() if gpu_is(given.target) else 0


def build_without_compiling() -> int:
    from cudnn.frost import compiled_cache

    graph = causal_graph(batch=3, seqlen=777)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    graph.select_plan(0)
    with compiled_cache.refuse_compiles():
        graph.build_plans()
    print(
        f"built with no compile: {graph.get_plan_name_at_index(0)}, {graph.get_workspace_size():,} bytes of workspace"
    )
    return 0


def gpu_is(name: str) -> bool:
    if torch.cuda.is_available():
        try:
            if target.resolve().name == name:
                return True
        except NotImplementedError as declined:
            print(f"not using the GPU: {declined}")
    print(f"no {name} GPU here: the kernels wait for one")
    return False


def causal_graph(batch: int, seqlen: int) -> cudnn.pygraph:
    """One attention backward, 4 heads of 64, (B, H, S, D) laid out as (B, S, H, D)."""
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32)
    layout = {"dim": [batch, 4, seqlen, 64], "stride": [seqlen * 256, 64, 256, 1]}
    inputs = {name: graph.tensor(name=name, data_type=bf16, **layout) for name in ("q", "k", "v", "o", "dO")}
    inputs["stats"] = graph.tensor(
        name="stats", dim=[batch, 4, seqlen, 1], stride=[4 * seqlen, seqlen, 1, 1], data_type=fp32
    )
    for gradient in graph.sdpa_backward(**inputs, attn_scale=0.125, use_causal_mask=True):
        gradient.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"]).set_data_type(bf16)
    return graph


if __name__ == "__main__":
    raise SystemExit(main())
