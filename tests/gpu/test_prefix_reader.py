"""pass-KV on GPUs: streams, memory, flashinfer's chunks, and real ranks with other collectives."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from sglang_dcp.attention.prefix_chunks import attend_prefix_chunks
from sglang_dcp.comm import TorchTransport
from sglang_dcp.prefix_gather import make_gather_plans, pack_chunks
from sglang_dcp.prefix_reader import PrefixReader
from sglang_dcp.workspace import ChunkBudget, ReadShape

RANK, WIDTH = 512, 576
NUM_GPUS = torch.cuda.device_count()
gpu = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA GPU")
MS = 1_700_000  # cycles of torch.cuda._sleep, about


class Stripes:
    """Latents of one request and the stripes of its group; slot(p) is p."""

    def __init__(self, num_tokens, dcp_size, dtype=torch.bfloat16, device="cuda", seed=0):
        generator = torch.Generator().manual_seed(seed)
        padded = -(-num_tokens // dcp_size) * dcp_size
        self.latents = torch.randn(padded, WIDTH, generator=generator).to(device, dtype)
        self.rows = [self.latents[rank::dcp_size].contiguous() for rank in range(dcp_size)]
        self.slots = torch.arange(num_tokens, dtype=torch.int32, device=device)


class SlowTransport:
    """all_gather of a group on one GPU, late: what does not wait for it reads poison."""

    def __init__(self, stripes, plans, sleep_ms):
        self.rank, self.size = 0, len(stripes.rows)
        self.stripes, self.sends = stripes, [plan.send_rows.long() for plan in plans]
        self.calls, self.sleep_ms, self.streams = 0, sleep_ms, set()

    def all_gather(self, out, inp):
        self.streams.add(torch.cuda.current_stream())
        out.fill_(255)  # NaN
        torch.cuda._sleep(self.sleep_ms * MS)
        rows = self.sends[self.calls % len(self.sends)]
        blocks = out.view(torch.bfloat16).view(self.size, len(rows), WIDTH)
        blocks[0].copy_(inp.view(torch.bfloat16).view(len(rows), WIDTH))
        for rank in range(1, self.size):
            torch.index_select(self.stripes.rows[rank], 0, rows, out=blocks[rank])
        self.calls += 1


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("slow", ["gather", "attention", "both"])
@pytest.mark.parametrize("num_tokens", [4096, 4001])
def test_streams_keep_their_order(slow, num_tokens):
    stripes, dcp_size, max_tokens = Stripes(num_tokens, 4), 4, 1000
    chunks = pack_chunks([num_tokens], max_tokens, dcp_size)
    plans = make_gather_plans(stripes.slots, chunks, dcp_size)
    transport = SlowTransport(stripes, plans, 0 if slow == "attention" else 3)
    reader = PrefixReader(transport, max_tokens, stripes.rows[0])
    for _ in range(3):  # layers
        got = []
        for index in range(len(plans)):
            if slow != "gather":
                torch.cuda._sleep(3 * MS)  # what is enqueued before is late
            nope, rope = reader.read(stripes.rows[0], plans, index, RANK, torch.bfloat16)
            if slow != "gather":
                torch.cuda._sleep(3 * MS)  # the copies are used late
            got.append(torch.cat([nope, rope], dim=1))
        assert torch.equal(torch.cat(got), stripes.latents[:num_tokens])
    # the first chunk's on the current stream, all others on one side stream
    assert len(transport.streams) == 2
    assert torch.cuda.current_stream() in transport.streams


@pytest.mark.gpu
@gpu
def test_the_next_gather_runs_beside_the_attention():
    """Gathers of 4 ms and attention of 4 ms, four chunks: 20 ms one ahead, 32 ms one by one."""
    stripes, max_tokens = Stripes(4000, 2), 1000
    plans = make_gather_plans(stripes.slots, pack_chunks([4000], max_tokens, 2), 2)
    transport = SlowTransport(stripes, plans, 4)
    reader = PrefixReader(transport, max_tokens, stripes.rows[0])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def layer():
        for index in range(len(plans)):
            reader.read(stripes.rows[0], plans, index, RANK, torch.bfloat16)
            torch.cuda._sleep(4 * MS)

    layer()
    begin.record()
    layer()
    end.record()
    end.synchronize()
    alone = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    alone[0].record()
    torch.cuda._sleep(4 * MS)
    alone[1].record()
    alone[1].synchronize()
    unit_ms = alone[0].elapsed_time(alone[1])
    assert begin.elapsed_time(end) < 6.5 * unit_ms, "5 units, against 8 without overlap"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("num_new", [64, 8192])
def test_peak_memory_stays_in_the_workspace(num_new):
    """96 heads on two ranks, 256 MiB, a prefix of 100000 tokens."""
    shape, limit = ReadShape(2, 48, 512, 128, 64, 128, 2), 256 << 20
    budget = ChunkBudget(limit, shape, 0, 128)
    stripes, max_tokens = Stripes(100_000, 2), budget.chunk_tokens([num_new], [100_000])
    chunks = pack_chunks([100_000], max_tokens, 2)
    plans = make_gather_plans(stripes.slots, chunks, 2)
    transport = SlowTransport(stripes, plans, 0)
    up = torch.randn(48 * 256, 512, device="cuda", dtype=torch.bfloat16)
    out = torch.randn(num_new, 48, 128, device="cuda", dtype=torch.bfloat16)
    lse = torch.zeros(num_new, 48, device="cuda")
    q = torch.randn(num_new, 48, 192, device="cuda", dtype=torch.bfloat16)
    reader, rows = None, stripes.rows[0]

    class Model:
        num_local_heads, qk_nope_head_dim, v_head_dim = 48, 128, 128

        def kv_b_proj(self, x):
            return torch.nn.functional.linear(x, up), None

        def attn_mha(self, q, k, v, batch, save_kv_cache):
            return torch.zeros_like(out), torch.zeros_like(lse)

        attn_mha.layer_id = 0

        def read_prefix_chunk(self, layer_id, batch, dtype):
            nope, rope = reader.read(rows, plans, batch.index, RANK, dtype)
            return nope, rope.unsqueeze(1)

    batch = SimpleNamespace(num_prefix_chunks=len(plans))
    batch.set_prefix_chunk_idx = lambda index: setattr(batch, "index", index)
    torch.nn.functional.linear(q[:, 0, :].new_zeros(8, 512), up)  # cuBLAS takes its own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reader = PrefixReader(transport, budget.most_tokens, rows)
    model = Model()
    for _ in range(2):
        attend_prefix_chunks(model, model, q, out, lse, "e", batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.9 * limit < peak < limit + (8 << 20), f"{peak / 2**20:.1f} MiB"


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_flashinfer_takes_requests_without_tokens_in_a_chunk(backend):
    """A full chunk belongs to few requests of the batch; the merge must leave the others alone.

    Their LSE is -inf or, from the kernel for Hopper, -5e4 in base 2, with a finite o.
    """
    flashinfer = pytest.importorskip("flashinfer")
    merge_state_v2 = pytest.importorskip("sgl_kernel").merge_state_v2
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
    q_lens, kv_lens, heads = [3, 70, 1, 5], [0, 300, 0, 17], 8

    def indptr(lens):
        ends = [sum(lens[:i]) for i in range(len(lens) + 1)]
        return torch.tensor(ends, dtype=torch.int32, device="cuda")

    wrapper.begin_forward(
        qo_indptr=indptr(q_lens), kv_indptr=indptr(kv_lens), num_qo_heads=heads,
        num_kv_heads=heads, head_dim_qk=192, head_dim_vo=128, q_data_type=torch.bfloat16,
        causal=False,
    )  # fmt: skip
    q, k = (torch.randn(sum(n), heads, 192).cuda().bfloat16() for n in (q_lens, kv_lens))
    v = torch.randn(sum(kv_lens), heads, 128).cuda().bfloat16()
    o, lse = wrapper.forward_return_lse(q, k, v, causal=False, sm_scale=0.07)
    real, real_lse = torch.randn_like(o), 30 * torch.randn_like(lse)  # of the new tokens
    merged, merged_lse = torch.full_like(o, math.nan), torch.full_like(lse, math.nan)
    merge_state_v2(o, lse * math.log(2), real, real_lse, merged, merged_lse)  # as upstream's loop
    q_at = kv_at = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        own_q, own_k = q[q_at : q_at + q_len].float(), k[kv_at : kv_at + kv_len].float()
        scores = torch.einsum("qhd,khd->qhk", own_q, own_k) * 0.07
        got_lse = lse[q_at : q_at + q_len] * math.log(2)
        rows = slice(q_at, q_at + q_len)
        if kv_len == 0:
            assert (got_lse <= -1e4).all()
            assert o[rows].isfinite().all()
            assert torch.equal(merged[rows], real[rows])
            assert torch.equal(merged_lse[rows], real_lse[rows])
        else:
            assert not torch.equal(merged[rows], real[rows])
            want = scores.softmax(-1)
            want = torch.einsum("qhk,khd->qhd", want, v[kv_at : kv_at + kv_len].float())
            torch.testing.assert_close(got_lse, scores.logsumexp(-1), atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(o[q_at : q_at + q_len].float(), want, atol=3e-2, rtol=3e-2)
        q_at, kv_at = q_at + q_len, kv_at + kv_len


# ---------------------------------------------------------------- real ranks


def _layers(rank, size, seed):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    transport = TorchTransport(dist.new_group(backend="nccl"))
    others = dist.new_group(backend="nccl")  # upstream's all-reduce has its own communicator
    stripes = Stripes(20_001, size, device=device, seed=seed)
    chunks = pack_chunks([20_001], 1000, size)
    plans = make_gather_plans(stripes.slots, chunks, size)
    reader = PrefixReader(transport, 1000, stripes.rows[rank])
    rng, ones, wrong = random.Random(rank), torch.ones(1 << 16, device=device), 0
    for _ in range(20):
        dist.all_reduce(ones.clone(), group=others)
        for index in range(len(plans)):
            nope, rope = reader.read(stripes.rows[rank], plans, index, RANK, torch.bfloat16)
            torch.cuda._sleep(rng.randrange(MS // 4))
            start, length = chunks[index].starts[0], chunks[index].lens[0]
            want = stripes.latents[start : start + length]
            wrong += (
                int((torch.cat([nope, rope], dim=1) != want).sum()) if rng.random() < 0.2 else 0
            )
        total = ones.clone()
        dist.all_reduce(total, group=others)
        wrong += int((total != size).sum()) if rng.random() < 0.3 else 0
    torch.cuda.synchronize()
    return wrong


@pytest.mark.multi_gpu
@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")
def test_ranks_out_of_step_neither_hang_nor_mix_up():
    """Collectives of two communicators, on two streams, on ranks that run apart."""
    size = 1 << (min(NUM_GPUS, 8).bit_length() - 1)
    assert run_ranks(size, _layers, 7, timeout_s=180) == [0] * size
