"""Stages 4-7 of 2, 4 and 8 ranks on one GPU: c = 8 before an 8-GPU node is at hand.

Each rank has a stream; the ranks' kernels really wait for each other, so they must be resident
together: small grids, queues of their own (CUDA_DEVICE_MAX_CONNECTIONS, set in conftest.py), and
every kernel loaded and every tensor allocated before the first wait. For that each sequence runs
once with flags raised far ahead, so that nothing waits, before it runs in earnest. Needs torch,
triton and pytest only.
"""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from support import assert_close, attention_ref, clean_env
from virtual_nvlink import (
    batches,
    make_ranks,
    max_line_bytes,
    own_merge,
    poison,
    random_partials,
    random_queries,
    start_at,
    states,
    wrap,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

ROPE, MAX_TOKENS, PROGRAMS = 64, 16, 8
LENS = [1, 7, 64, 3, 2, 33, 8, 9, 1, 40, 5, 64, 6, 1, 2, 12]  # short ones leave ranks empty
WRAP = 2**31 - 3
both_kinds = pytest.mark.parametrize("lines", [False, True], ids=["flags", "lines"])
GRID = [(2, h) for h in (12, 16, 96, 128)] + [(4, h) for h in (12, 16, 96, 128)]
GRID += [(8, h) for h in (16, 96, 128)]
CYCLES_PER_US = 1500


def in_earnest(comms, epoch, sequence, outputs):
    """Run sequence(comm) on every rank: without waits, then after epoch `epoch` on NaN outputs.

    Each part holds one launch of each kernel at most.
    """
    streams = [torch.cuda.Stream() for _ in comms]
    torch.cuda.synchronize()
    for comm, stream in zip(comms, streams, strict=True):
        with torch.cuda.stream(stream):
            for part in sequence(comm):
                start_at(comm, epoch - 2**20, flag_epoch=epoch)
                part()
        torch.cuda.synchronize()
    for comm in comms:
        start_at(comm, epoch)
    for output in outputs:
        output.fill_(math.nan)
    torch.cuda.synchronize()
    for parts in zip(*(sequence(comm) for comm in comms), strict=True):
        for part, stream in zip(parts, streams, strict=True):
            with torch.cuda.stream(stream):
                part()
    torch.cuda.synchronize()


@dataclasses.dataclass
class Step:
    """Inputs of one decode step on the GPU, and what each rank left there."""

    lens: list[int]
    lse_base: str
    nope: list[torch.Tensor]
    pe: list[torch.Tensor]
    q_all: torch.Tensor
    kv: torch.Tensor
    stripes: list[torch.Tensor]
    local: torch.Tensor
    got_q: list[torch.Tensor]
    o: torch.Tensor
    lse: torch.Tensor
    merged: list[torch.Tensor]


def make_step(size, num_tokens, num_heads, dim, dtype, lse_base, device):
    lens = LENS[:num_tokens]
    local_heads = num_heads // size
    nope, pe, q_all = random_queries(size, num_tokens, local_heads, dim, ROPE, dtype, device)
    kv = torch.randn(num_tokens, max(lens), dim + ROPE, device=device).to(dtype)
    garbage = torch.randn(num_tokens, 1, dim + ROPE, device=device).to(dtype) * 5
    local = [[len(range(r, n, size)) for n in lens] for r in range(size)]

    def nan(*shape, like=dtype):
        return torch.full(shape, math.nan, dtype=like, device=device)

    return Step(
        lens,
        lse_base,
        nope,
        pe,
        q_all,
        kv,
        [torch.cat([kv[:, r::size], garbage], 1).float() for r in range(size)],
        torch.tensor(local, dtype=torch.int32, device=device),
        [nan(num_tokens, num_heads, dim + ROPE) for _ in range(size)],
        nan(size, num_heads, num_tokens, dim).transpose(1, 2),
        nan(size, num_tokens, num_heads, like=torch.float32),
        [nan(num_tokens, local_heads, dim) for _ in range(size)],
    )


def attend(step, rank, q, dim, scale):
    """Stage 5 in float32 with lengths clamped to 1: an empty stripe attends to a garbage row."""
    stripe = step.stripes[rank]
    logits = torch.bmm(q.float(), stripe.transpose(1, 2)) * scale
    position = torch.arange(stripe.shape[1], device=q.device)
    beyond = position[None] >= step.local[rank].clamp(min=1)[:, None]
    logits = logits.masked_fill(beyond[:, None], -math.inf)
    lse = logits.logsumexp(-1)
    step.o[rank].copy_(torch.bmm((logits - lse[..., None]).exp(), stripe[..., :dim]))
    step.lse[rank].copy_(lse / math.log(2) if step.lse_base == "2" else lse)


def layer(step, comm, dim, scale):
    """Stages 4-7 of one layer on one rank."""

    def run():
        rank = comm.rank
        q = comm.gather_q(step.nope[rank], step.pe[rank])
        assert q.is_contiguous()
        step.got_q[rank].copy_(q)
        attend(step, rank, q, dim, scale)
        merged = comm.exchange_merge(step.o[rank], step.lse[rank], step.lse_base, step.local)
        step.merged[rank].copy_(merged)

    return run


@both_kinds
@pytest.mark.parametrize(("dim", "dtype"), [(512, torch.bfloat16), (256, torch.float16)])
@pytest.mark.parametrize(("size", "num_heads"), GRID)
def test_layer_equals_unsharded_attention_and_a2a(size, num_heads, dim, dtype, lines):
    device = torch.device("cuda")
    comms = make_ranks(
        size,
        device,
        PROGRAMS,
        num_heads=num_heads,
        kv_lora_rank=dim,
        qk_rope_head_dim=ROPE,
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        max_line_bytes=max_line_bytes(lines),
    )
    scale = (dim + ROPE) ** -0.5
    steps = [
        make_step(size, n, num_heads, dim, dtype, "e2"[i // 2 % 2], device)
        for i, n in enumerate((1, 16, 5, 16, 2, 1))
    ]
    outputs = [t for s in steps for t in (*s.got_q, s.o, s.lse, *s.merged)]
    in_earnest(comms, WRAP, lambda comm: [layer(step, comm, dim, scale) for step in steps], outputs)
    for comm in comms:
        assert comm.failure() is None
        for state in states(comm):
            assert state.counters.eq(wrap(WRAP + len(steps))).all()
    for step in steps:
        for rank in range(size):
            assert torch.equal(step.got_q[rank], step.q_all)
            want = own_merge(rank, step.o, step.lse, step.local, step.lse_base)
            assert torch.equal(step.merged[rank], want)
        kv = step.kv.double().cpu()
        unsharded, _ = attention_ref(
            step.q_all.double().cpu() * scale, kv, kv[..., :dim], step.lens
        )
        assert_close(torch.cat(step.merged, 1), unsharded)


groups = pytest.mark.parametrize(
    ("size", "num_heads", "dtype"),
    [(2, 12, torch.float16), (4, 96, torch.bfloat16), (8, 16, torch.bfloat16)],
)


def late_ranks(size, num_heads, dtype, lines, jitter_us):
    """Ranks whose kernels wait a random while before they push, signal and read."""
    comms = make_ranks(
        size,
        torch.device("cuda"),
        PROGRAMS,
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=ROPE,
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        max_line_bytes=max_line_bytes(lines),
    )
    for comm in comms:
        for name in ("_exchange_state", "_line_state", "_line_gather_state"):
            state = dataclasses.replace(getattr(comm, name), jitter_us=jitter_us, refresh_epochs=16)
            setattr(comm, name, state)
    return comms


@both_kinds
@pytest.mark.parametrize("jitter_us", [0, 60])
@pytest.mark.parametrize("lse_base", ["e", "2"])
@groups
def test_back_to_back_launches(size, num_heads, dtype, lse_base, jitter_us, lines):
    """Alternating batches with nothing between, over the wrap; what was read is poisoned."""
    device, dim, count = torch.device("cuda"), 512, 60
    comms = late_ranks(size, num_heads, dtype, lines, jitter_us)
    sizes = batches(MAX_TOKENS, count)
    inputs = {n: random_partials(size, n, num_heads, dim, dtype, device) for n in set(sizes)}
    got = [
        [
            torch.full((n, num_heads // size, dim), math.nan, dtype=dtype, device=device)
            for n in sizes
        ]
        for _ in comms
    ]
    shapes = [(n, num_heads // size) for n in sizes]
    got_lse = [[torch.full(shape, math.nan, device=device) for shape in shapes] for _ in comms]

    def launches(comm):
        def launch(i, n):
            o, lse, lens = inputs[n]
            if (i * 7 + comm.rank * 3) % 5 == 0:
                torch.cuda._sleep(((i + comm.rank) % 4) * 40 * CYCLES_PER_US)
            kept = got_lse[comm.rank][i] if i % 2 else None
            merged = comm.exchange_merge(o[comm.rank], lse[comm.rank], lse_base, lens, kept)
            got[comm.rank][i].copy_(merged)
            if i % 3:
                poison(comm, WRAP + 1 + i)

        return [lambda i=i, n=n: launch(i, n) for i, n in enumerate(sizes)]

    in_earnest(comms, WRAP, launches, [t for row in got + got_lse for t in row])
    for rank in range(size):
        for i, n in enumerate(sizes):
            want_lse = torch.full(shapes[i], math.nan, device=device)
            want = own_merge(rank, *inputs[n], lse_base, want_lse)
            assert torch.equal(got[rank][i], want), f"rank {rank}, launch {i}, batch {n}"
            assert i % 2 == 0 or torch.equal(got_lse[rank][i], want_lse), f"lse of launch {i}"


@pytest.mark.parametrize("jitter_us", [0, 60])
@groups
def test_gathers_by_lines_back_to_back(size, num_heads, dtype, jitter_us):
    """Alternating batches without an exchange, over the wrap; what was read is poisoned."""
    device, dim, count = torch.device("cuda"), 512, 60
    comms = late_ranks(size, num_heads, dtype, True, jitter_us)
    sizes = batches(MAX_TOKENS, count)
    local = num_heads // size
    inputs = [random_queries(size, n, local, dim, ROPE, dtype, device) for n in sizes]
    got = [[torch.full_like(q_all, math.nan) for _, _, q_all in inputs] for _ in comms]

    def launches(comm):
        def launch(i):
            nope, pe, _ = inputs[i]
            if (i * 7 + comm.rank * 3) % 5 == 0:
                torch.cuda._sleep(((i + comm.rank) % 4) * 40 * CYCLES_PER_US)
            q_all = comm.gather_q(nope[comm.rank], pe[comm.rank])
            if (i * 3 + comm.rank) % 4 == 0:
                torch.cuda._sleep(20 * CYCLES_PER_US)
            got[comm.rank][i].copy_(q_all)
            q_all.fill_(math.nan)
            if i % 3:
                poison(comm, WRAP + 1 + i)

        return [lambda i=i: launch(i) for i in range(count)]

    in_earnest(comms, WRAP, launches, [t for row in got for t in row])
    for rank in range(size):
        for i, (_, _, want) in enumerate(inputs):
            assert torch.equal(got[rank][i], want), f"rank {rank}, launch {i}, batch {sizes[i]}"


ALONE = """
import torch
from virtual_nvlink import make_ranks, max_line_bytes, random_partials
device = torch.device("cuda")
comm, _ = make_ranks(2, device, 4, num_heads=4, kv_lora_rank=512, qk_rope_head_dim=64,
                     max_tokens=4, dtype=torch.bfloat16, max_line_bytes=max_line_bytes({lines}))
comm.set_wait_limit(0.5)
o, lse, lens = random_partials(2, 3, 4, 512, torch.bfloat16, device)
if "{call}" == "exchange":
    comm.exchange_merge(o[0], lse[0], "e", lens)
else:
    comm.gather_q(o[0, :, :2], o[0, :, :2, :64])
try:
    torch.cuda.synchronize()
    print("no error")
except RuntimeError:
    print(comm.failure(), flush=True)
"""


@both_kinds
@pytest.mark.parametrize("call", ["exchange", "gather"])
def test_a_dead_peer_traps_and_is_named(call, lines):
    env = clean_env() | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    program = ALONE.replace("{call}", call).replace("{lines}", str(lines))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"DCP rank 0 waited for rank 1 in the {call} kernel" in done.stdout, done
    assert "epoch 1)" in done.stdout
