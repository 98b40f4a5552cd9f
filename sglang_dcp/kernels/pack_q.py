"""Concatenate the two parts of the absorbed query, heads first, for the all-gather (stage 4).

Legend: B tokens, Hl heads of one rank, D = kv_lora_rank (512), R = qk_rope_head_dim (64).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

BLOCK_ROWS = 2


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_tokens",
        "stride_nb",
        "stride_nh",
        "stride_pb",
        "stride_ph",
    ]
)
def pack_q_kernel(
    nope_ptr,
    pe_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    stride_nb,
    stride_nh,
    stride_pb,
    stride_ph,
    NOPE_DIM: tl.constexpr,
    PE_DIM: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_PE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = (row < num_rows)[:, None]
    h = (row // num_tokens).to(tl.int64)
    b = (row % num_tokens).to(tl.int64)
    dst = out_ptr + row.to(tl.int64)[:, None] * (NOPE_DIM + PE_DIM)

    d = tl.arange(0, BLOCK_NOPE)[None, :]
    mask = in_rows & (d < NOPE_DIM)
    src = tl.multiple_of(b * stride_nb + h * stride_nh, [ALIGN])
    tl.store(dst + d, tl.load(nope_ptr + src[:, None] + d, mask=mask), mask=mask)

    d = tl.arange(0, BLOCK_PE)[None, :]
    mask = in_rows & (d < PE_DIM)
    src = tl.multiple_of(b * stride_pb + h * stride_ph, [ALIGN])
    tl.store(dst + NOPE_DIM + d, tl.load(pe_ptr + src[:, None] + d, mask=mask), mask=mask)


_launches = Launches()


def pack_q(q_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write [q_nope | q_pe] heads first, in one launch.

    An all-gather of out over the ranks gives [H, B, D+R] with every head in order, which is
    viewed as [B, H, D+R] (strides (D+R, B*(D+R), 1)) without a copy.

    Args:
        q_nope: [B, Hl, D], absorbed query; last dim contiguous, other strides free (upstream
            hands a transposed view of [Hl, B, D]).
        q_pe: [B, Hl, R], the same dtype; last dim contiguous, other strides free.
        out: [Hl, B, D+R], contiguous, written.

    Returns:
        out.
    """
    num_tokens, local_heads, nope_dim = q_nope.shape
    pe_dim = q_pe.shape[2]
    assert q_pe.shape[:2] == q_nope.shape[:2], f"{q_pe.shape} does not fit {q_nope.shape}"
    assert out.shape == (local_heads, num_tokens, nope_dim + pe_dim), tuple(out.shape)
    assert out.is_contiguous()
    assert q_nope.stride(2) == q_pe.stride(2) == 1, (q_nope.stride(), q_pe.stride())
    assert q_nope.dtype == q_pe.dtype == out.dtype, (q_nope.dtype, q_pe.dtype, out.dtype)
    if num_tokens == 0:
        return out
    if not use_triton(q_nope):
        return pack_q_ref(q_nope, q_pe, out)
    num_rows = local_heads * num_tokens

    def plan() -> Plan:
        strides = (*q_nope.stride()[:2], *q_pe.stride()[:2])
        return Plan(
            (cdiv(num_rows, BLOCK_ROWS),),
            num_rows,
            num_tokens,
            *q_nope.stride()[:2],
            *q_pe.stride()[:2],
            NOPE_DIM=nope_dim,
            PE_DIM=pe_dim,
            ALIGN=common_alignment(q_nope.element_size(), *strides),
            BLOCK_NOPE=next_power_of_2(nope_dim),
            BLOCK_PE=next_power_of_2(pe_dim),
            BLOCK_ROWS=BLOCK_ROWS,
        )

    _launches(pack_q_kernel, (q_nope, q_pe, out), (), plan)
    return out


def pack_q_ref(q_nope: torch.Tensor, q_pe: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Torch reference of `pack_q`."""
    nope_dim = q_nope.shape[2]
    out[..., :nope_dim].copy_(q_nope.transpose(0, 1))
    out[..., nope_dim:].copy_(q_pe.transpose(0, 1))
    return out
