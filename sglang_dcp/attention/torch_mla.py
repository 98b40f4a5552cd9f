"""Attention backend `torch_mla`: MLA in plain torch with an LSE, for ranks without a GPU.

`TorchMLABackend` serves without DCP, so that a baseline runs on the same ground;
`DcpTorchMLABackend` attends to the stripe. All LSEs are base e.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_dcp import counters, state
from sglang_dcp.attention.prefix_slices import Share
from sglang_dcp.attention.stripe import StripeMixin
from sglang_dcp.layout import first_owned


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal_offset: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of T queries over S keys.

    Args:
        q: [T, H, D]; k: [S, K, D] and v: [S, K, Dv] with K = 1 or H.
        scale: softmax scale.
        causal_offset: query t sees keys up to t + causal_offset; None: all keys.

    Returns:
        o [T, H, Dv] float32, 0 where S is 0, and lse [T, H] float32, base e, -inf where S is 0.
    """
    num_heads = q.shape[1]
    k, v = (x.float().expand(-1, num_heads, -1) for x in (k, v))
    scores = torch.einsum("thd,shd->ths", q.float(), k) * scale
    if causal_offset is not None:
        t, s = torch.arange(q.shape[0]), torch.arange(k.shape[0])
        hidden = s[None, :] > t[:, None] + causal_offset
        scores.masked_fill_(hidden[:, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("ths,shd->thd", weights, v), lse


def attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` for several requests, one after another in q [T, H, D] and in k, v.

    Rows past the last request (padding) come back as 0 with lse -inf.
    """
    o = q.new_zeros((q.shape[0], q.shape[1], v.shape[-1]), dtype=torch.float32)
    lse = torch.full(q.shape[:2], float("-inf"))
    q_at = kv_at = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        rows, cols = slice(q_at, q_at + q_len), slice(kv_at, kv_at + kv_len)
        offset = kv_len - q_len if causal else None
        o[rows], lse[rows] = attend(q[rows], k[cols], v[cols], scale, offset)
        q_at, kv_at = q_at + q_len, kv_at + kv_len
    return o, lse


class TorchMLABackend(AttentionBackend):
    """MLA over an unstriped latent pool, with upstream's three forms of attention.

    Decode and short-prefix extend are absorbed (q_nope and q_pe apart); prefill is MHA on
    expanded K and V, over prefix chunks with an LSE where upstream asks for one.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Rows of every request in this rank's pool, read once a batch."""
        if forward_batch.forward_mode.is_idle():
            return
        req_to_token = self.req_to_token_pool.req_to_token
        self.kv_rows = [
            self._rows(req_to_token[req, :length].long())
            for req, length in zip(
                forward_batch.req_pool_indices.tolist(),
                forward_batch.seq_lens.tolist(),
                strict=True,
            )
        ]

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def init_mha_chunk_metadata(self, forward_batch: Any, **kwargs: Any) -> None:
        """Upstream asks for chunk metadata once a batch; here the lengths are read per chunk."""

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # asked for by DP attention's padding even without graphs

    def _attend_pool(
        self, q: torch.Tensor, q_lens: Sequence[int], layer: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, 576] over `kv_rows` of the pool."""
        latent = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[torch.cat(self.kv_rows)]
        kv_lens = [rows.shape[0] for rows in self.kv_rows]
        v = latent[..., : layer.v_head_dim]
        return attend_segments(q, latent, v, q_lens, kv_lens, layer.scaling, causal)

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
        return self._absorbed(
            q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope, [1] * len(self.kv_rows)
        )

    def _absorbed(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        q_rope: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        q_lens: Sequence[int],
    ) -> torch.Tensor:
        assert q_rope is not None, "torch_mla gets nope and rope apart"
        if k is not None and k_rope is not None and save_kv_cache:
            latent = torch.cat([k, k_rope], dim=-1)
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, latent, None)
        q = torch.cat([q, q_rope], dim=-1)
        o, _ = self._attend_pool(q, q_lens, layer, causal=True)
        return o.to(q.dtype).flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        q_lens = forward_batch.extend_seq_lens_cpu
        if q_rope is not None:
            return self._absorbed(q, k, layer, forward_batch, save_kv_cache, q_rope, k_rope, q_lens)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        over_prefix = bool(forward_batch.attn_attend_prefix_cache)
        kv_lens = q_lens
        if over_prefix:
            chunk = forward_batch.prefix_chunk_idx
            kv_lens = forward_batch.prefix_chunk_seq_lens[chunk].tolist()
            counters.count("prefix_chunk")
        o, lse = attend_segments(q, k, v, q_lens, kv_lens, layer.scaling, causal=not over_prefix)
        o = o.to(q.dtype)
        return (o, lse) if forward_batch.mha_return_lse else o.flatten(1)


class DcpTorchMLABackend(StripeMixin, TorchMLABackend):
    """Decode over the stripe of a striped pool; prefill is the chunked MHA above, or pass-Q."""

    lse_base = "e"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_decode():
            self.fill_stripe_lens(forward_batch.seq_lens, in_graph=False)

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        dcp = state.get_state()
        owned = slots[first_owned(0, dcp.dcp_rank, dcp.dcp_size) :: dcp.dcp_size]
        assert bool((owned % dcp.dcp_size == dcp.dcp_rank).all()), "slot(p) % c must equal p % c"
        return owned // dcp.dcp_size

    def attend_stripe(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, 576] -> o [B, H, 512], lse [B, H], base e.

        An empty stripe comes back as NaN and +inf, the worst that a GPU kernel returns for it
        (FlashMLA's LSE), so that ranks without a GPU prove that it is dropped by a select.
        """
        return self._attend_rows(q, [1] * len(self.kv_rows), self.kv_rows, layer)

    def _attend_rows(
        self, q: torch.Tensor, q_lens: Sequence[int], kv_rows: list[torch.Tensor], layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[torch.cat(kv_rows)]
        kv_lens, v = [rows.shape[0] for rows in kv_rows], latent[..., : layer.v_head_dim]
        o, lse = attend_segments(q, latent, v, q_lens, kv_lens, layer.scaling, causal=False)
        empty = torch.tensor(kv_lens).eq(0).repeat_interleave(torch.tensor(q_lens))
        o[empty], lse[empty] = float("nan"), float("inf")
        counters.count("empty_stripe", int(empty.sum()))
        return o.to(q.dtype), lse

    def plan_prefix(self, share: Share, forward_batch: Any) -> Any:
        """Each request's token count, and its rows of this rank's pool."""
        req_to_token = self.req_to_token_pool.req_to_token
        lens = forward_batch.extend_prefix_lens_cpu
        rows = [
            self._rows(req_to_token[forward_batch.req_pool_indices[b], : lens[b]].long())
            for b in share.requests
        ]
        return share.counts, rows

    def attend_prefix(
        self, q: torch.Tensor, layer: Any, kernel: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, 576] -> o [n, H, 512], lse [n, H], base e; empty stripes as `attend_stripe`."""
        counts, rows = kernel
        return self._attend_rows(q, counts, rows, layer)

    def plan_fresh(self, forward_batch: Any) -> None:
        """Nothing but the lengths."""
        self._new_lens = forward_batch.extend_seq_lens_cpu

    def attend_fresh(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ExtendAttention.attend_fresh`; lse base e, -inf for padded rows at the end."""
        latent, lens = torch.cat([k_nope, k_pe], dim=-1), self._new_lens
        v = latent[..., : layer.v_head_dim]
        q = torch.cat([q_nope, q_pe], dim=-1)
        o, lse = attend_segments(q, latent, v, lens, lens, layer.scaling, causal=True)
        return o.to(q.dtype), lse


def create_backend(runner: Any) -> TorchMLABackend:
    """Factory for ATTENTION_BACKENDS["torch_mla"], with and without DCP."""
    return DcpTorchMLABackend(runner) if state.is_initialized() else TorchMLABackend(runner)
