"""fp32 accumulators in global memory: one layout for who adds to them, zeroes them and reads them back.

[slot][rows rounded up / 16][headdim / 8][32 lanes][4]: the C fragments of m16n8k16, so that a lane's four values are
16 consecutive bytes. Lane `4 r + c` holds columns 2c, 2c+1 of row r, then the same of row r + 8. A slot is a (batch,
head), or one of the parts that are summed into it.
"""

from __future__ import annotations

ROWS = 16
COLUMNS = 8
FRAGMENT = 128
"""fp32 values of one 16x8 fragment."""


def fragment_offset(row_block, column_block, headdim: int):
    """Offset (values) of a fragment within a slot: `row_block` of 16 rows, `column_block` of 8 columns."""
    return (row_block * (headdim // COLUMNS) + column_block) * FRAGMENT
