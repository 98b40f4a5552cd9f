"""`nvlink` between real GPUs: rendezvous, capture and replay in any mix, eager calls, teardown.

Needs torch, triton and pytest only, and two or more GPUs with peer access.
"""

import dataclasses
import random
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from virtual_nvlink import (
    own_merge,
    poison,
    random_partials,
    random_queries,
    start_at,
    states,
    wrap,
)

from sglang_dcp.comm import TorchTransport
from sglang_dcp.comm.nvlink import LineBytes, NvlinkCommunicator
from sglang_dcp.comm.symmetric import probe_peers

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs with peer access"),
]
DIM, ROPE, MAX_TOKENS = 512, 64, 64
#: Bytes that go by lines.
LINES = {"flags": LineBytes(0, 0), "lines": LineBytes(1 << 40, 1 << 40)}
LINES["mixed"] = LineBytes(1 << 17, 1 << 17)
EPOCH = 2**31 - 40


def connect(rank, size):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    host_group = dist.group.WORLD
    able, reason = probe_peers(device, host_group)
    assert able, reason
    transport = TorchTransport(dist.new_group(backend="nccl"))
    return device, transport


def make_comm(device, transport, num_heads, dtype, max_line_bytes, jitter_us=0):
    comm = NvlinkCommunicator(
        transport,
        num_heads=num_heads,
        kv_lora_rank=DIM,
        qk_rope_head_dim=ROPE,
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        device=device,
        max_line_bytes=max_line_bytes,
    )
    comm.warm_up()
    comm.set_wait_limit(20)
    for name in ("_exchange_state", "_line_state", "_gather_state", "_line_gather_state"):
        setattr(comm, name, dataclasses.replace(getattr(comm, name), jitter_us=jitter_us))
    torch.cuda.synchronize()
    dist.barrier()
    return comm


class Layers:
    """Three layers of one batch size: static inputs, and what this rank computed."""

    def __init__(self, comm, num_tokens, num_heads, dtype, device):
        size = comm.dcp_size
        self.comm = comm
        self.queries = [
            random_queries(size, num_tokens, num_heads // size, DIM, ROPE, dtype, device)
            for _ in range(3)
        ]
        self.partials = [
            random_partials(size, num_tokens, num_heads, DIM, dtype, device) for _ in range(3)
        ]
        self.got_q = [torch.empty_like(q[2]) for q in self.queries]
        shape = (num_tokens, num_heads // size, DIM)
        self.got = [torch.empty(shape, dtype=dtype, device=device) for _ in range(3)]

    def run(self):
        rank = self.comm.rank
        for i in range(3):
            nope, pe, _ = self.queries[i]
            self.got_q[i].copy_(self.comm.gather_q(nope[rank], pe[rank]))
            o, lse, lens = self.partials[i]
            self.got[i].copy_(self.comm.exchange_merge(o[rank], lse[rank], "e2"[i % 2], lens))

    def clear(self):
        for t in (*self.got_q, *self.got):
            t.fill_(float("nan"))

    def wrong(self):
        rank = self.comm.rank
        return [
            i
            for i in range(3)
            if not torch.equal(self.got_q[i], self.queries[i][2])
            or not torch.equal(self.got[i], own_merge(rank, *self.partials[i], "e2"[i % 2]))
        ]


def mixed_steps(rank, size, num_heads, dtype, jitter_us, max_line_bytes, seed):
    device, transport = connect(rank, size)
    comm = make_comm(device, transport, num_heads, dtype, max_line_bytes, jitter_us)
    one_kernel = comm.line_tokens in (0, MAX_TOKENS)
    torch.manual_seed(seed)  # all ranks know all inputs
    pick = random.Random(seed)  # and take the same steps
    layers = {
        n: Layers(comm, n, num_heads, dtype, device) for n in (1, 2, 3, 16, 63, MAX_TOKENS, 100)
    }
    graphs = {}
    for n in (MAX_TOKENS, 16, 2, 1):
        layers[n].run()
        torch.cuda.synchronize()
        dist.barrier()
        graphs[n] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[n]):
            layers[n].run()
    torch.cuda.synchronize()
    dist.barrier()
    if one_kernel:
        start_at(comm, EPOCH)
    torch.cuda.synchronize()
    dist.barrier()
    wrong, ran, epoch = [], set(), EPOCH
    for step in range(120):
        n = pick.choice(list(layers))
        replay = n in graphs and pick.random() < 0.7
        layers[n].clear()
        if step % 4 == rank % 4:
            time.sleep(0.002 * random.random())
        graphs[n].replay() if replay else layers[n].run()
        ran.add(n)
        epoch += 3 if n <= MAX_TOKENS else 0
        if one_kernel:
            poison(comm, epoch)
        if pick.random() < 0.3:
            wrong += [(step, n, i) for i in layers[n].wrong()]
    wrong += [(n, i) for n in ran for i in layers[n].wrong()]
    if one_kernel:
        assert all(state.counters.eq(wrap(epoch)).all() for state in states(comm))
    torch.cuda.synchronize()
    assert comm.failure() is None
    # a second communicator on the same GPUs, after the first one is gone
    graphs.clear()
    comm.destroy()
    second = make_comm(device, transport, num_heads, dtype, max_line_bytes)
    again = Layers(second, 5, num_heads, dtype, device)
    again.run()
    wrong += [("second", i) for i in again.wrong()]
    second.destroy()
    return wrong


@pytest.mark.parametrize("max_line_bytes", LINES.values(), ids=LINES)
@pytest.mark.parametrize("jitter_us", [0, 30])
@pytest.mark.parametrize("size", [n for n in (2, 4, 8) if n <= NUM_GPUS])
@pytest.mark.parametrize(("num_heads", "dtype"), [(96, torch.bfloat16), (16, torch.float16)])
def test_graphs_and_eager_calls_mix(size, num_heads, dtype, jitter_us, max_line_bytes, fresh_seed):
    settings = num_heads, dtype, jitter_us, max_line_bytes
    results = run_ranks(size, mixed_steps, *settings, fresh_seed)
    assert results == [[]] * size


def gather_steps(rank, size, jitter_us, seed):
    """Gathers by lines and by flags, all read; an exchange only between two by flags."""
    device, transport = connect(rank, size)
    comm = make_comm(device, transport, 96, torch.bfloat16, LINES["mixed"], jitter_us)
    limit, local_heads = comm.line_gather_tokens, 96 // size
    assert 0 < limit < MAX_TOKENS
    torch.manual_seed(seed)  # all ranks know all inputs
    pick = random.Random(seed)  # and take the same steps
    sizes = (1, limit, limit + 1, MAX_TOKENS)
    queries = {
        n: random_queries(size, n, local_heads, DIM, ROPE, torch.bfloat16, device) for n in sizes
    }
    o, lse, lens = random_partials(size, 3, 96, DIM, torch.bfloat16, device)
    differing = torch.zeros(200, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    dist.barrier()
    by_flags = False
    for step in range(len(differing)):
        n = pick.choice(sizes)
        if by_flags and n > limit:
            comm.exchange_merge(o[rank], lse[rank], "e", lens)
        by_flags = n > limit
        nope, pe, want = queries[n]
        q_all = comm.gather_q(nope[rank], pe[rank])
        if (step * 7 + rank) % 5 == 0:
            torch.cuda._sleep(100_000)  # a late reader
        differing[step] = (q_all != want).sum()
        if not by_flags:
            q_all.fill_(float("nan"))  # nobody else's memory
    wrong = differing.nonzero().flatten().tolist()
    comm.destroy()
    return wrong


@pytest.mark.parametrize("jitter_us", [0, 30])
@pytest.mark.parametrize("size", [n for n in (2, 4, 8) if n <= NUM_GPUS])
def test_gathers_by_lines_need_no_exchange(size, jitter_us, fresh_seed):
    assert run_ranks(size, gather_steps, jitter_us, fresh_seed) == [[]] * size


def one_leaves(rank, size, call, max_line_bytes):
    device, transport = connect(rank, size)
    comm = make_comm(device, transport, 16, torch.bfloat16, max_line_bytes)
    o, lse, lens = random_partials(size, 3, 16, DIM, torch.bfloat16, device)
    comm.set_wait_limit(1.0)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        time.sleep(4)
        return
    if call == "gather":
        comm.run_once(3)
    else:
        comm.exchange_merge(o[rank], lse[rank], "e", lens)
    try:
        torch.cuda.synchronize()
    except RuntimeError as e:
        raise AssertionError(comm.failure()) from e


@pytest.mark.parametrize("lines", [False, True], ids=["flags", "lines"])
@pytest.mark.parametrize("call", ["exchange", "gather"])
def test_a_missing_rank_is_named_in_time(call, lines):
    with pytest.raises(AssertionError, match=f"rank 1 waited for rank 0 in the {call} kernel"):
        run_ranks(2, one_leaves, call, LINES["lines" if lines else "flags"], timeout_s=120)
