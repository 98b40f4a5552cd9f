"""Owner-filtered write of latent rows into this rank's stripe of the KV pool (stage 2).

Legend: T tokens, D = kv_lora_rank (512), R = qk_rope_head_dim (64), c = dcp_size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

# Rows of one program. A rank skips (c-1)/c of them, so one row each would mostly be launch cost.
BLOCK_TOKENS = 4


@triton.jit(do_not_specialize=["num_tokens", "dcp_rank"])
def set_mla_kv_buffer_dcp_sharded_kernel(
    kv_ptr,
    loc_ptr,
    nope_ptr,
    rope_ptr,
    num_tokens,
    dcp_rank,
    stride_kv,
    stride_nope,
    stride_rope,
    DCP_SIZE: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    in_batch = token < num_tokens
    # int64 before any product: a pool has more than 2^31 elements
    loc = tl.load(loc_ptr + token, mask=in_batch, other=0).to(tl.int64)
    owned = (in_batch & (loc % DCP_SIZE == dcp_rank))[:, None]
    row = (loc // DCP_SIZE)[:, None]
    token = token.to(tl.int64)[:, None]

    d = tl.arange(0, BLOCK_NOPE)[None, :]
    mask = owned & (d < NOPE_DIM)
    nope = tl.load(nope_ptr + token * stride_nope + d, mask=mask)
    tl.store(kv_ptr + row * stride_kv + d, nope, mask=mask)

    d = tl.arange(0, BLOCK_ROPE)[None, :]
    mask = owned & (d < ROPE_DIM)
    rope = tl.load(rope_ptr + token * stride_rope + d, mask=mask)
    tl.store(kv_ptr + row * stride_kv + NOPE_DIM + d, rope, mask=mask)


_launches = Launches()


def set_mla_kv_buffer_dcp_sharded(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Write [k_nope | k_rope] of the tokens that this rank owns; other rows stay untouched.

    Token t goes to row loc[t] // c if loc[t] % c == r and is skipped otherwise (seed section 4,
    step 2). One launch, no host sync, capturable; padded tokens may repeat slot 0.

    Args:
        kv_buffer: [rows, 1, D+R] or [rows, D+R], any dtype (fp8: pass views as uint8); written.
        loc: [T] int32 or int64, virtual slots >= 0, below rows * c; contiguous.
        k_nope: [T, 1, D] or [T, D], dtype of kv_buffer; last dim contiguous, rows with any stride.
            Rows past T (padding that has no slot) are ignored, as upstream's writer does.
        k_rope: [T, 1, R] or [T, R], the same; may be a slice of a wider tensor.
        dcp_rank: r of this rank.
        dcp_size: c, at least 1.
    """
    num_tokens, nope_dim, rope_dim = loc.numel(), k_nope.shape[-1], k_rope.shape[-1]
    for t in (kv_buffer, k_nope, k_rope):
        assert t.dim() == 2 or t.shape[1:-1] == (1,), f"not [N, 1, W] or [N, W]: {tuple(t.shape)}"
        assert t.stride(-1) == 1, f"last dim must be contiguous, strides {t.stride()}"
        assert t.dtype == kv_buffer.dtype, (t.dtype, kv_buffer.dtype)
    assert nope_dim + rope_dim == kv_buffer.shape[-1], (nope_dim, rope_dim, kv_buffer.shape)
    assert min(k_nope.shape[0], k_rope.shape[0]) >= num_tokens, (k_nope.shape, k_rope.shape)
    if num_tokens == 0:
        return
    if not use_triton(kv_buffer):
        set_mla_kv_buffer_dcp_sharded_ref(kv_buffer, loc, k_nope, k_rope, dcp_rank, dcp_size)
        return
    assert loc.is_contiguous(), f"loc has stride {loc.stride()}"

    def plan() -> Plan:
        return Plan(
            (cdiv(num_tokens, BLOCK_TOKENS),),
            num_tokens,
            dcp_rank,
            kv_buffer.stride(0),
            k_nope.stride(0),
            k_rope.stride(0),
            DCP_SIZE=dcp_size,
            NOPE_DIM=nope_dim,
            ROPE_DIM=rope_dim,
            BLOCK_NOPE=next_power_of_2(nope_dim),
            BLOCK_ROPE=next_power_of_2(rope_dim),
            BLOCK_TOKENS=BLOCK_TOKENS,
        )

    _launches(
        set_mla_kv_buffer_dcp_sharded_kernel,
        (kv_buffer, loc, k_nope, k_rope),
        (dcp_rank, dcp_size),
        plan,
    )


def set_mla_kv_buffer_dcp_sharded_ref(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Torch reference of `set_mla_kv_buffer_dcp_sharded`; syncs on CUDA (boolean indexing)."""
    kv, nope, rope = (t.view(len(t), t.shape[-1]) for t in (kv_buffer, k_nope, k_rope))
    owned = loc % dcp_size == dcp_rank
    num_tokens = len(loc)
    latents = torch.cat([nope[:num_tokens], rope[:num_tokens]], dim=1)
    kv[(loc[owned] // dcp_size).long()] = latents[owned]
