"""pass-KV: the collective read of striped prefixes against direct indexing of the whole cache."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_ranks import gather_on_all_ranks

from sglang_dcp.prefix_gather import make_gather_plan

NOPE, ROPE, MAX_LEN = 5, 3, 96


class Group:
    """The caches of every rank of a group that holds the same requests.

    Ranks number their slots differently, as after different evictions; only the owner rule and
    the lengths are common. `latents` [requests, MAX_LEN, NOPE + ROPE] is the truth.
    """

    def __init__(self, num_requests, page_size, dcp_size, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        wide = page_size * dcp_size
        pages_each = -(-MAX_LEN // wide)
        num_rows = (num_requests * pages_each + 1) * page_size
        self.dcp_size = dcp_size
        shape = (num_requests, MAX_LEN, NOPE + ROPE)
        self.latents = torch.randn(shape, generator=generator).to(dtype)
        self.slots, self.rows = [], []  # by rank: [requests, MAX_LEN] and [num_rows, NOPE + ROPE]
        position = torch.arange(MAX_LEN)
        for rank in range(dcp_size):
            pages = torch.randperm(num_requests * pages_each, generator=generator) + 1
            pages = pages.view(num_requests, pages_each)
            slots = pages[:, position // wide] * wide + position % wide
            rows = torch.full((num_rows, NOPE + ROPE), float("nan"), dtype=dtype)
            owned = position % dcp_size == rank
            rows[slots[:, owned] // dcp_size] = self.latents[:, owned]
            self.slots.append(slots.to(torch.int32))
            self.rows.append(rows)

    def slots_of(self, rank, starts, lens):
        """[T] virtual slots of `rank`, requests one after another."""
        return _cut(self.slots[rank], starts, lens)

    def truth(self, starts, lens):
        """[T, NOPE + ROPE], what the gather must return."""
        return _cut(self.latents, starts, lens)


def _cut(table, starts, lens):
    spans = zip(table, starts, lens, strict=True)
    return torch.cat([row[start : start + length] for row, start, length in spans])


def check_gather(group, starts, lens):
    def gather(rank, transport):
        slots = group.slots_of(rank, starts, lens)
        plan = make_gather_plan(slots, starts, lens, rank, group.dcp_size)
        nope, rope = plan.gather(group.rows[rank], transport, NOPE)
        assert nope.is_contiguous()
        assert rope.is_contiguous()
        return torch.cat([nope, rope], dim=-1)

    want = group.truth(starts, lens)
    for got in gather_on_all_ranks(group.dcp_size, gather):
        assert torch.equal(got, want)


chunks = st.lists(
    st.tuples(st.integers(0, MAX_LEN // 2), st.integers(0, MAX_LEN // 2)), min_size=1, max_size=5
)


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    chunks=chunks,
    page_size=st.sampled_from([1, 2, 4]),
    dcp_size=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 2**20),
)
@example(chunks=[(0, 0)], page_size=1, dcp_size=2, seed=0)  # nothing at all
@example(chunks=[(0, 3), (0, 0), (0, 1)], page_size=1, dcp_size=8, seed=0)  # shorter than c
@example(chunks=[(7, 5), (1, 1), (3, 13)], page_size=4, dcp_size=4, seed=0)  # unaligned
def test_gather_equals_direct_indexing(chunks, page_size, dcp_size, seed):
    starts, lens = (list(column) for column in zip(*chunks, strict=True))
    check_gather(Group(len(chunks), page_size, dcp_size, seed), starts, lens)


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
@pytest.mark.parametrize("chunk_len", [1, 5, 8, 50])
def test_chunks_cover_the_prefix(dcp_size, chunk_len):
    """Chunk by chunk, cut anywhere, every prefix token comes once and in order."""
    prefixes = [61, 3, 0, dcp_size]
    group = Group(len(prefixes), 1, dcp_size)
    for start in range(0, max(prefixes), chunk_len):
        lens = [min(max(n - start, 0), chunk_len) for n in prefixes]
        check_gather(group, [start] * len(prefixes), lens)


@pytest.mark.parametrize("wrong", ["starts", "rank"])
def test_a_wrong_plan_is_visible(wrong):
    """The checks can fail: aligned starts assumed, or another rank's rows sent."""
    group, starts, lens = Group(2, 1, 4), [3, 1], [9, 6]

    def gather(rank, transport):
        slots = group.slots_of(rank, starts, lens)
        plan_starts = [0, 0] if wrong == "starts" else starts
        plan_rank = (rank + 1) % 4 if wrong == "rank" else rank
        plan = make_gather_plan(slots, plan_starts, lens, plan_rank, 4)
        return torch.cat(plan.gather(group.rows[rank], transport, NOPE), dim=-1)

    assert not torch.equal(gather_on_all_ranks(4, gather)[0], group.truth(starts, lens))


def test_ranks_send_equal_blocks():
    """The collective needs one size on all ranks, whoever owns more; the rest is row 0."""
    group, starts, lens = Group(3, 1, 4), [0, 0, 0], [1, 1, 1]
    plans = [
        make_gather_plan(group.slots_of(r, starts, lens), starts, lens, r, 4) for r in range(4)
    ]
    assert [plan.send_rows.shape[0] for plan in plans] == [3, 3, 3, 3]
    assert all(plan.send_rows.eq(0).all() for plan in plans[1:])  # they own nothing
    assert all(torch.equal(plan.source, plans[0].source) for plan in plans)
    assert plans[0].send_rows.dtype == plans[0].source.dtype == torch.int64


# ---------------------------------------------------------------- through upstream's own chunks


def make_batch(rank, group, prefixes, new_tokens):
    """A ForwardBatch in small: upstream's mixin over this rank's req_to_token."""
    from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import (
        ForwardBatchDeepSeekMHAMixin,
    )

    batch = ForwardBatchDeepSeekMHAMixin()
    seq_lens = torch.tensor([p + n for p, n in zip(prefixes, new_tokens, strict=True)])
    batch.batch_size = len(prefixes)
    batch.extend_prefix_lens_cpu = list(prefixes)
    batch.extend_prefix_lens = torch.tensor(prefixes)
    batch.seq_lens, batch.seq_lens_cpu = seq_lens, seq_lens
    # requests lie in rows of their own choice of the table
    batch.req_pool_indices = torch.arange(len(prefixes)).flip(0) + 1
    table = torch.zeros(len(prefixes) + 2, MAX_LEN, dtype=torch.int32)
    table[batch.req_pool_indices] = group.slots[rank]
    return batch, SimpleNamespace(req_to_token=table)


@pytest.fixture
def read(plugin, monkeypatch):
    """Runs a read of the model (our hook) in upstream's forward context, on simulated ranks."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as mixin
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from sglang_dcp.hooks import cpu
    from sglang_dcp.hooks.forward_mha import around_get_mla_kv_buffer
    from sglang_dcp.pool import DcpMLATokenToKVPool

    for name in ("create_chunked_prefix_cache_kv_indices", "create_flashinfer_kv_indices_triton"):
        monkeypatch.setattr(mixin, name, getattr(cpu, name))
    model = SimpleNamespace(attn_mha=SimpleNamespace(layer_id=3))

    def pool_of(rows):
        pool = object.__new__(DcpMLATokenToKVPool)
        assert isinstance(pool, MLATokenToKVPool)
        pool.start_layer, pool.kv_lora_rank, pool.qk_rope_head_dim = 2, NOPE, ROPE
        pool.kv_buffer = [torch.full_like(rows, float("nan")), rows.unsqueeze(1)]
        return pool

    def run(group, batches, prepare, dtype=torch.float32):
        """prepare(batch) -> kv_indices, with upstream's code; returns every rank's result."""

        def call(rank, transport):
            batch, req_to_token_pool = batches[rank]
            backend = SimpleNamespace(
                token_to_kv_pool=pool_of(group.rows[rank]), req_to_token_pool=req_to_token_pool
            )
            with forward_context(ForwardContext(backend)):
                return around_get_mla_kv_buffer(None, model, prepare(batch), dtype, batch)

        return gather_on_all_ranks(group.dcp_size, call)

    return run


PREFIXES = [[40], [3, 0, 33], [17, 64, 8, 1], [0, 5]]


@pytest.mark.parametrize("dcp_size", [2, 8])
@pytest.mark.parametrize("capacity", [20, 64, 1000])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_positions_are_upstreams_chunks(read, monkeypatch, dcp_size, capacity, prefixes):
    """Chunk starts and lengths, and through them every row, against what upstream prepares."""
    from sglang.srt.environ import envs

    from sglang_dcp.hooks.forward_mha import _positions

    group = Group(len(prefixes), 1, dcp_size)
    batches = [make_batch(r, group, prefixes, [2] * len(prefixes)) for r in range(dcp_size)]

    def prepare(batch):
        with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(capacity):
            batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
        batch.prefix_chunk_idx = index
        return batch.prefix_chunk_kv_indices[index]

    index, num_chunks = 0, 1
    while index < num_chunks:
        results = read(group, batches, prepare)
        batch = batches[0][0]
        num_chunks = batch.num_prefix_chunks
        starts, lens = (list(column) for column in _positions(batch))
        assert starts == batch.prefix_chunk_starts[index].tolist()
        assert lens == batch.prefix_chunk_seq_lens[index].tolist()
        want = group.truth(starts, lens)
        for nope, rope in results:
            assert torch.equal(nope, want[:, :NOPE])
            assert torch.equal(rope, want[:, None, NOPE:])
        index += 1
    assert num_chunks == -(-max(prefixes) // (capacity // len(prefixes)))


@pytest.mark.parametrize("dcp_size", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_positions_one_shot(read, dcp_size, dtype, prefixes):
    """The one-shot form reads whole sequences, new tokens included."""
    new = [1 + b for b in range(len(prefixes))]
    group = Group(len(prefixes), 1, dcp_size)
    batches = [make_batch(r, group, prefixes, new) for r in range(dcp_size)]
    for batch, _ in batches:
        batch.mha_one_shot = True
    lens = [p + n for p, n in zip(prefixes, new, strict=True)]
    want = group.truth([0] * len(lens), lens).to(dtype)
    results = read(group, batches, lambda batch: batch.fetch_mha_one_shot_kv_indices(), dtype)
    for nope, rope in results:
        assert torch.equal(nope, want[:, :NOPE])
        assert torch.equal(rope, want[:, None, NOPE:])
        assert nope.is_contiguous()
        assert rope.is_contiguous()


def test_the_plan_is_made_once_a_read(read, monkeypatch):
    """One plan a chunk serves all layers; chunks and the one-shot form do not share one."""
    from sglang_dcp.hooks import forward_mha

    made = []

    def counting(*args):
        made.append(args[1:3])
        return make_gather_plan(*args)

    monkeypatch.setattr(forward_mha, "make_gather_plan", counting)
    group = Group(1, 1, 2)
    batches = [make_batch(rank, group, [40], [1]) for rank in range(2)]
    for index in (0, 0, 1):  # two layers, then another chunk
        for batch, _ in batches:
            batch.mha_one_shot, batch.prefix_chunk_len, batch.prefix_chunk_idx = None, 25, index

        def chunk(batch):
            table = group.slots[0 if batch is batches[0][0] else 1]
            return table[0, batch.prefix_chunk_idx * 25 : 40][:25]

        read(group, batches, chunk)
    for batch, _ in batches:
        batch.mha_one_shot = True
    read(group, batches, lambda batch: batch.fetch_mha_one_shot_kv_indices())
    assert made == [*[([0], [25])] * 2, *[([25], [15])] * 2, *[([0], [41])] * 2]
