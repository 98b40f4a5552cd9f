"""Exact merge of attention partials over disjoint KV stripes (stage 7, seed section 3).

Legend: N = dcp_size stripes, B tokens, H heads, D head dim.

The jit helpers at the top are the one implementation of the two-pass rule. The merge kernel here,
the correction of `ag_rs` (`lse_weigh`) and any fused exchange kernel call them, so that all
communicators agree on weights, on the order of ranks and on empty stripes:

    pass 1, n = 0..N-1:  m = max_step(m, lse_n, owned_n)
    pass 2, n = 0..N-1:  w_n = weight(lse_n, m, owned_n);  acc = add_step(acc, o_n, w_n, owned_n)
    out = finish(acc, sum of w_n)

A stripe is empty for a token if and only if its local length is 0. Attention kernels get lengths
clamped to 1, so an empty stripe returns a finite LSE of a foreign row, or NaN or inf: `owned` is
never judged from the LSE, and drops values by a select, never by a product with 0.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

LseBase = Literal["e", "2"]

BLOCK_HEADS = 2
NUM_WARPS = 4


@triton.jit
def max_step(m, lse, owned):
    """Pass 1, one stripe: running maximum of the LSEs of non-empty stripes."""
    return tl.where(owned, tl.maximum(m, lse), m)


@triton.jit
def weight(lse, m, owned, BASE_2: tl.constexpr):
    """Pass 2, one stripe: its unnormalized weight, base ** (lse - m); 0 if empty."""
    x = lse - m
    return tl.where(owned, tl.exp2(x) if BASE_2 else tl.exp(x), 0.0)


@triton.jit
def add_step(acc, o, w, owned):
    """Pass 2, one stripe: acc + w * o in float32, with o read as 0 if the stripe is empty.

    acc and o are [heads, D]; w is [heads], owned a scalar or [heads].
    """
    return acc + w[:, None] * tl.where(owned, o.to(tl.float32), 0.0)


@triton.jit
def finish(acc, total):
    """acc / total by row, and 0 where no stripe held a token (total is at least 1 otherwise)."""
    return tl.where(total[:, None] > 0, acc / total[:, None], 0.0)


@triton.jit
def finish_lse(m, total, BASE_2: tl.constexpr):
    """LSE over the union, in the base of the inputs; -inf where no stripe held a token."""
    log_total = tl.log2(total) if BASE_2 else tl.log(total)
    return tl.where(total > 0, m + log_total, float("-inf"))


@triton.jit
def max_pass(lse_ptrs, len_ptr, stride_lse_n, stride_len_n, mask, N: tl.constexpr):
    """Pass 1 over N stripes at fixed strides: lse_ptrs [heads] and len_ptr (scalar) of stripe 0."""
    m = tl.full(mask.shape, float("-inf"), tl.float32)
    for n in tl.static_range(N):
        owned = tl.load(len_ptr + n * stride_len_n) > 0
        lse = tl.load(lse_ptrs + n * stride_lse_n, mask=mask, other=0.0)
        m = max_step(m, lse, owned)
    return m


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "stride_on",
        "stride_ob",
        "stride_oh",
        "stride_ln",
        "stride_lb",
        "stride_lh",
        "stride_cn",
        "stride_mb",
        "stride_mh",
        "stride_sb",
        "stride_sh",
    ]
)
def merge_partials_kernel(
    out_ptr,
    lse_ptr,
    lens_ptr,
    merged_ptr,
    merged_lse_ptr,
    num_heads,
    stride_on,
    stride_ob,
    stride_oh,
    stride_ln,
    stride_lb,
    stride_lh,
    stride_cn,
    stride_mb,
    stride_mh,
    stride_sb,
    stride_sh,
    N: tl.constexpr,
    D: tl.constexpr,
    BASE_2: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_heads = h < num_heads
    mask = in_heads[:, None] & (d < D)

    lse_ptrs = lse_ptr + b * stride_lb + h * stride_lh
    m = max_pass(lse_ptrs, lens_ptr + b, stride_ln, stride_cn, in_heads, N)

    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    rows = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    for n in tl.static_range(N):
        owned = tl.load(lens_ptr + b + n * stride_cn) > 0
        w = weight(tl.load(lse_ptrs + n * stride_ln, mask=in_heads, other=0.0), m, owned, BASE_2)
        offs = tl.multiple_of(rows + n * stride_on.to(tl.int64), [ALIGN])
        o = tl.load(out_ptr + offs[:, None] + d, mask=mask, other=0.0)
        acc = add_step(acc, o, w, owned)
        total += w

    offs = tl.multiple_of(b * stride_mb + h * stride_mh, [ALIGN])
    merged = finish(acc, total).to(merged_ptr.dtype.element_ty)
    tl.store(merged_ptr + offs[:, None] + d, merged, mask=mask)
    if STORE_LSE:
        merged_lse = finish_lse(m, total, BASE_2)
        tl.store(merged_lse_ptr + b * stride_sb + h * stride_sh, merged_lse, mask=in_heads)


_launches = Launches()


def merge_partials(
    out: torch.Tensor,
    lse: torch.Tensor,
    local_lens: torch.Tensor,
    lse_base: LseBase,
    merged: torch.Tensor | None = None,
    merged_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merge attention over N disjoint KV stripes into attention over their union.

    Exact up to rounding (float32 accumulation, ranks in order 0..N-1): with m the largest LSE of
    the non-empty stripes and w_n = base ** (lse_n - m), merged = sum w_n * o_n / sum w_n.

    Args:
        out: [N, B, H, D] bfloat16, float16 or float32; each stripe's output, normalized over
            that stripe alone. Last dim contiguous, other strides free.
        lse: [N, B, H] float32, any strides. Log-sum-exp of the scaled logits in base lse_base,
            finite where the stripe is not empty.
        local_lens: [N, B] int32, unclamped local lengths; rows may be strided. 0 means that the
            stripe is empty for that token: its out and lse are ignored, whatever they hold.
        lse_base: "e" (FlashAttention, FlashMLA) or "2" (FlashInfer). Required, because a wrong
            base raises nothing and only skews the weights.
        merged: [B, H, D], written if given; any dtype, last dim contiguous, other strides free.
        merged_lse: [B, H] float32, written if given: LSE over the union in base lse_base, -inf
            where every stripe is empty.

    Returns:
        merged, or a new tensor in the dtype of out; 0 where every stripe is empty.

    The same bits on all ranks from the same inputs. Inputs are not modified. No host sync; nothing
    is allocated when merged is given. Source: seed section 3; FlashAttention's two-pass softmax.
    """
    num_ranks, num_tokens, num_heads, dim = out.shape
    check_partials(out, lse, local_lens, lse_base)
    if merged is None:
        merged = out.new_empty(num_tokens, num_heads, dim)
    assert merged.shape == out.shape[1:], f"{merged.shape} != {out.shape[1:]}"
    assert merged.stride(2) == 1, merged.stride()
    if num_tokens == 0:
        return merged
    if not use_triton(out):
        return merge_partials_ref(out, lse, local_lens, lse_base, merged, merged_lse)
    lse_out = merged if merged_lse is None else merged_lse

    def plan() -> Plan:
        strides = (*out.stride()[:3], *merged.stride()[:2])
        return Plan(
            (num_tokens, cdiv(num_heads, BLOCK_HEADS)),
            num_heads,
            *out.stride()[:3],
            *lse.stride(),
            local_lens.stride(0),
            *merged.stride()[:2],
            *lse_out.stride()[:2],
            N=num_ranks,
            D=dim,
            BASE_2=lse_base == "2",
            STORE_LSE=merged_lse is not None,
            ALIGN=common_alignment(min(out.element_size(), merged.element_size()), *strides),
            BLOCK_H=BLOCK_HEADS,
            BLOCK_D=next_power_of_2(dim),
            num_warps=NUM_WARPS,
            # The same roundings in every kernel that merges: contracted or not, a*b + c differs.
            enable_fp_fusion=False,
        )

    _launches(
        merge_partials_kernel,
        (out, lse, local_lens, merged, lse_out),
        (lse_base, merged_lse is None),
        plan,
    )
    return merged


def merge_partials_ref(
    out: torch.Tensor,
    lse: torch.Tensor,
    local_lens: torch.Tensor,
    lse_base: LseBase,
    merged: torch.Tensor | None = None,
    merged_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch reference of `merge_partials`: the same passes, order and selects in float32."""
    total, m, weights = stripe_weights_ref(lse, local_lens, lse_base)
    acc = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
    for n, w in enumerate(weights):
        owned = (local_lens[n] > 0)[:, None, None]
        acc += w[..., None] * torch.where(owned, out[n].float(), 0.0)
    result = torch.where(total[..., None] > 0, acc / total[..., None], 0.0)
    if merged_lse is not None:
        log_total = total.log2() if lse_base == "2" else total.log()
        merged_lse.copy_(torch.where(total > 0, m + log_total, float("-inf")))
    if merged is None:
        return result.to(out.dtype)
    return merged.copy_(result)


def merge_lses(
    lse: torch.Tensor, local_lens: torch.Tensor, lse_base: LseBase, merged_lse: torch.Tensor
) -> None:
    """LSE over the union of N stripes, without their outputs.

    Args:
        lse: [N, B, H] float32 in base lse_base, any strides; ignored where the stripe is empty.
        local_lens: [N, B] int32, unclamped local lengths.
        lse_base: "e" or "2", of both LSEs.
        merged_lse: [B, H] float32, written; -inf where every stripe is empty.
    """
    scale = math.log(2) if lse_base == "2" else 1.0
    owned = torch.where((local_lens > 0)[..., None], lse * scale, float("-inf"))
    torch.div(torch.logsumexp(owned, 0), scale, out=merged_lse)


def stripe_weights_ref(
    lse: torch.Tensor, local_lens: torch.Tensor, lse_base: LseBase
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Both passes on [N, B, H] LSEs: (sum of weights [B, H], maximum [B, H], N weights [B, H])."""
    owned = (local_lens > 0)[..., None]
    m = torch.where(owned, lse, float("-inf")).amax(0)
    power = torch.exp2 if lse_base == "2" else torch.exp
    weights = [torch.where(owned[n], power(lse[n] - m), 0.0) for n in range(len(lse))]
    total = torch.zeros_like(m)
    for w in weights:
        total += w
    return total, m, weights


def check_partials(
    out: torch.Tensor, lse: torch.Tensor, local_lens: torch.Tensor, lse_base: LseBase
) -> None:
    """Shape and dtype invariants of the merge inputs (host metadata only, no sync)."""
    assert lse_base in ("e", "2"), f"lse_base {lse_base!r} is neither 'e' nor '2'"
    assert lse.shape == out.shape[:3], f"lse {lse.shape} does not fit out {out.shape}"
    assert local_lens.shape == out.shape[:2], f"lens {local_lens.shape}, out {out.shape}"
    assert lse.dtype == torch.float32, lse.dtype
    assert local_lens.stride(1) == 1, local_lens.stride()
    assert out.stride(3) == 1, out.stride()
