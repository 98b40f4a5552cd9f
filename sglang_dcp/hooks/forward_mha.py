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
from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

from sglang_dcp import state
from sglang_dcp.attention.prefix_chunks import attend_prefix_chunks
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
    very small, and chunks start anywhere; ours are full and start at multiples of dcp_size, and the
    new tokens' outputs, which the workspace holds too, make them smaller. All lengths come from the
    host and are equal on all ranks.
    """
    if self.prefix_chunk_len is not None or not any(self.extend_prefix_lens_cpu):
        original(self, device)
        return
    dcp = state.get_state()
    dcp_size, capacity = dcp.dcp_size, self.get_max_chunk_capacity()
    if dcp.chunk_budget is not None:
        lens = self.extend_seq_lens_cpu, self.extend_prefix_lens_cpu
        capacity = min(capacity, dcp.chunk_budget.chunk_tokens(*lens))
    chunks = pack_chunks(self.extend_prefix_lens_cpu, capacity, dcp_size)
    slots = _prefix_slots(self, device)
    self.dcp_gather_plans = make_gather_plans(slots, chunks, dcp_size)
    self.dcp_prefix_chunks = chunks
    self.prefix_chunk_idx, self.prefix_chunk_len = -1, capacity
    _set_chunks(self, chunks, device)


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


def around_chunked_prefix_attn_mha(
    original: Callable[..., Any],
    self: Any,
    q: torch.Tensor,
    accum_output: torch.Tensor,
    accum_lse: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """AROUND DeepseekMHAForwardMixin._chunked_prefix_attn_mha: our loop over the chunks.

    Upstream's reads the pool by virtual slot, merges in base e only, and holds the last chunk and
    three outputs of the new tokens at a time.
    """
    base = get_attn_backend().extend_lse_base
    pool = get_token_to_kv_pool()
    return attend_prefix_chunks(self, pool, q, accum_output, accum_lse, base, forward_batch)


def force_expanded_prefill() -> None:
    """Make upstream prefill on expanded K and V whatever the prefix length.

    Below its threshold (8192 tokens) it would attend absorbed over the paged pool.
    """
    envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.set(0)
