"""One process plays every rank of a DCP group: state and collectives without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class ReplayTransport:
    """all_gather for one rank of a group whose other ranks' blocks are known beforehand."""

    def __init__(self, rank: int, blocks: list[torch.Tensor]) -> None:
        self.rank, self.size, self._blocks = rank, len(blocks), blocks

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        assert torch.equal(inp, self._blocks[self.rank]), "this rank sends something else"
        assert {block.shape for block in self._blocks} == {inp.shape}, "ranks disagree in size"
        out.copy_(torch.cat(self._blocks))


@contextmanager
def as_rank(dcp_rank: int, dcp_size: int, transport: Any = None) -> Iterator[None]:
    """Code inside runs as that rank of a DCP group."""
    from sglang_dcp import state

    comm: Any = SimpleNamespace(transport=transport, destroy=lambda: None)
    coordinator = SimpleNamespace(destroy=lambda: None)
    ranks = tuple(range(dcp_size))
    state.set_state(state.DcpState(dcp_size, dcp_rank, ranks, coordinator, comm))
    try:
        yield
    finally:
        state.clear_state()
