"""Wire format of the all-to-all: one block per head owner, outputs first, then LSEs (stage 6).

Legend: N = dcp_size ranks, B tokens, H heads of the group, Hl = H/N heads of one rank, D head dim.

Block n of the send buffer holds the heads [n*Hl, (n+1)*Hl) that rank n owns:

    [o: B*Hl*D elements of o's dtype][lse: B*Hl float32][padding to 16 bytes]

The float32 LSE costs 4 bytes a head and no rounding; after the exchange the merge reads both
parts in place (`wire_views`), so that there is no unpack step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2, use_triton
from sglang_dcp.kernels.launch import Launches, Plan

BLOCK_HEADS = 2
NUM_WARPS = 4
_ALIGN_BYTES = 16


def wire_block_bytes(num_tokens: int, local_heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of one rank's block: B*Hl*(D*itemsize + 4), rounded up to 16."""
    size = num_tokens * local_heads * (dim * dtype.itemsize + 4)
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def wire_views(
    buf: torch.Tensor,
    num_ranks: int,
    num_tokens: int,
    local_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-copy views of a wire buffer, usable as inputs of `merge_partials`.

    Args:
        buf: [N, block_bytes] uint8, contiguous, block_bytes from `wire_block_bytes`.

    Returns:
        (o [N, B, Hl, D] of dtype, lse [N, B, Hl] float32), strided by block, on buf's storage.
    """
    size = wire_block_bytes(num_tokens, local_heads, dim, dtype)
    assert buf.shape == (num_ranks, size), f"{tuple(buf.shape)} != {(num_ranks, size)}"
    assert buf.dtype == torch.uint8, buf.dtype
    assert buf.is_contiguous()
    rows = num_tokens * local_heads
    split = rows * dim * dtype.itemsize
    assert split % 4 == 0, f"o block of {split} bytes leaves the float32 LSEs unaligned"
    o = buf.view(dtype)[:, : rows * dim]
    lse = buf.view(torch.float32)[:, split // 4 : split // 4 + rows]
    return (
        o.view(num_ranks, num_tokens, local_heads, dim),
        lse.view(num_ranks, num_tokens, local_heads),
    )


@triton.jit(
    do_not_specialize=[
        "local_heads",
        "stride_ob",
        "stride_oh",
        "stride_lb",
        "stride_lh",
        "stride_so",
        "stride_sl",
    ]
)
def pack_partials_kernel(
    o_ptr,
    lse_ptr,
    send_o_ptr,
    send_lse_ptr,
    num_heads,
    local_heads,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_so,
    stride_sl,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    in_heads = h < num_heads
    mask = in_heads[:, None] & (d < D)
    rank = (h // local_heads).to(tl.int64)
    row = b * local_heads + h % local_heads

    src = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    dst = tl.multiple_of(rank * stride_so + row * D, [ALIGN])
    o = tl.load(o_ptr + src[:, None] + d, mask=mask)
    tl.store(send_o_ptr + dst[:, None] + d, o, mask=mask)
    lse = tl.load(lse_ptr + b * stride_lb + h * stride_lh, mask=in_heads)
    tl.store(send_lse_ptr + rank * stride_sl + row, lse, mask=in_heads)


_launches = Launches()


def pack_partials(o: torch.Tensor, lse: torch.Tensor, send: torch.Tensor) -> None:
    """Sort one rank's partials by head owner into the wire format, in one launch.

    Values are copied as they are: empty stripes are dropped by the receiver's merge.

    Args:
        o: [B, H, D] bfloat16, float16 or float32; last dim contiguous, other strides free (it
            may be heads-first storage seen as [B, H, D]).
        lse: [B, H] float32, any strides, any base.
        send: [N, block_bytes] uint8, contiguous, written except for its padding; N divides H.
    """
    num_tokens, num_heads, dim = o.shape
    num_ranks = send.shape[0]
    local_heads = num_heads // num_ranks
    assert local_heads * num_ranks == num_heads, f"{num_heads} heads over {num_ranks} ranks"
    assert lse.shape == (num_tokens, num_heads), f"lse {lse.shape} does not fit o {o.shape}"
    assert lse.dtype == torch.float32, lse.dtype
    assert o.stride(2) == 1, o.stride()
    if num_tokens == 0:
        return
    if not use_triton(o):
        pack_partials_ref(o, lse, send)
        return
    send_o, send_lse = wire_views(send, num_ranks, num_tokens, local_heads, dim, o.dtype)

    def plan() -> Plan:
        strides = (*o.stride()[:2], send_o.stride(0), dim)
        return Plan(
            (num_tokens, cdiv(num_heads, BLOCK_HEADS)),
            num_heads,
            local_heads,
            *o.stride()[:2],
            *lse.stride(),
            send_o.stride(0),
            send_lse.stride(0),
            D=dim,
            ALIGN=common_alignment(o.element_size(), *strides),
            BLOCK_H=BLOCK_HEADS,
            BLOCK_D=next_power_of_2(dim),
            num_warps=NUM_WARPS,
        )

    _launches(pack_partials_kernel, (o, lse, send_o, send_lse), (), plan)


def pack_partials_ref(o: torch.Tensor, lse: torch.Tensor, send: torch.Tensor) -> None:
    """Torch reference of `pack_partials`."""
    num_tokens, num_heads, dim = o.shape
    num_ranks = send.shape[0]
    local_heads = num_heads // num_ranks
    send_o, send_lse = wire_views(send, num_ranks, num_tokens, local_heads, dim, o.dtype)
    send_o.copy_(o.unflatten(1, (num_ranks, local_heads)).transpose(0, 1))
    send_lse.copy_(lse.unflatten(1, (num_ranks, local_heads)).transpose(0, 1))
