"""Warp roles of the main kernel.

One CTA per SM, whose schedulers run one warp of each group: warps 0-3 are the scores group (S, P, dV), warps 4-7 the
gradient group (dP, dS, dK), and warps 8-11, where a configuration has them, the dQ group. Warp w and warp w + 4 own the
same key rows and hand P over in pairs.
"""

from enum import Enum

WARPS_PER_GROUP = 4
WARPS = 2 * WARPS_PER_GROUP
"""Of the scores and the gradient group."""
LOAD_WARP = WARPS_PER_GROUP
"""The warp that issues TMA loads (the first of the gradient group: measured 28 % faster than the scores group's)."""


class DqWarps(Enum):
    """Which warps of the main kernel compute dQ."""

    NONE = "none"  # a kernel of its own does
    SCORES_GROUP = "scores group"
    BOTH_GROUPS = "both groups"
    DQ_GROUP = "dq group"

    @property
    def in_scores_group(self) -> bool:
        """The scores group takes part, and reads K from shared memory for it."""
        return self in (DqWarps.SCORES_GROUP, DqWarps.BOTH_GROUPS)


GROUP_REGISTERS, DQ_GROUP_REGISTERS = 192, 120
"""Registers of a thread where there is a dQ group, of the other groups and of it: three warps of a scheduler share 512,
and are launched with 168 each."""
