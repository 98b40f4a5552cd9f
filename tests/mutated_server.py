"""`python -m mutated_server ARGS...`: the DCP server with deliberate bugs, to test the tests.

The file $MUTATION_FILE names the bug of the moment; it is read at every call, so that one server
shows them all. Spawned ranks run this module too (multiprocessing imports a `-m` main again).
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from sglang_dcp import state

MUTATIONS = ("average", "wrong base", "dropped row", "no owner filter", "multiply")


def current() -> str:
    return Path(os.environ["MUTATION_FILE"]).read_text()


def _multiply(out, lse, local_lens, merged):
    """The merge with a product by 0 where a select belongs."""
    weights = torch.exp(lse - lse.amax(0)) * (local_lens > 0)[..., None]
    total = (weights[..., None] * out).sum(0)
    return merged.copy_(total / weights.sum(0)[..., None])


def mutate_merge() -> None:
    from sglang_dcp.comm import a2a

    merge_partials = a2a.merge_partials

    def merge(out, lse, local_lens, lse_base, merged, merged_lse):
        bug = current()
        if bug == "multiply":
            return _multiply(out, lse, local_lens, merged)
        if bug == "average":
            lse = torch.zeros_like(lse)
        if bug == "wrong base":
            lse_base = {"e": "2", "2": "e"}[lse_base]
        return merge_partials(out, lse, local_lens, lse_base, merged, merged_lse)

    a2a.merge_partials = merge


def mutate_pool() -> None:
    from sglang_dcp import pool

    write = pool.set_mla_kv_buffer_dcp_sharded

    def write_rows(kv, loc, nope, rope, dcp_rank, dcp_size):
        if current() == "no owner filter":
            loc = loc // dcp_size * dcp_size + dcp_rank
        write(kv, loc, nope, rope, dcp_rank, dcp_size)

    pool.set_mla_kv_buffer_dcp_sharded = write_rows


def mutate_backend() -> None:
    from sglang_dcp.attention.torch_mla import DcpTorchMLABackend

    rows_of = DcpTorchMLABackend._rows

    def rows(self, slots):
        found = rows_of(self, slots)
        dcp = state.get_state()
        drops = current() == "dropped row" and dcp.dcp_rank == dcp.dcp_size - 1 and len(found) > 1
        return found[:-1] if drops else found

    DcpTorchMLABackend._rows = rows


def set_state_and_mutate(value: Any) -> None:
    """The first moment at which a rank has imported everything that is to be broken."""
    original_set_state(value)
    mutate_merge()
    mutate_pool()
    mutate_backend()


original_set_state = state.set_state
if __name__ in ("__main__", "__mp_main__"):  # the launcher and its ranks, not who imports names
    state.set_state = set_state_and_mutate

if __name__ == "__main__":
    from sglang_dcp.launch_server import main

    sys.exit(main())
