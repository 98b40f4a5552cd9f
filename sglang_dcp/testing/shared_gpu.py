"""Serve with all ranks on GPU 0: `python -m sglang_dcp.testing.shared_gpu MODULE ARGS...`.

For correctness checks on a machine with one GPU. NCCL refuses two ranks of one host on one GPU, so
each rank calls itself a host of its own and they talk over loopback sockets: slow, but the same
kernels, collectives and captured graphs. Never a place to measure time.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator

SHARED_GPU_ENV = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    # Ranks load at different times, so the free memory that they see differs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


@contextlib.contextmanager
def _always_gpu_zero(gpu_id: int) -> Iterator[int]:
    os.environ["NCCL_HOSTID"] = f"rank{gpu_id}"  # inherited by the rank that starts now
    yield 0


def main() -> None:
    """Become the server, told on the command line."""
    from sglang.srt.entrypoints import engine

    os.environ.update(SHARED_GPU_ENV)
    engine.maybe_reindex_device_id = _always_gpu_zero  # type: ignore[assignment]
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments, "--disable-custom-all-reduce"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
