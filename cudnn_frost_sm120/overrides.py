"""Execute-time overrides: the facts of a graph with the shapes that one call gives its tensors.

cudnn-frontend hands an override over in the order of axes of the caller's buffer, not of the graph. What it is of the
graph's tensor is told from the extents that cannot change (heads, head dims, broadcast dims) and from the order of the
strides, which is that of the graph's tensor, or row-major where the caller passed no strides. Where that leaves two
readings the call is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from .facts import BwdFacts, TensorFacts

Extents = Sequence[int]
_HEADS, _HEADDIM = 1, 3


def with_shapes(
    facts: BwdFacts, shapes: Mapping[str, Extents], strides: Mapping[str, Extents] | None = None
) -> BwdFacts:
    """The facts with other dims, and strides where given, of the tensors of these names, in the graph's order of axes.

    Raises ValueError for dims of another rank than the tensor's.
    """
    changed = {}
    for name, dim in shapes.items():
        tensor: TensorFacts = getattr(facts, name)
        stride = tuple(strides[name]) if strides is not None else row_major(dim)
        if len(dim) != len(tensor.dim) or len(stride) != len(dim):
            raise ValueError(f"the override of {name} has {len(dim)} dims, and the graph's tensor {len(tensor.dim)}")
        changed[name] = replace(tensor, dim=tuple(dim), stride=stride)
    return replace(facts, **changed)  # type: ignore[arg-type]


def row_major(dim: Extents) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(dim):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def in_graph_order(tensor: TensorFacts, batch: int, shape: Extents, stride: Extents) -> tuple[Extents, Extents]:
    """(dim, stride) of an override of ``tensor`` whose axes come in any order. ``batch`` is the graph's.

    Raises ValueError where no reading, or more than one, keeps the extents that cannot change.
    """
    if len(shape) != len(tensor.dim) or len(stride) != len(shape):
        raise ValueError(f"the override of {tensor.name} has {len(shape)} dims, and the graph's has {len(tensor.dim)}")
    readings = set(_readings(tensor, shape, stride))
    same_batch = {reading for reading in readings if reading[0][0] in (batch, tensor.dim[0])}
    if len(same_batch or readings) == 1:
        return next(iter(same_batch or readings))
    wrong = "changes its heads or head dim, or the order of its axes" if not readings else "reads in more than one way"
    raise ValueError(
        f"the override of {tensor.name}, with extents {tuple(shape)} and strides {tuple(stride)}, {wrong}; "
        "batch and sequence lengths can change, with strides in the graph's order"
    )


def _readings(tensor: TensorFacts, shape: Extents, stride: Extents) -> Iterator[tuple[Extents, Extents]]:
    """Ways to give the extents above 1, from the largest stride down, to axes in one of the two orders."""
    fixed = {axis: tensor.dim[axis] for axis in _fixed_axes(tensor)}
    stepped = sorted(((s, n) for n, s in zip(shape, stride, strict=True) if n != 1), reverse=True)
    axes = range(len(tensor.dim))
    declared = tuple(sorted(axes, key=lambda axis: -tensor.stride[axis]))
    for order in {declared, tuple(axes)}:
        for chosen in combinations(order, len(stepped)):
            dim, steps = [1] * len(order), list(tensor.stride)
            for axis, (step, extent) in zip(chosen, stepped, strict=True):
                dim[axis], steps[axis] = extent, step
            if all(dim[axis] == extent for axis, extent in fixed.items()):
                yield tuple(dim), tuple(steps)


def _fixed_axes(tensor: TensorFacts) -> tuple[int, ...]:
    if tensor.name in ("bias", "dbias"):
        return tuple(a for a, extent in enumerate(tensor.dim) if extent == 1 or a == _HEADS)
    if tensor.name in ("sink", "dsink", "scale_tensor"):
        return tuple(range(len(tensor.dim)))
    if tensor.name in ("seq_len_q", "seq_len_kv"):
        return tuple(range(1, len(tensor.dim)))
    return (_HEADS, _HEADDIM)
