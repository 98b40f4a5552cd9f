"""pass-KV: read whole prefixes out of a striped pool (arXiv 2411.01783, seed 2).

A plan says which rows of this rank go out and where the gathered rows belong; it is made once per
batch from lengths that all ranks know, without a host sync, and used by every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from sglang_dcp.comm.transport import Transport
from sglang_dcp.layout import first_owned, local_len


@dataclass(frozen=True)
class GatherPlan:
    """Which rows a rank sends and where gathered rows go.

    Attributes:
        send_rows: [N_max] int64, physical rows of this rank in sending order; ranks that own
            fewer tokens than the fullest one send row 0 for the rest.
        source: [T] int64, for every token of the result its row among the gathered [c * N_max].
        dcp_size: number of ranks, c.
    """

    send_rows: torch.Tensor
    source: torch.Tensor
    dcp_size: int

    def gather(
        self, rows: torch.Tensor, transport: Transport, kv_lora_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather from `rows` [C + P, 576] of every rank; returns nope [T, 512] and rope [T, 64]."""
        send = rows.index_select(0, self.send_rows)
        gathered = send.new_empty((self.dcp_size * send.shape[0], send.shape[1]))
        transport.all_gather(gathered, send)
        nope, rope = gathered[:, :kv_lora_rank], gathered[:, kv_lora_rank:]
        return nope.index_select(0, self.source), rope.index_select(0, self.source)


def make_gather_plan(
    slots: torch.Tensor,
    starts: Sequence[int],
    lens: Sequence[int],
    dcp_rank: int,
    dcp_size: int,
) -> GatherPlan:
    """Plan the gather of positions [starts[b], starts[b] + lens[b]) of every request b.

    Args:
        slots: [T] virtual slots of those positions, requests one after another; T = sum(lens).
        starts: first position of each request, host integers, any alignment.
        lens: number of positions of each request, host integers; may be 0.
        dcp_rank, dcp_size: this rank and c.

    Relies on slot(p) % c == p % c, which widened pages give; ranks may differ in slots but not in
    lengths. Nothing is read back from the device.
    """
    assert slots.shape[0] == sum(lens), (slots.shape, lens)
    ranks = range(dcp_size)
    counts = [
        [local_len(n, r, dcp_size, s) for s, n in zip(starts, lens, strict=True)] for r in ranks
    ]
    num_max = max(sum(row) for row in counts)
    # Row of the first token that rank r has of request b, among all that r sends; minus its
    # position over c, so that the row of position p is base[r, b] + p // c for every owner r.
    base = [
        [
            n - first_owned(s, r, dcp_size) // dcp_size
            for n, s in zip(accumulate(row, initial=0), starts, strict=False)
        ]
        for r, row in enumerate(counts)
    ]
    host = torch.tensor([list(lens), list(starts), *base], dtype=torch.int64)
    table = host.to(slots.device, non_blocking=True)
    request = torch.repeat_interleave(table[0], output_size=slots.shape[0])
    offset = table[0].cumsum(0) - table[0]
    position = (
        torch.arange(slots.shape[0], device=slots.device) - offset[request] + table[1][request]
    )
    owner = position % dcp_size
    row = table[2:][owner, request] + position // dcp_size
    send_rows = slots.new_zeros(num_max + 1, dtype=torch.int64)  # the last entry takes the others'
    mine = torch.where(owner == dcp_rank, row, num_max)
    send_rows.scatter_(0, mine, torch.where(owner == dcp_rank, slots.long() // dcp_size, 0))
    return GatherPlan(send_rows[:num_max], owner * num_max + row, dcp_size)
