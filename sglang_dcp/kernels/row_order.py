"""Put the gathered rows of a chunk of prefixes into token order and split them (pass-KV)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

# Tokens of one program: independent loads that hide each other's latency.
BLOCK_TOKENS = 8


@triton.jit(do_not_specialize=["num_tokens", "num_groups"])
def order_rows_kernel(
    gathered_ptr,
    source_ptr,
    nope_ptr,
    rope_ptr,
    num_tokens,
    num_groups,
    C: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    t = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    valid = t < num_tokens
    if HAS_SOURCE:
        row = tl.load(source_ptr + t, mask=valid, other=0)
    else:
        row = t % C * num_groups + t // C
    t, row, valid = t[:, None], row[:, None], valid[:, None]
    d, r = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    in_nope, in_rope = valid & (d < D), valid & (r < R)
    nope = tl.load(gathered_ptr + row * (D + R) + d, mask=in_nope)
    rope = tl.load(gathered_ptr + row * (D + R) + D + r, mask=in_rope)
    tl.store(nope_ptr + t * D + d, nope.to(nope_ptr.dtype.element_ty), mask=in_nope)
    tl.store(rope_ptr + t * R + r, rope.to(rope_ptr.dtype.element_ty), mask=in_rope)


_launches = Launches()


def order_rows(
    gathered: torch.Tensor, source: torch.Tensor | None, nope: torch.Tensor, rope: torch.Tensor
) -> None:
    """Copy gathered latent rows into token order, [nope | rope] apart, in one launch.

    Args:
        gathered: [c, N, D+R], rows of every rank in rank order, contiguous.
        source: [T] int64, contiguous, for every token its row among the c*N; None: token t is row
            t // c of rank t % c, and T = c*N.
        nope: [T, D], contiguous, written; cast where its dtype is another.
        rope: [T, R], the same.
    """
    dcp_size, num_groups, width = gathered.shape
    num_tokens, nope_dim = nope.shape
    rope_dim = rope.shape[1]
    assert nope_dim + rope_dim == width, (nope.shape, rope.shape, gathered.shape)
    assert rope.shape[0] == num_tokens, (nope.shape, rope.shape)
    assert nope.dtype == rope.dtype, (nope.dtype, rope.dtype)
    assert gathered.is_contiguous(), gathered.stride()
    assert nope.is_contiguous(), nope.stride()
    assert rope.is_contiguous(), rope.stride()
    if source is None:
        assert num_tokens == dcp_size * num_groups, (nope.shape, gathered.shape)
    else:
        assert source.shape == (num_tokens,), (source.shape, nope.shape)
        assert source.is_contiguous(), source.stride()
    if num_tokens == 0:
        return
    if not use_triton(gathered):
        order_rows_ref(gathered, source, nope, rope)
        return

    def plan() -> Plan:
        return Plan(
            (cdiv(num_tokens, BLOCK_TOKENS),),
            num_tokens,
            num_groups,
            C=dcp_size,
            D=nope_dim,
            R=rope_dim,
            HAS_SOURCE=source is not None,
            BLOCK_D=next_power_of_2(nope_dim),
            BLOCK_R=next_power_of_2(rope_dim),
            BLOCK_TOKENS=BLOCK_TOKENS,
        )

    of_tokens = gathered if source is None else source
    _launches(order_rows_kernel, (gathered, of_tokens, nope, rope), source is None, plan)


def order_rows_ref(
    gathered: torch.Tensor, source: torch.Tensor | None, nope: torch.Tensor, rope: torch.Tensor
) -> None:
    """Torch reference of `order_rows`, without temporaries while dtypes are the same."""
    at = 0
    for out in (nope, rope):
        part = gathered[..., at : at + out.shape[1]]
        at += out.shape[1]
        if source is None:
            out.view(part.shape[1], part.shape[0], part.shape[2]).copy_(part.transpose(0, 1))
        else:
            raw = part.view(torch.uint8).flatten(0, 1)  # torch indexes not every dtype
            if out.dtype == part.dtype:
                torch.index_select(raw, 0, source, out=out.view(torch.uint8))
            else:
                out.copy_(raw[source].view(part.dtype))
