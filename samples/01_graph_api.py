"""The engine through cudnn-frontend's graph API, on the operands of one attention layer that read real text.

    python samples/01_graph_api.py            # `make demo` runs this

Builds an sdpa_backward graph, shows the ranked plans and why the others are not there, compiles ours, and checks the
gradients against torch autograd. With an SM12x GPU the kernels run; without one they are compiled for sm_120a all the
same, and the fp64 reference runs the graph on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

os.environ.setdefault("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "1")  # cudnn-frontend's switch for opt-in engines

import cudnn
import torch
from tiny_layer import AttentionLayer, attention_layer

import cudnn_frost_sm120
from cudnn_frost_sm120 import cubin, reference, target
from cudnn_frost_sm120.explain import explain
from cudnn_frost_sm120.facts import facts_from_graph
from cudnn_frost_sm120.plan import BwdPlan, make_plan
from cudnn_frost_sm120.register import ENGINE_NAME

logging.getLogger("cudnn").setLevel(logging.ERROR)  # what it warns of, explain says in full

DATA_TYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float32: cudnn.data_type.FLOAT}
LIMIT = 6e-3  # bf16 gradients against an exact one


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--batch", type=int, default=2)
    options.add_argument("--seqlen", type=int, default=1024)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--headdim", type=int, default=64)
    given = options.parse_args()

    device = pick_device()
    layer = attention_layer(given.batch, given.seqlen, given.heads, given.headdim, device)
    versions = {"cudnn_frost_sm120": cudnn_frost_sm120, "cudnn-frontend": cudnn, "torch": torch}
    print(", ".join(f"{name} {module.__version__}" for name, module in versions.items()))
    print(
        f"one causal attention layer on real text, next-byte loss {layer.loss:.3f}; q is {tuple(layer.q.shape)} bf16\n"
    )

    graph, tensors = backward_graph(layer)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    print(explain(graph), "\n")

    index = our_plan(graph)
    graph.select_plan(index)  # strict: this plan or an error, never another one
    graph.check_support()
    graph.build_plans()  # compiles
    facts = facts_from_graph(graph)
    print_resources(make_plan(facts, graph.plans[index].knobs, target.resolve(graph)))

    by_name = {t.name: tensors[t.uid] for t in (*facts.inputs(), *facts.outputs()) if t.uid is not None}
    if device.type == "cuda":
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
        graph.execute(tensors, workspace)
        where = f"by our kernels on {torch.cuda.get_device_name()}"
    else:
        reference.run_graph(facts, by_name)
        where = "by the fp64 reference on the CPU (no SM12x GPU here: the kernels were compiled for sm_120a, not run)"

    errors = {name: reference.relative_error(by_name[name], exact) for name, exact in layer.autograd.items()}
    verdict = "all within" if max(errors.values()) <= LIMIT else "NOT all within"
    listed = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"\nchecked: {listed} relative to torch autograd, {verdict} {LIMIT:.0e}; computed {where}")
    return 0 if verdict == "all within" else 1


def pick_device() -> torch.device:
    """The GPU if it is one that the engine serves; else the CPU, planning for the named target sm_120."""
    if torch.cuda.is_available():
        try:
            target.resolve()
            return torch.device("cuda", torch.cuda.current_device())
        except NotImplementedError as declined:
            print(f"not using the GPU: {declined}")
    os.environ.setdefault(target.TARGET_ENV, "sm_120")
    return torch.device("cpu")


def backward_graph(layer: AttentionLayer) -> tuple[cudnn.pygraph, dict[int, torch.Tensor]]:
    """The graph of the layer's attention backward, and its buffers by uid; gradients start as NaN."""
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    buffers = {"q": layer.q, "k": layer.k, "v": layer.v, "o": layer.o, "dO": layer.do, "stats": layer.lse}
    inputs = {
        name: graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=DATA_TYPES[t.dtype], name=name)
        for name, t in buffers.items()
    }
    gradients = graph.sdpa_backward(**inputs, attn_scale=layer.scale, use_causal_mask=True, name="attention")
    tensors = {inputs[name].get_uid(): buffer for name, buffer in buffers.items()}
    for gradient, like in zip(gradients, (layer.q, layer.k, layer.v), strict=True):
        gradient.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        tensors[gradient.get_uid()] = torch.full_like(like, torch.nan)
    return graph, tensors


def our_plan(graph: cudnn.pygraph) -> int:
    names = [graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())]
    return next(index for index, name in enumerate(names) if name.startswith(ENGINE_NAME))


def print_resources(plan: BwdPlan) -> None:
    """Registers, shared memory and compile time of a plan's kernels, read from the cubin."""
    print(f"compiled for {plan.target.arch}; workspace {plan.workspace_bytes:,} bytes")
    try:
        rows = cubin.report(plan.key, plan.target)
    except FileNotFoundError as missing:  # the tools come with the `test` extra
        print(f"  {missing}")
        return
    print(f"  {'kernel':<20}{'registers':>10}{'shared bytes':>14}{'stack bytes':>13}")
    for row in rows:
        print(f"  {row.kernel:<20}{row.registers:>10}{row.shared_bytes:>14,}{row.stack_bytes:>13}")
    print(f"  {rows[0].seconds:.1f} s for the chain of {len(rows)}; other lengths, strides and scales reuse it")


if __name__ == "__main__":
    sys.exit(main())
