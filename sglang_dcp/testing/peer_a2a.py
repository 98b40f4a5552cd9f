"""The a2a path of SGLang 0.5.17's own DCP, launch for launch, as a baseline of benchmarks.

After attention it issues a copy of the outputs, a copy of the LSEs, a copy that packs these, one
all-to-all of bytes, a copy that unpacks the LSEs, and a combine kernel (its
`dcp_a2a_lse_reduce` with CUDA-graph buffers). The combine is that release's own if installed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

_LSE_COLUMNS = 2  # a float32 LSE in columns of a 2-byte type


@triton.jit
def _combine_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    stride_on,
    stride_ob,
    stride_oh,
    stride_ln,
    stride_lb,
    stride_lh,
    stride_mb,
    stride_mh,
    N: tl.constexpr,
    D: tl.constexpr,
    BASE_E: tl.constexpr,
):
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    lse_ptr += b * stride_lb + h * stride_lh
    m = float("-inf")
    for n in tl.static_range(N):
        lse = tl.load(lse_ptr + n * stride_ln)
        m = tl.maximum(m, tl.where((lse != lse) | (lse == float("inf")), float("-inf"), lse))
    m = tl.where(m == float("-inf"), 0.0, m)
    acc = tl.zeros([D], tl.float32)
    total = 0.0
    for n in tl.static_range(N):
        lse = tl.load(lse_ptr + n * stride_ln)
        lse = tl.where((lse != lse) | (lse == float("inf")), float("-inf"), lse)
        w = tl.exp(lse - m) if BASE_E else tl.exp2(lse - m)
        total += w
        acc += w * tl.load(out_ptr + n * stride_on + b * stride_ob + h * stride_oh + d)
    merged = (acc / total).to(merged_ptr.dtype.element_ty)
    tl.store(merged_ptr + b * stride_mb + h * stride_mh + d, merged)


def _combine(
    out: torch.Tensor, lse: torch.Tensor, is_lse_base_on_e: bool = True
) -> tuple[torch.Tensor, None]:
    num_ranks, num_tokens, num_heads, dim = out.shape
    merged = out.new_empty(num_tokens, num_heads, dim)
    _combine_kernel[(num_tokens, num_heads)](
        out,
        lse,
        merged,
        *out.stride()[:3],
        *lse.stride(),
        *merged.stride()[:2],
        N=num_ranks,
        D=dim,
        BASE_E=is_lse_base_on_e,
    )
    return merged, None


combine: Any = _combine
PEER_SOURCE = "launches of SGLang 0.5.17, re-created"
try:
    from sglang.kernels.ops.attention.dcp_kernels import dcp_lse_combine_triton
except ImportError:  # 0.5.14, or no SGLang at all
    pass
else:
    combine, PEER_SOURCE = dcp_lse_combine_triton, "kernels of the installed SGLang"


class PeerA2A:
    """Same calls as a `Communicator`, over the default process group; for benchmarks only.

    Args:
        num_heads: heads of the group.
        dim, rope_dim: of the latent and of its rope part.
        max_tokens: size of the buffers.
        dtype: bfloat16 or float16.
        device: of everything.
    """

    def __init__(
        self,
        num_heads: int,
        dim: int,
        rope_dim: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size, self.dim = dist.get_world_size(), dim
        self.local_heads = num_heads // self.size
        self.dtype, self.device = dtype, device
        self._q = torch.zeros(
            max_tokens * self.local_heads * (dim + rope_dim), dtype=dtype, device=device
        )
        self._gathered = self._q.new_empty(self.size * self._q.numel())
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}

    def gather_q(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """The all-gather alone: [N, Hl*B*(D+R)], of whatever the concatenation left."""
        num_elements = q_nope.numel() + q_pe.numel()
        gathered = self._gathered[: num_elements * self.size]
        dist.all_gather_into_tensor(gathered, self._q[:num_elements])
        return gathered

    def exchange_merge(
        self, o: torch.Tensor, lse: torch.Tensor, lse_base: str, local_lens: torch.Tensor
    ) -> torch.Tensor:
        """o [B, H, D], lse [B, H] in base lse_base -> [B, Hl, D]; local_lens is not looked at."""
        batch, dim = o.shape[0], self.dim
        send, recv, send_lse, recv_lse = self._of_batch(batch)
        heads = (batch, self.size, self.local_heads)
        send[..., :dim].copy_(o.view(*heads, dim).permute(1, 0, 2, 3))
        send_lse.copy_(lse.view(heads).permute(1, 0, 2))
        columns = (self.size, batch, self.local_heads, _LSE_COLUMNS)
        send[..., dim:].copy_(send_lse.view(o.dtype).view(columns))
        dist.all_to_all_single(recv.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8))
        recv_lse.view(o.dtype).view(columns).copy_(recv[..., dim:])
        return combine(recv[..., :dim], recv_lse, is_lse_base_on_e=lse_base == "e")[0]

    def _of_batch(self, batch: int) -> tuple[torch.Tensor, ...]:
        """Static send and receive buffers, of outputs with LSE columns and of LSEs."""
        if batch not in self._buffers:
            shape = (self.size, batch, self.local_heads)
            wide = (*shape, self.dim + _LSE_COLUMNS)
            outs = (torch.empty(wide, dtype=self.dtype, device=self.device) for _ in range(2))
            lses = (torch.empty(shape, device=self.device) for _ in range(2))
            self._buffers[batch] = (*outs, *lses)
        return self._buffers[batch]

    def destroy(self) -> None:
        """Drop the buffers."""
        self._buffers.clear()
        del self._q, self._gathered
