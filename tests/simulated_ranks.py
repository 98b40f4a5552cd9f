"""One process plays every rank of a DCP group: state and collectives without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class ReplayTransport:
    """all_gather for one rank of a group whose other ranks' blocks are known beforehand."""

    def __init__(self, rank: int, blocks: list[torch.Tensor]) -> None:
        self.rank, self.size, self._blocks = rank, len(blocks), blocks

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        own = self._blocks[self.rank].view(torch.uint8)  # bytes: poison is NaN
        assert torch.equal(inp.view(torch.uint8), own), "this rank sends something else"
        assert {block.shape for block in self._blocks} == {inp.shape}, "ranks disagree in size"
        out.copy_(torch.cat(self._blocks))


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
        out.fill_(float("nan"))


def gather_on_all_ranks(dcp_size: int, call: Callable[[int, Any], Any]) -> list[Any]:
    """Results of call(rank, transport), one all_gather each, on every rank of a group."""
    recorders = [_Recorder(rank, dcp_size) for rank in range(dcp_size)]
    for recorder in recorders:
        with as_rank(recorder.rank, dcp_size, recorder):
            call(recorder.rank, recorder)
    assert [len(recorder.sent) for recorder in recorders] == [1] * dcp_size
    blocks = [recorder.sent[0] for recorder in recorders]
    results = []
    for rank in range(dcp_size):
        transport = ReplayTransport(rank, blocks)
        with as_rank(rank, dcp_size, transport):
            results.append(call(rank, transport))
    return results
