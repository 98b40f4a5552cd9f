"""One rank's side of the merge for `ag_rs`: scale its own partial so that a plain sum is exact.

Legend: N = dcp_size stripes, B tokens, H heads (all of the DCP group), D head dim.
"""

from __future__ import annotations

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
    check_partials,
    finish,
    max_pass,
    stripe_weights_ref,
    weight,
)


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_heads",
        "stride_ob",
        "stride_oh",
        "stride_ln",
        "stride_lb",
        "stride_lh",
        "stride_cn",
        "stride_wb",
        "stride_wh",
    ]
)
def weigh_partial_kernel(
    out_ptr,
    lse_ptr,
    lens_ptr,
    weighed_ptr,
    rank,
    num_heads,
    stride_ob,
    stride_oh,
    stride_ln,
    stride_lb,
    stride_lh,
    stride_cn,
    stride_wb,
    stride_wh,
    N: tl.constexpr,
    D: tl.constexpr,
    BASE_2: tl.constexpr,
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
    total = tl.zeros([BLOCK_H], tl.float32)
    for n in tl.static_range(N):
        owned = tl.load(lens_ptr + b + n * stride_cn) > 0
        lse = tl.load(lse_ptrs + n * stride_ln, mask=in_heads, other=0.0)
        total += weight(lse, m, owned, BASE_2)

    owned = tl.load(lens_ptr + b + rank * stride_cn) > 0
    lse = tl.load(lse_ptrs + rank.to(tl.int64) * stride_ln, mask=in_heads, other=0.0)
    w = weight(lse, m, owned, BASE_2)
    offs = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    o = tl.load(out_ptr + offs[:, None] + d, mask=mask, other=0.0)
    acc = add_step(tl.zeros([BLOCK_H, BLOCK_D], tl.float32), o, w, owned)
    offs = tl.multiple_of(b * stride_wb + h.to(tl.int64) * stride_wh, [ALIGN])
    tl.store(weighed_ptr + offs[:, None] + d, finish(acc, total), mask=mask)


_launches = Launches()


def weigh_partial(
    out: torch.Tensor,
    lse_all: torch.Tensor,
    local_lens: torch.Tensor,
    rank: int,
    lse_base: LseBase,
    weighed: torch.Tensor,
) -> torch.Tensor:
    """Scale one stripe's output by its normalized weight: the sum over ranks is the merge.

    Args:
        out: [B, H, D] bfloat16, float16 or float32, the output of stripe `rank`; last dim
            contiguous, other strides free.
        lse_all: [N, B, H] float32, the LSEs of every stripe in base lse_base, any strides.
        local_lens: [N, B] int32, unclamped local lengths, rows may be strided; 0 means that the
            stripe is empty for that token, and its out and lse are ignored.
        rank: index of this stripe.
        lse_base: "e" or "2".
        weighed: [B, H, D] float32, written: out * w_rank / sum of w, 0 where this stripe is empty;
            last dim contiguous, other strides free.

    Returns:
        weighed.
    """
    num_tokens, num_heads, dim = out.shape
    num_ranks = lse_all.shape[0]
    check_partials(out.expand(num_ranks, -1, -1, -1), lse_all, local_lens, lse_base)
    assert weighed.shape == out.shape, f"{weighed.shape} != {out.shape}"
    assert weighed.stride(2) == 1, weighed.stride()
    assert weighed.dtype == torch.float32, weighed.dtype
    if num_tokens == 0:
        return weighed
    if not use_triton(out):
        return weigh_partial_ref(out, lse_all, local_lens, rank, lse_base, weighed)

    def plan() -> Plan:
        strides = (*out.stride()[:2], *weighed.stride()[:2])
        return Plan(
            (num_tokens, cdiv(num_heads, BLOCK_HEADS)),
            rank,
            num_heads,
            *out.stride()[:2],
            *lse_all.stride(),
            local_lens.stride(0),
            *weighed.stride()[:2],
            N=num_ranks,
            D=dim,
            BASE_2=lse_base == "2",
            ALIGN=common_alignment(out.element_size(), *strides),
            BLOCK_H=BLOCK_HEADS,
            BLOCK_D=next_power_of_2(dim),
            num_warps=NUM_WARPS,
            # The same roundings in every kernel that merges: contracted or not, a*b + c differs.
            enable_fp_fusion=False,
        )

    _launches(weigh_partial_kernel, (out, lse_all, local_lens, weighed), (rank, lse_base), plan)
    return weighed


def weigh_partial_ref(
    out: torch.Tensor,
    lse_all: torch.Tensor,
    local_lens: torch.Tensor,
    rank: int,
    lse_base: LseBase,
    weighed: torch.Tensor,
) -> torch.Tensor:
    """Torch reference of `weigh_partial`."""
    total, _, weights = stripe_weights_ref(lse_all, local_lens, lse_base)
    owned = (local_lens[rank] > 0)[:, None, None]
    scaled = weights[rank][..., None] * torch.where(owned, out.float(), 0.0) / total[..., None]
    return weighed.copy_(torch.where(owned, scaled, 0.0))
