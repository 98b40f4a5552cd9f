"""Run a function on several gloo ranks: spawned processes, a timeout, checked exit codes."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GRACE_S = 1.0  # for the other ranks to report after the first one failed


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 240.0,
    interpret: bool = False,
) -> list[Any]:
    """Call fn(rank, num_ranks, *args) on every rank with gloo as the default process group.

    Ranks meet through a file, so there is no port to race for. interpret: run Triton kernels of
    the ranks under the interpreter; otherwise CPU tensors take the torch references.

    Returns the results in rank order. Raises AssertionError with the ranks' tracebacks if one
    fails, and if they do not end in time (they are killed then).
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(num_ranks, fn, args, folder, interpret)
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
                if any(p.exitcode for p in ranks):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                time.sleep(0.02)
        finally:
            for p in ranks:
                if p.is_alive():
                    p.kill()
                p.join()
        codes = [p.exitcode for p in ranks]
        errors = [f.read_text() for f in sorted(Path(folder).glob("error.*"))]
        assert codes == [0] * num_ranks, f"exit codes {codes}\n" + "\n".join(errors)
        return [torch.load(f"{folder}/result.{r}", weights_only=False) for r in range(num_ranks)]


def _start(
    num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: str, interpret: bool
) -> list[Any]:
    """Spawn the ranks; they inherit TRITON_INTERPRET exactly as asked."""
    context = mp.get_context("spawn")
    saved = os.environ.pop("TRITON_INTERPRET", None)
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        ranks = [
            context.Process(target=_rank_main, args=(r, num_ranks, fn, args, folder))
            for r in range(num_ranks)
        ]
        for p in ranks:
            p.start()
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if saved is not None:
            os.environ["TRITON_INTERPRET"] = saved
    return ranks


def _rank_main(
    rank: int, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: str
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks
        )
        torch.save(fn(rank, num_ranks, *args), f"{folder}/result.{rank}")
        dist.destroy_process_group()
    except BaseException:
        Path(f"{folder}/error.{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
