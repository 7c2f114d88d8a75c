"""The hot path: addresses in, one call into the compiled chain out. It never allocates, compiles or waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .config.arch import TMA_ALIGNMENT
from .facts import TensorFacts
from .plan import BwdPlan, effective_bounds
from .workspace import WORKSPACE_ALIGNMENT

TENSORS = ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")
"""Operands that every launch has, in the chain's order."""


def canonical_strides(tensor: TensorFacts) -> tuple[int, int, int]:
    """(batch, head, sequence) strides in elements; a dim of extent 1 gets a stride that TMA takes, whatever it was."""
    filler = -(-tensor.dim[3] // 8) * 8
    batch, head, sequence = (filler if tensor.dim[i] == 1 else tensor.stride[i] for i in range(3))
    return batch, head, sequence


class Launcher:
    """One plan, ready to run on any buffers of its geometry, from any thread."""

    def __init__(self, plan: BwdPlan, chain: Callable[..., None]):
        facts = plan.facts
        self._chain = chain
        self._strides = tuple(canonical_strides(getattr(facts, name)) for name in TENSORS)
        self._alignment = tuple(4 if name == "stats" else TMA_ALIGNMENT for name in TENSORS)
        self._workspace_bytes = plan.workspace_bytes
        self._regions = tuple(plan.workspace.offset(name) for name in ("lse", "delta", "dq_accum"))
        left, right = effective_bounds(facts)
        band = (int(facts.mask.bottom_right), left or 0, right or 0)
        extents = (facts.batch, facts.heads_q, facts.heads_k, facts.seqlen_q, facts.seqlen_k)
        self._extents_band = ((*extents, facts.headdim_qk, facts.headdim_v), band)
        self._padded = plan.key.padded
        self._scale_group = (facts.scale, plan.head_group)

    def run(self, addresses: Mapping[str, int], workspace: int, workspace_bytes: int | None, stream: int) -> None:
        """Enqueue the chain on `stream`.

        `addresses`: device address of every tensor by port name. `workspace`: device address of at least the plan's
        `workspace_bytes`; `workspace_bytes` None means its size is not known. Raises ValueError, before anything is
        launched, for a missing or misaligned address or a workspace that is too small.
        """
        if not workspace:
            raise ValueError(f"this plan needs a workspace of {self._workspace_bytes} bytes, and none was passed")
        if workspace_bytes is not None and workspace_bytes < self._workspace_bytes:
            raise ValueError(f"this plan needs a workspace of {self._workspace_bytes} bytes, not {workspace_bytes}")
        if workspace % WORKSPACE_ALIGNMENT:
            raise ValueError(f"the workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes")
        operands = []
        for name, strides, alignment in zip(TENSORS, self._strides, self._alignment, strict=True):
            address = addresses.get(name)
            if not address:
                raise ValueError(f"no buffer was passed for {name}")
            if address % alignment:
                raise ValueError(f"the buffer of {name} must be aligned to {alignment} bytes")
            operands.append((address, *strides))
        lengths = None
        if self._padded:
            lengths = (addresses.get("seq_len_q"), addresses.get("seq_len_kv"))
            if not all(lengths):
                raise ValueError("this plan needs the buffers of seq_len_q and seq_len_kv")
        scratch = tuple(workspace + offset for offset in self._regions)
        self._chain(*operands, scratch, *self._extents_band, lengths, *self._scale_group, stream)
