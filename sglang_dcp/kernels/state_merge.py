"""Exact merge of two attention states over disjoint keys, into the first, each with its LSE base.

Legend: T rows of the state, n rows of the part, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan
from sglang_dcp.kernels.lse_merge import (
    BLOCK_HEADS,
    NUM_WARPS,
    LseBase,
    add_step,
    finish,
    finish_lse,
    max_step,
    weight,
)

LOG2_E = tl.constexpr(1 / math.log(2))
LN_2 = tl.constexpr(math.log(2))


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "stride_ob",
        "stride_oh",
        "stride_lb",
        "stride_lh",
        "stride_pb",
        "stride_ph",
        "stride_qb",
        "stride_qh",
    ]
)
def merge_state_into_kernel(
    o_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    rows_ptr,
    num_heads,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_pb,
    stride_ph,
    stride_qb,
    stride_qh,
    D: tl.constexpr,
    BASE_2: tl.constexpr,
    PART_BASE_2: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    UPDATE_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64) if HAS_ROWS else i
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_heads = h < num_heads
    mask = in_heads[:, None] & (d < D)

    lse = tl.load(lse_ptr + row * stride_lb + h * stride_lh, mask=in_heads, other=0.0)
    part_lse = tl.load(part_lse_ptr + i * stride_qb + h * stride_qh, mask=in_heads, other=0.0)
    if not BASE_2:
        lse *= LOG2_E
    if not PART_BASE_2:
        part_lse *= LOG2_E
    owned = lse > float("-inf")
    part_owned = part_lse > float("-inf")
    m = max_step(tl.full([BLOCK_H], float("-inf"), tl.float32), lse, owned)
    m = max_step(m, part_lse, part_owned)
    w = weight(lse, m, owned, True)
    part_w = weight(part_lse, m, part_owned, True)

    offs = tl.multiple_of(row * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    o_ptrs = o_ptr + offs[:, None] + d
    part_offs = tl.multiple_of(i * stride_pb + h.to(tl.int64) * stride_ph, [ALIGN])
    o = tl.load(o_ptrs, mask=mask, other=0.0)
    part = tl.load(part_ptr + part_offs[:, None] + d, mask=mask, other=0.0)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    acc = add_step(acc, o, w, owned[:, None])
    acc = add_step(acc, part, part_w, part_owned[:, None])
    tl.store(o_ptrs, finish(acc, w + part_w).to(o_ptr.dtype.element_ty), mask=mask)
    if UPDATE_LSE:
        merged_lse = finish_lse(m, w + part_w, True)
        if not BASE_2:
            merged_lse *= LN_2
        tl.store(lse_ptr + row * stride_lb + h * stride_lh, merged_lse, mask=in_heads)


_launches = Launches()


def merge_state_into(
    o: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    part_base: LseBase,
    rows: torch.Tensor | None = None,
    *,
    update_lse: bool = False,
) -> torch.Tensor:
    """o[rows] becomes attention over the keys of both, and lse[rows] its LSE if `update_lse`.

    Args:
        o: [T, H, D] bfloat16, float16 or float32, changed in place; last dim contiguous.
        lse: [T, H] float32 in base lse_base, any strides; -inf for a row without keys, whose o is
            then ignored whatever it holds.
        lse_base: "e" or "2".
        part: [n, H, D], the other state's output, any float dtype; last dim contiguous.
        part_lse: [n, H] float32 in base part_base; -inf as above.
        part_base: "e" or "2".
        rows: [n] int64, the row of o that each row of part belongs to, each at most once; None:
            row i belongs to row i, and n = T.
        update_lse: whether more is to be merged into these rows; -inf then stands where neither saw
            a key. Else lse keeps what it held.

    Returns:
        o; 0 where neither saw a key. Rows that `rows` does not name stay as they are.
    """
    num_rows, num_heads, dim = part.shape
    assert {lse_base, part_base} <= {"e", "2"}, (lse_base, part_base)
    assert o.shape[1:] == part.shape[1:], (o.shape, part.shape)
    assert lse.shape == o.shape[:2], (lse.shape, o.shape)
    assert part_lse.shape == part.shape[:2], (part_lse.shape, part.shape)
    assert lse.dtype == part_lse.dtype == torch.float32, (lse.dtype, part_lse.dtype)
    assert o.stride(2) == part.stride(2) == 1, (o.stride(), part.stride())
    assert num_rows == (o.shape[0] if rows is None else rows.shape[0]), (num_rows, o.shape)
    if num_rows == 0:
        return o
    if not use_triton(o):
        return merge_state_into_ref(
            o, lse, lse_base, part, part_lse, part_base, rows, update_lse=update_lse
        )

    def plan() -> Plan:
        strides = (*o.stride()[:2], *part.stride()[:2])
        return Plan(
            (num_rows, cdiv(num_heads, BLOCK_HEADS)),
            num_heads,
            *o.stride()[:2],
            *lse.stride(),
            *part.stride()[:2],
            *part_lse.stride(),
            D=dim,
            BASE_2=lse_base == "2",
            PART_BASE_2=part_base == "2",
            HAS_ROWS=rows is not None,
            UPDATE_LSE=update_lse,
            ALIGN=common_alignment(min(o.element_size(), part.element_size()), *strides),
            BLOCK_H=BLOCK_HEADS,
            BLOCK_D=next_power_of_2(dim),
            num_warps=NUM_WARPS,
            # Contracted with the change of base, lse - max of the larger would not be exactly 0.
            enable_fp_fusion=False,
        )

    _launches(
        merge_state_into_kernel,
        (o, lse, part, part_lse, part if rows is None else rows),
        (lse_base, part_base, rows is None, update_lse),
        plan,
    )
    return o


def merge_state_into_ref(
    o: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    part_base: LseBase,
    rows: torch.Tensor | None = None,
    *,
    update_lse: bool = False,
) -> torch.Tensor:
    """Torch reference of `merge_state_into`."""
    where = slice(None) if rows is None else rows
    lses = [
        part_lse if base == "2" else part_lse / math.log(2)
        for part_lse, base in ((lse[where], lse_base), (part_lse, part_base))
    ]
    m = torch.maximum(*lses)
    acc, total = torch.zeros(part.shape, device=o.device), torch.zeros_like(m)
    for state, state_lse in zip((o[where], part), lses, strict=True):
        owned = state_lse > float("-inf")
        w = torch.where(owned, torch.exp2(state_lse - m), 0.0)
        acc += w[..., None] * torch.where(owned[..., None], state.float(), 0.0)
        total += w
    o[where] = torch.where(total[..., None] > 0, acc / total[..., None], 0.0).to(o.dtype)
    if update_lse:
        merged_lse = torch.where(total > 0, m + total.log2(), float("-inf"))
        lse[where] = merged_lse if lse_base == "2" else merged_lse * math.log(2)
    return o
