"""Hooks for prefill over a striped prefix: pass-KV in chunks that fit the workspace.

Upstream's chunked form serves every batch with a prefix: fresh tokens attend to each other where
they are, then to the prefix chunk by chunk (sglang.srt.models.deepseek_common...forward_mha and
sglang.srt.model_executor.forward_batch_deepseek_mha_mixin).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

from sglang_dcp import state
from sglang_dcp.prefix_gather import PrefixChunk, make_gather_plans, pack_chunks


def around_support_mha_one_shot(
    original: Callable[..., bool], attn: Any, forward_batch: Any, backend_name: str
) -> bool:
    """AROUND attention_backend_handler._support_mha_one_shot: never; chunks serve every batch.

    The one-shot form reads whole sequences from the pool, so it would gather the fresh tokens too,
    which every rank has just computed.
    """
    return False


def around_prepare_chunked_prefix_cache_info(
    original: Callable[..., None], self: Any, device: torch.device
) -> None:
    """AROUND ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info: our chunks and plans.

    Upstream divides the capacity by the batch size, so a long prefix beside many short ones is cut
    very small, and chunks start anywhere; ours are full and start at multiples of dcp_size. All
    lengths come from the host and are equal on all ranks.
    """
    if self.prefix_chunk_len is not None or not any(self.extend_prefix_lens_cpu):
        original(self, device)
        return
    dcp_size, capacity = state.get_state().dcp_size, self.get_max_chunk_capacity()
    chunks = pack_chunks(self.extend_prefix_lens_cpu, capacity, dcp_size)
    slots = _prefix_slots(self, device)
    self.dcp_gather_plans = make_gather_plans(slots, chunks, dcp_size)
    self.dcp_prefix_chunks = chunks
    self.prefix_chunk_idx, self.prefix_chunk_len = -1, capacity
    _set_chunks(self, chunks, device)
    self.prefix_chunk_kv_indices = list(slots.split(self.prefix_chunk_num_tokens))


def _set_chunks(batch: Any, chunks: Sequence[PrefixChunk], device: torch.device) -> None:
    """What upstream keeps of its chunks, for `chunks`."""
    lens = [list(chunk.lens) for chunk in chunks]
    ends = [list(accumulate(row, initial=0)) for row in lens]
    starts = [list(chunk.starts) for chunk in chunks]
    host = torch.tensor([s + n + e for s, n, e in zip(starts, lens, ends, strict=True)])
    table = host.to(dtype=torch.int32).to(device, non_blocking=True)
    size = batch.batch_size
    batch.num_prefix_chunks = len(chunks)
    batch.prefix_chunk_starts = table[:, :size].contiguous()
    batch.prefix_chunk_seq_lens = table[:, size : 2 * size].contiguous()
    batch.prefix_chunk_cu_seq_lens = table[:, 2 * size :].contiguous()
    batch.prefix_chunk_max_seq_lens = [max(row) for row in lens]
    batch.prefix_chunk_num_tokens = [sum(row) for row in lens]
    batch.prefix_chunk_has_zero_kv = [0 in row for row in lens]


def _prefix_slots(batch: Any, device: torch.device) -> torch.Tensor:
    """[T] int32 virtual slots of all prefixes, requests one after another, by upstream's kernel."""
    whole = PrefixChunk((0,) * batch.batch_size, tuple(batch.extend_prefix_lens_cpu))
    _set_chunks(batch, [whole], device)
    batch.prepare_chunked_kv_indices(device)
    (slots,) = batch.prefix_chunk_kv_indices
    return slots


def around_get_mla_kv_buffer(
    original: Callable[..., Any],
    self: Any,
    kv_indices: torch.Tensor,
    dst_dtype: torch.dtype,
    forward_batch: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """AROUND DeepseekMHAForwardMixin._get_mla_kv_buffer: the collective read of a chunk.

    Hooked here and not in the pool, because off CUDA upstream indexes the key buffer by slot
    itself.

    Args:
        kv_indices: [T] virtual slots of the chunk; the batch's plans were made of them.
        dst_dtype: dtype of the result.

    Returns:
        kv_a [T, 512] and k_pe [T, 1, 64], contiguous.
    """
    assert not forward_batch.mha_one_shot, "prefixes are read in chunks"
    return get_token_to_kv_pool().read_prefix_chunk(
        self.attn_mha.layer_id,
        forward_batch.dcp_gather_plans,
        forward_batch.prefix_chunk_idx,
        forward_batch.prefix_chunk_len,
        dst_dtype,
    )


def force_expanded_prefill() -> None:
    """Make upstream prefill on expanded K and V whatever the prefix length.

    Below its threshold (8192 tokens) it would attend absorbed over the paged pool.
    """
    envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.set(0)
