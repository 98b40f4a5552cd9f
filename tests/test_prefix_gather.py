"""pass-KV: the collective read of striped prefixes against direct indexing of the whole cache."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_ranks import gather_on_all_ranks

from sglang_dcp import state
from sglang_dcp.prefix_gather import PrefixChunk, make_gather_plans, pack_chunks
from sglang_dcp.prefix_reader import PrefixReader
from sglang_dcp.workspace import ChunkBudget, ReadShape

NOPE, ROPE, MAX_LEN, ROW_BYTES = 5, 3, 96, 4 * 8  # float32


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


def _cut(table, starts, lens):
    spans = zip(table, starts, lens, strict=True)
    return torch.cat([row[start : start + length] for row, start, length in spans])


def packed(table, chunks):
    """[T, ...] of the tokens of all chunks, in order, from table [requests, MAX_LEN, ...]."""
    return torch.cat([_cut(table, chunk.starts, chunk.lens) for chunk in chunks])


# ---------------------------------------------------------------- chunks


prefix_lists = st.lists(st.integers(0, MAX_LEN), min_size=1, max_size=6)


@given(prefixes=prefix_lists, size=st.sampled_from([2, 4, 8]), room=st.integers(0, 60))
def test_chunks_cover_prefixes_in_whole_groups(prefixes, size, room):
    chunks = pack_chunks(prefixes, size + room, size)
    seen = [[] for _ in prefixes]
    order = []
    for chunk in chunks:
        assert 0 < chunk.num_groups(size) * size <= size + room
        for b, (start, length) in enumerate(zip(chunk.starts, chunk.lens, strict=True)):
            assert start % size == 0
            seen[b] += range(start, start + length)
            order += [(b, position) for position in range(start, start + length)]
    assert seen == [list(range(prefix)) for prefix in prefixes]
    assert order == sorted(order), "the tokens of all chunks are those of all prefixes, in order"
    assert all(c.num_groups(size) == (size + room) // size for c in chunks[:-1]), "full"


def test_chunks_do_not_shrink_with_the_batch():
    """A long prefix beside many short ones: upstream would cut it into 8192 / 64 tokens each."""
    assert len(pack_chunks([128] * 63 + [65536], 8192, 8)) == 9


# ---------------------------------------------------------------- gathers


def check_gather(group, chunks, alter=lambda plans: plans):
    """Every chunk, gathered and put in order, against direct indexing; [requests] prefixes."""

    def gather(rank, transport):
        slots = packed(group.slots[rank], chunks)
        results = []
        for plan in alter(make_gather_plans(slots, chunks, group.dcp_size)):
            gathered = plan.gather(group.rows[rank], transport)
            nope, rope = plan.in_order(gathered, NOPE, torch.float32)
            assert nope.is_contiguous()
            assert rope.is_contiguous()
            results.append(torch.cat([nope, rope], dim=-1))
        return torch.cat(results)

    want = packed(group.latents, chunks)
    return all(torch.equal(got, want) for got in gather_on_all_ranks(group.dcp_size, gather))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    prefixes=prefix_lists,
    page_size=st.sampled_from([1, 2, 4]),
    dcp_size=st.sampled_from([2, 4, 8]),
    room=st.integers(0, 60),
    seed=st.integers(0, 2**20),
)
@example(prefixes=[3, 0, 1], page_size=1, dcp_size=8, room=0, seed=0)  # shorter than c
@example(prefixes=[64, 32], page_size=4, dcp_size=8, room=30, seed=0)  # whole groups only
def test_gather_equals_direct_indexing(prefixes, page_size, dcp_size, room, seed):
    prefixes = [*prefixes, 1 + seed % MAX_LEN]
    chunks = pack_chunks(prefixes, dcp_size + room, dcp_size)
    assert check_gather(Group(len(prefixes), page_size, dcp_size, seed), chunks)


@pytest.mark.parametrize("prefixes", [[9, 6], [8, 16]])
def test_a_wrong_plan_is_visible(prefixes):
    """The check can fail: other rows, or another order; with cut and with whole groups."""
    group, chunks = Group(2, 1, 4), pack_chunks(prefixes, 100, 4)
    assert check_gather(group, chunks)

    def swapped(plans):
        rows = plans[0].send_rows.roll(1)
        return [dataclasses.replace(plans[0], send_rows=rows)]

    assert not check_gather(group, chunks, swapped)
    if chunks[0].num_tokens % 4:
        assert not check_gather(group, chunks, lambda plans: [dropped_source(plans[0])])


def dropped_source(plan):
    num_tokens = plan.source.shape[0]
    return dataclasses.replace(plan, source=torch.arange(num_tokens))


def test_plans_are_the_same_work_on_all_ranks():
    group, chunks = Group(3, 1, 4), pack_chunks([1, 1, 6], 8, 4)
    plans = [make_gather_plans(packed(slots, chunks), chunks, 4) for slots in group.slots]
    assert [[plan.send_rows.shape[0] for plan in own] for own in plans] == [[2, 2]] * 4
    for own in plans:
        assert all(torch.equal(a.source, b.source) for a, b in zip(own, plans[0], strict=True))
    (whole,) = make_gather_plans(packed(group.slots[0], [PrefixChunk((0,) * 3, (8, 4, 0))]),
                                 [PrefixChunk((0,) * 3, (8, 4, 0))], 4)  # fmt: skip
    assert whole.source is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_rows_travel_as_bytes(dtype):
    """Also in dtypes that torch can neither index nor send."""
    rows = torch.randn(20, 8).to(dtype)
    plan = make_gather_plans(torch.arange(24), [PrefixChunk((0,), (24,))], 2)[0]

    def gather(rank, transport):
        return plan.gather(rows, transport).view(torch.uint8)

    for got in gather_on_all_ranks(2, gather):
        want = rows[:12].view(torch.uint8)
        assert torch.equal(got, torch.stack([want, want]))


# ---------------------------------------------------------------- the reader


def read_layers(group, chunks, num_layers, max_tokens, rank, transport):
    """All chunks of several layers through one reader; layer l holds rows + l."""
    plans = make_gather_plans(packed(group.slots[rank], chunks), chunks, group.dcp_size)
    reader = PrefixReader(transport, max_tokens, group.rows[rank])
    results = []
    for layer in range(num_layers):
        rows = group.rows[rank] + layer
        parts = [reader.read(rows, plans, i, NOPE, torch.float32) for i in range(len(plans))]
        results.append(torch.cat([torch.cat(part, dim=-1) for part in parts]))
    return reader, torch.stack(results)


@pytest.mark.parametrize("dcp_size", [2, 8])
@pytest.mark.parametrize("max_tokens", [8, 40, 400])
def test_reader_keeps_chunks_apart(dcp_size, max_tokens):
    """One buffer receives every chunk, one ahead: results are copies, and all are right."""
    prefixes = [61, 3, 0, dcp_size]
    group, chunks = Group(len(prefixes), 1, dcp_size), pack_chunks(prefixes, max_tokens, dcp_size)

    def read(rank, transport):
        return read_layers(group, chunks, 2, max_tokens, rank, transport)

    want = packed(group.latents, chunks)
    for reader, got in gather_on_all_ranks(dcp_size, read):
        torch.testing.assert_close(got, torch.stack([want, want + 1]))
        assert reader.buffer_bytes == max_tokens * ROW_BYTES * (dcp_size + 1) // dcp_size


def test_a_chunk_larger_than_the_buffers_is_refused():
    """A temporary would be outside the workspace, and freed on another stream than its last use."""
    group, chunks = Group(1, 1, 2), pack_chunks([20], 20, 2)
    silent = SimpleNamespace(rank=0, size=2, all_gather=lambda out, inp: None)
    read_layers(group, chunks, 1, 20, 0, silent)
    with pytest.raises(AssertionError):
        read_layers(group, chunks, 1, 18, 0, silent)


def test_reader_gathers_one_ahead_and_not_across_layers():
    group, chunks, sent = Group(1, 1, 2), pack_chunks([20], 8, 2), []

    class Counting:
        rank, size = 0, 2

        def all_gather(self, out, inp):
            sent.append(inp.numel() // ROW_BYTES)
            out.zero_()

    plans = make_gather_plans(packed(group.slots[0], chunks), chunks, 2)
    reader = PrefixReader(Counting(), 8, group.rows[0])

    def read(index):
        reader.read(group.rows[0], plans, index, NOPE, torch.float32)

    for index, want in enumerate([[4, 4], [4, 4, 2], [4, 4, 2]]):  # the last one starts nothing
        read(index)
        assert sent == want
    with pytest.raises(AssertionError):
        read(1)
    read(0)
    with pytest.raises(AssertionError, match="were not read to the end"):
        read(0)
    read(0)
    with pytest.raises(AssertionError, match="out of order"):
        read(2)


# ---------------------------------------------------------------- through upstream's forward batch


def make_batch(rank, group, prefixes):
    """A ForwardBatch in small: upstream's mixin over this rank's req_to_token."""
    from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import (
        ForwardBatchDeepSeekMHAMixin,
    )

    batch = ForwardBatchDeepSeekMHAMixin()
    batch.batch_size = len(prefixes)
    batch.extend_prefix_lens_cpu = list(prefixes)
    batch.extend_prefix_lens = torch.tensor(prefixes)
    # requests lie in rows of their own choice of the table
    batch.req_pool_indices = torch.arange(len(prefixes)).flip(0) + 1
    table = torch.zeros(len(prefixes) + 2, MAX_LEN, dtype=torch.int32)
    table[batch.req_pool_indices] = group.slots[rank]
    return batch, SimpleNamespace(req_to_token=table)


@pytest.fixture
def as_model(plugin, monkeypatch):
    """Runs a call on simulated ranks in upstream's forward context; call(batch, model)."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as mixin
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from sglang_dcp.hooks import cpu
    from sglang_dcp.pool import DcpMLATokenToKVPool

    name = "create_chunked_prefix_cache_kv_indices"
    monkeypatch.setattr(mixin, name, getattr(cpu, name))
    model = SimpleNamespace(attn_mha=SimpleNamespace(layer_id=3))

    def pool_of(rows):
        pool = object.__new__(DcpMLATokenToKVPool)
        assert isinstance(pool, MLATokenToKVPool)
        pool.start_layer, pool.kv_lora_rank, pool.qk_rope_head_dim = 2, NOPE, ROPE
        pool.kv_buffer = [torch.full_like(rows, float("nan")), rows.unsqueeze(1)]
        return pool

    def run(group, prefixes, call):
        def on_rank(rank, transport):
            batch, req_to_token_pool = make_batch(rank, group, prefixes)
            backend = SimpleNamespace(
                token_to_kv_pool=pool_of(group.rows[rank]), req_to_token_pool=req_to_token_pool
            )
            with forward_context(ForwardContext(backend)):
                return call(batch, model)

        return gather_on_all_ranks(group.dcp_size, on_rank)

    return run


def prepare(batch, capacity):
    """Our hook on upstream's method, as upstream calls it."""
    from sglang.srt.environ import envs

    from sglang_dcp.hooks.forward_mha import around_prepare_chunked_prefix_cache_info as ours

    original = type(batch).prepare_chunked_prefix_cache_info
    with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(capacity):
        ours(original, batch, torch.device("cpu"))


def read_chunk(batch, model, index, dtype=torch.float32):
    """The read of a chunk, as our loop does it."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    batch.set_prefix_chunk_idx(index)
    return get_token_to_kv_pool().read_prefix_chunk(model.attn_mha.layer_id, batch, dtype)


PREFIXES = [[40], [3, 0, 33], [17, 64, 8, 1], [0, 5]]


@pytest.mark.parametrize("dcp_size", [2, 8])
@pytest.mark.parametrize("capacity", [20, 64, 1000])
@pytest.mark.parametrize("prefixes", PREFIXES)
def test_chunks_of_a_batch(as_model, dcp_size, capacity, prefixes):
    """What upstream's attention is told about the chunks, and what the model gets for them."""
    group = Group(len(prefixes), 1, dcp_size)

    def call(batch, model):
        prepare(batch, capacity)
        parts = [read_chunk(batch, model, i) for i in range(batch.num_prefix_chunks)]
        return batch, parts

    for batch, parts in as_model(group, prefixes, call):
        starts, lens = batch.prefix_chunk_starts, batch.prefix_chunk_seq_lens
        assert lens.sum(dim=0).tolist() == prefixes
        assert lens.dtype == starts.dtype == batch.prefix_chunk_cu_seq_lens.dtype == torch.int32
        for i, (nope, rope) in enumerate(parts):
            own = lens[i].tolist()
            assert batch.prefix_chunk_cu_seq_lens[i].tolist() == [
                sum(own[:b]) for b in range(len(own) + 1)
            ]
            assert batch.prefix_chunk_num_tokens[i] == sum(own) <= capacity
            assert batch.prefix_chunk_max_seq_lens[i] == max(own)
            assert batch.prefix_chunk_has_zero_kv[i] == (0 in own)
            want = _cut(group.latents, starts[i].tolist(), own)
            assert torch.equal(nope, want[:, :NOPE])
            assert torch.equal(rope, want[:, None, NOPE:])
        assert len(parts) == -(-sum(-(-n // dcp_size) for n in prefixes) // (capacity // dcp_size))


def test_more_new_tokens_make_smaller_chunks(as_model):
    """Their outputs share the workspace with the chunk; upstream's capacity bounds both."""
    budget = ChunkBudget(1 << 20, ReadShape(2, 4, NOPE, 16, ROPE, 16, 4), 0, page_tokens=2)

    def call(batch, model):
        current = state.get_state()
        state._state = dataclasses.replace(current, chunk_budget=budget)
        sizes = []
        for num_new, capacity in ((1, 10**6), (1000, 10**6), (1000, 50)):
            batch.extend_seq_lens_cpu, batch.prefix_chunk_len = [num_new], None
            prepare(batch, capacity)
            sizes.append(batch.prefix_chunk_len)
        state._state = current
        read_chunk(batch, model, 0)  # the only one
        return sizes

    for few, many, capped in as_model(Group(1, 1, 2), [40], call):
        assert few == budget.chunk_tokens([1], [40])
        assert many == budget.chunk_tokens([1000], [40]) < few
        assert capped == 50


def test_plans_are_made_once_a_batch(as_model, monkeypatch):
    from sglang_dcp.hooks import forward_mha

    made = []

    def counting(*args):
        made.append(args[1])
        return make_gather_plans(*args)

    monkeypatch.setattr(forward_mha, "make_gather_plans", counting)

    def call(batch, model):
        for _ in range(3):  # layers
            prepare(batch, 16)
            for index in range(batch.num_prefix_chunks):
                read_chunk(batch, model, index)

    as_model(Group(1, 1, 2), [40], call)
    assert len(made) == 2 * 2, "ranks, each played twice"


def test_no_prefix_needs_no_plan(as_model):
    def call(batch, model):
        prepare(batch, 16)
        assert batch.num_prefix_chunks == 0
        prepared, _ = make_batch(0, Group(1, 1, 2), [40])
        prepare(prepared, 16)
        return read_chunk(prepared, model, 0)

    as_model(Group(1, 1, 2), [0], call)
