"""The speed of the host that --dcp-prefill auto reckons with."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from sglang_dcp import envs, host_speed
from sglang_dcp.prefill_policy import PrefillRates


def ratio_on(rank, size):
    """Of ranks whose launches take 1, 3.04 and 2 times the reference's."""
    times = [1, 3.04, 2]
    host_speed.launch_us = lambda device: times[rank] * host_speed.REFERENCE_LAUNCH_US
    return host_speed.slowest_host_ratio(torch.device("cpu"), torch.distributed.group.WORLD)


def test_all_ranks_reckon_with_the_slowest_host():
    assert run_ranks(3, ratio_on) == [pytest.approx(3.0)] * 3


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


@pytest.mark.parametrize("named", [{}, {"hbm_bytes_per_s": 3e12}, {"pass_q_layer_us": 7.0}])
@pytest.mark.parametrize("mode", ["auto", "pass-q"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_file_goes_over_what_is_measured(plugin, monkeypatch, tmp_path, named, mode, device):
    """Only `auto` on GPUs measures; the group is the world, where all wait for each other."""
    from sglang_dcp.hooks import parallel_state as hooks

    world, asked = SimpleNamespace(cpu_group="all ranks"), []
    monkeypatch.setattr(hooks.parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(hooks, "slowest_host_ratio", lambda *args: asked.append(args) or 2.0)
    if named:
        (tmp_path / "rates.json").write_text(json.dumps(named))
        monkeypatch.setenv(envs.PREFILL_CALIBRATION, str(tmp_path / "rates.json"))
    args = SimpleNamespace(dcp_prefill=mode)
    rates = hooks._prefill_rates(args, torch.device(device))
    measures = mode == "auto" and device == "cuda"
    assert asked == ([(torch.device("cuda"), "all ranks")] if measures else [])
    want = PrefillRates().on_host(2.0) if measures else PrefillRates()
    assert rates == dataclasses.replace(want, **named)
    assert ("times 2.0" in rates.source) == measures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_launch_takes_microseconds():
    assert 1 < host_speed.launch_us(torch.device("cuda")) < 100
