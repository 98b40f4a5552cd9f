"""pass-KV and pass-Q leave the same rows in the pool, on every rank, whatever the batches were.

Upstream's DeepSeek attention on its mixins, our hooks, backends, communicator and pool. Three
layers, so that a row of the later ones holds what attention returned before. Ranks are threads of
this process; requests grow by random chunks, several in a batch.
"""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_ranks import Turns, TurnsTransport

from sglang_dcp import state
from sglang_dcp.comm.a2a import A2ACommunicator
from sglang_dcp.kernels import dispatch
from sglang_dcp.prefill_policy import PrefillPolicy

LAYERS, HIDDEN, OWN_HEADS = 3, 24, 2
NOPE, ROPE, V = 6, 32, 5
MAX_LEN, MAX_DIFF = 96, 1e-4


class Sizes(NamedTuple):
    """c, P, tokens of pass-Q's buffers, tokens of a prefix chunk, width of a row without rope."""

    dcp_size: int
    page_size: int
    slice_tokens: int
    chunk_tokens: int
    kv_rank: int = 12


class Case:
    """Batches of (request, new tokens) over one set of slots, and the weights of all layers."""

    def __init__(self, sizes, batches, seed):
        generator = torch.Generator().manual_seed(seed)
        num_requests = 1 + max(request for batch in batches for request, _ in batch)
        wide = sizes.page_size * sizes.dcp_size
        pages_each = -(-MAX_LEN // wide)
        pages = torch.randperm(num_requests * pages_each, generator=generator) + 1
        position = torch.arange(MAX_LEN)
        self.sizes, self.num_requests = sizes, num_requests
        self.slots = pages.view(num_requests, -1)[:, position // wide] * wide + position % wide
        self.num_rows = (num_requests * pages_each + 1) * sizes.page_size
        heads = sizes.dcp_size * OWN_HEADS

        def weight(*shape):
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.layers = [
            {
                "q_proj": 3 * weight(heads, NOPE + ROPE, HIDDEN),  # sharp softmaxes
                "kv_a_proj_with_mqa": weight(sizes.kv_rank + ROPE, HIDDEN),
                "kv_b_proj": weight(heads, NOPE + V, sizes.kv_rank),
                "o_proj": weight(HIDDEN, heads, V),
            }
            for _ in range(LAYERS)
        ]
        self.hidden = torch.randn(num_requests, MAX_LEN, HIDDEN, generator=generator)
        self.batches = batches

    def spans(self):
        """For every batch its (request, prefix, new) with new > 0, cut at MAX_LEN."""
        lens = [0] * self.num_requests
        for batch in self.batches:
            spans = []
            for request, new in dict(batch).items():
                new = min(new, MAX_LEN - lens[request])
                if new:
                    spans.append((request, lens[request], new))
                    lens[request] += new
            if spans:
                yield spans

    def last_spans(self):
        """Written positions of every request: [request, length]."""
        lens = dict.fromkeys(range(self.num_requests), 0)
        for spans in self.spans():
            lens |= {request: prefix + new for request, prefix, new in spans}
        return lens

    def owned(self, rank):
        """[num_rows], True where a slot of a token that was written lies in this rank's row."""
        written = torch.zeros(self.num_rows, dtype=torch.bool)
        for request, length in self.last_spans().items():
            slots = self.slots[request, :length]
            written[slots[slots % self.sizes.dcp_size == rank] // self.sizes.dcp_size] = True
        return written


@pytest.fixture
def prefill(plugin_loaded, monkeypatch):
    """prefill(case, mode, backend="torch_mla", break_comm=None): rows of all ranks, and variants.

    Rows are [c, layers, rows, width] and NaN at first; variants are those that ran.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as batch_mixin
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods import (
        AttnForwardMethod,
        forward_mha,
        forward_mla,
    )

    from sglang_dcp.attention.torch_mla import DcpTorchMLABackend
    from sglang_dcp.attention.triton import DcpTritonBackend
    from sglang_dcp.hooks import cpu
    from sglang_dcp.hooks import forward_mha as ours
    from sglang_dcp.hooks.deepseek_v2 import around_dispatch_attn_forward_method
    from sglang_dcp.pool import DcpMLATokenToKVPool

    interpreted, gpu = dispatch.INTERPRETED, SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(forward_mha, "merge_state_v2", cpu.merge_state_v2, raising=False)
    name = "create_chunked_prefix_cache_kv_indices"
    monkeypatch.setattr(batch_mixin, name, getattr(cpu, name))
    apart = [*forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS, "torch_mla", "triton"]
    monkeypatch.setattr(forward_mla, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", apart)
    monkeypatch.setattr(handler, "_support_mha_one_shot", lambda *args: False)
    monkeypatch.setattr(handler, "mla_use_prefill_cp", lambda batch: False)
    monkeypatch.setattr(forward_mla, "mla_use_prefill_cp", lambda batch: False)
    monkeypatch.setattr(forward_mla, "dsa_use_prefill_cp", lambda batch: False)
    args = SimpleNamespace(
        dsa_decode_backend=None, dsa_prefill_backend=None, enable_deterministic_inference=False
    )
    for module in (forward_mla, handler):
        monkeypatch.setattr(module, "get_global_server_args", lambda: args)

    class Batch(batch_mixin.ForwardBatchDeepSeekMHAMixin):
        forward_mode = ForwardMode.EXTEND
        spec_info = seq_lens_sum = None

        def __init__(self, case, spans):
            requests, prefix_lens, new_lens = (list(x) for x in zip(*spans, strict=True))
            self.batch_size = len(spans)
            self.extend_prefix_lens_cpu, self.extend_seq_lens_cpu = prefix_lens, new_lens
            self.extend_prefix_lens = torch.tensor(prefix_lens)
            self.extend_seq_lens = torch.tensor(new_lens)
            self.req_pool_indices = torch.tensor(requests)
            self.seq_lens = self.extend_prefix_lens + torch.tensor(new_lens)
            self.out_cache_loc = torch.cat([case.slots[r, p : p + n] for r, p, n in spans])

        def prepare_chunked_prefix_cache_info(self, device):
            original = batch_mixin.ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info
            ours.around_prepare_chunked_prefix_cache_info(original, self, device)

    class Layer(forward_mha.DeepseekMHAForwardMixin, forward_mla.DeepseekMLAForwardMixin):
        """One layer's attention on one rank, as DeepseekV2AttentionMLA without rope is."""

        q_lora_rank = rotary_emb = alt_stream = next_skip_topk = llama_4_scaling = None
        use_dsa = use_deep_gemm_bmm = flashinfer_mla_disable_ragged = False
        disable_chunked_prefix_cache = False
        chunked_prefix_cache_threshold = 0
        num_local_heads, v_head_dim = OWN_HEADS, V
        qk_nope_head_dim, qk_rope_head_dim, qk_head_dim = NOPE, ROPE, NOPE + ROPE

        def __init__(self, layer_id, weights, transport, backend):
            self.layer_id, self.transport = layer_id, transport
            self.current_attention_backend = backend
            heads = slice(transport.rank * OWN_HEADS, (transport.rank + 1) * OWN_HEADS)
            self.kv_b = weights["kv_b_proj"][heads]
            self.kv_lora_rank = rank = self.kv_b.shape[2]
            self.w_kc = self.kv_b[:, :NOPE]
            self.w_vc = self.kv_b[:, NOPE:].transpose(1, 2)
            self.q, self.kv_a = weights["q_proj"][heads], weights["kv_a_proj_with_mqa"]
            self.o = weights["o_proj"][:, heads].flatten(1)
            scale = (NOPE + ROPE) ** -0.5
            self.attn_mqa = RadixAttention(
                OWN_HEADS, rank + ROPE, scale, 1, layer_id, v_head_dim=rank
            )
            self.attn_mha = RadixAttention(
                OWN_HEADS, NOPE + ROPE, scale, OWN_HEADS, layer_id, v_head_dim=V
            )

        def q_proj(self, x):
            return x @ self.q.flatten(0, 1).T, None

        def kv_a_proj_with_mqa(self, x):
            return x @ self.kv_a.T, None

        def kv_a_layernorm(self, x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        def kv_b_proj(self, x):
            return x @ self.kv_b.flatten(0, 1).T, None

        def o_proj(self, x):
            """Row-parallel, with its all-reduce."""
            return sum(self.transport.turns.exchange(self.transport.rank, x @ self.o.T)), None

        def _chunked_prefix_attn_mha(self, q, accum_output, accum_lse, forward_batch):
            states = accum_output, accum_lse
            return ours.around_chunked_prefix_attn_mha(None, self, q, *states, forward_batch)

        def forward(self, x, batch):
            def upstream(attn, forward_batch):
                if self.current_attention_backend == "triton":
                    return handler.handle_attention_triton(attn, forward_batch)
                return cpu.handle_attention_torch_mla(attn, forward_batch)

            method = around_dispatch_attn_forward_method(upstream, self, batch)
            if method == AttnForwardMethod.MLA:
                inner = self.forward_absorb_prepare(None, x, batch, None)
                return self.forward_absorb_core(*inner)
            if method == AttnForwardMethod.MHA:
                inner = self.forward_normal_prepare(None, x, batch, None)
                return self.forward_normal_core(*inner)
            assert method == AttnForwardMethod.MHA_CHUNKED_KV
            inner = self.forward_normal_chunked_kv_prepare(None, x, batch, None)
            return self.forward_normal_chunked_kv_core(*inner)

    def make_pool(case):
        pool = object.__new__(DcpMLATokenToKVPool)
        pool.start_layer, pool.kv_lora_rank, pool.qk_rope_head_dim = 0, case.sizes.kv_rank, ROPE
        pool.layer_transfer_counter, pool.dtype, pool.store_dtype = None, *[torch.float32] * 2
        shape = (case.num_rows, 1, case.sizes.kv_rank + ROPE)
        pool.kv_buffer = [torch.full(shape, torch.nan) for _ in range(LAYERS)]
        return pool

    def make_state(case, mode, transport, break_comm):
        sizes = case.sizes
        comm = A2ACommunicator(
            transport,
            num_heads=sizes.dcp_size * OWN_HEADS,
            kv_lora_rank=sizes.kv_rank,
            qk_rope_head_dim=ROPE,
            max_tokens=sizes.slice_tokens,
            dtype=torch.float32,
            device="cpu",
        )
        if break_comm:
            break_comm(comm)
        ranks, nothing = tuple(range(sizes.dcp_size)), SimpleNamespace(destroy=lambda: None)
        return state.DcpState(
            sizes.dcp_size,
            transport.rank,
            ranks,
            nothing,
            comm,
            prefill_policy=PrefillPolicy(mode),
        )

    def make_backend(name, case, pool):
        table = SimpleNamespace(req_to_token=case.slots.int(), size=case.num_requests)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool)
        if name == "torch_mla":
            return DcpTorchMLABackend(runner)
        backend = object.__new__(DcpTritonBackend)  # upstream's constructor asks for a driver
        vars(backend).update(
            vars(runner),
            req_to_token=table.req_to_token,
            max_kv_splits=2,
            kv_indptr=torch.zeros(9, dtype=torch.int32),
            qo_indptr=torch.zeros(9, dtype=torch.int32),
            window_kv_indptr=None,
            sliding_window_size=None,
            use_sliding_window_kv_pool=False,
            enable_deterministic=False,
            use_verify_splitkv=False,
            extend_attention_fwd=extend_attention_fwd,
        )
        return backend

    def run(case, mode, name="torch_mla", break_comm=None):
        # the kernels have tests of their own; the triton backend is made of them
        monkeypatch.setattr(dispatch, "INTERPRETED", name == "triton" and interpreted)
        turns, ran = Turns(case.sizes.dcp_size), []

        def on_rank(rank):
            transport, pool = TurnsTransport(turns, rank), make_pool(case)
            state.set_state(make_state(case, mode, transport, break_comm))
            try:
                backend = make_backend(name, case, pool)
                layers = [Layer(i, w, transport, name) for i, w in enumerate(case.layers)]
                for spans in case.spans():
                    batch = Batch(case, spans)
                    backend.init_forward_metadata(batch)
                    x = torch.cat([case.hidden[r, p : p + n] for r, p, n in spans])
                    with forward_context(ForwardContext(backend)):
                        for layer in layers:
                            x = x + layer.forward(x, batch)
                    ran.append(batch.dcp_prefill_variant)
                return torch.stack(pool.kv_buffer).squeeze(2)
            finally:
                state.clear_state()

        with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(case.sizes.chunk_tokens):
            return torch.stack(turns.run(on_rank)), set(ran)

    return run


def differences(case, first, second):
    """What is not alike in two results of `prefill`, in words."""
    found = []
    for rank in range(case.sizes.dcp_size):
        want = case.owned(rank).expand(LAYERS, -1)
        for name, rows in (("first", first[rank]), ("second", second[rank])):
            # padding's row belongs to rank 0 and nobody reads it; no batch here is padded
            if not torch.equal(rows.isnan().all(-1), ~want) or not rows[want].isfinite().all():
                found.append(f"rank {rank}: {name} wrote other rows than it owns")
        both = want & first[rank].isfinite().all(-1) & second[rank].isfinite().all(-1)
        far = (first[rank] - second[rank]).abs().amax(-1)[both] >= MAX_DIFF
        if far.any():
            found.append(f"rank {rank}: values of {int(far.sum())} rows")
    return found


requests = st.tuples(st.integers(0, 3), st.integers(1, 30))
batches = st.lists(st.lists(requests, min_size=1, max_size=4), min_size=2, max_size=5)
#: c, P; chunks and slices are drawn from one group, or one token, upwards
layouts = st.sampled_from([(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layout=layouts,
    slice_tokens=st.integers(1, 16),
    extra=st.integers(0, 40),
    batches=batches,
    seed=st.integers(0, 2**31),
)
@example((8, 1), 64, 0, [[(0, 3)], [(0, 2)], [(0, 30), (1, 1)]], 0)  # a prefix shorter than c
@example((4, 2), 2, 1, [[(0, 17), (1, 8)], [(1, 9), (2, 4), (0, 1)]], 1)  # some without prefix
@example((2, 1), 5, 9, [[(0, 30)]] * 4, 2)  # many chunks and slices
def test_both_variants_leave_the_same_rows(prefill, layout, slice_tokens, extra, batches, seed):
    case = Case(Sizes(*layout, slice_tokens, layout[0] + extra), batches, seed)
    (by_kv, kv_ran), (by_q, q_ran) = prefill(case, "pass-kv"), prefill(case, "pass-q")
    assert differences(case, by_kv, by_q) == []
    assert kv_ran <= {"none", "pass_kv"}
    assert q_ran <= {"none", "pass_q"}
    assert len(kv_ran) == len(q_ran)


CASE = Sizes(4, 1, 8, 16), [[(0, 21), (1, 6)], [(0, 9), (1, 13), (2, 3)], [(2, 30)]]


def test_the_comparison_can_fail(prefill):
    """One row shifted, one row more, one row of another owner."""
    case = Case(*CASE, seed=3)
    (rows, ran), (other, _) = prefill(case, "pass-q"), prefill(case, "pass-kv")
    assert ran == {"none", "pass_q"}
    assert differences(case, rows, other) == []
    own, free = case.owned(2).nonzero()[1], (~case.owned(2)).nonzero()[-1]
    shifted = other.clone()
    shifted[2, 1, own] = other[2, 1, case.owned(2).nonzero()[2]]
    assert differences(case, rows, shifted) == ["rank 2: values of 1 rows"]
    more = other.clone()
    more[2, 0, free] = other[2, 0, own]
    assert differences(case, rows, more) == ["rank 2: second wrote other rows than it owns"]
    assert differences(case, rows, other.roll(1, dims=0))


def test_a_wrong_merge_shows_in_the_rows(prefill):
    """Later layers' rows depend on attention: counting empty or equal weights changes them."""

    def equal_weights(comm):
        exchange_merge = comm.exchange_merge
        comm.exchange_merge = lambda o, lse, *args: exchange_merge(o, torch.zeros_like(lse), *args)

    case = Case(*CASE, seed=4)
    (rows, _), (other, _) = (
        prefill(case, "pass-kv"),
        prefill(case, "pass-q", break_comm=equal_weights),
    )
    assert torch.equal(rows.isnan(), other.isnan())
    assert differences(case, rows, other)
    torch.testing.assert_close(rows[:, 0], other[:, 0], equal_nan=True)  # nothing came before


@pytest.mark.skipif(not dispatch.INTERPRETED, reason="on a GPU servers show it")
def test_triton(prefill):
    """The backend with its real kernels, 256 + 32 wide as upstream's want it, against torch."""
    case = Case(Sizes(2, 2, 8, 16, 256), [[(0, 21), (1, 6)], [(0, 9), (1, 13), (2, 3)]], seed=5)
    want, _ = prefill(case, "pass-kv")
    for mode, variant in (("pass-kv", "pass_kv"), ("pass-q", "pass_q")):
        rows, ran = prefill(case, mode, "triton")
        assert ran == {"none", variant}
        assert differences(case, want, rows) == []
