"""Decode steps of `nvlink` ranks that are processes over shared memory."""

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from interpreted_nvlink import (
    CPU,
    DIM,
    MAX_TOKENS,
    ROPE,
    WRAP,
    both_kinds,
    dims,
    interpreted,
    shared_dims,
    shared_memory,
)
from ranks import run_ranks
from virtual_nvlink import (
    batches,
    max_line_bytes,
    own_merge,
    poison,
    random_partials,
    random_queries,
    start_at,
    states,
    wrap,
)

from sglang_dcp.comm import COMM_BACKENDS, TorchTransport
from sglang_dcp.comm.nvlink import LineBytes, NvlinkCommunicator
from sglang_dcp.testing.peer_a2a import PeerA2A


def serve_steps(rank, size, folder, num_heads, dtype, lines, seed):
    """Decode steps of alternating batches over the wrap of the epochs; all that differed."""
    settings = shared_dims(num_heads, dtype)
    comm = NvlinkCommunicator(
        TorchTransport(),
        allocate=shared_memory(folder, rank, size),
        device="cpu",
        max_line_bytes=max_line_bytes(lines),
        **settings,
    )
    a2a = COMM_BACKENDS["a2a"](TorchTransport(), device="cpu", **settings)
    comm.max_programs = 3
    start_at(comm, WRAP)
    dist.barrier()
    torch.manual_seed(seed)  # every rank knows all ranks' inputs
    wrong = []
    for step, num_tokens in enumerate(batches(MAX_TOKENS, 5)):
        queries = random_queries(size, num_tokens, num_heads // size, DIM, ROPE, dtype, CPU)
        o, lse, lens = random_partials(size, num_tokens, num_heads, DIM, dtype, CPU)
        lse_base = "e2"[step % 2]
        time.sleep(0.02 * ((step + rank) % 3))
        q_all = comm.gather_q(queries[0][rank], queries[1][rank])
        assert q_all.is_contiguous()
        if not torch.equal(q_all, queries[2]):
            wrong.append((step, "gather"))
        q_all.fill_(float("nan"))
        time.sleep(0.02 * ((step + 2 * rank) % 3))
        got_lse, want_lse = torch.full((2, num_tokens, num_heads // size), float("nan"))
        kept = got_lse if step % 2 else None
        merged = comm.exchange_merge(o[rank], lse[rank], lse_base, lens, kept).clone()
        if not torch.equal(merged, own_merge(rank, o, lse, lens, lse_base, want_lse)):
            wrong.append((step, "exchange"))
        if kept is not None and not torch.equal(got_lse, want_lse):
            wrong.append((step, "lse"))
        if step == 3 and not torch.equal(
            merged, a2a.exchange_merge(o[rank], lse[rank], lse_base, lens)
        ):
            wrong.append((step, "a2a"))
        poison(comm, WRAP + 1 + step)
        for state in states(comm):
            assert state.counters.eq(wrap(WRAP + 1 + step)).all()
    # above max_tokens: over a2a, on temporaries, and peer memory goes on working
    o, lse, lens = random_partials(size, MAX_TOKENS + 2, num_heads, DIM, dtype, CPU)
    got_lse, want_lse = torch.full((2, MAX_TOKENS + 2, num_heads // size), float("nan"))
    large = comm.exchange_merge(o[rank], lse[rank], "e", lens, got_lse)
    if not torch.equal(large, own_merge(rank, o, lse, lens, "e", want_lse)):
        wrong.append("large batch")
    if not torch.equal(got_lse, want_lse):
        wrong.append("large batch's lse")
    # the same shapes in both bases, with and without an LSE: not the launch of the first call
    o, lse, lens = random_partials(size, 2, num_heads, DIM, dtype, CPU)
    for lse_base, keeps in product("e2", (False, True)):
        got_lse, want_lse = torch.full((2, 2, num_heads // size), float("nan"))
        kept = got_lse if keeps else None
        merged = comm.exchange_merge(o[rank], lse[rank], lse_base, lens, kept)
        if not torch.equal(merged, own_merge(rank, o, lse, lens, lse_base, want_lse)):
            wrong.append((lse_base, keeps, "exchange"))
        if keeps and not torch.equal(got_lse, want_lse):
            wrong.append((lse_base, keeps, "lse"))
    assert comm.failure() is None
    return wrong


@interpreted
@both_kinds
@pytest.mark.parametrize(
    ("size", "num_heads", "dtype"), [(2, 12, torch.bfloat16), (4, 8, torch.float16)]
)
def test_ranks_meet_in_shared_memory(tmp_path, fresh_seed, size, num_heads, dtype, lines):
    args = (str(tmp_path), num_heads, dtype, lines, fresh_seed)
    assert run_ranks(size, serve_steps, *args, interpret=True) == [[]] * size


#: Batches of gathers by lines (1 and 2 tokens) and by flags; an exchange only where None is.
GATHERS = [1, 2, 5, 1, 4, 2, 2, 1, 3, None, 5, None, 4, 1, 1, 3, 2, 5]


def gather_steps(rank, size, folder, seed):
    """Gathers of both kinds, whose results are read late; all that differed."""
    most = 2 * (size - 1) * 8 // size * 96
    settings = dims(8, torch.bfloat16) | {"max_line_bytes": LineBytes(most, most)}
    comm = NvlinkCommunicator(
        TorchTransport(), allocate=shared_memory(folder, rank, size), device="cpu", **settings
    )
    assert (comm.line_gather_tokens, comm.line_tokens, comm.max_tokens) == (2, 3, MAX_TOKENS)
    comm.max_programs = 3
    torch.manual_seed(seed)
    wrong = []
    for step, num_tokens in enumerate(GATHERS):
        if num_tokens is None:
            o, lse, lens = random_partials(size, 5, 8, DIM, torch.bfloat16, CPU)
            comm.exchange_merge(o[rank], lse[rank], "e", lens)
            continue
        nope, pe, want = random_queries(size, num_tokens, 8 // size, DIM, ROPE, torch.bfloat16, CPU)
        q_all = comm.gather_q(nope[rank], pe[rank])
        time.sleep(0.03 * ((step + rank) % 3))
        if not torch.equal(q_all, want):
            wrong.append(step)
        if num_tokens <= 2:
            q_all.fill_(float("nan"))  # nobody else's memory
    counts = [state.counters[0].item() for state in (comm._line_gather_state, comm._gather_state)]
    assert counts == [9, 7]
    return wrong


@interpreted
def test_gathers_by_lines_need_no_exchange(tmp_path, fresh_seed):
    results = run_ranks(2, gather_steps, str(tmp_path), fresh_seed, interpret=True)
    assert results == [[], []]


def peer_exchange(rank, size, seed):
    torch.manual_seed(seed)
    o, lse, lens = random_partials(size, 3, 8, DIM, torch.bfloat16, CPU)
    o, lse, lens = o.nan_to_num().contiguous(), lse.clamp(max=9), torch.ones_like(lens)
    peer = PeerA2A(8, DIM, ROPE, 4, torch.bfloat16, CPU)
    assert peer.gather_q(o[0, :, :4], o[0, :, :4, :ROPE]).numel() == size * 3 * 4 * (DIM + ROPE)
    got = [peer.exchange_merge(o[rank], lse[rank], base, lens).clone() for base in ("e", "2")]
    return got, [own_merge(rank, o, lse, lens, base) for base in ("e", "2")]


@interpreted
def test_the_baseline_of_the_benchmark_merges_too(fresh_seed):
    for got, want in run_ranks(2, peer_exchange, fresh_seed, interpret=True):
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
