"""Reduce the split-KV partials of SGLang's Triton MLA decode to one (o, lse) per head.

Upstream's own second stage returns no LSE. Legend: B tokens, H heads, S the largest number of
splits, D = 512.
"""

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import next_power_of_2
from sglang_dcp.kernels.launch import Launches, Plan

#: SGLang rounds the tokens of a split up to this many (triton_ops/decode_attention.py).
MIN_BLOCK_KV = 32


@triton.jit
def reduce_splits_kernel(
    partial_ptr,
    partial_lse_ptr,
    kv_indptr_ptr,
    num_kv_splits_ptr,
    o_ptr,
    lse_ptr,
    stride_pb,
    stride_ph,
    stride_ps,
    stride_lb,
    stride_lh,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_len = tl.load(kv_indptr_ptr + token + 1) - tl.load(kv_indptr_ptr + token)
    num_splits = tl.load(num_kv_splits_ptr + token)
    split_len = tl.cdiv(tl.cdiv(kv_len, num_splits), MIN_BLOCK) * MIN_BLOCK
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D

    # Splits past the end were not written: they hold an earlier batch's values.
    running_max = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    for split in range(tl.cdiv(kv_len, split_len)):
        lse = tl.load(partial_lse_ptr + token * stride_lb + head * stride_lh + split)
        o = tl.load(
            partial_ptr + token * stride_pb + head * stride_ph + split * stride_ps + offs_d,
            mask=in_d,
            other=0.0,
        )
        new_max = tl.maximum(running_max, lse)
        rescale = tl.exp(running_max - new_max)
        weight = tl.exp(lse - new_max)
        acc = acc * rescale + o * weight
        total = total * rescale + weight
        running_max = new_max

    row = token * H + head
    tl.store(o_ptr + row * D + offs_d, (acc / total).to(o_ptr.dtype.element_ty), mask=in_d)
    tl.store(lse_ptr + row, running_max + tl.log(total))


_launches = Launches()


def reduce_splits(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_kv_splits: torch.Tensor,
    num_tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact merge of the splits that the first stage wrote.

    Args:
        partials: [>= B, H, S, D] float32, each split's normalized output.
        partial_lse: [>= B, H, S] float32, base e.
        kv_indptr: [B + 1] int32, prefix sums of the lengths, each at least 1.
        num_kv_splits: [>= B] int32, splits asked for; unused ones hold stale values.
        num_tokens: B.
        dtype: dtype of o.

    Returns:
        o [B, H, D] and lse [B, H] float32, base e. No row is empty here: lengths are at least 1.
    """
    num_heads, head_dim = partials.shape[1], partials.shape[3]
    o = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=partials.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=partials.device)

    def plan() -> Plan:
        return Plan(
            (num_tokens, num_heads),
            partials.stride(0),
            partials.stride(1),
            partials.stride(2),
            partial_lse.stride(0),
            partial_lse.stride(1),
            num_heads,
            D=head_dim,
            BLOCK_D=next_power_of_2(head_dim),
            MIN_BLOCK=MIN_BLOCK_KV,
            num_warps=4,
        )

    _launches(
        reduce_splits_kernel, (partials, partial_lse, kv_indptr, num_kv_splits, o, lse), (), plan
    )
    return o, lse


def reduce_splits_ref(
    partials: torch.Tensor,
    partial_lse: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_kv_splits: torch.Tensor,
    num_tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `reduce_splits`, one token at a time, float64."""
    outs, lses = [], []
    for token in range(num_tokens):
        kv_len = int(kv_indptr[token + 1] - kv_indptr[token])
        split_len = -(-kv_len // int(num_kv_splits[token]))
        split_len = -(-split_len // MIN_BLOCK_KV) * MIN_BLOCK_KV
        used = -(-kv_len // split_len)
        split_lse = partial_lse[token, :, :used].double()
        lse = torch.logsumexp(split_lse, dim=-1)
        weights = torch.exp(split_lse - lse[:, None])
        outs.append((weights[..., None] * partials[token, :, :used].double()).sum(1))
        lses.append(lse)
    return torch.stack(outs).to(dtype), torch.stack(lses).float()
