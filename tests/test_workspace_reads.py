"""--dcp-workspace-mb: what prefill over a striped prefix really allocates, and serves."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from serving import MODELS, WORK, Farm, Spec
from simulated_ranks import gather_on_all_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dcp import prefix_gather
from sglang_dcp.kernels import dispatch
from sglang_dcp.kernels.key_concat import concat_keys_ref
from sglang_dcp.kernels.row_order import order_rows_ref
from sglang_dcp.kernels.row_pick import pick_rows_ref
from sglang_dcp.kernels.state_merge import merge_state_into_ref
from sglang_dcp.prefix_gather import make_gather_plans, pack_chunks
from sglang_dcp.testing.compare import compare_results
from sglang_dcp.workspace import ChunkBudget, ReadShape, pass_q_bytes

# ---------------------------------------------------------------- allocations


def id_of(tensor):
    return tensor.untyped_storage()._cdata


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return: the largest, and most that live at once."""

    def __init__(self):
        super().__init__()
        self.paused, self.peak_bytes, self.largest_bytes = False, 0, 0
        self._live = {}

    @contextlib.contextmanager
    def pause(self):
        self.paused = True
        yield
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            new = isinstance(tensor, torch.Tensor) and id_of(tensor) not in given  # no view
            if new and not self.paused:
                storage = tensor.untyped_storage()
                self._live[id_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
        live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        sizes = [size for _, size in live.values()]
        self._live = live
        self.peak_bytes = max(self.peak_bytes, sum(sizes))
        self.largest_bytes = max(self.largest_bytes, *sizes, 0)
        return result


SHAPE = ReadShape(4, 2, 32, 16, 8, 24, 4)
NUM_NEW = [2, 1, 1]
PREFIXES = [700, 5, 92]


@pytest.fixture
def prefix_attention(plugin, monkeypatch):
    """The loop over prefix chunks on every rank of a simulated group, for chunks of a size."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha as upstream

    from sglang_dcp.attention import prefix_chunks
    from sglang_dcp.attention.torch_mla import attend_segments
    from sglang_dcp.hooks import forward_mha as hooks
    from sglang_dcp.pool import DcpMLATokenToKVPool

    h, nope, rope, v = 2, SHAPE.qk_nope_head_dim, SHAPE.qk_rope_head_dim, SHAPE.v_head_dim
    scale, up = 0.3, torch.randn(h * (nope + v), SHAPE.kv_lora_rank) / SHAPE.kv_lora_rank**0.5
    unit = 1.0

    class Model(upstream.DeepseekMHAForwardMixin):
        num_local_heads, qk_nope_head_dim, qk_head_dim, v_head_dim = h, nope, nope + rope, v

        def __init__(self, watch):
            self.watch = watch
            monkeypatch.setattr(prefix_chunks, "merge_state_into", self.merge)
            # the interpreter allocates, kernels do not
            monkeypatch.setattr(prefix_chunks, "concat_keys", concat_keys_ref)
            monkeypatch.setattr(prefix_gather, "pick_rows", pick_rows_ref)
            monkeypatch.setattr(prefix_gather, "order_rows", order_rows_ref)

        def kv_b_proj(self, x):
            return torch.nn.functional.linear(x, up), None

        def attn_mha(self, q, k, values, batch, save_kv_cache):
            kv_lens = batch.prefix_chunk_seq_lens[batch.prefix_chunk_idx].tolist()
            with self.watch.pause():  # a kernel's own scratch is not the read's, its results are
                result = attend_segments(q, k, values, batch.num_new, kv_lens, scale, causal=False)
            return result[0].clone(), result[1] / unit

        def merge(self, *args, **kwargs):
            with self.watch.pause():
                merge_state_into_ref(*args, **kwargs)

    Model.attn_mha.layer_id = 0

    def run(max_tokens, base="e", said_base=None, num_new=NUM_NEW):
        """With LSEs in `base`, by a backend that says so, or says another one."""
        nonlocal unit
        unit = math.log(2) if base == "2" else 1.0
        c, width = SHAPE.dcp_size, SHAPE.kv_lora_rank + rope
        latents = torch.randn(sum(-(-n // c) * c for n in PREFIXES), width)
        chunks = pack_chunks(PREFIXES, max_tokens, c)
        starts = [0, 700, 708]  # of the requests in latents, whole groups each
        slots = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, PREFIXES, strict=True)])
        q = torch.randn(sum(num_new), h, nope + rope)

        def on_rank(rank, transport):
            batch = SimpleNamespace(
                batch_size=3, num_new=num_new, get_max_chunk_capacity=lambda: max_tokens,
                dcp_gather_plans=make_gather_plans(slots, chunks, c),
            )  # fmt: skip
            batch.set_prefix_chunk_idx = lambda i: setattr(batch, "prefix_chunk_idx", i)
            hooks._set_chunks(batch, chunks, torch.device("cpu"))
            pool = object.__new__(DcpMLATokenToKVPool)
            pool.start_layer, pool.kv_lora_rank = 0, SHAPE.kv_lora_rank
            pool.kv_buffer = [latents[rank::c].clone().unsqueeze(1)]
            out = torch.full((sum(num_new), h, v), math.nan)  # no key seen so far
            lse = torch.full((sum(num_new), h), -math.inf)
            backend = SimpleNamespace(token_to_kv_pool=pool, extend_lse_base=said_base or base)
            with Allocations() as watch, forward_context(ForwardContext(backend)):
                model = Model(watch)
                hooks.around_chunked_prefix_attn_mha(None, model, q, out, lse, batch)
            return out, lse * unit, watch

        kv = torch.nn.functional.linear(latents[:, : SHAPE.kv_lora_rank], up).view(-1, h, nope + v)
        k_pe = latents[:, None, SHAPE.kv_lora_rank :].expand(-1, h, -1)
        k = torch.cat([kv[..., :nope], k_pe], dim=-1)
        want = attend_segments(
            q, k[slots], kv[slots][..., nope:], num_new, PREFIXES, scale, causal=False
        )
        return want, gather_on_all_ranks(c, on_rank)

    return run


@pytest.mark.parametrize("limit", [30_000, 60_000, 150_000])
def test_reads_stay_inside_the_workspace(prefix_attention, limit):
    tokens = ChunkBudget(limit, SHAPE, 0, SHAPE.dcp_size).chunk_tokens(NUM_NEW, PREFIXES)
    assert SHAPE.dcp_size < tokens < sum(PREFIXES)
    want, results = prefix_attention(tokens)
    for *got, watch in results:
        for result, expected in zip(got, want, strict=True):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        assert watch.largest_bytes < limit
        assert 0.3 * limit < watch.peak_bytes <= limit


@pytest.mark.parametrize("counted", [True, False])
def test_outputs_of_the_new_tokens_count(prefix_attention, counted):
    """One output beside the one that it is merged into; chunks that ignore it exceed the limit."""
    limit, num_new = 150_000, [200, 100, 60]
    assert sum(num_new) * SHAPE.output_bytes() > 0.4 * limit
    budget = ChunkBudget(limit, SHAPE, 0, SHAPE.dcp_size)
    tokens = budget.chunk_tokens(num_new if counted else [1], PREFIXES)
    want, results = prefix_attention(tokens, num_new=num_new)
    for *got, watch in results:
        for result, expected in zip(got, want, strict=True):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        assert (watch.peak_bytes <= limit) == counted


def test_the_base_is_the_backends(prefix_attention):
    """Of the new tokens' LSE and of every chunk's; another one would show."""
    want, results = prefix_attention(64, base="2")
    for out, lse, _ in results:
        torch.testing.assert_close(out, want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, want[1], atol=1e-5, rtol=1e-5)
    want, results = prefix_attention(64, base="2", said_base="e")
    assert all((out - want[0]).abs().max() > 1e-3 for out, *_ in results)


def test_an_unbounded_read_would_show(prefix_attention):
    (want, _), results = prefix_attention(4096)
    for out, _, watch in results:
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
        assert watch.peak_bytes > 2 * 150_000


# ---------------------------------------------------------------- pass-Q's allocations


class NoPeers:
    """Collectives of one rank alone: as much memory as with others, zeros instead of their data."""

    def __init__(self, size):
        self.rank, self.size = 0, size

    def all_gather(self, out, inp):
        out.zero_()

    all_to_all = all_gather


def pause_in_kernels(monkeypatch, watch):
    """Triton's interpreter copies the tensors of a launch, which a GPU does not."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def paused(*args, **kwargs):
        with watch.pause():
            launch(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", paused)


@pytest.mark.skipif(not dispatch.INTERPRETED, reason="the launches are watched in the interpreter")
@pytest.mark.usefixtures("plugin_loaded")
@pytest.mark.parametrize(("slice_tokens", "fits"), [(8, True), (24, False)])
def test_pass_q_stays_inside_the_workspace(monkeypatch, slice_tokens, fits):
    """The triton backend, whose partial outputs are torch's; larger slices would show."""
    from extend_ranks import Pool, make_backend
    from simulated_ranks import as_rank

    from sglang_dcp import state, workspace
    from sglang_dcp.attention.extend import extend_over_stripes
    from sglang_dcp.comm.a2a import A2ACommunicator

    monkeypatch.setattr(workspace, "SPLIT_ROWS", 64)  # of a GPU with one multiprocessor
    gpu = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    shape, dims = ReadShape(2, 8, 256, 128, 32, 128, 4), (256, 32)
    pool = Pool("small", 2, 16, dims, torch.float32, torch.device("cpu"))
    limit = pass_q_bytes(8, len(pool.q), shape)
    with as_rank(0, 2):
        comm = A2ACommunicator(
            NoPeers(2), num_heads=16, kv_lora_rank=256, qk_rope_head_dim=32,
            max_tokens=slice_tokens, dtype=torch.float32, device="cpu",
        )  # fmt: skip
        state._state = dataclasses.replace(state.get_state(), comm=comm)
        backend = make_backend("triton", pool, 0)
        own = pool.q[:, :8].transpose(0, 1).contiguous().transpose(0, 1)
        with Allocations() as watch:
            pause_in_kernels(monkeypatch, watch)
            backend.plan_extend(pool.batch())
            tensors = own[..., :256], own[..., 256:], pool.latent[..., :256], pool.latent[..., 256:]
            extend_over_stripes(backend, *tensors, pool.layer)
    absorbed_bytes = len(pool.q) * 8 * 256 * 4  # counted, and made before
    assert (watch.peak_bytes + absorbed_bytes <= limit) == fits, (watch.peak_bytes, limit)
    assert watch.peak_bytes + absorbed_bytes > 0.4 * limit


# ---------------------------------------------------------------- a server


@pytest.mark.slow
def test_tiny_workspace_serves_the_same_tokens(farm: Farm):
    """1 MiB holds a few hundred tokens of this model, several prompts of the batch more."""
    args = ("--dcp-workspace-mb", "1", "--chunked-prefill-size", "512")
    served = farm.outcome(Spec(dcp_size=2, args=args, pool_tokens=8192, work="long_prefixes"))
    model = MODELS["dense"]
    shape = ReadShape(2, model.num_heads // 2, model.kv_lora_rank, model.qk_nope_head_dim,
                      model.qk_rope_head_dim, model.v_head_dim, 4)  # fmt: skip
    longest = max(len(p) for batch in WORK["long_prefixes"].values() for p in batch.prompts)
    assert ChunkBudget(1 << 20, shape, 0, 2).most_tokens * 3 < longest
    assert min(served.counts("prefix_chunk")) > min(served.counts("kv_write")) / 2
    want = farm.outcome(Spec(pool_tokens=8192, work="long_prefixes")).results
    for name in served.results:
        found = compare_results(want[name], served.results[name])
        assert found.differences == ()
        assert found.tokens_equal
        assert found.max_logprob_diff < 1e-4
    assert served.flushed
