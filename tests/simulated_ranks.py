"""One process plays every rank of a DCP group: state and collectives without processes."""

from __future__ import annotations

import threading
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


class Turns:
    """Every rank of a group in a thread of its own, one running at a time, up to a collective.

    A rank that sends hands over to the next one and goes on when all have sent; what SGLang and
    this project keep in globals of a process changes with it. So ranks may compute on with what
    they received, which `gather_on_all_ranks` cannot play.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: list[list[Any]] = [[] for _ in range(size)]
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._error: BaseException | None = None

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """Results of call(rank) of every rank."""
        results: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                if self._error is None:
                    results[rank] = call(rank)
            except BaseException as error:
                self._error = self._error or error
            self._turns[(rank + 1) % self.size].release()

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        counts = {len(sent) for sent in self._sent}
        assert len(counts) == 1, f"ranks made different numbers of collectives: {counts}"
        return results

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the tensors that all ranks sent in this round."""
        from sglang.srt.model_executor.forward_context import set_forward_context

        from sglang_dcp import state

        round_ = len(self._sent[rank])
        self._sent[rank].append(tensor.clone())
        mine = state._state, set_forward_context(None)
        state._state = None
        self._turns[(rank + 1) % self.size].release()
        self._turns[rank].acquire()
        state._state, context = mine
        set_forward_context(context)
        if self._error is not None:
            raise RuntimeError("another rank failed") from self._error
        return [sent[round_] for sent in self._sent]


class TurnsTransport:
    """The communicators' collectives over `Turns`."""

    process_group = None

    def __init__(self, turns: Turns, rank: int) -> None:
        self.turns, self.rank, self.size = turns, rank, turns.size

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        blocks = self.turns.exchange(self.rank, inp)
        out.view(-1).copy_(torch.cat([block.view(-1) for block in blocks]))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        blocks = [sent.view(self.size, -1) for sent in self.turns.exchange(self.rank, inp)]
        out.view(self.size, -1).copy_(torch.stack([block[self.rank] for block in blocks]))
