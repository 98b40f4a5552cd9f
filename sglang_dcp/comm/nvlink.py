"""`nvlink`: one kernel gathers the queries, one kernel exchanges and merges. No NCCL, no packing.

Ranks store into each other's symmetric memory; the protocol is in `kernels.peer_signal`. Either
kernel has a twin for small batches, whose data carry their own flags (`kernels.line_exchange`, and
`kernels.line_gather_q`, off by default): one trip over the link instead of two, with 9/8 of the
bytes. Buffers are sized once for the largest decode batch and never move, so graphs of all batch
sizes share them with eager calls. Larger eager batches (graphs off) go over `a2a`; prefill comes in
slices that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglang_dcp.comm.a2a import A2ACommunicator
from sglang_dcp.comm.base import Communicator, GroupInfo
from sglang_dcp.comm.buffers import Scratch
from sglang_dcp.comm.registry import register_comm_backend
from sglang_dcp.comm.symmetric import SymmetricBuffer, rendezvous
from sglang_dcp.comm.transport import Transport
from sglang_dcp.kernels.exchange_lines import LINE_BYTES, lines_per_row
from sglang_dcp.kernels.line_exchange import line_exchange
from sglang_dcp.kernels.line_gather_q import line_gather_q, lines_of_rows
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.kernels.nvlink_exchange import MAX_SLICES, nvlink_exchange
from sglang_dcp.kernels.nvlink_gather_q import nvlink_gather_q
from sglang_dcp.kernels.peer_signal import FLAG_WORDS, REPORT_WORDS, PeerState, resident_programs
from sglang_dcp.kernels.tilings import (
    NUM_WARPS,
    VEC_BYTES,
    exchange_tiling,
    gather_tiling,
    line_tiling,
)

MAX_LANES = 512
# While ranks compile, load and capture they may be minutes apart; in serving they are not.
START_UP_WAIT_S = 600.0
_REGION_ALIGN = 256

Allocate = Callable[[int], SymmetricBuffer]


class LineBytes(NamedTuple):
    """The largest calls, in bytes that a rank receives, that go by lines; 0 for none."""

    exchange: int
    gather: int


#: Exchanges: 32 tokens for H=96, c=2, where lines won at 16 and lost at 64
#: (scripts/results/bench_exchange_c2_kernels.json). Gathers: none until both kernels are timed
#: (`bench_exchange.py --backends lines flags`).
MAX_LINE_BYTES = LineBytes(exchange=3 << 19, gather=0)


@register_comm_backend("nvlink")
class NvlinkCommunicator(Communicator):
    """Peer stores within one node; see `Communicator` for the contract.

    All calls must be on one stream, and every `gather_q` whose result is read must be followed by
    an `exchange_merge` on that stream. (`kernels.line_gather_q` says who needs it: not the gathers
    by lines, but a caller does not know which these are.)

    Args:
        transport: names the group, and carries batches above max_tokens.
        allocate: from bytes to this rank's symmetric buffer; by default a rendezvous of the
            transport's process group.
        max_line_bytes: which calls go by lines. The bits are the same.
        dims: as for `Communicator`.

    Raises:
        RuntimeError: a rank cannot map the buffers; raised on all ranks.
    """

    priority = 20

    def __init__(
        self,
        transport: Transport,
        *,
        allocate: Allocate | None = None,
        max_line_bytes: LineBytes = MAX_LINE_BYTES,
        **dims: Any,
    ) -> None:
        super().__init__(transport, **dims)
        item = self.dtype.itemsize
        row_bytes, q_bytes = self.kv_lora_rank * item, self.q_dim * item
        self.line_tokens = self._tokens_in(max_line_bytes.exchange, row_bytes)
        # lines of queries are made of whole chunks of either part
        in_chunks = row_bytes % VEC_BYTES == q_bytes % VEC_BYTES == 0
        self.line_gather_tokens = self._tokens_in(max_line_bytes.gather * in_chunks, q_bytes)
        self._row_lines = lines_per_row(self.kv_lora_rank, item)
        self._gather_lines = lines_of_rows(self.line_gather_tokens * self.local_heads, q_bytes)
        self._add_buffer("q_all", self.line_gather_tokens * self.num_heads * self.q_dim, self.dtype)
        self._row_capacity = max(4, -(-self.max_tokens * self.local_heads // 4) * 4)
        self._offsets, num_bytes = self._regions()
        self._symmetric = (allocate or self._rendezvous)(num_bytes)
        assert self._symmetric.rank == self.rank, (self._symmetric.rank, self.rank)
        assert self._symmetric.size == self.dcp_size, (self._symmetric.size, self.dcp_size)
        self.max_programs = min(MAX_LANES, resident_programs(self._symmetric.num_sms, NUM_WARPS))
        self._limit_ns = torch.empty(1, dtype=torch.int64, device=self.device)
        self.set_wait_limit(START_UP_WAIT_S)
        self._tables = {name: self._symmetric.table(at) for name, at in self._offsets.items()}
        region = self._symmetric.local[self._offsets["q"] :]
        region = region[: self.max_tokens * self.num_heads * q_bytes]
        self._q_region = Scratch(region.view(self.dtype))
        self._exchange_state = self._peer_state("exchange_flags")
        self._line_state = self._peer_state("exchange_lines")
        self._gather_state = self._peer_state("gather_flags")
        self._line_gather_state = self._peer_state("gather_lines")
        # all its buffers are temporaries
        self._large = A2ACommunicator(transport, **{**dims, "max_tokens": 0})

    @classmethod
    def is_available(cls, group_info: GroupInfo) -> tuple[bool, str]:
        """One node of CUDA GPUs that `symmetric.probe_peers` found able, on every rank."""
        if group_info.device_type != "cuda":
            return False, f"needs CUDA GPUs, not {group_info.device_type}"
        if group_info.size not in (2, 4, 8):
            return False, f"serves 2, 4 or 8 ranks, not {group_info.size}"
        if group_info.num_nodes != 1:
            return False, f"serves one node, not {group_info.num_nodes}"
        if not group_info.peer_access:
            return False, group_info.peer_reason or "needs peer access between all GPUs"
        return True, "one node with peer access"

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers of this rank, symmetric memory included."""
        symmetric = self._symmetric.local.nbytes if self._buffers else 0
        return super().buffer_bytes + symmetric

    def gather_q(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        """See `Communicator.gather_q`; up to max_tokens, q_all is [B, H, D+R] contiguous."""
        num_tokens = q_nope.shape[0]
        assert self._buffers, "NvlinkCommunicator was destroyed"
        if num_tokens > self.max_tokens:
            return self._large.gather_q(q_nope, q_pe)
        assert q_nope.dtype == self.dtype, (q_nope.dtype, self.dtype)
        num_rows, row_bytes = num_tokens * self.local_heads, self.q_dim * self.dtype.itemsize
        if 0 < num_tokens <= self.line_gather_tokens:
            num_lines = lines_of_rows(num_rows, row_bytes)
            tiling = line_tiling(num_lines, self.dcp_size, self.max_programs)
            q_all = self._take("q_all", num_tokens, self.num_heads, self.q_dim)
            capacity = self._gather_lines
            return line_gather_q(q_nope, q_pe, q_all, capacity, self._line_gather_state, tiling)
        if num_tokens:
            tiling = gather_tiling(num_rows * row_bytes // VEC_BYTES, self.max_programs)
            nvlink_gather_q(q_nope, q_pe, self._tables["q"], self._gather_state, tiling)
        return self._q_region.take(num_tokens, self.num_heads, self.q_dim)

    def exchange_merge(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        lse_base: LseBase,
        local_lens: torch.Tensor,
        merged_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Communicator.exchange_merge`; ranks are summed in order 0..N-1 on every rank."""
        num_tokens = o.shape[0]
        if num_tokens > self.max_tokens:
            return self._large.exchange_merge(o, lse, lse_base, local_lens, merged_lse)
        assert o.dtype == self.dtype, (o.dtype, self.dtype)
        merged = self._take("merged", num_tokens, self.local_heads, self.kv_lora_rank)
        if num_tokens == 0:
            return merged
        num_rows = num_tokens * self.local_heads
        partials = o, lse, lse_base, local_lens, merged
        if num_tokens <= self.line_tokens:
            tiling = line_tiling(num_rows * self._row_lines, self.dcp_size, self.max_programs)
            capacity = self.line_tokens * self.local_heads
            return line_exchange(*partials, capacity, self._line_state, tiling, merged_lse)
        row_bytes = self.kv_lora_rank * self.dtype.itemsize
        tiling = exchange_tiling(num_rows, row_bytes, self.dcp_size, self.max_programs)
        tables = self._tables["o"], self._tables["lse"]
        state = self._exchange_state
        return nvlink_exchange(*partials, *tables, self._row_capacity, state, tiling, merged_lse)

    def warm_up(self) -> None:
        """Compile for every batch size class and connect what larger batches need.

        Starts after a host barrier, with the long wait limit. To be called by all ranks.
        """
        self._symmetric.host_barrier()
        doublings = {1 << i for i in range(self.max_tokens.bit_length())}
        largest = {self.line_tokens, self.line_gather_tokens}
        for num_tokens in sorted((doublings | largest) - {0}):
            self.run_once(num_tokens)
        self._large.run_once(1)
        super().warm_up()

    def set_wait_limit(self, seconds: float) -> None:
        """Bound every later wait of the kernels, those of captured graphs included.

        A wait that runs out records (rank, peer, lane, epoch) for `failure` and ends the CUDA
        context with an error.
        """
        self._limit_ns.fill_(int(seconds * 1e9))

    def failure(self) -> str | None:
        """What the first recorded wait that ran out says, or None; works after the CUDA error."""
        exchanges = ("exchange", self._exchange_state), ("exchange", self._line_state)
        gathers = ("gather", self._gather_state), ("gather", self._line_gather_state)
        for name, state in (*exchanges, *gathers):
            for rank, peer, lane, epoch in state.report.tolist():
                if rank >= 0:
                    return (
                        f"DCP rank {rank} waited for rank {peer} in the {name} kernel (lane {lane},"
                        f" epoch {epoch}) until its limit: rank {peer} died or hangs. See its log."
                    )
        return None

    def destroy(self) -> None:
        """Release all buffers; the mapping goes when torch has synchronized the device."""
        if self._buffers:
            self._large.destroy()
            self._tables.clear()
            del self._symmetric, self._q_region
        super().destroy()

    def _add_q_buffers(self) -> None:
        """None here: queries go from where they lie into symmetric memory."""

    def _tokens_in(self, num_bytes: int, row_bytes: int) -> int:
        """Tokens, up to max_tokens, whose rows a rank receives in num_bytes."""
        token_bytes = (self.dcp_size - 1) * self.local_heads * row_bytes
        return min(self.max_tokens, num_bytes // token_bytes)

    def _regions(self) -> tuple[dict[str, int], int]:
        """Offset of each region of the symmetric buffer, and its size, in bytes."""
        item = self.dtype.itemsize
        slots = 2 * (self.dcp_size - 1)
        rows, flag_bytes = slots * self._row_capacity, MAX_LANES * FLAG_WORDS * 4
        exchange_lines = self.line_tokens * self.local_heads * self._row_lines
        sizes = {
            "o": rows * self.kv_lora_rank * item,
            "lse": rows * 4,
            "exchange_lines": slots * exchange_lines * LINE_BYTES,
            "gather_lines": slots * self._gather_lines * LINE_BYTES,
            "q": self.max_tokens * self.num_heads * self.q_dim * item,
            "exchange_flags": MAX_SLICES * flag_bytes,
            "gather_flags": flag_bytes,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // _REGION_ALIGN) * _REGION_ALIGN
        return offsets, end

    def _rendezvous(self, num_bytes: int) -> SymmetricBuffer:
        group = self.transport.process_group or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialized"
        return rendezvous(num_bytes, self.device, group)

    def _peer_state(self, flags: str) -> PeerState:
        report = torch.full(
            (MAX_LANES, REPORT_WORDS),
            -1,
            dtype=torch.int32,
            pin_memory=self.device.type == "cuda",
        )
        return PeerState(
            rank=self.rank,
            num_ranks=self.dcp_size,
            flags=self._tables[flags],
            counters=torch.zeros(MAX_LANES, dtype=torch.int32, device=self.device),
            limit_ns=self._limit_ns,
            report=report,
        )
