"""Pick the rows that a rank sends of a chunk of prefixes (pass-KV)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

# Rows of one program: independent loads that hide each other's latency.
BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["num_rows"])
def pick_rows_kernel(
    rows_ptr,
    index_ptr,
    out_ptr,
    num_rows,
    stride_row,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    w = tl.arange(0, BLOCK_W)[None, :]
    valid = i < num_rows
    row = tl.load(index_ptr + i, mask=valid, other=0).to(tl.int64)
    mask = valid[:, None] & (w < W)
    picked = tl.load(rows_ptr + row[:, None] * stride_row + w, mask=mask)
    tl.store(out_ptr + i.to(tl.int64)[:, None] * W + w, picked, mask=mask)


_launches = Launches()


def pick_rows(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i] = rows[index[i]], bit for bit, in one launch.

    Args:
        rows: [R, W] of any dtype, last dim contiguous.
        index: [N] int32 or int64, contiguous, rows of `rows`.
        out: [N, W] of the same dtype, contiguous, written.

    Returns:
        out.
    """
    num_rows, width = out.shape
    assert rows.shape[1] == width, (rows.shape, out.shape)
    assert rows.dtype == out.dtype, (rows.dtype, out.dtype)
    assert index.shape == (num_rows,), (index.shape, out.shape)
    assert rows.stride(1) == 1, rows.stride()
    assert out.is_contiguous(), out.stride()
    if num_rows == 0:
        return out
    if not use_triton(rows):
        return pick_rows_ref(rows, index, out)
    assert index.stride(0) == 1, index.stride()

    def plan() -> Plan:
        return Plan(
            (cdiv(num_rows, BLOCK_ROWS),),
            num_rows,
            rows.stride(0),
            W=width,
            BLOCK_W=next_power_of_2(width),
            BLOCK_ROWS=BLOCK_ROWS,
        )

    _launches(pick_rows_kernel, (rows, index, out), (), plan)
    return out


def pick_rows_ref(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Torch reference of `pick_rows`; as bytes, since torch indexes not every dtype."""
    torch.index_select(rows.view(torch.uint8), 0, index, out=out.view(torch.uint8))
    return out
