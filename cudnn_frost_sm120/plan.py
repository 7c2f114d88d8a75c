"""Facts + knobs + target -> BwdPlan: what is compiled, what is launched, and the workspace it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config.roles import DqWarps
from .config.tiles import WITHOUT_DQ, WITHOUT_DQ_GROUP, TileConfig, configs_for
from .facts import BwdFacts, effective_bounds
from .knobs import BwdKnobs, ReductionMode
from .target import Target
from .workspace import WorkspaceTable, ds_region_bytes, layout


@dataclass(frozen=True)
class ChainKey:
    """Everything the compiled chain depends on, beside the target. No extent, stride, length, scale or window width."""

    dtype: str  # "fp16" | "bf16"
    tile: TileConfig
    mask_right: bool
    mask_left: bool
    grouped: bool
    padded: bool
    dsink: bool
    reduction: ReductionMode
    bias: str | None = None  # dtype of the bias
    dbias: str | None = None  # dtype of dBias
    dbias_over_q: bool = False  # dBias has extent 1 there: its kernel sums over the dim
    dbias_over_k: bool = False
    scale_tensor: bool = False  # the scale lies in device memory
    every_lane_arrives: bool = False  # a build for race checkers (kernels/main_setup.py); no plan has it
    throttled: bool = False  # a build for the benchmark (device/mma.py), never cached on disk; no plan has it

    @property
    def optional_operands(self) -> dict[str, bool]:
        """Operands of the chain after the strided ones, in its order, and whether this chain has them."""
        return {
            "seq_len_q": self.padded,
            "seq_len_kv": self.padded,
            "sink": self.dsink,
            "dsink": self.dsink,
            "bias": self.bias is not None,
            "dbias": self.dbias is not None,
            "scale_tensor": self.scale_tensor,
        }

    @property
    def name(self) -> str:
        """Short and readable, for logs and compiled symbols; unique among the keys of one version."""
        tile = self.tile
        flags = {
            "right": self.mask_right,
            "left": self.mask_left,
            "gqa": self.grouped,
            "padded": self.padded,
            "dsink": self.dsink,
            self.reduction.name.lower(): self.reduction is not ReductionMode.ATOMIC,
            f"bias_{self.bias}": self.bias is not None,
            f"dbias_{self.dbias}": self.dbias is not None,
            "over_q": self.dbias_over_q,
            "over_k": self.dbias_over_k,
            "scale": self.scale_tensor,
            "lanes": self.every_lane_arrives,
            "throttled": self.throttled,
        }
        shape = f"d{tile.headdim_qk}x{tile.headdim_v}_t{tile.tile_m}x{tile.tile_n}_s{tile.q_stages}"
        return "_".join(["sdpa_bwd", self.dtype, shape, *(name for name, on in flags.items() if on)])


@dataclass(frozen=True)
class BwdPlan:
    facts: BwdFacts
    knobs: BwdKnobs
    target: Target
    key: ChainKey
    workspace: WorkspaceTable
    head_group: int  # heads whose key tiles are scheduled together (device/scheduler.py)
    key_group: int  # key tiles that the relay orders together (device/relay_order.py), a power of two
    slots_per_launch: int  # (batch, walked heads) that share the space for dS; the others come after them

    @property
    def workspace_bytes(self) -> int:
        return self.workspace.nbytes


CAUSAL_HEAD_GROUP = 8
"""Measured on the prototype (H200, S 4096, D128 causal): groups of 4 to 16 heads 361-363 TFLOP/s, of one 324."""
WINDOW_HEAD_GROUP = 16
"""Measured (H200, S 4096, 64/8 heads, PACK_GQA 4): windows of 1024 took 0.96-0.97 of the time of groups of one, and
0.99 of groups of 8; windows of 128 the same with any."""


DS_WAVES = 8
DS_MODEST = 2 << 30
"""dS takes more than this many bytes only for launches of less than `DS_WAVES` CTAs on each SM. D128 causal, S 32768,
H200: launches of 2 waves (2 GiB) took 1.13 of the time of atomic adds, of 4 waves 0.98."""


def fitted(tile: TileConfig, facts: BwdFacts, knobs: BwdKnobs) -> TileConfig:
    """The configuration with the registers freed that a feature needs; without this, sm_120a spills 16 to 256 bytes.

    Where the main kernel leaves dQ out, the space of dS, and of K where it is in registers, goes to other stages."""
    if (facts.bias is not None or facts.mask.padding) and tile.dq is DqWarps.DQ_GROUP:
        tile = replace(tile, **WITHOUT_DQ_GROUP)
    elif facts.bias is not None and tile.headdim_qk >= 128:
        tile = replace(tile, k_in_registers=False)
    if not knobs.reduction_mode.dq_in_main:
        tile = replace(tile, dq=DqWarps.NONE, ds_stages=0, p_stages=2)
        return tile if tile.keeps_k else replace(tile, **WITHOUT_DQ[tile.headdim_qk, tile.headdim_v])
    if knobs.reduction_mode is ReductionMode.RELAY and tile.headdim_qk == 128 and facts.mask.padding:
        tile = replace(tile, k_in_registers=False)
    return tile


def knobs_of(tile: TileConfig, heads_per_cta: int, mode: ReductionMode = ReductionMode.ATOMIC) -> BwdKnobs:
    """The knobs that name a configuration."""
    return BwdKnobs(tile.tile_m, tile.tile_n, tile.q_stages, heads_per_cta, mode)


def make_plan(facts: BwdFacts, knobs: BwdKnobs, target: Target) -> BwdPlan:
    """The plan for facts that admission has accepted; raises NotImplementedError for unknown knobs."""
    rows = configs_for(facts.headdim_qk, facts.headdim_v)
    tile = next((row for row in rows if knobs_of(row, knobs.heads_per_cta, knobs.reduction_mode) == knobs), None)
    if tile is None or knobs.heads_per_cta < 1 or facts.group % knobs.heads_per_cta:
        served = "; ".join(str(knobs_of(row, facts.group)) for row in rows) or "none"
        raise NotImplementedError(
            f"no kernel has the knobs {knobs} at head dims {facts.headdim_qk}/{facts.headdim_v}; served: {served}"
        )
    left, right = effective_bounds(facts)
    tile = fitted(tile, facts, knobs)
    key = ChainKey(
        dtype=facts.dtype,
        tile=tile,
        mask_right=right is not None,
        mask_left=left is not None,
        grouped=facts.group > 1,
        padded=facts.mask.padding,
        dsink=facts.dsink is not None,
        reduction=knobs.reduction_mode,
        bias=None if facts.bias is None else facts.bias.dtype,
        dbias=None if facts.dbias is None else facts.dbias.dtype,
        scale_tensor=facts.scale_tensor is not None and not facts.scale_tensor.by_value,
        dbias_over_q=facts.dbias is not None and facts.dbias.dim[2] == 1,
        dbias_over_k=facts.dbias is not None and facts.dbias.dim[3] == 1,
    )
    per_launch = slots_per_launch(facts, knobs, target)
    workspace = layout(facts, tile, knobs.heads_per_cta, key.reduction, per_launch * knobs.heads_per_cta)
    head_group = min(head_group_of(facts, knobs), per_launch)
    return BwdPlan(facts, knobs, target, key, workspace, head_group, key_group_of(facts, knobs, target), per_launch)


def head_group_of(facts: BwdFacts, knobs: BwdKnobs) -> int:
    """Heads whose key tiles start together; the relay wants few CTAs of one head at a time, as they queue for tiles."""
    if knobs.reduction_mode is ReductionMode.RELAY:
        return facts.batch * facts.heads_q // knobs.heads_per_cta
    left, right = effective_bounds(facts)
    if right is None:
        return 1
    return CAUSAL_HEAD_GROUP if left is None else WINDOW_HEAD_GROUP


def slots_per_launch(facts: BwdFacts, knobs: BwdKnobs, target: Target) -> int:
    """Where dS is stored: as many (batch, walked heads) as `DS_MODEST`, or `DS_WAVES`, and the budget have room for, at
    least one, in equal parts of whole head groups; they are worked on one part after the other. Else all."""
    slots = facts.batch * facts.heads_q // knobs.heads_per_cta
    if knobs.reduction_mode is not ReductionMode.DS_STORE:
        return slots
    enough = -(-DS_WAVES * target.sm_count // -(-facts.seqlen_k // knobs.tile_n))
    each = ds_region_bytes(facts, knobs.heads_per_cta)
    fit = max(1, min(target.ds_budget // each, max(enough, DS_MODEST // each)))
    if fit >= slots:
        return slots
    even = -(-slots // -(-slots // fit))
    group = min(head_group_of(facts, knobs), fit)
    return min(-(-even // group), fit // group) * group


def key_group_of(facts: BwdFacts, knobs: BwdKnobs, target: Target) -> int:
    """Key tiles of a head that run at a time, when all heads run at once."""
    slots = facts.batch * facts.heads_q // knobs.heads_per_cta
    return 1 << max(0, target.sm_count // slots).bit_length() - 1 if slots < target.sm_count else 1
