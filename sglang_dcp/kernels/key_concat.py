"""Put expanded keys together: the part of each head, and the rope part that all heads share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

# (token, head) rows of one program.
BLOCK_ROWS = 16


@triton.jit(do_not_specialize=["num_rows", "stride_ns", "stride_nh", "stride_rs"])
def concat_keys_kernel(
    nope_ptr,
    rope_ptr,
    out_ptr,
    num_rows,
    stride_ns,
    stride_nh,
    stride_rs,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = (row < num_rows)[:, None]
    s, h = (row // H).to(tl.int64), row % H
    out = tl.multiple_of(row.to(tl.int64) * (D + R), [ALIGN])[:, None]
    src = tl.multiple_of(s * stride_ns + h * stride_nh, [ALIGN])[:, None]
    shared = tl.multiple_of(s * stride_rs, [ALIGN])[:, None]
    d, r = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    in_nope, in_rope = valid & (d < D), valid & (r < R)
    nope = tl.load(nope_ptr + src + d, mask=in_nope)
    rope = tl.load(rope_ptr + shared + r, mask=in_rope)
    tl.store(out_ptr + out + d, nope, mask=in_nope)
    tl.store(out_ptr + out + D + r, rope, mask=in_rope)


_launches = Launches()


def concat_keys(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """[k_nope | k_rope] for every head, in one launch.

    SGLang's own kernels take 128 heads, or a power of two; otherwise it copies twice.

    Args:
        k_nope: [S, H, D], last dim contiguous, other strides free (half of what kv_b_proj yields).
        k_rope: [S, 1, R] of the same dtype, last dim contiguous.

    Returns:
        [S, H, D+R], new, contiguous.
    """
    num_tokens, num_heads, nope_dim = k_nope.shape
    rope_dim = k_rope.shape[2]
    assert k_rope.shape[:2] == (num_tokens, 1), (k_nope.shape, k_rope.shape)
    assert k_nope.dtype == k_rope.dtype, (k_nope.dtype, k_rope.dtype)
    assert k_nope.stride(2) == k_rope.stride(2) == 1, (k_nope.stride(), k_rope.stride())
    if not use_triton(k_nope):
        return concat_keys_ref(k_nope, k_rope)
    out = k_nope.new_empty((num_tokens, num_heads, nope_dim + rope_dim))
    if num_tokens == 0:
        return out

    def plan() -> Plan:
        strides = (*k_nope.stride()[:2], k_rope.stride(0), nope_dim + rope_dim)
        num_rows = num_tokens * num_heads
        return Plan(
            (cdiv(num_rows, BLOCK_ROWS),),
            num_rows,
            *k_nope.stride()[:2],
            k_rope.stride(0),
            H=num_heads,
            D=nope_dim,
            R=rope_dim,
            BLOCK_D=next_power_of_2(nope_dim),
            BLOCK_R=next_power_of_2(rope_dim),
            BLOCK_ROWS=BLOCK_ROWS,
            ALIGN=common_alignment(k_nope.element_size(), *strides),
        )

    _launches(concat_keys_kernel, (k_nope, k_rope, out), (), plan)
    return out


def concat_keys_ref(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Torch reference of `concat_keys`."""
    return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1)], dim=2)
