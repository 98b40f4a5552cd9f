"""The speed of the host that --dcp-prefill auto reckons with."""

import pytest
import torch
from ranks import run_ranks

from sglang_dcp import host_speed


def ratio_on(rank, size):
    """Of ranks whose launches take 10, 30 and 20 times the reference's."""
    times = [10, 30, 20]
    host_speed.launch_us = lambda device: times[rank] * host_speed.REFERENCE_LAUNCH_US
    return host_speed.slowest_host_ratio(torch.device("cpu"), torch.distributed.group.WORLD)


def test_all_ranks_reckon_with_the_slowest_host():
    assert run_ranks(3, ratio_on) == [pytest.approx(30.0)] * 3


def test_the_shortest_run_counts(monkeypatch):
    """Others on the host make runs longer, never shorter; each run ends before the next begins."""
    clock, done, added = [0.0], [], []
    runs = iter([5e-3, 2e-3, 9e-3] * 40)
    monkeypatch.setattr(
        host_speed.torch.cuda, "synchronize", lambda device: done.append(len(added))
    )

    def add(x, y):
        added.append(x)
        if len(added) % host_speed._LAUNCHES == 0:
            clock[0] += next(runs)

    monkeypatch.setattr(host_speed.torch, "add", add)
    monkeypatch.setattr(host_speed.time, "perf_counter", lambda: clock[0])
    assert host_speed.launch_us(torch.device("cpu")) == pytest.approx(2e3 / host_speed._LAUNCHES)
    assert done == [n * host_speed._LAUNCHES for n in range(host_speed._RUNS + 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_launch_takes_microseconds():
    """The shortest of many runs is about the same again."""
    first, second = (host_speed.launch_us(torch.device("cuda")) for _ in range(2))
    assert 1 < first < 100
    assert second == pytest.approx(first, rel=0.3)
