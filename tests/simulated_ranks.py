"""One process plays every rank of a DCP group: state and collectives without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class ReplayTransport:
    """all_gather for one rank of a group whose other ranks' blocks are known beforehand.

    Args:
        rank: this rank.
        rounds: for every all_gather in order, the blocks of all ranks.
    """

    def __init__(self, rank: int, rounds: list[list[torch.Tensor]]) -> None:
        self.rank, self.size, self._rounds = rank, len(rounds[0]), iter(rounds)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        blocks = next(self._rounds)
        own = blocks[self.rank].view(torch.uint8)  # bytes: poison is NaN
        assert torch.equal(inp.view(torch.uint8), own), "this rank sends something else"
        assert {block.shape for block in blocks} == {inp.shape}, "ranks disagree in size"
        for part, block in zip(out.view(self.size, -1), blocks, strict=True):
            part.copy_(block.view(-1))  # no temporary: a test counts allocations


@contextmanager
def as_rank(dcp_rank: int, dcp_size: int, transport: Any = None) -> Iterator[None]:
    """Code inside runs as that rank of a DCP group."""
    from sglang_dcp import state

    comm: Any = SimpleNamespace(
        transport=transport, destroy=lambda: None, set_wait_limit=lambda seconds: None
    )
    coordinator = SimpleNamespace(destroy=lambda: None)
    ranks = tuple(range(dcp_size))
    state.set_state(state.DcpState(dcp_size, dcp_rank, ranks, coordinator, comm))
    try:
        yield
    finally:
        state.clear_state()


class _Recorder:
    """Notes what a rank sends; what comes back is garbage."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: list[torch.Tensor] = []

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        assert out.numel() == self.size * inp.numel()
        self.sent.append(inp.clone())
        out.fill_(255)  # bytes of NaN


def gather_on_all_ranks(dcp_size: int, call: Callable[[int, Any], Any]) -> list[Any]:
    """Results of call(rank, transport), which may gather several times, on every rank."""
    recorders = [_Recorder(rank, dcp_size) for rank in range(dcp_size)]
    for recorder in recorders:
        with as_rank(recorder.rank, dcp_size, recorder):
            call(recorder.rank, recorder)
    counts = {len(recorder.sent) for recorder in recorders}
    assert len(counts) == 1, f"ranks made different numbers of collectives: {counts}"
    assert counts != {0}
    rounds = [list(blocks) for blocks in zip(*(r.sent for r in recorders), strict=True)]
    results = []
    for rank in range(dcp_size):
        transport = ReplayTransport(rank, rounds)
        with as_rank(rank, dcp_size, transport):
            results.append(call(rank, transport))
        assert next(transport._rounds, None) is None
    return results
