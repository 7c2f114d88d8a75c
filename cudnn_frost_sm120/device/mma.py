"""mma.sync m16n8k16 on registers, and the GEMM loops of the main kernel built on it.

Accumulators are scalars (4 per 16x8 tile): `cute.gemm` would carry them as pairs, 165-187 extra MOVs per loop.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

from .copy import ldmatrix_x4


def mma(c: list | None, a: list, b0, b1, dtype) -> list:
    """c + a b for one m16n8k16 tile: `c` 4 fp32 (None is zero), `a` 4 and `b` 2 registers of 16-bit pairs."""
    t = "bf16" if dtype is cutlass.BFloat16 else "f16"
    op = f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}},"
    op += "{{$r0},{$r1},{$r2},{$r3}},{{$r4},{$r5}},"
    if c is None:  # a zero C inside the block costs nothing; as an operand it costs four MOVs
        code, c = "{ .reg .f32 z; mov.f32 z, 0f00000000; " + op + "{z,z,z,z}; }", []
    else:
        code = op + "{{$r6},{$r7},{$r8},{$r9}};"
    return list(prims.inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[*a, b0, b1, *c]))


def pack_pair(lo, hi, dtype):
    """Two fp32 to one register of 16-bit values, round to nearest even."""
    t = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    code = f"cvt.rn.{t}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return prims.inline_ptx(code, write_only_types=[Int32], read_only_args=[lo, hi])


def unpack_pair(pair, dtype):
    """One register of 16-bit values to two fp32, exactly."""
    if dtype is cutlass.BFloat16:
        return (pair << 16).bitcast(Float32), (pair & Int32(-65536)).bitcast(Float32)
    return prims.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; cvt.f32.f16 {$w0}, l; cvt.f32.f16 {$w1}, h; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def transposed_a(a: list) -> list:
    """The A fragment (16x16) of the transpose of what the A fragment `a` holds: its 8x8 blocks transposed, and the two
    off the diagonal exchanged."""
    code = "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};"
    return [prims.inline_ptx(code, write_only_types=[Int32], read_only_args=[a[i]]) for i in (0, 2, 1, 3)]


def a_fragments(base, headdim: int, tile_rows: int, blocks: int, in_registers: bool) -> Callable[[int], list]:
    """`k -> A fragments` of 16-column step k, one for each 16-row block, in a [tile_rows, headdim] smem tile; `base` is
    at the first row, lane offset included."""

    def load(k: int) -> list:
        column = (k >> 2) * tile_rows * 128
        return [ldmatrix_x4(base ^ ((k & 3) << 5), column + block * 2048) for block in range(blocks)]

    if not in_registers:
        return load
    loaded = [load(k) for k in range(headdim // 16)]
    return loaded.__getitem__


def gemm_scores(frags_of: Callable[[int], list], base, headdim: int, rows: int, dtype, tile_rows: int = 0) -> list:
    """[blocks][rows / 8][4] scores: the rows of `frags_of` (`a_fragments`) times `rows` rows of a smem tile at `base`
    (lane offset included) that has `tile_rows` in all (0: as many)."""
    out: list = []
    for k in range(headdim // 16):
        frags = frags_of(k)
        out = out or [[None] * (rows // 8) for _ in frags]
        for j in range(rows // 16):
            b = ldmatrix_x4(base ^ ((k & 3) << 5), (k >> 2) * (tile_rows or rows) * 128 + j * 2048)
            for block, a in zip(out, frags, strict=True):
                for e in range(2):
                    block[2 * j + e] = mma(block[2 * j + e], a, b[2 * e], b[2 * e + 1], dtype)
    return out


def gemm_accumulate(acc, frags: list, base, headdim: int, rows: int, dtype, tile_rows: int = 0) -> None:
    """acc[blocks][headdim / 8][4] += `frags[blocks][rows / 16]` (registers) times `rows` rows of a smem tile at `base`
    (lane offset included) that has `tile_rows` in all (0: as many)."""
    for k in range(rows // 16):
        for j in range(headdim // 16):
            b = ldmatrix_x4(base ^ ((j & 3) << 5), (j >> 2) * (tile_rows or rows) * 128 + k * 2048, transpose=True)
            for block, a in enumerate(frags):
                for e in range(2):
                    at = (block * (headdim // 8) + 2 * j + e) * 4
                    acc_c = mma([acc[at + i] for i in range(4)], a[k], b[2 * e], b[2 * e + 1], dtype)
                    for i in range(4):
                        acc[at + i] = acc_c[i]
