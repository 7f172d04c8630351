"""Pieces that the sparse attention kernels share: tile loads, matrix products and the packed list of selected keys.

`pack_slots` turns a row's selected indices, with -1 anywhere, into the form that the kernels walk: 32-bit, the selected
keys first and in their order, every unused slot filled with a key that the row has selected. The kernels then gather
without masks, and a filled slot can neither leave the tensor nor bring in another row's NaN.

Bytes moved: T * K * (4 or 8) read, 4 * T * K written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOT_MULTIPLE = 128  # rows of slots are padded to it, so that no block of up to 128 keys needs a mask to load its slots
_PACK_BLOCK = 1024


@triton.jit
def loop_bound(value, INTERPRETED: tl.constexpr):
    """A loop bound; the interpreter holds a scalar as an array, which numpy does not take for an integer."""
    if INTERPRETED:
        return value.handle.data.item()
    else:
        return value


@triton.jit
def load_tile(p_rows, o_column, m_row, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [M, 1] of pointers and columns [N] -> [M, N]; a mask only where something was padded, zeros there."""
    p_tile = p_rows + o_column[None, :]
    if MASK_ROWS and WIDTH < COLUMNS:
        return tl.load(p_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :], other=0.0)
    elif MASK_ROWS:
        return tl.load(p_tile, mask=m_row[:, None], other=0.0)
    elif WIDTH < COLUMNS:
        return tl.load(p_tile, mask=(o_column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def store_tile(p_rows, o_column, b_tile, m_row, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store [M, N] to rows [M, 1] of pointers, rounded once to their dtype."""
    p_tile = p_rows + o_column[None, :]
    b_tile = b_tile.to(p_rows.dtype.element_ty)
    if MASK_ROWS and WIDTH < COLUMNS:
        tl.store(p_tile, b_tile, mask=m_row[:, None] & (o_column < WIDTH)[None, :])
    elif MASK_ROWS:
        tl.store(p_tile, b_tile, mask=m_row[:, None])
    elif WIDTH < COLUMNS:
        tl.store(p_tile, b_tile, mask=(o_column < WIDTH)[None, :])
    else:
        tl.store(p_tile, b_tile)


@triton.jit
def matmul(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b in fp32: tensor cores for 16-bit operands, exact products for fp32 ones."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["stride_row", "num_slots"])
def _pack_slots_kernel(
    p_indices,
    p_begin,
    p_end,
    p_slots,
    p_counts,
    stride_row,
    num_slots,
    padded_slots,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_slot = tl.arange(0, BLOCK)
    p_row = p_slots + i_row * padded_slots
    count = 0
    highest = 0
    for start in tl.range(0, loop_bound(num_slots, INTERPRETED), BLOCK):
        m_slot = start + o_slot < num_slots
        b_index = tl.load(p_indices + i_row * stride_row + start + o_slot, mask=m_slot, other=-1)
        m_keep = b_index >= 0
        if BOUNDED:
            m_keep = m_keep & (b_index >= tl.load(p_begin + i_row)) & (b_index < tl.load(p_end + i_row))
        b_index = tl.where(m_keep, b_index, 0).to(tl.int32)
        o_packed = count + tl.cumsum(m_keep.to(tl.int32), 0) - 1
        tl.store(p_row + o_packed, b_index, mask=m_keep)
        count += tl.sum(m_keep.to(tl.int32), 0)
        highest = tl.maximum(highest, tl.max(b_index, 0))
    for start in tl.range(loop_bound(count, INTERPRETED), loop_bound(padded_slots, INTERPRETED), BLOCK):
        tl.store(p_row + start + o_slot, highest, mask=start + o_slot < padded_slots)
    tl.store(p_counts + i_row, count)


_INTERPRETED = bool(triton.knobs.runtime.interpret)  # settled for every kernel of this process as it is defined


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return _INTERPRETED


def padded_width(width: int) -> int:
    """Columns of the tile that holds a row of `width`: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(width))


def pack_slots(topk_indices: Tensor, bounds: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Move every row's selected keys to its front and fill the rest with one of them.

    Args:
        topk_indices: selected keys [T, K], int32 or int64, unit last stride, -1 = unused slot anywhere.
        bounds: (begin, end) int [T] each: a key outside begin <= key < end counts as unused.

    Returns:
        (slots, counts): int32 [T, padded K] and int32 [T].
    """
    rows, num_slots = topk_indices.shape
    padded_slots = triton.cdiv(max(num_slots, 1), SLOT_MULTIPLE) * SLOT_MULTIPLE
    slots = torch.empty(rows, padded_slots, dtype=torch.int32, device=topk_indices.device)
    counts = torch.empty(rows, dtype=torch.int32, device=topk_indices.device)
    if rows:
        begin, end = bounds if bounds is not None else (counts, counts)
        _pack_slots_kernel[(rows,)](
            topk_indices,
            begin,
            end,
            slots,
            counts,
            topk_indices.stride(0),
            num_slots,
            padded_slots,
            BOUNDED=bounds is not None,
            BLOCK=_PACK_BLOCK,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
    return slots, counts


def takes_gluon(*tensors: Tensor) -> bool:
    """Whether Gluon kernels for Hopper serve these tensors: a device, a Triton, 16-bit floats and 16-byte addresses."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.startswith("3.6.")  # Gluon changes between versions; this one was tried
        and all(t.dtype in (torch.float16, torch.bfloat16) and t.data_ptr() % 16 == 0 for t in tensors)
    )


def takes_hopper_kernels(query: Tensor, key: Tensor, kv_rank: int) -> bool:
    """Whether the kernels of sparse_mla_hopper.py are right for these inputs on this device."""
    return (
        takes_gluon(query, key)
        and (kv_rank, query.shape[2]) == (512, 576)
        and query.shape[1] % 64 == 0
        and key.shape[0] > 0  # a token without selected keys still gathers key 0
    )


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device."""
    if tensor.device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def shared_memory(tensor: Tensor) -> int:
    """Bytes of shared memory that one program may use on the tensor's device."""
    if tensor.device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(tensor.device)
    staging = 40 * 1024 if properties.major >= 10 else 0  # products through tensor memory stage one more operand
    return int(getattr(properties, "shared_memory_per_block_optin", 64 * 1024)) - staging
