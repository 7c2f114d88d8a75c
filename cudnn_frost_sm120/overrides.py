"""Execute-time overrides: the facts of a graph with the shapes that one call gives its tensors.

cudnn-frontend hands an override over in the order of axes of the caller's buffer, not of the graph. Which axis is which
is told from the extents that cannot change (heads, head dims, broadcast dims), from the order of the strides, which is
that of the graph's tensor, or row-major where the caller passed no strides, and from a batch that stays. Where that
leaves two readings the call is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

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
    axes = range(len(tensor.dim))
    orders = {tuple(sorted(axes, key=lambda axis: -tensor.stride[axis])), tuple(axes)}
    pairs = list(zip(stride, shape, strict=True))
    stepped = [pair for pair in pairs if pair[1] != 1]
    # The stride of a size-1 dim has a place in the order too, unless the caller gave it any value.
    usual = set(_readings(tensor, pairs, orders)) or set(_readings(tensor, stepped, orders))
    same_batch = {reading for reading in _readings(tensor, stepped, permutations(axes)) if reading[0][0] == batch}
    likely = (usual & same_batch) or (same_batch if not usual else usual)
    if len(likely) == 1 and (likely <= same_batch or not same_batch):
        return next(iter(likely))
    wrong = "reads in more than one way" if usual or same_batch else "changes its heads or head dim"
    raise ValueError(
        f"the override of {tensor.name}, with extents {tuple(shape)} and strides {tuple(stride)}, {wrong}; "
        "batch and sequence lengths can change, with strides in the graph's order"
    )


def _readings(
    tensor: TensorFacts, pairs: list[tuple[int, int]], orders: Iterable[Extents]
) -> Iterator[tuple[Extents, Extents]]:
    """Ways to give (stride, extent) pairs, from the largest stride down, to axes in one of the orders."""
    fixed = {axis: tensor.dim[axis] for axis in _fixed_axes(tensor)}
    ordered = sorted(pairs, reverse=True)
    for order in orders:
        for chosen in combinations(order, len(ordered)):
            dim, steps = [1] * len(order), list(tensor.stride)
            for axis, (step, extent) in zip(chosen, ordered, strict=True):
                dim[axis] = extent
                steps[axis] = step if extent > 1 else tensor.stride[axis]
            innermost = dim[-1] == 1 or steps[-1] == tensor.stride[-1]  # admission wants 1 of the io tensors
            if innermost and all(dim[axis] == extent for axis, extent in fixed.items()):
                yield tuple(dim), tuple(steps)


def _fixed_axes(tensor: TensorFacts) -> tuple[int, ...]:
    if tensor.name in ("bias", "dbias"):
        return tuple(a for a, extent in enumerate(tensor.dim) if extent == 1 or a == _HEADS)
    if tensor.name in ("sink", "dsink", "scale_tensor"):
        return tuple(range(len(tensor.dim)))
    if tensor.name in ("seq_len_q", "seq_len_kv"):
        return tuple(range(1, len(tensor.dim)))
    return (_HEADS, _HEADDIM)
