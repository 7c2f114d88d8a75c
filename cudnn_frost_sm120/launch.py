"""The hot path: addresses in, one call into the compiled chain out. It never allocates, compiles or waits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from . import driver
from .config.arch import TMA_ALIGNMENT
from .facts import ITEMSIZE, TensorFacts
from .kernels.operands import TENSORS, Band, Extents, Geometry, Scratch, pack_geometry
from .plan import BwdPlan
from .replay import Replay
from .workspace import WORKSPACE_ALIGNMENT

WORD_ALIGNMENT = 4
BOUND_LAUNCHES = 256
"""Sets of addresses that a plan remembers."""


def canonical_strides(tensor: TensorFacts) -> tuple[int, int, int]:
    """(batch, head, sequence) strides in elements; a dim of extent 1 gets a stride that TMA takes, whatever it was."""
    filler = -(-tensor.dim[3] // 8) * 8
    batch, head, sequence = (filler if tensor.dim[i] == 1 else tensor.stride[i] for i in range(3))
    return batch, head, sequence


def broadcast_strides(tensor: TensorFacts | None) -> tuple[int, ...]:
    """Strides in elements of a (batch, head, query, key) tensor, 0 where its extent is 1; zeros for an absent one."""
    if tensor is None:
        return (0, 0, 0, 0)
    return tuple(0 if extent == 1 else stride for extent, stride in zip(tensor.dim, tensor.stride, strict=True))


def host_block(geometry: Geometry) -> ctypes.Array[ctypes.c_char]:
    """The geometry block in host memory; the chain reads it before it returns."""
    block = pack_geometry(geometry)
    return ctypes.create_string_buffer(block, len(block))


def read_host_scale(address: int | None) -> float:
    """The fp32 scale at a host address. Raises ValueError if there is none or it is not finite."""
    if not address:
        raise ValueError("no buffer was passed for the scale")
    value = ctypes.c_float.from_address(address).value
    if not math.isfinite(value):
        raise ValueError(f"attn_scale is {value}, and must be finite")
    return value


class Launcher:
    """One plan, ready to run on any buffers of its geometry, from any thread."""

    def __init__(self, plan: BwdPlan, chain: Callable[..., None]):
        facts, knobs = plan.facts, plan.knobs
        self._chain = chain
        self._workspace_bytes = plan.workspace_bytes
        required = [(name, WORD_ALIGNMENT if name == "stats" else TMA_ALIGNMENT) for name in TENSORS]
        optional = [
            (name, ITEMSIZE[getattr(facts, name).dtype] if present else 0)
            for name, present in plan.key.optional_operands.items()
        ]
        self._operands = (*required, *optional)  # (name, alignment in bytes, 0 for an absent operand)
        reach = facts.seqlen_q + facts.seqlen_k  # a bound from here on cuts nothing; sums of 32 bits hold it
        left, right = (min(bound or 0, reach) for bound in (facts.mask.left_bound, facts.mask.right_bound))
        extents = (facts.batch, facts.heads_q, facts.heads_k, facts.seqlen_q, facts.seqlen_k)
        geometry = Geometry(
            [canonical_strides(getattr(facts, name)) for name in TENSORS],
            broadcast_strides(facts.bias),
            broadcast_strides(facts.dbias),
            (0, 0) if facts.dbias is None else facts.dbias.dim[:2],
            Extents(*extents, facts.headdim_qk, facts.headdim_v, knobs.heads_per_cta),
            Band(int(facts.mask.bottom_right), left, right),
            plan.head_group,
            plan.key_group,
            plan.slots_per_launch,
            facts.scale if facts.scale is not None else 1.0,
            [plan.workspace.offset(name) for name in Scratch._fields],
        )
        scale = facts.scale_tensor
        self._geometry = geometry
        self._scale_by_value = scale is not None and scale.by_value
        self._block = host_block(geometry)
        # By value, the scale may change from call to call; with no device there is nothing to record on.
        self._recordable = not self._scale_by_value and plan.target.device is not None
        self._remembered = lru_cache(maxsize=BOUND_LAUNCHES)(
            lambda items, *workspace: self.bind(dict(items), *workspace)
        )

    def for_plan(self, plan: BwdPlan) -> Launcher:
        """A launcher of the same kernels for a plan of other shapes."""
        return Launcher(plan, self._chain)

    def run(self, addresses: Mapping[str, int], workspace: int, workspace_bytes: int | None, stream: int) -> None:
        """Enqueue the chain on `stream`; what `bind` gives for these addresses is remembered."""
        self._remembered(tuple(addresses.items()), workspace, workspace_bytes)(stream)

    def bind(self, addresses: Mapping[str, int], workspace: int, workspace_bytes: int | None) -> Callable[[int], None]:
        """What enqueues the chain on a stream, any number of times, on these addresses.

        `addresses`: device address of every tensor by port name. `workspace`: device address of at least the plan's
        `workspace_bytes`; `workspace_bytes` None means its size is not known. A scale tensor passed by value has
        a host address, and is read by each call. Raises ValueError, before anything is launched, for a missing or
        misaligned address, a workspace that is too small, or (then in the call) a host scale that is not finite.
        """
        enqueue = self.plain(addresses, workspace, workspace_bytes)
        return Replay(enqueue) if self._recordable and driver.available() else enqueue

    def plain(self, addresses: Mapping[str, int], workspace: int, workspace_bytes: int | None) -> Callable[[int], None]:
        """As `bind`, with an ordinary launch of every kernel in each call."""
        if not workspace:
            raise ValueError(f"this plan needs a workspace of {self._workspace_bytes} bytes, and none was passed")
        if workspace_bytes is not None and workspace_bytes < self._workspace_bytes:
            raise ValueError(f"this plan needs a workspace of {self._workspace_bytes} bytes, not {workspace_bytes}")
        if workspace % WORKSPACE_ALIGNMENT:
            raise ValueError(f"the workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes")
        operands: list[int | None] = []
        for name, alignment in self._operands:
            if not alignment:
                operands.append(None)
                continue
            address = addresses.get(name)
            if not address:
                raise ValueError(f"no buffer was passed for {name}")
            if address % alignment:
                raise ValueError(f"the buffer of {name} must be aligned to {alignment} bytes")
            operands.append(address)
        if self._scale_by_value:
            return partial(self._run_with_host_scale, addresses.get("scale_tensor"), operands, workspace)
        bound = partial(self._chain, *operands, workspace, ctypes.addressof(self._block))
        bound.__dict__["block"] = self._block  # which must live as long as its address is in use
        return bound

    def _run_with_host_scale(self, scale: int | None, operands: list[int | None], workspace: int, stream: int) -> None:
        block = host_block(self._geometry._replace(scale=read_host_scale(scale)))
        self._chain(*operands, workspace, ctypes.addressof(block), stream)
