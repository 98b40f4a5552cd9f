"""pass-KV on upstream's terms: the form that is chosen, and flashinfer's plans for its chunks."""

import functools
from types import SimpleNamespace

import pytest
import torch

from sglang_dcp.prefix_gather import pack_chunks


@pytest.mark.parametrize("backend", ["flashinfer", "flashmla"])
@pytest.mark.parametrize("prefix", [0, 40, 100_000])
def test_every_prefix_is_read_in_chunks(plugin, monkeypatch, backend, prefix):
    """The one-shot form is never chosen, nor the absorbed one, which needs the whole pool."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    from sglang_dcp.hooks.forward_mha import around_support_mha_one_shot

    attn = SimpleNamespace(
        flashinfer_mla_disable_ragged=False,
        chunked_prefix_cache_threshold=0,
        disable_chunked_prefix_cache=False,
    )
    batch = SimpleNamespace(
        seq_lens_cpu=[prefix + 1],
        extend_prefix_lens_cpu=[prefix],
        get_max_chunk_capacity=lambda: 131072,
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
    )
    monkeypatch.setattr(handler, "mla_use_prefill_cp", lambda batch: False)
    choose = handler._handle_attention_backend
    assert choose(attn, batch, backend) == AttnForwardMethod.MHA_ONE_SHOT
    ours = functools.partial(around_support_mha_one_shot, handler._support_mha_one_shot)
    monkeypatch.setattr(handler, "_support_mha_one_shot", ours)
    assert choose(attn, batch, backend) == AttnForwardMethod.MHA_CHUNKED_KV


# ---------------------------------------------------------------- flashinfer's plans


class Runner:
    """FlashInferMhaChunkKVRunner without flashinfer: wrappers note what they were planned for."""

    def __init__(self):
        self.chunk_ragged_wrappers = []
        self.num_ragged_plans = 0

    def update_wrapper(self, batch, disable_flashinfer_ragged=False):
        while len(self.chunk_ragged_wrappers) < batch.num_prefix_chunks:
            self.chunk_ragged_wrappers.append({})
        for index in range(batch.num_prefix_chunks):
            kv_indptr = batch.prefix_chunk_cu_seq_lens[index]
            self.chunk_ragged_wrappers[index]["kv_indptr"] = kv_indptr.tolist()
        self.num_ragged_plans += not disable_flashinfer_ragged


def test_equal_chunks_share_a_plan(plugin):
    from sglang_dcp.attention.ragged_chunks import RaggedChunksMixin
    from sglang_dcp.hooks.forward_mha import _set_chunks

    backend = RaggedChunksMixin()
    backend.mha_chunk_kv_cache = runner = Runner()
    for prefixes, num_plans in (([1003], 2), ([400, 3, 500], 4), ([64], 1)):
        chunks = pack_chunks(prefixes, 64, 2)
        batch = SimpleNamespace(batch_size=len(prefixes), dcp_prefix_chunks=chunks)
        _set_chunks(batch, chunks, torch.device("cpu"))
        indptr = batch.prefix_chunk_cu_seq_lens
        backend.init_mha_chunk_metadata(batch)
        planned = [wrapper["kv_indptr"] for wrapper in runner.chunk_ragged_wrappers]
        assert planned == indptr.tolist()
        assert len({id(wrapper) for wrapper in runner.chunk_ragged_wrappers}) == num_plans
        assert batch.num_prefix_chunks == len(chunks)
        assert batch.prefix_chunk_cu_seq_lens is indptr
    assert runner.num_ragged_plans == 3
    assert len(backend._chunk_wrappers) == 4, "wrappers are kept for later batches"
