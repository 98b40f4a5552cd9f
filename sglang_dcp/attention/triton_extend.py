"""Prefill over a striped prefix in Triton: pass-KV's chunks, and pass-Q on SGLang's decode kernel.

Upstream's extend kernel returns no LSE, so what is merged comes from `kernels/ragged_attention.py`.
All LSEs here are base e.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import logit_capping_mod
from sglang.srt.layers.attention.triton_ops.decode_attention import _decode_grouped_att_m_fwd

from sglang_dcp import counters, state
from sglang_dcp.attention.prefill import prefill_variant
from sglang_dcp.attention.prefix_slices import Share
from sglang_dcp.attention.token_groups import TokenGroups, make_groups, sizes_that_fit
from sglang_dcp.kernels.kv_index import build_local_kv_indices
from sglang_dcp.kernels.ragged_attention import Spans, make_spans, ragged_attention
from sglang_dcp.kernels.split_reduce import reduce_splits

#: Query rows (token, head) of one program, and the most tokens of a group: every head count of a
#: group compiles the kernel anew, so sizes are powers of two up to this.
ROW_TILE, MAX_GROUP = 16, 16


@dataclass(frozen=True)
class _PrefixKernel:
    """Arguments of the decode kernel for a slice of new tokens; one sequence per group."""

    groups: TokenGroups
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    num_kv_splits: torch.Tensor
    splits: int


class TritonExtend:
    """Mixed into the subclass of TritonAttnBackend."""

    _new: Spans  # of the new tokens of this batch

    def plan_prefix(self, share: Share, forward_batch: Any) -> _PrefixKernel:
        """Groups of tokens of one request, as more heads of one token: keys are read once."""
        dcp, backend = state.get_state(), _as_any(self)
        device: Any = backend.device
        size = sizes_that_fit(share.counts, MAX_GROUP)[-1]
        groups = make_groups(share.requests, share.counts, size, device)
        of_groups = torch.tensor(groups.requests).to(device, non_blocking=True)
        lens = backend.own_prefix_lens(groups.requests, forward_batch)
        kv_indptr = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
        kv_indptr = kv_indptr.to(device, non_blocking=True)
        kv_indices = torch.empty(sum(lens), dtype=torch.int32, device=device)
        build_local_kv_indices(
            backend.req_to_token,
            forward_batch.req_pool_indices[of_groups],
            forward_batch.extend_prefix_lens[of_groups],
            kv_indptr,
            kv_indices,
            dcp.dcp_rank,
            dcp.dcp_size,
        )
        num_groups, rows = len(lens), size * dcp.comm.num_heads
        splits = self._num_splits(num_groups * -(-rows // ROW_TILE))
        num_kv_splits = torch.full((num_groups,), splits, dtype=torch.int32, device=device)
        return _PrefixKernel(groups, kv_indptr, kv_indices, num_kv_splits, splits)

    def _num_splits(self, num_programs: int) -> int:
        """Shares of the keys that fill the GPU twice; partials are float32, so no more."""
        backend = _as_any(self)
        num_sms = torch.cuda.get_device_properties(backend.device).multi_processor_count
        return max(1, min(-(-2 * num_sms // num_programs), backend.max_kv_splits))

    def attend_prefix(
        self, q: torch.Tensor, layer: Any, kernel: _PrefixKernel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, 576] -> o [n, H, 512], lse [n, H], base e; every token sees all of its keys."""
        k_buffer, v_buffer = _as_any(self).token_to_kv_pool.get_kv_buffer(layer.layer_id)
        grouped = kernel.groups.packed(q)  # [G, s, H, 576]
        rows = grouped.flatten(1, 2)
        partial_lse = rows.new_empty((*rows.shape[:2], kernel.splits), dtype=torch.float32)
        partials = partial_lse.new_empty((*partial_lse.shape, layer.v_head_dim))
        _decode_grouped_att_m_fwd(
            rows,
            k_buffer,
            v_buffer,
            partials,
            partial_lse,
            kernel.kv_indptr,
            kernel.kv_indices,
            kernel.num_kv_splits,
            kernel.splits,
            layer.scaling,
            logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
            has_mla=True,
        )
        o, lse = reduce_splits(
            partials,
            partial_lse,
            kernel.kv_indptr,
            kernel.num_kv_splits,
            num_tokens=grouped.shape[0],
            dtype=q.dtype,
        )
        shape = grouped.shape[:3]
        return kernel.groups.unpacked(o.view(*shape, -1)), kernel.groups.unpacked(lse.view(shape))

    def plan_fresh(self, forward_batch: Any) -> None:
        """Where each request's new tokens lie, for both variants."""
        self._new = make_spans(forward_batch.extend_seq_lens_cpu, _as_any(self).device)

    def attend_fresh(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExtendAttention.attend_fresh`; lse base e, -inf for padded rows at the end."""
        latent, indptr = torch.cat([k_nope, k_pe], dim=-1), self._new.indptr
        v = latent[..., : layer.v_head_dim]
        return ragged_attention(q_nope, q_pe, latent, v, self._new, indptr, layer.scaling, True)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Pass-KV: expanded heads over the new tokens or a prefix chunk; else as StripeMixin.

        Args:
            q: [T, H/c, 192], k: [S, H/c, 192], v: [S, H/c, 128], S the keys of the part.

        Returns:
            o [T, H/c, 128] and lse [T, H/c], base e; a request without a key in the chunk has o = 0
            and lse = -inf, and so have padded rows at the end.
        """
        if prefill_variant(forward_batch) != "pass_kv":
            return super().forward_extend(  # type: ignore[misc]
                q, k, v, layer, forward_batch, *args, **kwargs
            )
        assert forward_batch.mha_return_lse, "the parts of pass-KV are merged"
        keys, over_prefix = self._new.indptr, forward_batch.attn_attend_prefix_cache
        if over_prefix:
            keys = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx]
            counters.count("prefix_chunk")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        nope = layer.qk_head_dim - _as_any(self).token_to_kv_pool.qk_rope_head_dim
        return ragged_attention(
            q[..., :nope], q[..., nope:], k, v, self._new, keys, layer.scaling, not over_prefix
        )


def _as_any(backend: Any) -> Any:
    """The mixin's self with the attributes of the class that it is mixed into."""
    return backend
