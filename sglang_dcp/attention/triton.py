"""SGLang's Triton MLA kernels over the stripe: token-granular indices, natural-log LSE."""

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend, logit_capping_mod
from sglang.srt.layers.attention.triton_ops.decode_attention import _decode_grouped_att_m_fwd

from sglang_dcp import state
from sglang_dcp.attention.prefill import prefill_variant
from sglang_dcp.attention.stripe import StripeMixin
from sglang_dcp.attention.triton_extend import TritonExtend
from sglang_dcp.kernels.kv_index import build_local_kv_indices
from sglang_dcp.kernels.split_reduce import reduce_splits


class DcpTritonBackend(TritonExtend, StripeMixin, TritonAttnBackend):
    """Decode over the stripe; with a prefix, prefill is chunked MHA, or pass-Q.

    Upstream prefills a prefix absorbed, over a contiguous index of all of it and without an LSE;
    its MHA serves batches without a prefix.
    """

    lse_base = "e"
    _striped = False  # True while upstream's metadata code runs for a decode batch

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        dcp_size = state.get_state().dcp_size
        self.num_head *= dcp_size
        # The split buffers are [tokens, heads, splits, 512] float32: c times the heads, 1/c of
        # the tokens each rank reads, so 1/c of the splits keeps both size and parallelism.
        self.max_kv_splits: int = max(1, self.max_kv_splits // dcp_size)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._striped = forward_batch.forward_mode.is_decode_or_idle()
        if not self._striped and prefill_variant(forward_batch) == "pass_kv":
            self.plan_fresh(forward_batch)
            return
        try:
            super().init_forward_metadata(forward_batch)
        finally:
            self._striped = False

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, *args: Any, **kw: Any
    ) -> None:
        most = max_num_tokens * (self.max_context_len // state.get_state().dcp_size + 1)
        indices = torch.zeros(most, dtype=torch.int32, device=self.device)
        super().init_cuda_graph_state(max_bs, max_num_tokens, indices)
        self.init_stripe_buffers(max_bs, self.device)

    def _fill_kv_indptr_and_indices(
        self,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        kv_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Upstream's seam for eager decode and for extend; only decode reads the stripe."""
        if not self._striped:
            return super()._fill_kv_indptr_and_indices(bs, seq_lens, req_pool_indices, kv_indices)
        return self._fill_stripe(bs, seq_lens, req_pool_indices, kv_indices, in_graph=False)

    def _update_decode_kv_buffers(
        self, bs: int, seq_lens: torch.Tensor, req_pool_indices: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        """Upstream's seam for captured decode graphs."""
        kv_indptr = self._fill_stripe(
            bs, seq_lens[:bs], req_pool_indices[:bs], self.cuda_graph_kv_indices, in_graph=True
        )
        return kv_indptr, None, None

    def _fill_stripe(
        self,
        bs: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        kv_indices: torch.Tensor,
        in_graph: bool,
    ) -> torch.Tensor:
        dcp = state.get_state()
        self.fill_stripe_lens(seq_lens, in_graph)
        kv_indptr = self.kv_indptr[: bs + 1]
        kv_indptr[1:] = torch.cumsum(self.kernel_lens, dim=0)
        build_local_kv_indices(
            self.req_to_token,
            req_pool_indices,
            seq_lens,
            kv_indptr,
            kv_indices,
            dcp.dcp_rank,
            dcp.dcp_size,
        )
        return kv_indptr

    def get_num_kv_splits(self, num_kv_splits: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Splits follow the local lengths; upstream passes the global ones."""
        super().get_num_kv_splits(num_kv_splits, self.kernel_lens)

    def attend_stripe(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, 576] -> o [B, H, 512], lse [B, H], base e."""
        metadata = self.forward_metadata
        k_buffer, v_buffer = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        _decode_grouped_att_m_fwd(
            q,
            k_buffer,
            v_buffer,
            metadata.attn_logits,
            metadata.attn_lse,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.num_kv_splits,
            self.max_kv_splits,
            layer.scaling,
            logit_capping_mod(layer.logit_capping_method, layer.logit_cap),
            has_mla=True,
        )
        return reduce_splits(
            metadata.attn_logits,
            metadata.attn_lse,
            metadata.kv_indptr,
            metadata.num_kv_splits,
            num_tokens=q.shape[0],
            dtype=q.dtype,
        )


def create_backend(runner: Any) -> DcpTritonBackend:
    """Factory for ATTENTION_BACKENDS["triton"]."""
    return DcpTritonBackend(runner)
