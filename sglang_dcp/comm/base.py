"""The communicator interface: stages 4, 6 and 7 of the decode step.

Legend: N = dcp_size ranks, B tokens, H heads of the DCP group, Hl = H/N heads of one rank,
D = kv_lora_rank (512), R = qk_rope_head_dim (64).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch

from sglang_dcp.comm.buffers import Scratch
from sglang_dcp.comm.transport import Transport
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.kernels.pack_q import pack_q


@dataclass(frozen=True)
class GroupInfo:
    """What a backend may ask about the DCP group before it is built; equal on all its ranks.

    Attributes:
        size: ranks of the group.
        device_type: "cuda" or "cpu".
        num_nodes: hosts that the group spans.
        peer_access: every GPU of the group can map every other one's memory and do atomics there
            (`symmetric.probe_peers`).
        peer_reason: if not, what is missing.
    """

    size: int
    device_type: str
    num_nodes: int = 1
    peer_access: bool = False
    peer_reason: str = ""


#: Limit of a kernel's wait for a peer once the server is ready (`Communicator.set_wait_limit`).
SERVING_WAIT_S = 30.0


class Communicator(ABC):
    """Moves queries and partial outputs between the ranks of one DCP group.

    Buffers belong to the communicator, are allocated here once for max_tokens and never move, so
    every method may run under CUDA-graph capture for B <= max_tokens. A larger eager batch runs
    on temporaries. All ranks must make the same calls with the same B.

    Results live in those buffers: q_all until the next `gather_q`, merged until the next
    `exchange_merge`. One instance serves all layers: a layer's consumers (attention, the w_vc
    product) are enqueued before the next layer's call, on the same stream, so the overwrite comes
    after the last read. Callers that keep a result longer, or read it on another stream, copy it.

    Args:
        transport: collectives of the group.
        num_heads: H, a multiple of N.
        kv_lora_rank: D.
        qk_rope_head_dim: R.
        max_tokens: largest B served from static buffers.
        dtype: of queries and partial outputs.
        device: of everything.
    """

    name: ClassVar[str] = ""
    # `auto` takes the available backend with the highest one
    priority: ClassVar[int] = 0

    def __init__(
        self,
        transport: Transport,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        assert num_heads % transport.size == 0, f"{num_heads} heads, {transport.size} ranks"
        self.transport = transport
        self.rank = transport.rank
        self.dcp_size = transport.size
        self.num_heads = num_heads
        self.local_heads = num_heads // transport.size
        self.kv_lora_rank = kv_lora_rank
        self.q_dim = kv_lora_rank + qk_rope_head_dim
        self.max_tokens = max_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        self._buffers: dict[str, Scratch] = {}
        self._add_q_buffers()
        self._add_buffer("merged", max_tokens * self.local_heads * kv_lora_rank, dtype)

    @classmethod
    def is_available(cls, group_info: GroupInfo) -> tuple[bool, str]:
        """Whether this backend can serve the group, and why (not), as part of a log line."""
        return True, "works on every group"

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers of this rank."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def gather_q(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """Stage 4: the absorbed queries of every head of the group.

        Args:
            q_nope: [B, Hl, D], last dim contiguous, other strides free.
            q_pe: [B, Hl, R], the same.

        Returns:
            q_all [B, H, D+R], last dim contiguous, valid until the next `gather_q`. Here strides
            are (D+R, B*(D+R), 1): a view of heads-first storage, which is what an all-gather
            yields without a copy.
        """
        num_tokens = q_nope.shape[0]
        send = self._take("q_send", self.local_heads, num_tokens, self.q_dim)
        q_all = self._take("q_all", self.num_heads, num_tokens, self.q_dim)
        self.transport.all_gather(q_all, pack_q(q_nope, q_pe, send))
        return q_all.transpose(0, 1)

    @abstractmethod
    def exchange_merge(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        lse_base: LseBase,
        local_lens: torch.Tensor,
        merged_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stages 6 and 7: send heads home and merge the stripes there, exactly.

        Args:
            o: [B, H, D] of the communicator's dtype, this stripe's output for all heads; last dim
                contiguous, other strides free.
            lse: [B, H] float32 in base lse_base, any strides.
            lse_base: "e" or "2".
            local_lens: [N, B] int32, unclamped local lengths of every rank, the same on all
                ranks; rows may be strided. Where 0, that rank's o and lse are ignored whatever
                they hold.
            merged_lse: [B, Hl] float32, contiguous, the caller's; written if given: LSE of the
                own heads over the whole context, in base lse_base, -inf where every stripe is
                empty. Prefill merges further with it; decode leaves it out and pays nothing.

        Returns:
            merged [B, Hl, D], contiguous, own heads over the whole context; 0 where every stripe
            is empty. Valid until the next `exchange_merge`.
        """

    def warm_up(self) -> None:
        """Run every collective once at full size: NCCL connects, kernels compile, memory is seen.

        To be called by all ranks, before KV memory is profiled and graphs are captured.
        """
        self.run_once(self.max_tokens)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run_once(self, num_tokens: int) -> None:
        """Gather and exchange num_tokens rows of zeros, with LSEs in either base, kept or not."""
        shape = (num_tokens, self.num_heads, self.kv_lora_rank)
        zeros = torch.zeros(self.q_dim, dtype=self.dtype, device=self.device)
        rows = zeros.expand(num_tokens, self.local_heads, self.q_dim)
        lse = torch.zeros(shape[:2], device=self.device)
        local_lens = torch.ones(self.dcp_size, num_tokens, dtype=torch.int32, device=self.device)
        merged_lse = lse.new_empty((num_tokens, self.local_heads))
        o = zeros[: self.kv_lora_rank].expand(shape)
        lse_bases: tuple[LseBase, ...] = ("e", "2")
        for lse_base, kept in product(lse_bases, (None, merged_lse)):
            self.gather_q(rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :])
            self.exchange_merge(o, lse, lse_base, local_lens, kept)

    def set_wait_limit(self, seconds: float) -> None:  # noqa: B027  a backend may have nothing to do
        """How long kernels of this backend wait for a peer; libraries have their own limits."""

    def failure(self) -> str | None:
        """After a CUDA error: which wait for which peer ended it, if this backend knows."""
        return None

    def destroy(self) -> None:
        """Release the buffers; graphs captured with them must not be replayed afterwards."""
        self._buffers.clear()

    def _add_q_buffers(self) -> None:
        """Buffers of `gather_q`."""
        self._add_buffer("q_send", self.max_tokens * self.local_heads * self.q_dim, self.dtype)
        self._add_buffer("q_all", self.max_tokens * self.num_heads * self.q_dim, self.dtype)

    def _add_buffer(self, name: str, num_elements: int, dtype: torch.dtype) -> None:
        self._buffers[name] = Scratch(torch.empty(num_elements, dtype=dtype, device=self.device))

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        assert self._buffers, f"{type(self).__name__} was destroyed"
        return self._buffers[name].take(*shape)
