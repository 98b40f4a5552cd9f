"""FlashMLA over the stripe: widened pages of 64 * c tokens, natural-log LSE."""

from typing import Any

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend, FlashMLADecodeMetadata

from sglang_dcp import state
from sglang_dcp.attention.ragged_chunks import RaggedChunksMixin
from sglang_dcp.attention.stripe import StripeMixin
from sglang_dcp.kernels.kv_index import build_block_table

PAGE_SIZE = 64


class DcpFlashMLABackend(RaggedChunksMixin, StripeMixin, FlashMLABackend):
    """Decode over the stripe; prefill is the flashinfer ragged path that FlashMLABackend uses."""

    lse_base = "e"
    extend_lse_base = "2"  # its prefill is flashinfer's

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.num_q_heads *= state.get_state().dcp_size  # heads after the gather

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
        """q [B, H, 576] -> o [B, H, 512], lse [B, H], base e (+inf would mark an empty row)."""
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


def create_backend(runner: Any) -> DcpFlashMLABackend:
    """Factory for ATTENTION_BACKENDS["flashmla"]."""
    return DcpFlashMLABackend(runner)
