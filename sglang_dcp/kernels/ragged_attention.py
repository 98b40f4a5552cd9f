"""Attention of several requests that lie one after another, with an LSE, in Triton.

Upstream's Triton prefill returns no LSE, so neither prefix chunks nor stripes could be merged with
what it computes. One kernel serves both variants of prefill: pass-KV on expanded K and V (as many
key heads as query heads), pass-Q's causal part on latent rows (one key head for all).

Legend: T queries, S keys, H query heads, K key heads, G = H / K, D key dim, Dv value dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, next_power_of_2
from sglang_dcp.kernels.launch import Launches, Plan

LN_2 = tl.constexpr(math.log(2))
#: Widest key for which a tile of 128 rows fits a multiprocessor's registers.
NARROW_DIM = 256
#: Shared memory of a block that takes the next keys while it works on these; half is enough else.
TWO_STAGES_BYTES = 140 << 10


@dataclass(frozen=True)
class Spans:
    """Lengths of every request of a batch, on the device and what the host needs of them.

    Attributes:
        indptr: [B + 1] int32, where each request starts.
        longest: tokens of the longest one.
        total: tokens of all.
    """

    indptr: torch.Tensor
    longest: int
    total: int


def make_spans(lens: Sequence[int], device: torch.device | str) -> Spans:
    """Spans of requests with so many tokens, copied without a host sync."""
    indptr = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
    return Spans(indptr.to(device, non_blocking=True), max(lens, default=0), sum(lens))


@triton.jit
def ragged_attention_kernel(
    q_nope_ptr,
    q_pe_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    q_indptr_ptr,
    kv_indptr_ptr,
    scale_log2,
    num_heads,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    GROUP: tl.constexpr,
    NOPE: tl.constexpr,
    PE: tl.constexpr,
    DV: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_PE: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    b, kv_head = tl.program_id(2), tl.program_id(1)
    q_start, kv_start = tl.load(q_indptr_ptr + b), tl.load(kv_indptr_ptr + b)
    q_len = tl.load(q_indptr_ptr + b + 1) - q_start
    kv_len = tl.load(kv_indptr_ptr + b + 1) - kv_start
    first = tl.program_id(0) * BLOCK_M
    if first >= q_len * GROUP:
        return
    # a row is a query head of a token; heads that share keys lie side by side
    m = first + tl.arange(0, BLOCK_M)
    token, head = m // GROUP, kv_head * GROUP + m % GROUP
    in_rows = token < q_len
    row = (q_start + token).to(tl.int64)
    nope, pe, dv = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_PE), tl.arange(0, BLOCK_DV)
    q = tl.load(
        q_nope_ptr + (row * stride_qt + head.to(tl.int64) * stride_qh)[:, None] + nope[None, :],
        mask=in_rows[:, None] & (nope < NOPE)[None, :],
        other=0.0,
    )
    q_pe = tl.load(
        q_pe_ptr + (row * stride_rt + head.to(tl.int64) * stride_rh)[:, None] + pe[None, :],
        mask=in_rows[:, None] & (pe < PE)[None, :],
        other=0.0,
    )

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    end = kv_len
    if CAUSAL:
        last_token = tl.minimum((first + BLOCK_M - 1) // GROUP, q_len - 1)
        end = last_token + 1 + kv_len - q_len
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        in_keys = n < kv_len
        key = (kv_start + n).to(tl.int64)
        k_rows = k_ptr + key * stride_kt + kv_head * stride_kh
        k = tl.load(
            k_rows[None, :] + nope[:, None],
            mask=in_keys[None, :] & (nope < NOPE)[:, None],
            other=0.0,
        )
        k_pe = tl.load(
            k_rows[None, :] + NOPE + pe[:, None],
            mask=in_keys[None, :] & (pe < PE)[:, None],
            other=0.0,
        )
        logits = tl.dot(q, k, input_precision=PRECISION)
        logits += tl.dot(q_pe, k_pe, input_precision=PRECISION)
        seen = in_keys[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= (token + kv_len - q_len)[:, None])
        logits = tl.where(seen, logits * scale_log2, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new_highest > float("-inf"), new_highest, 0.0)  # no inf - inf
        p = tl.exp2(logits - base[:, None])
        kept = tl.exp2(highest - base)
        v = tl.load(
            v_ptr + (key * stride_vt + kv_head * stride_vh)[:, None] + dv[None, :],
            mask=in_keys[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(p, 1)
        acc = acc * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        highest = new_highest

    some = total > 0
    divisor = tl.where(some, total, 1.0)
    o_row = row * num_heads + head
    tl.store(
        o_ptr + o_row[:, None] * DV + dv[None, :],
        (acc / divisor[:, None]).to(o_ptr.dtype.element_ty),
        mask=in_rows[:, None] & (dv < DV)[None, :],
    )
    lse = tl.where(some, (highest + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(lse_ptr + o_row, lse, mask=in_rows)


_launches = Launches()


def ragged_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Spans,
    keys: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries to its keys; everything is bounded by its results.

    Args:
        q_nope: [T, H, D - R] and q_pe: [T, H, R], any strides but the last.
        k: [S, K, D], the keys' parts in the same order; v: [S, K, Dv]. Last dims contiguous.
        queries: of the requests; at most T tokens.
        keys: [B + 1] int32, where each request's keys start; a request may have none.
        scale: softmax scale.
        causal: query t of a request sees its keys up to t + keys - queries, at least one.

    Returns:
        o [T, H, Dv] in q's dtype and lse [T, H] float32, base e, both contiguous. A query without
        keys has o = 0 and lse = -inf, and so have tokens behind the last request.
    """
    num_tokens, num_heads, nope = q_nope.shape
    pe, dv, group = q_pe.shape[2], v.shape[2], num_heads // k.shape[1]
    assert k.shape[2] == nope + pe, (q_nope.shape, q_pe.shape, k.shape)
    assert v.shape[:2] == k.shape[:2], (k.shape, v.shape)
    assert num_heads == group * k.shape[1], (q_nope.shape, k.shape)
    assert q_nope.stride(2) == q_pe.stride(2) == k.stride(2) == v.stride(2) == 1
    assert queries.total <= num_tokens, (queries, q_nope.shape)
    o = q_nope.new_empty((num_tokens, num_heads, dv))
    lse = q_nope.new_empty((num_tokens, num_heads), dtype=torch.float32)
    o[queries.total :] = 0
    lse[queries.total :] = float("-inf")
    if queries.total == 0:
        return o, lse
    narrow = k.shape[2] <= NARROW_DIM and q_nope.element_size() == 2
    block_m, block_n = (128, 64) if narrow else (32, 32)
    grid = (
        cdiv(queries.longest * group, block_m),
        k.shape[1],
        queries.indptr.shape[0] - 1,
    )

    def plan() -> Plan:
        return Plan(
            grid,
            scale / math.log(2),
            num_heads,
            *q_nope.stride()[:2],
            *q_pe.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            GROUP=group,
            NOPE=nope,
            PE=pe,
            DV=dv,
            CAUSAL=causal,
            PRECISION="ieee" if q_nope.dtype == torch.float32 else "tf32",
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_NOPE=max(16, next_power_of_2(nope)),
            BLOCK_PE=max(16, next_power_of_2(pe)),
            BLOCK_DV=max(16, next_power_of_2(dv)),
            num_warps=8,
            num_stages=_num_stages(q_nope.device),
        )

    _launches(
        ragged_attention_kernel,
        (q_nope, q_pe, k, v, o, lse, queries.indptr, keys),
        (queries.longest, scale, causal),
        plan,
    )
    return o, lse


@functools.cache
def _num_stages(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return 2 if properties.shared_memory_per_block_optin >= TWO_STAGES_BYTES else 1
