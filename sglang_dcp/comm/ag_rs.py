"""`ag_rs`: all-gather the LSEs, weigh the own partial, reduce-scatter over heads in float32.

The reference communicator: plain collectives, no wire format, twice the bytes of `a2a` in bf16.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp.comm.base import Communicator
from sglang_dcp.comm.registry import register_comm_backend
from sglang_dcp.comm.transport import Transport
from sglang_dcp.kernels.lse_merge import LseBase, merge_lses
from sglang_dcp.kernels.lse_weigh import weigh_partial


@register_comm_backend("ag_rs")
class AgRsCommunicator(Communicator):
    """All-gather and reduce-scatter; see `Communicator` for the contract."""

    priority = 0

    def __init__(self, transport: Transport, **dims: Any) -> None:
        super().__init__(transport, **dims)
        rows = self.max_tokens * self.num_heads
        self._add_buffer("lse", rows, torch.float32)
        self._add_buffer("lse_all", self.dcp_size * rows, torch.float32)
        self._add_buffer("weighed", rows * self.kv_lora_rank, torch.float32)
        self._add_buffer("summed", rows // self.dcp_size * self.kv_lora_rank, torch.float32)

    def exchange_merge(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        lse_base: LseBase,
        local_lens: torch.Tensor,
        merged_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Communicator.exchange_merge`; the order of the sum over ranks is the library's."""
        num_tokens = o.shape[0]
        own_lse = self._take("lse", num_tokens, self.num_heads).copy_(lse)
        lse_all = self._take("lse_all", self.dcp_size, num_tokens, self.num_heads)
        self.transport.all_gather(lse_all, own_lse)
        if merged_lse is not None:
            first = self.rank * self.local_heads
            own = lse_all[..., first : first + self.local_heads]
            merge_lses(own, local_lens, lse_base, merged_lse)
        # heads first, so that each head owner's part is one block of the reduce-scatter
        weighed = self._take("weighed", self.num_heads, num_tokens, self.kv_lora_rank)
        weigh_partial(o, lse_all, local_lens, self.rank, lse_base, weighed.transpose(0, 1))
        summed = self._take("summed", self.local_heads, num_tokens, self.kv_lora_rank)
        self.transport.reduce_scatter(summed, weighed)
        merged = self._take("merged", num_tokens, self.local_heads, self.kv_lora_rank)
        return merged.copy_(summed.transpose(0, 1))
