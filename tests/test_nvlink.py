"""The `nvlink` communicator under Triton's interpreter: real kernels, real memory, real waits.

Ranks are processes over shared memory where they must meet, and a list in one process where only
addresses, epochs and halves matter. On a GPU: tests/gpu/test_nvlink_virtual.py.
"""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from virtual_nvlink import (
    NoTransport,
    batches,
    flags,
    half_views,
    line_words,
    make_ranks,
    max_line_bytes,
    own_merge,
    poison,
    raise_flags,
    random_partials,
    random_queries,
    start_at,
    states,
    wrap,
)

from sglang_dcp.comm import (
    COMM_BACKENDS,
    GroupInfo,
    TorchTransport,
    hangs_on_peer_access,
    resolve_auto,
    symmetric,
)
from sglang_dcp.comm.nvlink import MAX_LANES, LineBytes, NvlinkCommunicator
from sglang_dcp.comm.symmetric import probe_peers, rendezvous, virtual_rank
from sglang_dcp.kernels import dispatch
from sglang_dcp.kernels.peer_signal import MAX_REGISTERS, resident_programs
from sglang_dcp.kernels.tilings import exchange_tiling, gather_tiling, line_tiling
from sglang_dcp.testing.peer_a2a import PeerA2A

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
    comm.run_once(2)
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


def test_availability_and_auto():
    def able(**facts):
        return NvlinkCommunicator.is_available(GroupInfo(**facts))

    assert able(size=8, device_type="cuda", peer_access=True) == (True, "one node with peer access")
    assert able(size=8, device_type="cpu", peer_access=True)[1] == "needs CUDA GPUs, not cpu"
    assert "one node, not 2" in able(size=8, device_type="cuda", num_nodes=2, peer_access=True)[1]
    assert "not 16" in able(size=16, device_type="cuda", peer_access=True)[1]
    info = GroupInfo(size=2, device_type="cuda", peer_reason="GPU 1 has no peer access")
    assert able(**dataclasses.asdict(info)) == (False, "GPU 1 has no peer access")
    assert resolve_auto("nvlink", GroupInfo(2, "cuda", peer_access=True))[0] == "nvlink"
    with pytest.raises(ValueError, match="nvlink cannot serve.*GPU 1 has no peer access.*a2a"):
        resolve_auto("nvlink", info)


@pytest.mark.parametrize(
    ("priority", "able", "picked"), [(5, True, "a2a"), (20, True, "nvlink"), (20, False, "a2a")]
)
def test_priority_alone_makes_auto_pick_nvlink(monkeypatch, priority, able, picked):
    monkeypatch.setattr(NvlinkCommunicator, "priority", priority)
    reason = "" if able else "GPU 1 has no peer access"
    info = GroupInfo(2, "cuda", peer_access=able, peer_reason=reason)
    name, why = resolve_auto("auto", info)
    assert name == picked
    assert ("not nvlink: GPU 1 has no peer access" in why) == (not able)
    # memory is mapped only where the answer matters, whatever is known of it yet
    assert hangs_on_peer_access("auto", info) == (priority > 10)
    assert hangs_on_peer_access("nvlink", info)
    for requested, facts in [
        ("a2a", info),
        ("unknown", info),
        ("auto", GroupInfo(2, "cpu")),
        ("nvlink", GroupInfo(2, "cpu")),
        ("auto", GroupInfo(16, "cuda")),
        ("auto", GroupInfo(2, "cuda", num_nodes=2)),
    ]:
        assert not hangs_on_peer_access(requested, facts), (requested, facts)


def fake_gpus(rank, size):
    """This process sees `size` GPUs that reach each other, and is on that of its rank."""
    torch.cuda.synchronize = lambda device: None
    torch.cuda.current_device = lambda: rank
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        uuid=f"GPU-{rank}", multi_processor_count=132
    )
    symmetric._has_native_peer_atomics = lambda device, peer: True


#: What one rank lacks, and what every rank says of it.
FAULTS = {
    "": "",
    "memory": "rank 1: allocation: out of memory",
    "mapping": "rank 1: rendezvous: cannot map",
    "driver": "GPU 1 cannot be asked for peer access: no libcuda",
    "atomics": "GPU 1 has no peer access with native atomics to [0]",
}


def choose_on_ranks(rank, size):
    """What the server's hook chooses, per fault of rank 1: auto at two priorities, nvlink, a2a."""
    import torch.distributed._symmetric_memory as symm_mem

    from sglang_dcp.hooks.parallel_state import _choose_backend

    fake_gpus(rank, size)
    real_tensor = torch.tensor
    torch.tensor = lambda data, dtype, device: real_tensor(data, dtype=dtype)
    ranks = list(range(size))
    coordinator = SimpleNamespace(world_size=size, cpu_group=dist.group.WORLD, ranks=ranks)
    chosen = {}
    for name in FAULTS:
        fault = name if rank == 1 else ""

        def empty(num_bytes, dtype, device, fault=fault):
            if fault == "memory":
                raise RuntimeError("out of memory")
            return torch.full((num_bytes,), 255, dtype=dtype)

        def meet(local, group_name, fault=fault):
            assert local.eq(0).all()
            if fault == "mapping":
                raise RuntimeError("cannot map")
            return SimpleNamespace(buffer_ptrs=[256] * size)

        def atomics(device, peer, fault=fault):
            assert device == rank != peer
            if fault == "driver":
                raise OSError("no libcuda")
            return fault != "atomics"

        symm_mem.empty, symm_mem.rendezvous = empty, meet
        symmetric._has_native_peer_atomics = atomics
        chosen[name] = []
        for requested, priority in (("auto", 5), ("auto", 20), ("nvlink", 5), ("a2a", 20)):
            NvlinkCommunicator.priority = priority
            args = SimpleNamespace(dcp_comm_backend=requested)
            try:
                got = _choose_backend(args, coordinator, torch.device("cuda", rank))
            except ValueError as e:
                got = str(e)
            chosen[name].append(got)
    return chosen


def test_all_ranks_choose_alike():
    first, second = run_ranks(2, choose_on_ranks)
    assert first == second
    assert first.pop("") == ["a2a", "nvlink", "nvlink", "a2a"]
    for name, (low, high, named, a2a) in first.items():
        assert low == high == a2a == "a2a"
        assert "nvlink cannot serve" in named
        assert FAULTS[name] in named
    assert len(first) == 4


def fail_together(rank, size):
    """A rank without symmetric memory: all ranks hear of it, none hangs."""
    import torch.distributed._symmetric_memory as symm_mem

    def empty(num_bytes, dtype, device):
        if rank == 1:
            raise RuntimeError("out of memory")
        return torch.empty(num_bytes, dtype=dtype)

    fake_gpus(rank, size)
    symm_mem.empty = empty
    messages = []
    for call in (rendezvous, None):
        try:
            if call:
                call(64, torch.device("cpu"), dist.group.WORLD)
            else:
                messages.append(probe_peers(torch.device("cpu"), dist.group.WORLD))
        except RuntimeError as e:
            messages.append(str(e))
    return messages


def share_a_gpu(rank, size):
    """Two ranks on one GPU, each of which sees it as device 0."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-0")
    return probe_peers(torch.device("cpu"), dist.group.WORLD)


def test_ranks_that_share_a_gpu_are_no_peers():
    assert run_ranks(2, share_a_gpu) == [(False, "two ranks share a GPU")] * 2


def test_one_rank_without_symmetric_memory_stops_all():
    for raised, probed in run_ranks(2, fail_together):
        assert "64 bytes" in raised
        assert "rank 1: allocation: out of memory. Use --dcp-comm-backend a2a" in raised
        assert probed[0] is False
        assert "rank 1: allocation: out of memory" in probed[1]


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
