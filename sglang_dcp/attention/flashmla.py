"""FlashMLA over the stripe: widened pages of 64 * c tokens, natural-log LSE."""

from dataclasses import dataclass
from typing import Any

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend, FlashMLADecodeMetadata

from sglang_dcp import state
from sglang_dcp.attention.flashinfer_extend import FlashInferExtend
from sglang_dcp.attention.prefix_slices import Share
from sglang_dcp.attention.ragged_chunks import RaggedChunksMixin
from sglang_dcp.attention.stripe import StripeMixin
from sglang_dcp.attention.token_groups import TokenGroups, best_group_size, make_groups
from sglang_dcp.kernels.kv_index import build_block_table

PAGE_SIZE = 64


@dataclass(frozen=True)
class _PrefixKernel:
    """FlashMLA's arguments for a slice of new tokens; one sequence per group."""

    groups: TokenGroups
    block_table: torch.Tensor
    kernel_lens: torch.Tensor
    schedule: torch.Tensor
    num_splits: torch.Tensor


class DcpFlashMLABackend(RaggedChunksMixin, FlashInferExtend, StripeMixin, FlashMLABackend):
    """Decode over the stripe; prefill is FlashMLABackend's flashinfer ragged path, or pass-Q."""

    lse_base = "e"
    extend_lse_base = "2"  # its prefill is flashinfer's

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.num_q_heads *= state.get_state().dcp_size  # heads after the gather
        self.load_pass_q()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if not forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata(forward_batch)
            return
        widened_page_size = PAGE_SIZE * state.get_state().dcp_size
        longest = max(forward_batch.seq_lens_cpu.tolist(), default=1)
        table = torch.zeros(
            (forward_batch.batch_size, -(-longest // widened_page_size)),
            dtype=torch.int32,
            device=self.device,
        )
        metadata, num_splits = self._plan(forward_batch, table, in_graph=False)
        self.forward_metadata = FlashMLADecodeMetadata(metadata, num_splits, table)

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        block_kv_indices: torch.Tensor | None = None,
    ) -> None:
        widened_page_size = PAGE_SIZE * state.get_state().dcp_size
        width = -(-self.max_context_len // widened_page_size) + 1
        table = torch.zeros((max_bs, width), dtype=torch.int32, device=self.device)
        super().init_cuda_graph_state(max_bs, max_num_tokens, block_kv_indices=table)
        self.init_stripe_buffers(max_bs, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        assert forward_batch.forward_mode.is_decode_or_idle(), forward_batch.forward_mode
        bs = forward_batch.batch_size
        table = self.cuda_graph_kv_indices[:bs]
        metadata, num_splits = self._plan(forward_batch, table, in_graph=True)
        # The number of SM parts depends on the heads only, so the view has one address for all bs.
        static_metadata = self.cuda_graph_mla_metadata[: metadata.shape[0]]
        static_metadata.copy_(metadata)
        static_splits = self.cuda_graph_num_splits[: bs + 1]
        static_splits.copy_(num_splits)
        self.forward_metadata = FlashMLADecodeMetadata(static_metadata, static_splits, table)

    def _plan(
        self, forward_batch: Any, table: torch.Tensor, in_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill lengths and block table; returns FlashMLA's schedule for the local lengths."""
        seq_lens = forward_batch.seq_lens[: forward_batch.batch_size]
        self.fill_stripe_lens(seq_lens, in_graph)
        build_block_table(
            self.req_to_token,
            forward_batch.req_pool_indices[: forward_batch.batch_size],
            seq_lens,
            table,
            PAGE_SIZE,
            state.get_state().dcp_size,
        )
        return get_mla_metadata(self.kernel_lens, self.num_q_heads, 1)

    def attend_stripe(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, 576] -> o [B, H, 512], lse [B, H], base e; none empty: lengths are clamped."""
        metadata = self.forward_metadata
        k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        o, lse = flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=k_cache.view(-1, PAGE_SIZE, 1, self.kv_cache_dim),
            block_table=metadata.block_kv_indices,
            cache_seqlens=self.kernel_lens,
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=metadata.flashmla_metadata,
            num_splits=metadata.num_splits,
            softmax_scale=layer.scaling,
            causal=True,
        )
        return o.squeeze(1), lse.squeeze(2)

    def plan_extend(self, forward_batch: Any) -> None:
        """As FlashInferExtend, with one block table of the prefixes for all slices."""
        dcp_size = state.get_state().dcp_size
        longest = max(forward_batch.extend_prefix_lens_cpu)
        self._prefix_table = torch.zeros(
            (forward_batch.batch_size, -(-longest // (PAGE_SIZE * dcp_size))),
            dtype=torch.int32,
            device=self.device,
        )
        build_block_table(
            self.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens,
            self._prefix_table,
            PAGE_SIZE,
            dcp_size,
        )
        super().plan_extend(forward_batch)

    def plan_prefix(self, share: Share, forward_batch: Any) -> _PrefixKernel:
        """Groups of tokens of one request, each group a sequence of the kernel."""
        num_heads = state.get_state().comm.num_heads
        lens = self.own_prefix_lens(share.requests, forward_batch)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = best_group_size(share.counts, lens, num_heads, num_sms)
        groups = make_groups(share.requests, share.counts, size, self.device)
        of_groups = torch.tensor(groups.requests).to(self.device, non_blocking=True)
        kernel_lens = torch.tensor(
            self.own_prefix_lens(groups.requests, forward_batch), dtype=torch.int32
        ).to(self.device, non_blocking=True)
        schedule, num_splits = get_mla_metadata(kernel_lens, size * num_heads, 1)
        table = self._prefix_table.index_select(0, of_groups)
        return _PrefixKernel(groups, table, kernel_lens, schedule, num_splits)

    def attend_prefix(
        self, q: torch.Tensor, layer: Any, kernel: _PrefixKernel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, 576] -> o [n, H, 512], lse [n, H], base e; every token sees all of its keys."""
        k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        o, lse = flash_mla_with_kvcache(
            q=kernel.groups.packed(q),
            k_cache=k_cache.view(-1, PAGE_SIZE, 1, self.kv_cache_dim),
            block_table=kernel.block_table,
            cache_seqlens=kernel.kernel_lens,
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=kernel.schedule,
            num_splits=kernel.num_splits,
            softmax_scale=layer.scaling,
            causal=False,
        )
        return kernel.groups.unpacked(o), kernel.groups.unpacked(lse.transpose(1, 2))


def create_backend(runner: Any) -> DcpFlashMLABackend:
    """Factory for ATTENTION_BACKENDS["flashmla"]."""
    return DcpFlashMLABackend(runner)
