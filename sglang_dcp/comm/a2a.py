"""`a2a`: pack, all-to-all, merge. Two kernels and one collective after attention (Helix).

Each rank receives N partials of its own heads only, (D*2 + 4) bytes per head and token from each
peer in bf16. Source: seed section 4, steps 6 and 7.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp.comm.base import Communicator
from sglang_dcp.comm.registry import register_comm_backend
from sglang_dcp.comm.transport import Transport
from sglang_dcp.kernels.lse_merge import LseBase, merge_partials
from sglang_dcp.kernels.pack import pack_partials, wire_block_bytes, wire_views


@register_comm_backend("a2a")
class A2ACommunicator(Communicator):
    """All-to-all of packed partials; see `Communicator` for the contract."""

    priority = 10

    def __init__(self, transport: Transport, **dims: Any) -> None:
        super().__init__(transport, **dims)
        num_bytes = self.dcp_size * self._block_bytes(self.max_tokens)
        self._add_buffer("send", num_bytes, torch.uint8)
        self._add_buffer("recv", num_bytes, torch.uint8)

    def exchange_merge(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        lse_base: LseBase,
        local_lens: torch.Tensor,
        merged_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Communicator.exchange_merge`; ranks are summed in order 0..N-1 on every rank."""
        assert o.dtype == self.dtype, (o.dtype, self.dtype)
        num_tokens, block_bytes = o.shape[0], self._block_bytes(o.shape[0])
        send = self._take("send", self.dcp_size, block_bytes)
        recv = self._take("recv", self.dcp_size, block_bytes)
        pack_partials(o, lse, send)
        self.transport.all_to_all(recv, send)
        o_all, lse_all = wire_views(
            recv, self.dcp_size, num_tokens, self.local_heads, self.kv_lora_rank, self.dtype
        )
        merged = self._take("merged", num_tokens, self.local_heads, self.kv_lora_rank)
        return merge_partials(o_all, lse_all, local_lens, lse_base, merged, merged_lse)

    def _block_bytes(self, num_tokens: int) -> int:
        return wire_block_bytes(num_tokens, self.local_heads, self.kv_lora_rank, self.dtype)
