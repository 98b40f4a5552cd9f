"""Hooks on sglang.srt.models.deepseek_common...forward_mha: prefill over a striped prefix."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

from sglang_dcp import state
from sglang_dcp.prefix_gather import GatherPlan, make_gather_plan


def _positions(forward_batch: Any) -> tuple[Sequence[int], Sequence[int]]:
    """First position and number of tokens of every request in the read that upstream is doing.

    Host integers, equal on all ranks: the whole sequence in the one-shot form, otherwise the
    current chunk of every prefix (upstream's rule: chunk i is [i * n, (i + 1) * n) cut to the
    prefix).
    """
    if forward_batch.mha_one_shot:
        lens = forward_batch.seq_lens_cpu.tolist()
        return [0] * len(lens), lens
    chunk_len = forward_batch.prefix_chunk_len
    start = forward_batch.prefix_chunk_idx * chunk_len
    prefixes = forward_batch.extend_prefix_lens_cpu
    lens = [min(max(prefix - start, 0), chunk_len) for prefix in prefixes]
    return [start] * len(lens), lens


def _gather_plan(forward_batch: Any, slots: torch.Tensor) -> GatherPlan:
    """The plan of this read, made in the first layer and kept on the batch for the others."""
    plans = forward_batch.__dict__.setdefault("dcp_gather_plans", {})
    key = None if forward_batch.mha_one_shot else forward_batch.prefix_chunk_idx
    if key not in plans:
        dcp = state.get_state()
        plans[key] = make_gather_plan(slots, *_positions(forward_batch), dcp.dcp_rank, dcp.dcp_size)
    return plans[key]


def around_get_mla_kv_buffer(
    original: Callable[..., Any],
    self: Any,
    kv_indices: torch.Tensor,
    dst_dtype: torch.dtype,
    forward_batch: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """AROUND DeepseekMHAForwardMixin._get_mla_kv_buffer: the collective read of pass-KV.

    Hooked here and not in the pool, because off CUDA upstream indexes the key buffer by slot
    itself.

    Args:
        kv_indices: [T] virtual slots in output order.
        dst_dtype: dtype of the result.

    Returns:
        kv_a [T, 512] and k_pe [T, 1, 64], contiguous.
    """
    plan = _gather_plan(forward_batch, kv_indices)
    return get_token_to_kv_pool().gather_prefix(self.attn_mha.layer_id, plan, dst_dtype)


def force_expanded_prefill() -> None:
    """Make upstream prefill on expanded K and V whatever the prefix length.

    Below its threshold (8192 tokens) it would attend absorbed over the paged pool.
    """
    from sglang.srt.environ import envs

    envs.SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD.set(0)
