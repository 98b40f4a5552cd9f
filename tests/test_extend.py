"""Pass-Q: slices, groups of tokens, and simulated ranks' whole extend against plain attention."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_ranks import as_rank
from support import assert_close

from sglang_dcp import state
from sglang_dcp.attention.prefix_slices import Share, cut_slices, make_prefix_slices
from sglang_dcp.attention.token_groups import best_group_size, make_groups, sizes_that_fit
from sglang_dcp.kernels.lse_merge import merge_partials_ref
from sglang_dcp.prefill_policy import PrefillPolicy

pytestmark = pytest.mark.usefixtures("plugin_loaded")

OWN_HEADS, NOPE, ROPE, SCALE, LAYER = 2, 12, 4, 0.4, 3
REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5
).filter(lambda requests: any(prefix for prefix, _ in requests))


# ---------------------------------------------------------------- slices and groups


@given(REQUESTS, st.integers(1, 12), st.sampled_from([2, 8]))
def test_slices_hold_every_token_with_a_prefix_once(requests, max_tokens, dcp_size):
    prefix_lens, new_lens = zip(*requests, strict=True)
    shares = []

    def plan(share):
        shares.append(share)
        return share

    slices = make_prefix_slices(new_lens, prefix_lens, max_tokens, dcp_size, "cpu", plan)
    owner = [b for b, n in enumerate(new_lens) for _ in range(n)]
    seen = []
    for part in slices:
        rows = torch.arange(len(owner))[part.tokens].tolist()
        assert 0 < len(rows) <= max_tokens
        assert isinstance(part.tokens, slice) == (rows[-1] - rows[0] + 1 == len(rows))
        assert rows == sorted(rows)
        of_share = zip(part.kernel.requests, part.kernel.counts, strict=True)
        assert [owner[row] for row in rows] == [b for b, n in of_share for _ in range(n)]
        want = [
            [sum(p % dcp_size == r for p in range(prefix_lens[owner[row]])) for row in rows]
            for r in range(dcp_size)
        ]
        assert part.local_lens.tolist() == want
        seen += rows
    assert seen == [row for row, b in enumerate(owner) if prefix_lens[b]]
    assert all(
        part.tokens.stop - part.tokens.start == max_tokens
        for part in slices[:-1]
        if isinstance(part.tokens, slice)
    )
    assert len(shares) == len(set(shares))


def test_a_long_request_is_planned_twice():
    """Its inner slices are equal to a kernel; only the rest differs."""
    shares = []
    slices = make_prefix_slices([70], [9], 16, 2, "cpu", shares.append)
    assert len(slices) == 5
    assert shares == [Share((0,), (16,)), Share((0,), (6,))]
    assert [len(pieces) for pieces in cut_slices([3, 50, 3], [1, 0, 1], 16)] == [2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_groups_hold_one_request_each(counts, size):
    requests = [3 * i + 1 for i in range(len(counts))]
    groups = make_groups(requests, counts, size, "cpu")
    q = torch.randn(sum(counts), 2, 3)
    packed = groups.packed(q.transpose(0, 1).contiguous().transpose(0, 1))
    assert packed.shape == (len(groups.requests), size, 2, 3)
    assert packed.is_contiguous()
    assert torch.equal(groups.unpacked(packed), q)
    of_row = [b for b, count in zip(requests, counts, strict=True) for _ in range(count)]
    for request, group in zip(groups.requests, packed, strict=True):
        for row in group:
            (token,) = (i for i in range(len(q)) if torch.equal(q[i], row))
            assert of_row[token] == request
    assert (groups.pack is None) == all(count % size == 0 for count in counts)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.sampled_from([1, 16, 64]))
@example([16] + [1] * 112, 16)  # one place in 14 would hold a token
def test_groups_are_half_full_at_least(counts, most):
    sizes = sizes_that_fit(counts, most)
    assert sizes[0] == 1
    for size in (1, 2, 4, 8, 16, 32, 64):
        places = len(make_groups(range(len(counts)), counts, size, "cpu").requests) * size
        useful = size < 2 * max(counts) and size <= most
        assert (size in sizes) == (useful and places <= 2 * sum(counts))


def test_group_size_fills_the_gpu():
    """64 tokens x 96 heads in one group would leave 36 of 132 multiprocessors idle."""
    assert best_group_size([64], [65536], 96, 132) == 8
    assert best_group_size([1] * 32, [65536] * 32, 96, 132) == 1  # as in decode
    assert best_group_size([4] * 32, [65536] * 32, 96, 132) in (2, 4)
    for counts in ([5], [3, 7], [1, 64]):
        assert best_group_size(counts, [1000] * len(counts), 16, 132) <= max(counts) * 2


# ---------------------------------------------------------------- the whole extend


class Comm:
    """The communicator of one of c ranks played in turn: the first round notes what each sends.

    In the second round the exchange knows every rank's partials; in the first it returns NaN.
    """

    def __init__(self, dcp_size, max_tokens, queries, mutation=""):
        self.dcp_size, self.max_tokens, self.queries = dcp_size, max_tokens, queries
        self.local_heads, self.num_heads = OWN_HEADS, dcp_size * OWN_HEADS
        self.rank, self.sent, self.mutation = 0, [[] for _ in range(dcp_size)], mutation
        self.replays = False

    def start(self, rank, replays):
        self.rank, self.replays, self.calls = rank, replays, 0

    def gather_q(self, q_nope, q_pe):
        own = torch.cat([q_nope, q_pe], -1)
        heads = slice(self.rank * OWN_HEADS, (self.rank + 1) * OWN_HEADS)
        (rows,) = (
            rows
            for rows in self.slices
            if len(rows) == len(own) and torch.equal(self.queries[rows][:, heads], own)
        )
        assert len(rows) <= self.max_tokens
        return self.queries[rows].transpose(0, 1).contiguous().transpose(0, 1)

    def exchange_merge(self, o, lse, lse_base, local_lens, merged_lse=None):
        shape = (len(o), OWN_HEADS, NOPE)
        merged = torch.full(shape, math.nan)
        merged_lse.fill_(math.nan)
        if not self.replays:
            self.sent[self.rank].append((o, lse))
            return merged
        sent = [calls[self.calls] for calls in self.sent]
        self.calls += 1
        heads = slice(self.rank * OWN_HEADS, (self.rank + 1) * OWN_HEADS)
        o, lse = (torch.stack([pair[i] for pair in sent])[:, :, heads] for i in (0, 1))
        if self.mutation == "ignore lens":
            local_lens = torch.ones_like(local_lens)
        return merge_partials_ref(o, lse, local_lens, lse_base, merged, merged_lse)

    def destroy(self):
        pass


class Extend:
    """A batch of (prefix, new) requests over one pool; every rank's backend and the reference."""

    def __init__(self, requests, dcp_size, page_size, max_tokens, padding=0):
        wide, num_requests = page_size * dcp_size, len(requests)
        self.prefix_lens, self.new_lens = (list(x) for x in zip(*requests, strict=True))
        self.dcp_size, self.max_tokens, self.num_tokens = dcp_size, max_tokens, sum(self.new_lens)
        longest = max(prefix + new for prefix, new in requests)
        pages_each = -(-longest // wide)
        pages = torch.randperm(num_requests * pages_each).view(num_requests, -1) + 1
        position = torch.arange(longest)
        self.slots = (pages[:, position // wide] * wide + position % wide).int()
        self.rows = torch.randn((num_requests * pages_each + 1) * wide, 1, NOPE + ROPE)
        spread = 10 ** (torch.rand(1, dcp_size * OWN_HEADS, 1) - 0.5)
        self.q = torch.randn(self.num_tokens + padding, dcp_size * OWN_HEADS, NOPE + ROPE) * spread
        spans = list(zip(self.prefix_lens, self.new_lens, strict=True))
        self.loc = torch.cat([self.slots[b, p : p + n] for b, (p, n) in enumerate(spans)])
        self.fresh = self.rows[self.loc].clone()  # the reference pool has them already
        if padding:
            self.loc = torch.cat([self.loc, self.loc.new_zeros(padding)])
            self.fresh = torch.cat([self.fresh, torch.randn(padding, 1, NOPE + ROPE)])

    def batch(self):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            extend_prefix_lens_cpu=self.prefix_lens,
            extend_seq_lens_cpu=self.new_lens,
            extend_prefix_lens=torch.tensor(self.prefix_lens, dtype=torch.int32),
            req_pool_indices=torch.arange(len(self.prefix_lens)),
            batch_size=len(self.prefix_lens),
            out_cache_loc=self.loc,
        )

    def reference(self):
        """float64, one token at a time over its prefix and the new tokens up to itself."""
        outs = []
        for b, (prefix, new) in enumerate(zip(self.prefix_lens, self.new_lens, strict=True)):
            for t in range(new):
                keys = self.rows[self.slots[b, : prefix + t + 1].long(), 0].double()
                q = self.q[len(outs)].double()
                outs.append((q @ keys.T * SCALE).softmax(-1) @ keys[:, :NOPE])
        return torch.stack(outs)

    def run(self, mutation="", extend_lse_base="e"):
        """Outputs of all heads [T, H, 12], and each rank's pool afterwards."""
        comm = Comm(self.dcp_size, self.max_tokens, self.q, mutation)
        rows = torch.arange(self.num_tokens)
        parts = make_prefix_slices(
            self.new_lens, self.prefix_lens, self.max_tokens, 2, "cpu", lambda share: None
        )
        comm.slices = [rows[part.tokens] for part in parts]
        for replays in (False, True):
            results = [
                self.run_rank(rank, comm, replays, extend_lse_base) for rank in range(self.dcp_size)
            ]
        outs, pools = zip(*results, strict=True)
        return torch.cat(outs, 1), pools

    def run_rank(self, rank, comm, replays, extend_lse_base):
        from sglang_dcp.attention.torch_mla import DcpTorchMLABackend
        from sglang_dcp.kernels.kv_write import set_mla_kv_buffer_dcp_sharded_ref

        comm.start(rank, replays)
        heads = slice(rank * OWN_HEADS, (rank + 1) * OWN_HEADS)
        pool_rows = self.rows[rank :: self.dcp_size].clone()
        # what this extend must write is not there yet, and rows that it must not read are poison
        pool_rows[self.loc[: self.num_tokens][self.own(rank)] // self.dcp_size] = math.nan

        def write(layer, loc, nope, rope):
            assert layer.layer_id == LAYER
            args = (pool_rows, loc, nope, rope, rank, self.dcp_size)
            set_mla_kv_buffer_dcp_sharded_ref(*args)

        pool = SimpleNamespace(
            get_key_buffer=lambda layer_id: pool_rows, set_mla_kv_buffer=write, kv_lora_rank=NOPE
        )
        table = SimpleNamespace(req_to_token=self.slots)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool)
        layer = SimpleNamespace(
            layer_id=LAYER,
            v_head_dim=NOPE,
            head_dim=NOPE + ROPE,
            scaling=SCALE,
            tp_q_head_num=OWN_HEADS,
        )
        with as_rank(rank, self.dcp_size):
            old = state.get_state()
            state._state = dataclasses.replace(
                old, comm=comm, prefill_policy=PrefillPolicy("pass-q")
            )
            backend, batch = DcpTorchMLABackend(runner), self.batch()
            backend.extend_lse_base = extend_lse_base
            backend.init_forward_metadata(batch)
            q = self.q[:, heads].transpose(0, 1).contiguous().transpose(0, 1)
            nope, rope = self.fresh.split([NOPE, ROPE], -1)
            out = backend.forward_extend(
                q[..., :NOPE], nope, nope, layer, batch, q_rope=q[..., NOPE:], k_rope=rope
            )
        return out.view(-1, OWN_HEADS, NOPE), pool_rows

    def own(self, rank):
        return self.loc[: self.num_tokens] % self.dcp_size == rank


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    st.sampled_from([(2, 1), (2, 4), (4, 1), (4, 4), (8, 1), (8, 64)]),
    st.integers(1, 12),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
@example([(3, 4)], (8, 1), 64, 0, 0)  # a prefix shorter than c
@example([(0, 5), (17, 3), (0, 1), (1, 2)], (4, 4), 64, 1, 1)  # others lie between: index rows
@example([(33, 9)], (2, 4), 2, 0, 2)  # several slices; the prefix ends inside a widened page
@example([(8, 1), (16, 1), (24, 1)], (4, 1), 2, 0, 3)  # as verification: few tokens each
def test_extend_equals_plain_attention(requests, sizes, max_tokens, padding, seed):
    torch.manual_seed(seed)
    extend = Extend(requests, *sizes, max_tokens, padding)
    out, pools = extend.run()
    assert_close(out[: extend.num_tokens], extend.reference())
    for rank, pool in enumerate(pools):  # all rows as one pool would hold them, row 0 is padding's
        assert torch.equal(pool[1:], extend.rows[rank :: extend.dcp_size][1:])


CASE = ([(30, 6), (2, 5), (0, 3)], 8, 1, 64)


def test_a_wrong_base_is_visible():
    extend = Extend(*CASE)
    out, _ = extend.run(extend_lse_base="2")
    assert (out.double() - extend.reference()).abs().max() > 1e-3


def test_counting_empty_stripes_is_visible():
    """Ranks 2 to 7 hold nothing of the second prefix; their partials must not count."""
    extend = Extend(*CASE)
    out, _ = extend.run(mutation="ignore lens")
    assert not torch.allclose(out.double(), extend.reference(), atol=1e-2)
    untouched = slice(11, 14)  # a request without a prefix does not take part
    assert_close(out[untouched], extend.reference()[untouched])
