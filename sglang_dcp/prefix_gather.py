"""pass-KV: read whole prefixes out of a striped pool (arXiv 2411.01783, seed 2), chunk by chunk.

Legend: c = dcp_size, W = 576 (nope 512 | rope 64), group = the c positions [g * c, (g + 1) * c) of
a request, one on each rank.

A widened page holds consecutive positions in consecutive slots and starts at a multiple of c, so
all slots of a group have the same slot // c: every rank finds its token of a group in the same
physical row. A chunk therefore starts at groups, every rank sends one row for each group, and no
rank needs to know what another one owns. In a group that the prefix cuts short, the ranks behind
its end send whatever their row holds, and it is dropped by a select.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sglang_dcp.comm.transport import Transport
from sglang_dcp.kernels.row_order import order_rows
from sglang_dcp.kernels.row_pick import pick_rows


@dataclass(frozen=True)
class PrefixChunk:
    """Positions [starts[b], starts[b] + lens[b]) of every request b; starts are multiples of c."""

    starts: tuple[int, ...]
    lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.lens)

    def num_groups(self, dcp_size: int) -> int:
        """Groups of all requests, which is the number of rows that every rank sends."""
        return sum(-(-length // dcp_size) for length in self.lens)


def pack_chunks(prefix_lens: Sequence[int], max_tokens: int, dcp_size: int) -> list[PrefixChunk]:
    """Cut prefixes into chunks that hold at most `max_tokens` tokens in whole groups.

    Requests are taken one after another and chunks filled up, however many requests there are and
    however unequal their prefixes; upstream gives every request the same share of every chunk.

    Args:
        prefix_lens: [B] host integers, at least 0.
        max_tokens: at least c.
        dcp_size: c.

    Returns:
        Chunks in order; the tokens of all chunks, one after another, are those of all prefixes.
    """
    assert max_tokens >= dcp_size, (max_tokens, dcp_size)
    full = max_tokens // dcp_size * dcp_size
    chunks: list[PrefixChunk] = []
    starts, lens, room = [0] * len(prefix_lens), [0] * len(prefix_lens), full
    for request, prefix_len in enumerate(prefix_lens):
        position = 0
        while position < prefix_len:
            taken = min(prefix_len - position, room)
            starts[request], lens[request] = position, taken
            position, room = position + taken, room - -(-taken // dcp_size) * dcp_size
            if room == 0:
                chunks.append(PrefixChunk(tuple(starts), tuple(lens)))
                starts, lens, room = [0] * len(prefix_lens), [0] * len(prefix_lens), full
    if any(lens):
        chunks.append(PrefixChunk(tuple(starts), tuple(lens)))
    return chunks


@dataclass(frozen=True)
class GatherPlan:
    """Which rows a rank sends for one chunk and where the gathered rows go.

    Attributes:
        send_rows: [N] integers, physical rows of this rank, one for each group.
        source: [T] int64, for every token its row among the gathered [c * N]; None if all groups
            are whole: the tokens are then the gathered rows, groups first.
        dcp_size: c.
    """

    send_rows: torch.Tensor
    source: torch.Tensor | None
    dcp_size: int

    def gather(
        self,
        rows: torch.Tensor,
        transport: Transport,
        send: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gather the chunk from `rows` [C + P, W] of every rank, as bytes whatever the dtype.

        Args:
            rows: this rank's rows.
            transport: collectives of the group.
            send: [N, W] of rows' dtype, scratch; allocated if None.
            out: [c, N, W] of rows' dtype for the result; allocated if None.

        Returns:
            out, in rank order.
        """
        shape = self.send_rows.shape[0], rows.shape[1]
        send = rows.new_empty(shape) if send is None else send
        out = rows.new_empty((self.dcp_size, *shape)) if out is None else out
        pick_rows(rows, self.send_rows, send)
        transport.all_gather(out.view(torch.uint8), send.view(torch.uint8))
        return out

    def in_order(
        self, gathered: torch.Tensor, kv_lora_rank: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of `gathered` [c, N, W] in token order: nope [T, 512] and rope [T, 64]."""
        dcp_size, num_groups, width = gathered.shape
        num_tokens = dcp_size * num_groups if self.source is None else self.source.shape[0]
        nope = gathered.new_empty((num_tokens, kv_lora_rank), dtype=dtype)
        rope = gathered.new_empty((num_tokens, width - kv_lora_rank), dtype=dtype)
        order_rows(gathered, self.source, nope, rope)
        return nope, rope


def make_gather_plans(
    slots: torch.Tensor, chunks: Sequence[PrefixChunk], dcp_size: int
) -> list[GatherPlan]:
    """Plan the gathers of `chunks`, once per batch; nothing is read back from the device.

    Args:
        slots: [T] virtual slots of all tokens of all chunks, in their order.
        chunks: equal on all ranks; slots may differ.
        dcp_size: c.
    """
    assert slots.shape[0] == sum(chunk.num_tokens for chunk in chunks), (slots.shape, chunks)
    assert not any(start % dcp_size for chunk in chunks for start in chunk.starts), chunks
    parts = slots.split([chunk.num_tokens for chunk in chunks])
    return [_plan(part, chunk, dcp_size) for part, chunk in zip(parts, chunks, strict=True)]


def _plan(slots: torch.Tensor, chunk: PrefixChunk, dcp_size: int) -> GatherPlan:
    """Plan one chunk; only the ends of prefixes cut groups, so few chunks need a source."""
    pieces = [length for length in chunk.lens if length]
    if not any(length % dcp_size for length in pieces):
        return GatherPlan(slots[::dcp_size] // dcp_size, None, dcp_size)
    index, num_groups = _padded_index(slots, pieces, dcp_size), chunk.num_groups(dcp_size)
    padded = slots.new_zeros(num_groups * dcp_size).index_copy_(0, index, slots)
    source = index % dcp_size * num_groups + index // dcp_size
    return GatherPlan(padded[::dcp_size] // dcp_size, source, dcp_size)


def _padded_index(slots: torch.Tensor, pieces: Sequence[int], dcp_size: int) -> torch.Tensor:
    """[T] int64, the index of every token where each piece is padded to whole groups."""
    padding = list(accumulate((-length % dcp_size for length in pieces), initial=0))[:-1]
    host = torch.tensor([list(pieces), padding], dtype=torch.int64)
    lens, shift = host.to(slots.device, non_blocking=True)
    num_tokens = slots.shape[0]
    shifts = torch.repeat_interleave(shift, lens, output_size=num_tokens)
    return torch.arange(num_tokens, device=slots.device) + shifts
