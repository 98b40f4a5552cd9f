"""Pass-Q on SGLang's Triton decode kernel; all LSEs here are base e."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import logit_capping_mod
from sglang.srt.layers.attention.triton_ops.decode_attention import _decode_grouped_att_m_fwd

from sglang_dcp import state
from sglang_dcp.attention.prefix_slices import Share
from sglang_dcp.attention.token_groups import TokenGroups, make_groups
from sglang_dcp.kernels.kv_index import build_local_kv_indices
from sglang_dcp.kernels.split_reduce import reduce_splits

#: Query rows (token, head) of one program, and the most tokens of a group: every head count of a
#: group compiles the kernel anew, so sizes are powers of two up to this.
ROW_TILE, MAX_GROUP = 16, 16
#: Queries of the causal part at a time, which bounds its scores.
FRESH_BLOCK = 64


@dataclass(frozen=True)
class _PrefixKernel:
    """Arguments of the decode kernel for a slice of new tokens; one sequence per group."""

    groups: TokenGroups
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    num_kv_splits: torch.Tensor
    partials: torch.Tensor
    partial_lse: torch.Tensor


def attend_latent_causal(
    q: torch.Tensor, latent: torch.Tensor, v_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one request's new tokens among themselves, in torch, float32.

    Args:
        q: [t, H, 576] absorbed queries with their rope parts.
        latent: [t, 576].
        v_dim: width of the values, which are the latent's first columns.
        scale: softmax scale.

    Returns:
        o [t, H, v_dim] float32 and lse [t, H] float32, base e.
    """
    keys, outs, lses = latent.float(), [], []
    for start in range(0, q.shape[0], FRESH_BLOCK):
        block = q[start : start + FRESH_BLOCK].float()
        end = start + block.shape[0]
        scores = (block.flatten(0, 1) @ keys[:end].T).view(*block.shape[:2], end) * scale
        position = torch.arange(end, device=q.device)
        hidden = position[None, :] > position[start:, None]
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
        outs.append(scores.softmax(-1) @ keys[:end, :v_dim])
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)


class TritonExtend:
    """Mixed into the subclass of TritonAttnBackend."""

    def plan_prefix(self, share: Share, forward_batch: Any) -> _PrefixKernel:
        """Groups of tokens of one request, as more heads of one token: keys are read once."""
        dcp, backend = state.get_state(), _as_any(self)
        device: Any = backend.device
        size = min(1 << (max(share.counts) - 1).bit_length(), MAX_GROUP)
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
        shape = (num_groups, rows, splits)
        return _PrefixKernel(
            groups,
            kv_indptr,
            kv_indices,
            torch.full((num_groups,), splits, dtype=torch.int32, device=device),
            torch.empty((*shape, dcp.comm.kv_lora_rank), device=device),
            torch.empty(shape, device=device),
        )

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
        _decode_grouped_att_m_fwd(
            grouped.flatten(1, 2),
            k_buffer,
            v_buffer,
            kernel.partials,
            kernel.partial_lse,
            kernel.kv_indptr,
            kernel.kv_indices,
            kernel.num_kv_splits,
            kernel.partials.shape[2],
            layer.scaling,
            logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
            has_mla=True,
        )
        o, lse = reduce_splits(
            kernel.partials,
            kernel.partial_lse,
            kernel.kv_indptr,
            kernel.num_kv_splits,
            num_tokens=grouped.shape[0],
            dtype=q.dtype,
        )
        shape = grouped.shape[:3]
        return kernel.groups.unpacked(o.view(*shape, -1)), kernel.groups.unpacked(lse.view(shape))

    def plan_fresh(self, forward_batch: Any) -> None:
        """Nothing but the lengths."""
        self._new_lens = forward_batch.extend_seq_lens_cpu

    def attend_fresh(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, latent: torch.Tensor, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExtendAttention.attend_fresh`; lse base e, -inf for padded rows at the end.

        In torch: upstream's extend kernel returns no LSE, and pass-Q is for few new tokens.
        """
        out = torch.zeros_like(q_nope, memory_format=torch.contiguous_format)
        lse = torch.full(q_nope.shape[:2], float("-inf"), device=q_nope.device)
        at = 0
        for length in self._new_lens:
            rows = slice(at, at + length)
            q = torch.cat([q_nope[rows], q_pe[rows]], dim=-1)
            o, lse[rows] = attend_latent_causal(q, latent[rows, 0], layer.v_head_dim, layer.scaling)
            out[rows] = o.to(out.dtype)
            at += length
        return out, lse


def _as_any(backend: Any) -> Any:
    """The mixin's self with the attributes of the class that it is mixed into."""
    return backend
