"""FlashInfer MLA over the stripe: token-granular indices, base-2 LSE."""

from itertools import accumulate
from typing import Any

import torch
from flashinfer import BatchMLAPagedAttentionWrapper
from sglang.srt.layers.attention.flashinfer_mla_backend import (
    FlashInferMLAAttnBackend,
    FlashInferMLAIndicesUpdaterDecode,
)

from sglang_dcp import state
from sglang_dcp.attention.flashinfer_extend import FlashInferExtend
from sglang_dcp.attention.prefix_slices import Share
from sglang_dcp.attention.ragged_chunks import RaggedChunksMixin
from sglang_dcp.attention.stripe import StripeMixin
from sglang_dcp.kernels.kv_index import build_local_kv_indices
from sglang_dcp.layout import local_len


def use_spare_plan(wrapper: Any) -> None:
    """Let the next plan of a replay be written to host memory that no pending copy reads.

    Upstream's plan of a replay fills one pinned buffer and copies it to the GPU without waiting. A
    host that runs ahead (overlap scheduling) fills it again while the copy of the plan before is
    still queued, and that step then attends by the lengths of the next one. Two buffers in turn,
    each waited for by event, keep the host one plan ahead and no further. The caller records
    `wrapper.dcp_plan_copied` behind the plan.
    """
    if not hasattr(wrapper, "dcp_spare_plan"):
        spare = torch.empty_like(wrapper._pin_memory_int_workspace_buffer, pin_memory=True)
        wrapper.dcp_spare_plan = spare, torch.cuda.Event()
        wrapper.dcp_plan_copied = torch.cuda.Event()
    last = wrapper._pin_memory_int_workspace_buffer, wrapper.dcp_plan_copied
    wrapper._pin_memory_int_workspace_buffer, wrapper.dcp_plan_copied = wrapper.dcp_spare_plan
    wrapper.dcp_plan_copied.synchronize()  # at once, unless two plans are queued
    wrapper.dcp_spare_plan = last


class _StripeIndicesUpdater(FlashInferMLAIndicesUpdaterDecode):
    """Plans the decode kernel for gathered heads and this rank's rows."""

    def __init__(self, model_runner: Any, attn_backend: "DcpFlashInferBackend") -> None:
        super().__init__(model_runner, attn_backend)
        self.num_local_heads *= state.get_state().dcp_size

    def call_begin_forward(
        self,
        wrapper: Any,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        q_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        init_metadata_replay: bool = False,
        spec_info: Any = None,
        **fast_decode_kwargs: Any,
    ) -> None:
        """Upstream's method with lengths and rows of the stripe; `paged_kernel_lens` are global."""
        dcp, backend, bs = state.get_state(), self.attn_backend, len(req_pool_indices)
        backend.fill_stripe_lens(paged_kernel_lens, in_graph=backend.planning_graph)
        kv_indptr[1 : bs + 1] = torch.cumsum(backend.kernel_lens, dim=0)
        kv_indptr = kv_indptr[: bs + 1]
        if init_metadata_replay:
            kv_indices = fast_decode_kwargs["kv_indices"]
        else:  # at most ceil(len / c) rows of each request, at least 1
            most = int(paged_kernel_lens_sum) // dcp.dcp_size + bs
            kv_indices = torch.zeros(most, dtype=torch.int32, device=kv_indptr.device)
        build_local_kv_indices(
            self.req_to_token,
            req_pool_indices,
            paged_kernel_lens,
            kv_indptr,
            kv_indices,
            dcp.dcp_rank,
            dcp.dcp_size,
        )
        shape = (self.num_local_heads, self.kv_lora_rank, self.qk_rope_head_dim, 1, False)
        dtypes = (self.data_type, self.data_type)
        if init_metadata_replay:
            q_indptr, kv_indptr = (
                fast_decode_kwargs[k] for k in ("qo_indptr_cpu", "kv_indptr_cpu")
            )
            lens = fast_decode_kwargs["kv_len_arr_cpu"]
            use_spare_plan(wrapper)
        else:
            q_indptr, lens = q_indptr[: bs + 1], backend.kernel_lens
        wrapper.plan(q_indptr, kv_indptr, kv_indices, lens, *shape, self.scaling, *dtypes)
        if init_metadata_replay:
            wrapper.dcp_plan_copied.record()


class DcpFlashInferBackend(
    RaggedChunksMixin, FlashInferExtend, StripeMixin, FlashInferMLAAttnBackend
):
    """Decode over the stripe; prefill is upstream's ragged path, or pass-Q."""

    lse_base = "2"
    extend_lse_base = "2"
    planning_graph = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.indices_updater_decode = _StripeIndicesUpdater(model_runner, self)
        self._prefix_wrappers: list[Any] = []  # one a plan of a batch; each owns 8 MB
        self.load_pass_q()

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        most = max_num_tokens * (self.max_context_len // state.get_state().dcp_size + 1)
        indices = torch.zeros(most, dtype=torch.int32, device=self.device)
        super().init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf=indices)
        self.init_stripe_buffers(max_bs, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.planning_graph = True
        try:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
        finally:
            self.planning_graph = False

    def _apply_cuda_graph_metadata(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor,
    ) -> None:
        """The replay plan reads lengths on the CPU: give it those of the stripe."""
        dcp = state.get_state()
        kernel_lens_cpu = local_len(seq_lens_cpu[:bs], dcp.dcp_rank, dcp.dcp_size).clamp(min=1)
        super()._apply_cuda_graph_metadata(
            bs, req_pool_indices, seq_lens, seq_lens_sum, forward_mode, spec_info, kernel_lens_cpu
        )

    def attend_stripe(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, 576] -> o [B, H, 512], lse [B, H], base 2; none empty: lengths are clamped."""
        return self._run(self.forward_metadata.decode_wrapper, q, layer)

    def _run(self, wrapper: Any, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return wrapper.run(
            q[..., : layer.v_head_dim],
            q[..., layer.v_head_dim :],
            k_buffer[..., : layer.v_head_dim],
            k_buffer[..., layer.v_head_dim :],
            return_lse=True,
        )

    def plan_extend(self, forward_batch: Any) -> None:
        """As FlashInferExtend; plans take the wrappers in turn."""
        self._num_prefix_plans = 0
        super().plan_extend(forward_batch)

    def plan_prefix(self, share: Share, forward_batch: Any) -> Any:
        """A planned wrapper: each request's tokens over its stripe, without a mask."""
        dcp = state.get_state()
        kv_lens = self.own_prefix_lens(share.requests, forward_batch)
        which = torch.tensor(share.requests).to(self.device, non_blocking=True)
        indptr = torch.tensor(list(accumulate(kv_lens, initial=0)), dtype=torch.int32)
        kv_indices = torch.empty(sum(kv_lens), dtype=torch.int32, device=self.device)
        build_local_kv_indices(
            self.indices_updater_decode.req_to_token,
            forward_batch.req_pool_indices[which],
            forward_batch.extend_prefix_lens[which],
            indptr.to(self.device, non_blocking=True),
            kv_indices,
            dcp.dcp_rank,
            dcp.dcp_size,
        )
        wrapper = self._next_prefix_wrapper()
        heads = dcp.comm.num_heads
        self.plan_mla(wrapper, list(share.counts), kv_lens, kv_indices, heads, causal=False)
        return wrapper

    def _next_prefix_wrapper(self) -> Any:
        if self._num_prefix_plans == len(self._prefix_wrappers):
            wrapper = BatchMLAPagedAttentionWrapper(self.workspace_buffer, backend="auto")
            self._prefix_wrappers.append(wrapper)
        self._num_prefix_plans += 1
        return self._prefix_wrappers[self._num_prefix_plans - 1]

    def attend_prefix(
        self, q: torch.Tensor, layer: Any, kernel: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, 576] -> o [n, H, 512], lse [n, H], base 2; kernel is the planned wrapper."""
        return self._run(kernel, q, layer)


def create_backend(runner: Any) -> DcpFlashInferBackend:
    """Factory for ATTENTION_BACKENDS["flashinfer"]."""
    return DcpFlashInferBackend(runner)
