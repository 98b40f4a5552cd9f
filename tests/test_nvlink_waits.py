"""Waits of the `nvlink` kernels: stale flags, dead peers, idle lanes, and resident grids."""

import dataclasses

import pytest
import torch
from interpreted_nvlink import CPU, DIM, ROPE, both_kinds, dims, interpreted
from virtual_nvlink import (
    flags,
    line_words,
    make_ranks,
    own_merge,
    raise_flags,
    random_partials,
    random_queries,
    start_at,
    states,
)

from sglang_dcp.comm.nvlink import MAX_LANES
from sglang_dcp.kernels.peer_signal import MAX_REGISTERS, resident_programs
from sglang_dcp.kernels.tilings import exchange_tiling, gather_tiling, line_tiling


@interpreted
@pytest.mark.parametrize("call", ["exchange", "gather"])
@pytest.mark.parametrize("stale", [3, 0, 7, -1, 5 - 2**31])
def test_a_line_with_a_stale_flag_is_not_consumed(stale, call):
    """One line of many has another launch's flag, and the data of this one."""
    sender, receiver = make_ranks(2, CPU, 4, **dims(4, torch.bfloat16, 64, lines=True))
    o, lse, lens = random_partials(2, 5, 4, 64, torch.bfloat16, CPU)
    nope, pe, q_all = random_queries(2, 5, 2, 64, ROPE, torch.bfloat16, CPU)
    run, want, num_lines = {
        "exchange": (
            lambda comm: comm.exchange_merge(o[comm.rank], lse[comm.rank], "e", lens),
            own_merge(1, o, lse, lens, "e"),
            5 * 2 * 2,
        ),
        "gather": (lambda comm: comm.gather_q(nope[comm.rank], pe[comm.rank]), q_all, 15),
    }[call]
    start_at(receiver, 4)
    start_at(sender, 4, flag_epoch=5)  # does not wait
    run(sender)
    arrived = line_words(receiver, call, 5)[0, :, -1]
    assert arrived.eq(5).sum() == num_lines
    arrived[13] = stale
    receiver.set_wait_limit(0.02)
    with pytest.raises(Exception, match="did not arrive in time"):
        run(receiver)
    assert receiver.failure().startswith(f"DCP rank 1 waited for rank 0 in the {call} kernel")
    # it was this flag alone
    for state in states(receiver):
        state.counters.fill_(4)
    arrived[13] = 5
    assert torch.equal(run(receiver), want)


@interpreted
@both_kinds
@pytest.mark.parametrize("call", ["exchange", "gather"])
def test_a_dead_peer_ends_the_wait(call, lines):
    comm = make_ranks(4, CPU, 2, **dims(4, lines=lines))[2]
    comm.set_wait_limit(0.02)
    start_at(comm, 11)
    raise_flags(comm, call, [0, 3], 12)  # rank 1 never came
    o, lse, lens = random_partials(4, 3, 4, DIM, torch.float32, CPU)
    assert comm.failure() is None
    calls = {
        "exchange": lambda: comm.exchange_merge(o[2], lse[2], "e", lens),
        "gather": lambda: comm.gather_q(o[2, :, :1], o[2, :, :1, :ROPE]),
    }
    with pytest.raises(Exception, match="did not arrive in time"):
        calls[call]()
    assert comm.failure().startswith(
        f"DCP rank 2 waited for rank 1 in the {call} kernel (lane 0, epoch 12)"
    )


@interpreted
def test_idle_lanes_do_not_fall_behind():
    """A lane that small batches never use would look raised 2^31 epochs later."""
    comms = make_ranks(2, CPU, 4, **dims(4, max_tokens=64))
    for comm in comms:
        for name in ("_exchange_state", "_gather_state"):
            setattr(comm, name, dataclasses.replace(getattr(comm, name), refresh_epochs=4))
        start_at(comm, 0)
    sender, receiver = comms
    start_at(sender, 0, flag_epoch=100)  # waits for nobody
    for epoch in range(1, 7):
        o, lse, lens = random_partials(2, 1, 4, DIM, torch.float32, CPU)
        sender.exchange_merge(o[0], lse[0], "e", lens)
        sender.gather_q(o[0, :, :2], o[0, :, :2, :ROPE])
        for name in ("exchange", "gather"):
            raised = flags(receiver, name)[:, 0]
            used = int(raised.eq(epoch).sum())
            assert used == len(raised) if epoch == 4 else 0 < used < len(raised)
            assert raised.ge(epoch // 4 * 4).all()
            assert flags(receiver, name)[:, 1:].eq(0).all()


def test_tilings_fit_the_limits():
    for size in (2, 4, 8):
        for num_rows in (1, 2, 3, 48, 500, 3072, 12288, 100000):
            for row_bytes in (64, 512, 1024, 2048):
                for most in (1, 5, 512):
                    tiling = exchange_tiling(num_rows, row_bytes, size, most)
                    assert 1 <= tiling.grid <= most
                    assert tiling.block & (tiling.block - 1) == 0
                    # a thread's loads are 16 bytes
                    assert tiling.block * row_bytes >= 32 * tiling.num_warps * 16
                    steps = -(-num_rows // tiling.block // tiling.grid)
                    assert tiling.slices <= max(steps, 1)
        for num_lines in (1, 9, 432, 6912, 55296, 10**6):
            for most in (1, 5, 512):
                tiling = line_tiling(num_lines, size, most)
                assert 1 <= tiling.grid <= most
                assert tiling.block & (tiling.block - 1) == 0
                # every thread has 16 bytes of a line
                assert tiling.block * 128 >= 32 * tiling.num_warps * 16
                assert tiling.slices == 1
    assert gather_tiling(1, 512).grid == 1
    assert gather_tiling(10**6, 512).grid <= 512
    # threads per SM times registers per thread stay within one Hopper SM
    assert resident_programs(132, 4) == 528
    assert resident_programs(1, 4) * 4 * 32 * MAX_REGISTERS <= 65536
    assert resident_programs(132, 4) >= MAX_LANES
