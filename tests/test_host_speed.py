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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_launch_takes_microseconds():
    """The shortest of many runs is about the same again."""
    first, second = (host_speed.launch_us(torch.device("cuda")) for _ in range(2))
    assert 1 < first < 100
    assert second == pytest.approx(first, rel=0.3)
