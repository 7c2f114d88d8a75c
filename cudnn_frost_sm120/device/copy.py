"""Moving data: shared pointers, ldmatrix and stmatrix, TMA and bulk loads, fp32 reductions to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, Int32, Int64, Uint8
from cutlass._mlir.dialects import llvm
from cutlass.experimental import primitives as prims

ROW, COL = prims.MMALayout.ROW, prims.MMALayout.COL


def smem_ptr(address, dtype=Int32):
    """Typed pointer at a 32-bit shared address; constants added to it with `+` fold into the instruction."""
    return cutlass.Pointer(llvm.inttoptr(llvm.PointerType.get(3), Int32(address).ir_value()), dtype=dtype)


def gmem_ptr(address, dtype):
    """Typed pointer at a 64-bit global address; `+` counts elements."""
    return cutlass.Pointer(llvm.inttoptr(llvm.PointerType.get(1), Int64(address).ir_value()), dtype=dtype)


def scale_of(scale, address):
    """The scale: the host's value, or the one fp32 at a device address where the graph has a tensor for it."""
    return scale if address is None else gmem_ptr(address, Float32).load()


def ldmatrix_x4(address, offset: int = 0, transpose: bool = False) -> list:
    """Four 8x8 matrices of 16-bit elements from `address + offset` bytes: 4 registers."""
    regs = prims.ldmatrix(smem_ptr(address, Uint8) + offset, 4, COL if transpose else ROW)
    return [regs[i] for i in range(4)]


def stmatrix_x4(address, offset: int, regs: list) -> None:
    prims.stmatrix(smem_ptr(address, Uint8) + offset, regs, ROW)


def a_lane_offset(lane):
    """Byte offset of a lane's ldmatrix row for an A operand, or a transposed B operand, at the origin of a tile.

    Tiles hold 128-byte rows with the 128-byte swizzle: the 16-byte chunk index is XORed with the row's low 3 bits.
    A 16-column step k of a 64-column chunk is reached by XORing the sum with `k << 5`.
    """
    row = (lane & 7) + ((lane >> 3) & 1) * 8
    return row * 128 + (((lane >> 4) ^ (lane & 7)) << 4)


def b_lane_offset(lane):
    """As `a_lane_offset`, for a B operand whose rows are the n index."""
    row = (lane & 7) + (lane >> 4) * 8
    return row * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)


def ds_offset(row, chunk, tile_m: int):
    """Byte offset of a 16-byte chunk of a dS^T row: tile_m elements per row, swizzled over 64 or 128 bytes."""
    if tile_m == 64:
        return row * 128 + ((chunk ^ (row & 7)) << 4)
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4)


def tensor_map(dtype, t, extents, rows: int):
    """Host side: the TMA descriptor of a (batch, head, sequence, head dim) tensor, for boxes of `rows` x 64 elements.

    `t` has address and strides (kernels/operands.py); strides are multiples of 16 bytes.
    """
    batch, heads, seqlen, headdim = extents
    strides = [Int64(stride) // 8 for stride in (t.stride_s, t.stride_h, t.stride_b)]  # elements to 16-byte units
    return cuda.create_tensor_map_tiled(
        t.address,
        dtype,
        [headdim, seqlen, heads, batch],
        strides,
        [64, rows, 1, 1],
        swizzle=cuda.TensorMapSwizzle.s128b,
        l2_promotion=cuda.TensorMapL2Promotion.l2_256b,
    )


@cute.jit
def tma_load_tile(
    desc, dst, bar, row, head, batch, rows: cutlass.Constexpr[int], column_chunks: cutlass.Constexpr[int]
):
    """Load `rows` rows from `row` on as 64-column chunks; rows and columns outside the tensor become zeros.

    Called by one thread, which has told `bar` to expect the bytes. The destination is `.shared::cta`: the cluster form
    makes ptxas for sm_120a add a CTA-id check and a CALL.
    """
    for c in cutlass.range_constexpr(column_chunks):
        prims.cp_async_bulk_tensor_shared_cta_global(
            smem_ptr(dst, Uint8) + c * rows * 128, desc.get_ptr(), (c * 64, row, head, batch), smem_ptr(bar, Int64)
        )


def bulk_load(dst, src, nbytes: int, bar) -> None:
    """1-D bulk copy to shared memory (inline for the same reason: the library form is `.shared::cluster` only)."""
    prims.inline_ptx(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[smem_ptr(dst), src, Int32(nbytes), smem_ptr(bar, Int64)],
    )


@cute.jit
def zero_rows(
    tile, row, rows: cutlass.Constexpr[int], column_chunks: cutlass.Constexpr[int], tid, threads: cutlass.Constexpr[int]
):
    """Zero the rows of a smem tile from `row` on; all threads take part and must meet at a barrier afterwards.

    The fence orders these stores before a later TMA load into the same space.
    """
    zero = cutlass.Vector.from_elements((Int32(0),) * 4, Int32)
    for i in cutlass.range_constexpr((rows * 8 + threads - 1) // threads):
        item = i * threads + tid
        if (item >= row * 8) & (item < rows * 8):
            for c in cutlass.range_constexpr(column_chunks):
                (smem_ptr(tile + item * 16) + c * rows * 32).store(zero, alignment=16)
    cute.arch.fence_proxy("async.shared", space="cta")


def reduce_add_v4(ptr, values: list) -> None:
    """Four fp32 additions to consecutive global addresses (16-byte aligned), in no particular order between CTAs."""
    prims.inline_ptx("red.global.add.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", read_only_args=[ptr, *values])
