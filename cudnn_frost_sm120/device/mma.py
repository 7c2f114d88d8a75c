"""mma.sync m16n8k16 on registers, and the GEMM loops of the main kernel built on it.

Accumulators are scalars (4 per 16x8 tile): `cute.gemm` would carry them as pairs, 165-187 extra MOVs per loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import cutlass
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prims

from .copy import ldmatrix_x4

_THROTTLED: ContextVar[bool] = ContextVar("throttled", default=False)


@contextmanager
def throttled(on: bool) -> Iterator[None]:
    """While on, every product that is traced comes with an idle one, whose B is zero and which changes no value.

    It halves the rate of the tensor pipe and nothing else, which gives Hopper about SM120's ratio of that rate to the
    bandwidth of shared memory. Idle products lengthen the chain of one accumulator, not of the loop: ptxas starts them
    as soon as A and the sums are there, ahead of the load of B. For the benchmark alone (plan.ChainKey).
    """
    token = _THROTTLED.set(on)
    try:
        yield
    finally:
        _THROTTLED.reset(token)


def mma(c: list | None, a: list, b0, b1, dtype) -> list:
    """c + a b for one m16n8k16 tile: `c` 4 fp32 (None is zero), `a` 4 and `b` 2 registers of 16-bit pairs."""
    if not _THROTTLED.get():
        return _product(c, a, (b0, b1), dtype)
    if c is None:  # ptxas drops a product of zeros that is added to zero
        return _product(_product(None, a, (b0, b1), dtype), a, None, dtype)
    return _product(_product(c, a, None, dtype), a, (b0, b1), dtype)


def _product(c: list | None, a: list, b: tuple | None, dtype) -> list:
    """Zeros inside the block cost nothing, as operands a MOV each: so for a `c` or a `b` of None."""
    t = "bf16" if dtype is cutlass.BFloat16 else "f16"
    op = f"mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{{{$w0}},{{$w1}},{{$w2}},{{$w3}}}},"
    b, b_names = ([], "zb,zb") if b is None else (list(b), "{$r4},{$r5}")
    first = 4 + len(b)
    c_names = "zc,zc,zc,zc" if c is None else ",".join(f"{{$r{first + i}}}" for i in range(4))
    op += f"{{{{$r0}},{{$r1}},{{$r2}},{{$r3}}}},{{{b_names}}},{{{c_names}}};"
    code = "{ .reg .f32 zc; .reg .b32 zb; mov.f32 zc, 0f00000000; mov.b32 zb, 0; " + op + " }"
    return list(prims.inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *(c or [])]))


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


def registers_of(frags_of: Callable[[int], list], headdim: int) -> list:
    """Every register of fragments that are in registers (`a_fragments`)."""
    return [register for k in range(headdim // 16) for block in frags_of(k) for register in block]


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


def zeros(count: int):
    """fp32 sums in registers, at zero."""
    sums = cutlass.Array(Float32, count, alignment=16)
    for x in range(count):
        sums[x] = Float32(0.0)
    return sums


def columns_of(headdim: int, column_warps: int) -> list[int]:
    """First columns of the 8-column fragments of the first of 1, 2 or 4 warps that share the columns of a tile.

    Each has as many of every 64-column chunk, in one piece: warp w the same 64 w / column_warps columns on."""
    return [column for column in range(0, headdim, 8) if column % 64 < 64 // column_warps]


def gemm_accumulate(
    acc, frags: list, base, headdim: int, rows: int, dtype, tile_rows: int = 0, column_warps: int = 1
) -> None:
    """acc[blocks][columns / 8][4] += `frags[blocks][rows / 16]` (registers) times `rows` rows of a smem tile at `base`
    (lane offset included, and that of the warp's first column) that has `tile_rows` in all (0: as many)."""
    columns = columns_of(headdim, column_warps)
    for k in range(rows // 16):
        for j, column in enumerate(columns[::2]):
            step = column // 16
            offset = (step >> 2) * (tile_rows or rows) * 128 + k * 2048
            b = ldmatrix_x4(base ^ ((step & 3) << 5), offset, transpose=True)
            for block, a in enumerate(frags):
                for e in range(2):
                    at = (block * len(columns) + 2 * j + e) * 4
                    acc_c = mma([acc[at + i] for i in range(4)], a[k], b[2 * e], b[2 * e + 1], dtype)
                    for i in range(4):
                        acc[at + i] = acc_c[i]
