"""Time every plan of a graph once, and have the fastest come first from then on.

    python samples/05_tune.py [--seqlen 1024] [--heads 8] [--kv-heads 2]

Lists the plans of a grouped-query layer, tunes the graph (on an SM12x GPU), plans it again to see the winner first, and
replays a recorded plan on a fresh graph. Without such a GPU nothing is timed, and the rest runs all the same.
"""

from __future__ import annotations

import argparse
import logging
import os

os.environ.setdefault("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")  # cudnn-frontend's switch for opt-in engines

import cudnn
import torch

import cudnn_frost_sm120
from cudnn_frost_sm120 import target

logging.getLogger("cudnn").setLevel(logging.ERROR)
HEADDIM = 128


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seqlen", type=int, default=1024)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--kv-heads", type=int, default=2)
    given = options.parse_args()
    sizes = (given.seqlen, given.heads, given.kv_heads)

    # 1. What there is to choose from, best first as far as the model knows.
    has_gpu = gpu_is_served()
    graph, shapes = planned_graph(*sizes)
    print_plans("plans, as ranked", graph)

    # 2. Measure. The variant pack is that of graph.execute; outputs are overwritten.
    if has_gpu:
        result = cudnn_frost_sm120.tune(graph, {uid: random_tensor(*shape) for uid, shape in shapes.items()})
        print(f"\n{result}\nstored in {result.path}")
        graph, _ = planned_graph(*sizes)
        print_plans("\nplans, as ranked from now on", graph)
    else:
        print("\nnothing is timed without an SM12x GPU")

    # 3. A record pins a plan for ever: an engine id and a complete set of knobs.
    last = graph.get_execution_plan_count() - 1
    engine_id, knobs = graph.get_engine_and_knobs_at_index(last)
    replayed, _ = described_graph(*sizes)
    replayed.create_execution_plan(engine_id, knobs)
    name = replayed.get_plan_name_at_index(0)
    print(f"\nreplayed from (engine_id={engine_id}, knobs): {name}")
    return 0 if name == graph.get_plan_name_at_index(last) else 1


def gpu_is_served() -> bool:
    if torch.cuda.is_available():
        try:
            target.resolve()
            return True
        except NotImplementedError as declined:
            print(f"not using the GPU: {declined}")
    os.environ.setdefault(target.TARGET_ENV, "sm_120")  # plan for it all the same
    return False


def described_graph(seqlen: int, heads: int, kv_heads: int) -> tuple[cudnn.pygraph, dict[int, tuple]]:
    """A causal attention backward of batch 1, and (shape, dtype) of each buffer by uid."""
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32)
    query, key, stats = [1, heads, seqlen, HEADDIM], [1, kv_heads, seqlen, HEADDIM], [1, heads, seqlen, 1]
    dims = {"q": query, "k": key, "v": key, "o": query, "dO": query, "stats": stats}
    inputs = {
        name: graph.tensor(name=name, dim=dim, stride=row_major(dim), data_type=fp32 if name == "stats" else bf16)
        for name, dim in dims.items()
    }
    gradients = graph.sdpa_backward(**inputs, attn_scale=HEADDIM**-0.5, use_causal_mask=True)
    for gradient, dim in zip(gradients, (query, key, key), strict=True):
        gradient.set_output(True).set_dim(dim).set_stride(row_major(dim)).set_data_type(bf16)
    tensors = [*inputs.values(), *gradients]
    return graph, {
        t.get_uid(): (t.get_dim(), torch.float32 if t is inputs["stats"] else torch.bfloat16) for t in tensors
    }


def planned_graph(*sizes: int) -> tuple[cudnn.pygraph, dict[int, tuple]]:
    graph, shapes = described_graph(*sizes)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans()
    return graph, shapes


def row_major(dim: list[int]) -> list[int]:
    return list(torch.empty(dim, device="meta").stride())


def random_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def print_plans(title: str, graph: cudnn.pygraph) -> None:
    print(title)
    for index in range(graph.get_execution_plan_count()):
        print(f"  [{index}] {graph.get_plan_name_at_index(index)}")


if __name__ == "__main__":
    raise SystemExit(main())
