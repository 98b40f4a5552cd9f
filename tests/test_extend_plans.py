"""Plans of pass-Q of the GPU backends, without a GPU.

FlashMLA and FlashInfer are played by torch functions with their arguments: pages, lengths and
indices go wrong here as they would there. Triton's kernel is the real one, interpreted.
On a GPU: tests/gpu/test_extend_backends.py.
"""

import importlib
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from extend_ranks import Pool, check_backend

from sglang_dcp.kernels import dispatch

pytestmark = [
    pytest.mark.usefixtures("plugin_loaded"),
    pytest.mark.skipif(not dispatch.INTERPRETED, reason="on a GPU the kernels themselves run"),
]


def attend(q, keys, v_dim, scale, hidden=None):
    """o, lse base e of q [t, H, D] over keys [s, D], float64 inside."""
    logits = q.double() @ keys.double().T * scale
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, :], -math.inf)
    o = logits.softmax(-1) @ keys[:, :v_dim].double()
    return o.to(q.dtype), logits.logsumexp(-1).float()


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    """The real one cuts the work; here it notes what it was asked for."""
    assert cache_seqlens.dtype == torch.int32
    assert num_heads_k == 1
    return (cache_seqlens.clone(), num_q_tokens_per_head_k), torch.zeros(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale,
    causal,
):
    groups, size, heads, _ = q.shape
    assert q.is_contiguous()
    assert not causal
    assert k_cache.shape[1:3] == (64, 1)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.shape[0] == cache_seqlens.shape[0] == groups
    planned_lens, planned_rows = tile_scheduler_metadata
    assert torch.equal(planned_lens, cache_seqlens)
    assert planned_rows == size * heads
    assert cache_seqlens.min() >= 1
    states = []
    for g in range(groups):
        keys = k_cache[block_table[g].long(), :, 0].flatten(0, 1)[: cache_seqlens[g]]
        states.append(attend(q[g], keys, head_dim_v, softmax_scale))
    o, lse = (torch.stack(x) for x in zip(*states, strict=True))
    return o, lse.transpose(1, 2).contiguous()  # [B, H, s_q]


class Wrapper:
    """BatchMLAPagedAttentionWrapper with page size 1; base 2."""

    def __init__(self, workspace, backend):
        assert backend == "auto"

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert t.dtype == torch.int32
        assert page_size == 1
        assert torch.equal(kv_indptr.diff(), kv_len_arr)
        assert len(kv_indices) == kv_indptr[-1]
        self.spans = [x.tolist() for x in (qo_indptr, kv_indptr)]
        self.rows, self.heads, self.dims = kv_indices, num_heads, (head_dim_ckv, head_dim_kpe)
        self.causal, self.scale = causal, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, return_lse=False):
        assert return_lse
        assert q_nope.shape == (self.spans[0][-1], self.heads, self.dims[0])
        assert q_pe.shape[1:] == (self.heads, self.dims[1])
        q = torch.cat([q_nope, q_pe], -1)
        keys = torch.cat([ckv_cache, kpe_cache], -1)[self.rows.long(), 0]
        out = torch.empty_like(q_nope) if out is None else out
        lse = torch.empty(q.shape[:2])
        (qs, ks) = self.spans
        for i in range(len(qs) - 1):
            t, s = qs[i + 1] - qs[i], ks[i + 1] - ks[i]
            hidden = torch.arange(s)[None] > torch.arange(t)[:, None] + s - t
            rows = slice(qs[i], qs[i + 1])
            out[rows], lse[rows] = attend(
                q[rows],
                keys[ks[i] : ks[i + 1]],
                self.dims[0],
                self.scale,
                hidden if self.causal else None,
            )
        return out, lse / math.log(2)


class Event:
    """A CUDA event of work that is done when it is asked for."""

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded


@pytest.fixture
def no_gpu(monkeypatch):
    """What the backends ask a driver for, and modules whose libraries do not load without one."""
    gpu = SimpleNamespace(multi_processor_count=12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    fake = SimpleNamespace(
        flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=get_mla_metadata
    )
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_mla=fake))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", fake)
    ours = ("sglang_dcp.attention.flashmla", "sglang.srt.layers.attention.flashmla_backend")
    before = {name: sys.modules.pop(name, None) for name in ours}
    flashinfer = importlib.import_module("sglang_dcp.attention.flashinfer")
    monkeypatch.setattr(flashinfer, "BatchMLAPagedAttentionWrapper", Wrapper)
    yield
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.mark.parametrize("batch", ["verify", "small"])
@pytest.mark.parametrize("dcp_size", [2, 8])
@pytest.mark.parametrize("name", ["flashmla", "flashinfer"])
def test_plans(no_gpu, name, dcp_size, batch):
    pool = Pool(batch, dcp_size, 16, (24, 8), torch.float32, torch.device("cpu"))
    check_backend(name, pool, 1e-4, Wrapper)


@pytest.mark.parametrize("dcp_size", [2, 8])
def test_triton(no_gpu, dcp_size):
    """256 + 32 wide: besides DeepSeek's, the one width that upstream's kernel is made for."""
    pool = Pool("small", dcp_size, 16, (256, 32), torch.float32, torch.device("cpu"))
    check_backend("triton", pool, 1e-4)
