"""--dcp-workspace-mb: pure accounting, what is refused, and what a read really allocates."""

import dataclasses
import math
import pickle
import random
from types import SimpleNamespace

import pytest
import torch
from serving import MODELS, WORK, Farm, Spec
from sglang_args import make_args, make_args_on
from simulated_ranks import gather_on_all_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dcp.kernels import dispatch
from sglang_dcp.prefix_gather import make_gather_plans, pack_chunks
from sglang_dcp.testing.compare import compare_results
from sglang_dcp.workspace import (
    PassQLimits,
    ReadShape,
    pass_q_bytes,
    pass_q_limits,
    workspace_bytes,
    workspace_tokens,
)

MIB = 1 << 20
K3_TP2 = ReadShape(2, 48, 512, 128, 64, 128, 2)


def random_shape():
    return ReadShape(
        dcp_size=random.choice([2, 4, 8]),
        heads_local=random.randint(1, 128),
        kv_lora_rank=random.choice([32, 512]),
        qk_nope_head_dim=random.choice([16, 128]),
        qk_rope_head_dim=random.choice([8, 64]),
        v_head_dim=random.choice([16, 128]),
        element_bytes=random.choice([2, 4]),
    )


def bytes_by_hand(tokens, s):
    """Every tensor of a read of `tokens` tokens, a multiple of c, by its shape."""
    c, width = s.dcp_size, s.kv_lora_rank + s.qk_rope_head_dim
    shapes = [
        (tokens // c, width),  # send
        (c, tokens // c, width),  # gathered
        (tokens, s.kv_lora_rank),
        (tokens, 1, s.qk_rope_head_dim),
        (tokens, s.heads_local, s.qk_nope_head_dim + s.v_head_dim),  # kv
    ]
    at_some_time = [
        (tokens, s.heads_local, s.qk_nope_head_dim + s.qk_rope_head_dim),  # k
        (tokens, s.heads_local, s.qk_nope_head_dim + s.v_head_dim),  # kv of the chunk before
        (tokens, width),  # nope and rope of the chunk before
    ]
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    elements += max(torch.Size(shape).numel() for shape in at_some_time)
    return elements * s.element_bytes + tokens * (4 + 8) + tokens // c * 8


def test_tokens_fill_the_workspace_and_no_more():
    for _ in range(200):
        shape, limit = random_shape(), random.randint(1, 1 << 24)
        tokens = workspace_tokens(limit, shape)
        assert tokens % shape.dcp_size == 0
        more = tokens + shape.dcp_size
        assert bytes_by_hand(tokens, shape) <= limit < bytes_by_hand(more, shape)
        assert workspace_bytes(tokens, shape) == bytes_by_hand(tokens, shape)
        assert workspace_bytes(tokens + 1, shape) == bytes_by_hand(more, shape)


def test_expanded_heads_are_most_of_it():
    """The numbers that the module and the option are about: 96 heads on two GPUs, 512 MiB."""
    assert 8000 < workspace_tokens(512 << 20, K3_TP2) < 12000
    group = K3_TP2.group_bytes()
    assert group["kv"] + group["k or last kv"] > 0.9 * sum(group.values())


def pass_q_by_hand(slice_tokens, batch_tokens, s):
    """Every tensor of a pass-Q batch by its shape; grouped queries take two places a token."""
    n, t, own, heads = slice_tokens, batch_tokens, s.heads_local, s.dcp_size * s.heads_local
    o, width = s.kv_lora_rank, s.kv_lora_rank + s.qk_rope_head_dim
    elements = [
        (n, own, width),  # q_nope and q_pe of a slice's rows
        (2, n, heads, width),
        (2, n, heads, o),
        (n, heads, o),
        (t, own, o),  # absorbed queries
        (t, own, o),  # attention to the new tokens
        (t, width),
    ]
    floats = [
        (2, n, heads, o),  # partial outputs of split keys
        (2, n, heads),
        (2, n, heads),  # lse in groups
        (n, heads),
        (n, own),
        (t, own),
        (t, s.dcp_size),  # local lens, int32
        (160 * 64, o + 1),  # one tile of rows for each multiprocessor
    ]
    total = sum(math.prod(shape) for shape in elements) * s.element_bytes
    return total + sum(math.prod(shape) for shape in floats) * 4 + t * (1 + 2 * 2) * 8


def test_pass_q_fills_the_workspace_and_no_more():
    for _ in range(200):
        shape, limit, most = random_shape(), random.randint(1, 1 << 28), random.randint(1, 300)
        found = pass_q_limits(limit, shape, most)
        if found == PassQLimits(0, 0):
            assert pass_q_by_hand(1, 1, shape) > limit
            continue
        sizes = found.slice_tokens, found.batch_tokens
        assert 1 <= found.slice_tokens <= most
        assert pass_q_bytes(*sizes, shape) == pass_q_by_hand(*sizes, shape) <= limit
        assert pass_q_by_hand(sizes[0], sizes[1] + 1, shape) > limit


GRID = [
    ReadShape(c, heads // c, 512, 128, 64, 128, element_bytes)
    for heads in (16, 32, 64, 96, 128)
    for c in (2, 4, 8)
    for element_bytes in (2, 4)
]


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_slices_of_tokens_reach_down_far_enough(shape):
    """Any workspace from the least one up holds chunks and slices, so heads need no slicing."""
    group, page = workspace_bytes(1, shape), workspace_bytes(64 * shape.dcp_size, shape)
    assert group < 0.3 * MIB
    assert page < 19 * MIB
    for limit in (page, random.randint(page, 1 << 30)):
        tokens = workspace_tokens(limit, shape)
        assert tokens >= 64 * shape.dcp_size
        assert bytes_by_hand(tokens, shape) <= limit
    least = pass_q_bytes(1, 1, shape)
    assert least < 23 * MIB
    for limit in (least, random.randint(least, 1 << 30)):
        found = pass_q_limits(limit, shape, 256)
        assert found.slice_tokens >= 1
        assert found.batch_tokens >= 1
        assert pass_q_by_hand(found.slice_tokens, found.batch_tokens, shape) <= limit
    assert pass_q_limits(least - 1, shape, 256) == PassQLimits(0, 0)


def test_the_least_workspaces_that_the_module_names():
    def least_mb(heads, c):
        shape = ReadShape(c, heads // c, 512, 128, 64, 128, 2)
        by_kv, by_q = workspace_bytes(64 * c, shape), pass_q_bytes(1, 1, shape)
        return -(-by_kv // MIB), -(-by_q // MIB)

    found = {heads: [least_mb(heads, c) for c in (2, 8)] for heads in (16, 128)}
    assert found == {16: [(2, 21), (3, 21)], 128: [(9, 22), (10, 22)]}
    assert 0.8 < sum(K3_TP2.slice_bytes().values()) / MIB < 1


# ---------------------------------------------------------------- arguments


@pytest.mark.usefixtures("plugin")
class TestArguments:
    def test_a_real_field(self, tiny_model):
        """CLI, keywords, pickle, asdict and replace carry it; without DCP it changes nothing."""
        from sglang.srt.server_args import prepare_server_args

        command = ["--model-path", str(tiny_model), "--tp", "8", "--device", "cpu"]
        assert prepare_server_args(command).dcp_workspace_mb == 512
        asked = [*command, "--dcp-size", "8", "--dcp-workspace-mb", "33"]
        assert prepare_server_args(asked).dcp_workspace_mb == 33
        args = make_args(tiny_model, dcp_size=8, dcp_workspace_mb=33)
        assert args != make_args(tiny_model, dcp_size=8)
        for travelled in (
            pickle.loads(pickle.dumps(args)),
            type(args)(**dataclasses.asdict(args)),
            dataclasses.replace(args),
        ):
            assert travelled == args
            assert travelled.dcp_workspace_mb == 33

    def test_too_small_for_a_page(self, tiny_model):
        said = "8 tokens of 2 heads need 1 MiB. Use --dcp-workspace-mb 1 or more"
        with pytest.raises(
            ValueError, match=f"--dcp-workspace-mb 0 was .*widened page, and {said}"
        ):
            make_args(tiny_model, dcp_size=8, dcp_workspace_mb=0)
        assert make_args(tiny_model, dcp_size=8, dcp_workspace_mb=1).dcp_workspace_mb == 1

    def test_the_named_minimum_is_enough(self, tiny_model):
        asked = {"dcp_size": 8, "page_size": 4096, "chunked_prefill_size": 65536}
        with pytest.raises(ValueError, match=r"32768 tokens of 2 heads need (\d+) MiB") as error:
            make_args(tiny_model, dcp_workspace_mb=1, **asked)
        least = int(str(error.value).split(" need ")[1].split()[0])
        assert make_args(tiny_model, dcp_workspace_mb=least, **asked)
        with pytest.raises(ValueError, match="at least one widened page"):
            make_args(tiny_model, dcp_workspace_mb=least - 1, **asked)

    def test_too_small_for_pass_q(self, tiny_model):
        """Only where pass-Q alone was asked for; pass-KV serves all batches in the other modes."""
        small = {"dcp_size": 2, "dcp_workspace_mb": 1}
        said = r"--dcp-prefill pass-q with --dcp-workspace-mb 1 was .* need (\d+) MiB"
        with pytest.raises(ValueError, match=said) as error:
            make_args(tiny_model, dcp_prefill="pass-q", **small)
        least = int(str(error.value).split(" need ")[1].split()[0])
        assert make_args(tiny_model, dcp_prefill="auto", **small)
        args = make_args(tiny_model, dcp_prefill="pass-q", dcp_size=2, dcp_workspace_mb=least)

        from sglang_dcp.hooks.workspace import limit_pass_q

        assert limit_pass_q(args, 64).batch_tokens >= 1

    def test_larger_than_the_share_that_is_left(self, tiny_model, monkeypatch):
        def make(workspace_mb):
            return make_args_on(
                "cuda",
                monkeypatch,
                tiny_model,
                dcp_size=2,
                attention_backend="flashinfer",
                mem_fraction_static=0.9,
                dcp_workspace_mb=workspace_mb,
            )

        share = int(141 * 1024 * (1 - 0.9))
        assert make(share).dcp_workspace_mb == share
        with pytest.raises(ValueError, match=rf"mem-fraction-static 0.900 .*{share} MiB of this"):
            make(share + 1)

    def test_without_dcp_nothing_is_checked(self, tiny_model):
        assert make_args(tiny_model, dcp_workspace_mb=0).dcp_workspace_mb == 0

    def test_upstreams_capacity_is_lowered(self, tiny_model):
        from sglang.srt.environ import envs

        from sglang_dcp.hooks.workspace import limit_prefix_chunks, prefix_chunk_tokens

        args = make_args(tiny_model, dcp_size=8, page_size=4, dcp_workspace_mb=1)
        tokens = prefix_chunk_tokens(args)
        assert tokens % 32 == 0
        assert 0 < tokens < envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get()
        limit_prefix_chunks(args)
        assert envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get() == tokens
        envs.SGLANG_MAX_KV_CHUNK_CAPACITY.set(51)  # what the user wants smaller stays smaller
        limit_prefix_chunks(args)
        assert envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get() == 48


# ---------------------------------------------------------------- allocations


def id_of(tensor):
    return tensor.untyped_storage()._cdata


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return: the largest, and most that live at once."""

    def __init__(self):
        super().__init__()
        self.paused, self.peak_bytes, self.largest_bytes = False, 0, 0
        self._live = {}

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
    """Upstream's loop over prefix chunks, with our hooks, on every rank of a simulated group."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha as upstream

    from sglang_dcp.attention.torch_mla import attend_segments
    from sglang_dcp.hooks import cpu
    from sglang_dcp.hooks.forward_mha import _set_chunks, around_get_mla_kv_buffer
    from sglang_dcp.pool import DcpMLATokenToKVPool

    monkeypatch.setattr(upstream, "merge_state_v2", cpu.merge_state_v2, raising=False)
    context = SimpleNamespace(token_to_kv_pool=None)
    monkeypatch.setattr(
        "sglang_dcp.hooks.forward_mha.get_token_to_kv_pool", lambda: context.token_to_kv_pool
    )
    monkeypatch.setattr(upstream, "_resolve_attn_backend", lambda batch: None)
    h, nope, rope, v = 2, SHAPE.qk_nope_head_dim, SHAPE.qk_rope_head_dim, SHAPE.v_head_dim
    scale, up = 0.3, torch.randn(h * (nope + v), SHAPE.kv_lora_rank)

    class Model(upstream.DeepseekMHAForwardMixin):
        num_local_heads, qk_nope_head_dim, qk_rope_head_dim = h, nope, rope
        v_head_dim, layer_id = v, 0

        def __init__(self, watch):
            self.watch = watch

        def kv_b_proj(self, x):
            return torch.nn.functional.linear(x, up), None

        def attn_mha(self, q, k, values, batch, save_kv_cache):
            self.watch.paused = True  # a kernel's own scratch is not the read's
            kv_lens = batch.prefix_chunk_seq_lens[batch.prefix_chunk_idx].tolist()
            result = attend_segments(q, k, values, NUM_NEW, kv_lens, scale, causal=False)
            self.watch.paused = False
            return result

        def _get_mla_kv_buffer(self, kv_indices, dtype, batch):
            return around_get_mla_kv_buffer(None, self, kv_indices, dtype, batch)

    Model.attn_mha.layer_id = 0

    def run(max_tokens):
        c, width = SHAPE.dcp_size, SHAPE.kv_lora_rank + rope
        latents = torch.randn(sum(-(-n // c) * c for n in PREFIXES), width)
        chunks = pack_chunks(PREFIXES, max_tokens, c)
        starts = [0, 700, 708]  # of the requests in latents, whole groups each
        slots = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, PREFIXES, strict=True)])
        q = torch.randn(sum(NUM_NEW), h, nope + rope)
        no_o, no_lse = torch.zeros(sum(NUM_NEW), h, v), torch.full((sum(NUM_NEW), h), -math.inf)

        def on_rank(rank, transport):
            batch = SimpleNamespace(
                batch_size=3, mha_one_shot=None, prefix_chunk_len=max_tokens,
                dcp_gather_plans=make_gather_plans(slots, chunks, c),
                prefix_chunk_kv_indices=list(slots.split([n.num_tokens for n in chunks])),
            )  # fmt: skip
            batch.set_prefix_chunk_idx = lambda i: setattr(batch, "prefix_chunk_idx", i)
            _set_chunks(batch, chunks, torch.device("cpu"))
            pool = object.__new__(DcpMLATokenToKVPool)
            pool.start_layer, pool.kv_lora_rank = 0, SHAPE.kv_lora_rank
            pool.kv_buffer = [latents[rank::c].clone().unsqueeze(1)]
            context.token_to_kv_pool = pool
            with Allocations() as watch:
                o = Model(watch)._chunked_prefix_attn_mha(q, no_o, no_lse, batch)
            return o, watch

        kv = torch.nn.functional.linear(latents[:, : SHAPE.kv_lora_rank], up).view(-1, h, nope + v)
        k_pe = latents[:, None, SHAPE.kv_lora_rank :].expand(-1, h, -1)
        k = torch.cat([kv[..., :nope], k_pe], dim=-1)
        want, _ = attend_segments(
            q, k[slots], kv[slots][..., nope:], NUM_NEW, PREFIXES, scale, causal=False
        )
        return want, gather_on_all_ranks(c, on_rank)

    return run


@pytest.mark.parametrize("limit", [20_000, 60_000, 150_000])
def test_reads_stay_inside_the_workspace(prefix_attention, limit):
    tokens = workspace_tokens(limit, SHAPE)
    assert tokens < sum(PREFIXES)
    want, results = prefix_attention(tokens)
    of_new_tokens = 12 * sum(NUM_NEW) * 2 * (SHAPE.v_head_dim + 1) * 4
    for o, watch in results:
        torch.testing.assert_close(o, want, atol=1e-5, rtol=1e-5)
        assert watch.largest_bytes < limit
        assert 0.5 * limit < watch.peak_bytes <= limit + of_new_tokens


def test_an_unbounded_read_would_show(prefix_attention):
    want, results = prefix_attention(4096)
    for o, watch in results:
        torch.testing.assert_close(o, want, atol=1e-5, rtol=1e-5)
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
        watch.paused = True
        launch(*args, **kwargs)
        watch.paused = False

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
            extend_over_stripes(backend, own[..., :256], own[..., 256:], pool.latent, pool.layer)
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
    assert workspace_tokens(1 << 20, shape) * 3 < longest
    assert min(served.counts("prefix_chunk")) > min(served.counts("kv_write")) / 2
    want = farm.outcome(Spec(pool_tokens=8192, work="long_prefixes")).results
    for name in served.results:
        found = compare_results(want[name], served.results[name])
        assert found.differences == ()
        assert found.tokens_equal
        assert found.max_logprob_diff < 1e-4
    assert served.flushed
