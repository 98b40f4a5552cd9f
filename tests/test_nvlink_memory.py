"""What the `nvlink` kernels write and where: addresses, halves, lines, and who owns the buffers."""

import pytest
import torch
from interpreted_nvlink import (
    CPU,
    DIM,
    MAX_TOKENS,
    ROPE,
    WRAP,
    both_kinds,
    dims,
    interpreted,
    run_in_turn,
)
from virtual_nvlink import (
    NoTransport,
    half_views,
    line_words,
    make_ranks,
    own_merge,
    poison,
    random_partials,
    random_queries,
    start_at,
    states,
)


@interpreted
@both_kinds
@pytest.mark.parametrize(
    ("size", "num_heads", "dim", "dtype"),
    [
        (2, 12, 24, torch.bfloat16),
        (2, 12, 512, torch.bfloat16),
        (4, 12, 64, torch.float32),
        (4, 48, 60, torch.float32),
        (8, 8, 32, torch.float16),
    ],
)
def test_addresses_halves_and_slices(size, num_heads, dim, dtype, lines):
    comms = make_ranks(size, CPU, 5, **dims(num_heads, dtype, dim, lines=lines))
    for epoch, num_tokens in zip((7, WRAP + 2, WRAP + 3), (5, 1, 4), strict=True):
        lse_base = "e2"[epoch % 2]
        for comm in comms:
            poison(comm, epoch)
            comm._symmetric.local[comm._offsets["q"] :][:4096].fill_(255)
            comm._take("q_all", comm._buffers["q_all"]._flat.numel()).fill_(float("nan"))
        o, lse, lens = random_partials(size, num_tokens, num_heads, dim, dtype, CPU)

        def exchange(comm, o=o, lse=lse, lens=lens, base=lse_base):
            return comm.exchange_merge(o[comm.rank], lse[comm.rank], base, lens)

        others = [[part.clone() for part in half_views(comm, epoch + 1)] for comm in comms]
        for comm, got in zip(comms, run_in_turn(comms, epoch, exchange), strict=True):
            assert torch.equal(got, own_merge(comm.rank, o, lse, lens, lse_base))
            assert got[0].eq(0).all()  # empty on all ranks
        nope, pe, want = random_queries(size, num_tokens, num_heads // size, dim, ROPE, dtype, CPU)

        def gather(comm, nope=nope, pe=pe):
            return comm.gather_q(nope[comm.rank], pe[comm.rank])

        assert all(torch.equal(q, want) for q in run_in_turn(comms, epoch, gather))
        for comm, before in zip(comms, others, strict=True):
            assert all(map(torch.equal, half_views(comm, epoch + 1), before))


@interpreted
@both_kinds
def test_the_poison_is_seen_without_waiting(lines):
    """The tests above can fail: a merge before the peer's push reads the poisoned half."""
    comms = make_ranks(2, CPU, 3, **dims(4, lines=lines))
    o, lse, lens = random_partials(2, 3, 4, DIM, torch.float32, CPU)
    poison(comms[0], 5)
    start_at(comms[0], 4, flag_epoch=9)
    merged = comms[0].exchange_merge(o[0], lse[0], "e", lens)
    assert lens[1, 1] > 0
    assert not torch.equal(merged[1], own_merge(0, o, lse, lens, "e")[1])
    nope, pe, want = random_queries(2, 3, 2, DIM, ROPE, torch.float32, CPU)
    q_all = comms[0].gather_q(nope[0], pe[0])
    assert torch.equal(q_all[:, :2], want[:, :2])
    assert not torch.equal(q_all[:, 2:], want[:, 2:])


@interpreted
def test_lines_of_queries():
    """Every byte that a gather sends, against its description."""
    sender, receiver = make_ranks(2, CPU, 3, **dims(6, torch.float16, lines=True))
    start_at(sender, -5, flag_epoch=-4)
    poison(receiver, -4)
    nope, pe, _ = random_queries(2, 4, 3, DIM, ROPE, torch.float16, CPU)
    sender.gather_q(nope[0], pe[0])
    sent = torch.cat([nope[0], pe[0]], -1).reshape(-1).view(torch.int32)
    assert sent.shape == (4 * 3 * (DIM + ROPE) // 2,)
    want = torch.full((-(-len(sent) // 28), 32), -4, dtype=torch.int32)
    want[:, :31] = 0
    for i, word in enumerate(sent.tolist()):
        want[i // 28, i % 28] = word
    got = line_words(receiver, "gather", -4)[0]
    assert torch.equal(got[: len(want)], want)
    assert len(want) < len(got)
    assert got[len(want) :].eq(-1).all()


@interpreted
def test_queries_that_are_not_whole_chunks_go_by_flags():
    comms = make_ranks(2, CPU, 3, **dims(4, torch.bfloat16, 28, lines=True))
    assert all((comm.line_tokens, comm.line_gather_tokens) == (MAX_TOKENS, 0) for comm in comms)
    nope, pe, want = random_queries(2, 3, 2, 28, ROPE, torch.bfloat16, CPU)
    got = run_in_turn(comms, 3, lambda comm: comm.gather_q(nope[comm.rank], pe[comm.rank]))
    assert all(torch.equal(q, want) for q in got)


@interpreted
@both_kinds
def test_life_of_a_communicator(lines):
    comm = make_ranks(2, CPU, 2, **dims(4, lines=lines))[0]
    local = comm._symmetric.local
    assert comm.buffer_bytes > local.nbytes > 0
    assert comm.transport == NoTransport(0, 2)
    q = comm.gather_q(torch.empty(0, 2, DIM), torch.empty(0, 2, ROPE))
    assert q.shape == (0, 4, DIM + ROPE)
    merged = comm.exchange_merge(
        torch.empty(0, 4, DIM), torch.empty(0, 4), "e", torch.empty(2, 0, dtype=torch.int32)
    )
    assert merged.shape == (0, 2, DIM)
    assert all(state.counters.eq(0).all() for state in states(comm))
    comm.destroy()
    comm.destroy()
    assert comm.buffer_bytes == 0
    with pytest.raises(AssertionError, match="was destroyed"):
        comm.gather_q(torch.empty(1, 2, DIM), torch.empty(1, 2, ROPE))
