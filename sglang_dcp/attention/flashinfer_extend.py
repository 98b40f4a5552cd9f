"""Pass-Q on FlashInfer's MLA kernel: the causal part of the new tokens, and plans without a sync.

FlashMLA has no form for the causal part (its keys lie in pages of a pool), so its backend takes
this one too; all LSEs here are base 2.
"""

from itertools import accumulate
from typing import Any

import torch

from sglang_dcp import state


class FlashInferExtend:
    """Mixed into subclasses of FlashInferMLAAttnBackend."""

    #: After the last plan's copies; a plan's host buffer must not be written before it.
    _planned: torch.cuda.Event | None = None

    def load_pass_q(self) -> None:
        """Build and load the kernel now: a build in mid-serving would let other ranks wait."""
        dcp = state.get_state()
        if dcp.prefill_policy.mode != "pass-kv":
            row = torch.zeros(1, dtype=torch.int32, device=self.device)  # type: ignore[attr-defined]
            wrapper: Any = self.prefill_wrapper_paged  # type: ignore[attr-defined]
            self.plan_mla(wrapper, [1], [1], row, dcp.comm.local_heads, causal=True)

    def plan_extend(self, forward_batch: Any) -> None:
        """As StripeMixin, and waits for the copies of the batch before, which are long over."""
        if self._planned is not None:
            self._planned.synchronize()
        super().plan_extend(forward_batch)  # type: ignore[misc]
        self._planned = torch.cuda.Event()
        self._planned.record()

    def plan_mla(
        self,
        wrapper: Any,
        q_lens: list[int],
        kv_lens: list[int],
        kv_indices: torch.Tensor,
        num_heads: int,
        causal: bool,
    ) -> None:
        """Plan a BatchMLAPagedAttentionWrapper for sequences one after another, page size 1.

        Args:
            wrapper: the wrapper, which keeps the plan.
            q_lens, kv_lens: of every sequence, each at least 1; on the host, so nothing is waited
                for.
            kv_indices: [sum(kv_lens)] int32, rows of the keys.
            num_heads: query heads.
            causal: query t of a sequence sees keys up to t + kv_len - q_len.
        """
        updater: Any = self.indices_updater_decode  # type: ignore[attr-defined]
        indptrs = [
            torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
            for lens in (q_lens, kv_lens)
        ]
        wrapper.plan(
            *indptrs,
            kv_indices,
            torch.tensor(kv_lens, dtype=torch.int32),
            num_heads,
            updater.kv_lora_rank,
            updater.qk_rope_head_dim,
            1,
            causal,
            updater.scaling,
            updater.data_type,
            updater.data_type,
        )

    def plan_fresh(self, forward_batch: Any) -> None:
        """The new tokens' latent rows are a small cache of their own, in batch order."""
        lens = forward_batch.extend_seq_lens_cpu
        device: Any = self.device  # type: ignore[attr-defined]
        rows = torch.arange(sum(lens), dtype=torch.int32, device=device)
        wrapper: Any = self.prefill_wrapper_paged  # type: ignore[attr-defined]
        self.plan_mla(wrapper, lens, lens, rows, state.get_state().comm.local_heads, causal=True)

    def attend_fresh(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExtendAttention.attend_fresh`; lse base 2. Padded rows at the end hold anything."""
        wrapper: Any = self.prefill_wrapper_paged  # type: ignore[attr-defined]
        return wrapper.run(
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            out=q_nope.new_empty(q_nope.shape),
            return_lse=True,
        )
