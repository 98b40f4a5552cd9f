"""What every DCP attention backend shares: lengths of the stripe, stage 2, and the way to 4-7."""

from collections.abc import Sequence
from typing import Any

import torch

from sglang_dcp import state
from sglang_dcp.attention.decode import decode_over_stripes
from sglang_dcp.attention.extend import PrefixSlice, extend_over_stripes
from sglang_dcp.attention.prefill import is_pass_q
from sglang_dcp.attention.prefix_slices import Share, make_prefix_slices
from sglang_dcp.kernels.kv_index import fill_local_lens
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.layout import local_len


class StripeMixin:
    """Mixed into a subclass of an upstream backend, before it in the bases.

    The subclass builds its metadata for the local stripe and implements `attend_stripe`. Prefill
    by pass-KV attends in upstream's code (`attention/prefix_chunks.py`); for pass-Q the subclass
    implements `plan_prefix`, `attend_prefix`, `plan_fresh` and `attend_fresh`.
    """

    lse_base: LseBase
    extend_lse_base: LseBase = "e"
    local_lens: torch.Tensor  # [c, B] int32
    kernel_lens: torch.Tensor  # [B] int32, this rank's local lengths clamped to 1
    prefix_slices: list[PrefixSlice]

    #: Static buffers for captured graphs, set by `init_stripe_buffers`.
    _graph_local_lens: torch.Tensor | None = None
    _graph_kernel_lens: torch.Tensor | None = None

    def init_stripe_buffers(self, max_bs: int, device: torch.device | str) -> None:
        """Allocate what captured graphs read, once, for batches of up to `max_bs` requests."""
        dcp_size = state.get_state().dcp_size
        self._graph_local_lens = torch.zeros(dcp_size * max_bs, dtype=torch.int32, device=device)
        self._graph_kernel_lens = torch.ones(max_bs, dtype=torch.int32, device=device)

    def fill_stripe_lens(self, seq_lens: torch.Tensor, in_graph: bool) -> None:
        """Set `local_lens` and `kernel_lens` from global lengths [B], without a host sync.

        Args:
            seq_lens: [B] int32 or int64, lengths including the token of this step.
            in_graph: write into the static buffers that captured graphs read. Their addresses
                depend only on B, so a graph captured at B finds them at each replay.
        """
        dcp, bs = state.get_state(), seq_lens.shape[0]
        if in_graph:
            assert self._graph_local_lens is not None
            assert self._graph_kernel_lens is not None
            self.local_lens = self._graph_local_lens[: dcp.dcp_size * bs].view(dcp.dcp_size, bs)
            self.kernel_lens = self._graph_kernel_lens[:bs]
        else:
            self.local_lens = seq_lens.new_empty((dcp.dcp_size, bs), dtype=torch.int32)
            self.kernel_lens = seq_lens.new_empty(bs, dtype=torch.int32)
        fill_local_lens(seq_lens, self.local_lens, self.kernel_lens, dcp.dcp_rank, dcp.dcp_size)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Upstream's, except for a prefill by pass-Q, which reads none of it."""
        if is_pass_q(forward_batch):
            self.plan_extend(forward_batch)
        else:
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]

    def plan_extend(self, forward_batch: Any) -> None:
        """Metadata of pass-Q, once a batch, from lengths on the host."""
        dcp = state.get_state()
        self.prefix_slices = make_prefix_slices(
            forward_batch.extend_seq_lens_cpu,
            forward_batch.extend_prefix_lens_cpu,
            min(dcp.comm.max_tokens, dcp.prefill_policy.limits.slice_tokens),
            dcp.dcp_size,
            self.device,  # type: ignore[attr-defined]
            lambda share: self.plan_prefix(share, forward_batch),
        )
        self.plan_fresh(forward_batch)

    def plan_prefix(self, share: Share, forward_batch: Any) -> Any:
        """Metadata of `attend_prefix` for a slice's share of the batch."""
        raise NotImplementedError

    def plan_fresh(self, forward_batch: Any) -> None:
        """Metadata of `attend_fresh`."""
        raise NotImplementedError

    def own_prefix_lens(self, requests: Sequence[int], forward_batch: Any) -> list[int]:
        """This rank's share of these requests' prefixes as a kernel gets it, clamped to 1."""
        dcp, lens = state.get_state(), forward_batch.extend_prefix_lens_cpu
        return [max(local_len(lens[b], dcp.dcp_rank, dcp.dcp_size), 1) for b in requests]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stages 2 and 4-7; q is q_nope [B, H/c, 512], k the latent [B, 1, 512], rope apart.

        With --dcp-replicate-q-proj q comes with all H heads of the group.
        """
        assert q_rope is not None, "DCP needs q_nope and q_pe apart"
        if k is not None and save_kv_cache:
            pool: Any = self.token_to_kv_pool  # type: ignore[attr-defined]
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        heads = q.shape[1] if q.dim() == 3 else layer.tp_q_head_num
        q_nope = q.view(-1, heads, layer.v_head_dim)
        q_pe = q_rope.view(-1, heads, layer.head_dim - layer.v_head_dim)
        return decode_over_stripes(self, q_nope, q_pe, layer)  # type: ignore[arg-type]

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
        """Prefill attention: pass-Q, or upstream's on expanded K and V.

        Upstream's comes with an LSE in base `extend_lse_base` where it is to be merged with prefix
        chunks (`attention/prefix_chunks.py`; upstream itself would merge as if it were base e,
        sglang issue 40903). A request without a key in a chunk comes back from flashinfer with a
        finite o and, in base 2, an LSE of -inf or of -5e4 (its kernel for Hopper).
        """
        if is_pass_q(forward_batch):
            return self.forward_pass_q(q, k, layer, forward_batch, *args, **kwargs)
        if layer.v_head_dim == self.token_to_kv_pool.kv_lora_rank:  # type: ignore[attr-defined]
            raise RuntimeError(
                "absorbed prefill was asked for over a striped pool, of which this rank holds only "
                "its own tokens, for a batch that is not prefilled by pass-Q. This is a bug of "
                "sglang-dcp."
            )
        return super().forward_extend(  # type: ignore[misc]
            q, k, v, layer, forward_batch, *args, **kwargs
        )

    def forward_pass_q(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stages 2 and 4-7 of a prefill; q is q_nope [T, H/c, 512], k the latent [T, 1, 512]."""
        assert q_rope is not None, "pass-Q needs q_nope and q_pe apart"
        assert k_rope is not None, "pass-Q needs the new tokens' latent rows"
        if save_kv_cache:
            pool: Any = self.token_to_kv_pool  # type: ignore[attr-defined]
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        heads = layer.tp_q_head_num
        q_nope = q.view(-1, heads, layer.v_head_dim)
        q_pe = q_rope.view(-1, heads, layer.head_dim - layer.v_head_dim)
        k_nope, k_pe = k.view(-1, 1, layer.v_head_dim), k_rope.view(-1, 1, q_pe.shape[2])
        return extend_over_stripes(self, q_nope, q_pe, k_nope, k_pe, layer)  # type: ignore[arg-type]
