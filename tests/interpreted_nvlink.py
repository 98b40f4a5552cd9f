"""The `nvlink` communicator under Triton's interpreter: real kernels, real memory, real waits.

Ranks are processes over shared memory where they must meet (`shared_memory`), and a list in one
process where only addresses, epochs and halves matter (`virtual_nvlink.make_ranks`). On a GPU:
tests/gpu/test_nvlink_virtual.py.
"""

import pytest
import torch
import torch.distributed as dist
from virtual_nvlink import max_line_bytes, start_at

from sglang_dcp.comm.symmetric import virtual_rank
from sglang_dcp.kernels import dispatch

CPU = torch.device("cpu")
DIM, ROPE, MAX_TOKENS = 32, 16, 5
WRAP = 2**31 - 3

both_kinds = pytest.mark.parametrize("lines", [False, True], ids=["flags", "lines"])
interpreted = pytest.mark.skipif(
    not dispatch.INTERPRETED, reason="kernels are compiled in this process"
)


def dims(num_heads, dtype=torch.float32, dim=DIM, max_tokens=MAX_TOKENS, lines=False):
    """Of an nvlink communicator; other communicators take `shared_dims`."""
    return shared_dims(num_heads, dtype, dim, max_tokens) | {
        "max_line_bytes": max_line_bytes(lines)
    }


def shared_dims(num_heads, dtype=torch.float32, dim=DIM, max_tokens=MAX_TOKENS):
    return {
        "num_heads": num_heads,
        "kv_lora_rank": dim,
        "qk_rope_head_dim": ROPE,
        "max_tokens": max_tokens,
        "dtype": dtype,
    }


def shared_memory(folder, rank, size):
    """A provider over files that all ranks map."""

    def allocate(num_bytes):
        mapped = [
            torch.from_file(f"{folder}/{r}", shared=True, size=num_bytes, dtype=torch.uint8)
            for r in range(size)
        ]
        dist.barrier()
        return virtual_rank(mapped, rank, num_sms=1)

    return allocate


def run_in_turn(comms, epoch, step):
    """One launch of all ranks without waits: everyone pushes, then again, and now merges.

    The second round stores the same data once more, so its results are those of a launch in which
    every push precedes every merge.
    """
    for comm in comms:
        start_at(comm, epoch - 1, flag_epoch=epoch)
    for comm in comms:
        step(comm)
    for comm in comms:
        start_at(comm, epoch - 1, flag_epoch=epoch)
    return [step(comm).clone() for comm in comms]
