"""How fast this host launches kernels: what short prefills wait for. Imports no SGLang."""

import time

import torch
import torch.distributed as dist

#: `launch_us` of the kind of host on which the host times of `PrefillRates` were measured: 10.2 and
#: 10.5 in two runs (scripts/results/launch_host_one_gpu.json).
REFERENCE_LAUNCH_US = 10.3
_LAUNCHES, _RUNS = 50, 40


def launch_us(device: torch.device) -> float:
    """Host time of one small eager launch on a GPU, in microseconds.

    The shortest of many short runs: other processes of a starting server only ever make it longer.
    """
    x = torch.zeros(64, 512, device=device)
    shortest_s = float("inf")
    for _ in range(_RUNS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            torch.add(x, x)
        shortest_s = min(shortest_s, time.perf_counter() - began)
    torch.cuda.synchronize(device)
    return shortest_s / _LAUNCHES * 1e6


def slowest_host_ratio(device: torch.device, process_group: dist.ProcessGroup) -> float:
    """`launch_us` of the group's slowest rank over the reference; the same on all ranks.

    Rounded to tenths, so that two starts on one machine mostly find the same.

    Args:
        device: this rank's GPU.
        process_group: a host group; all of its ranks call this.
    """
    slowest = torch.tensor(launch_us(device), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=process_group)
    return max(round(slowest.item() / REFERENCE_LAUNCH_US, 1), 0.1)
