"""Time of stages 6 + 7, sampled: what one exchange costs while a server runs."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from sglang_dcp.comm.base import Communicator


class ExchangeTimer:
    """Times every `every`-th eager `exchange_merge` of one communicator and waits for nothing.

    On a GPU a sample is two events around the call, read once the stream has passed them. Calls
    under graph capture are never timed, so replayed decode steps give no samples. On a CPU it is
    the wall time of the call. Both include waiting for the slowest rank.

    Args:
        comm: the communicator; its `exchange_merge` is replaced on the instance.
        every: sampling period in calls. A prime takes every layer of a model in turn.
        max_pending: samples kept until `take`; calls beyond are not timed.
    """

    def __init__(self, comm: Communicator, every: int = 101, max_pending: int = 256) -> None:
        assert every > 0, every
        self._exchange_merge = comm.exchange_merge
        self._on_gpu = comm.device.type == "cuda"
        self._every = every
        self._num_calls = 0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._samples_us: list[float] = []
        self._max_pending = max_pending
        comm.exchange_merge = self._call  # type: ignore[method-assign]

    def take(self) -> list[float]:
        """Microseconds of the samples that have finished since the last call; never blocks."""
        while self._events and self._events[0][1].query():
            begin, end = self._events.popleft()
            self._samples_us.append(begin.elapsed_time(end) * 1e3)
        samples_us, self._samples_us = self._samples_us, []
        return samples_us

    def _call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._num_calls += 1
        if self._num_calls % self._every or not self._may_time():
            return self._exchange_merge(*args, **kwargs)
        return self._time_on_gpu(args, kwargs) if self._on_gpu else self._time_on_cpu(args, kwargs)

    def _may_time(self) -> bool:
        if len(self._events) + len(self._samples_us) >= self._max_pending:
            return False
        return not (self._on_gpu and torch.cuda.is_current_stream_capturing())

    def _time_on_gpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        merged = self._exchange_merge(*args, **kwargs)
        end.record()
        self._events.append((begin, end))
        return merged

    def _time_on_cpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        began = time.perf_counter()
        merged = self._exchange_merge(*args, **kwargs)
        self._samples_us.append((time.perf_counter() - began) * 1e6)
        return merged
