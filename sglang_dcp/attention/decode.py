"""Stages 4-7 of the decode step: move the query, never the cache.

    1  down-projection, RMSNorms          upstream, every rank computes all B tokens
    2  write the latent row               pool.py, kernels/kv_write.py: only the owner stores
    3  q_b_proj, absorb w_kc, rope        upstream, own heads
    4  gather the query heads             comm/: q [B, H/c, 576] -> [B, H, 576]
    5  attend to the stripe               attention/<backend>.py: (o, lse) over this rank's tokens
    6  send (o, lse) to the head owners   comm/
    7  merge by LSE, exactly              kernels/lse_merge.py; then w_vc, upstream
    8  o_proj, all-reduce                 upstream

c = dcp_size, H = heads of the DCP group, B = tokens (one per request).
"""

from typing import Any, Protocol

import torch

from sglang_dcp import counters, state
from sglang_dcp.kernels.lse_merge import LseBase


class StripeAttention(Protocol):
    """What stage 5 needs from an attention backend.

    Attributes:
        lse_base: "e" or "2", the base of the LSE that `attend_stripe` returns.
        local_lens: [c, B] int32, tokens of every request on every rank. A rank's partial of a
            request counts as empty if and only if its local length is 0; the kernels see lengths
            clamped to 1, so the LSE of an empty stripe is finite and means nothing.
    """

    lse_base: LseBase
    local_lens: torch.Tensor

    def attend_stripe(self, q: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, H, 576] over the local stripe -> o [B, H, 512], lse [B, H] float32."""
        ...


def decode_over_stripes(
    backend: StripeAttention, q_nope: torch.Tensor, q_pe: torch.Tensor, layer: Any
) -> torch.Tensor:
    """Attention of one decode step over the striped cache (seed 1, stages 4-7).

    Args:
        backend: stage 5.
        q_nope: [B, H/c, 512] absorbed queries of this rank's heads, any strides; or [B, H, 512]
            of all heads, where the rank computes them itself (attention/all_heads.py).
        q_pe: their rope parts [B, H/c, 64] or [B, H, 64], any strides.
        layer: the RadixAttention, for its scale and its layer of the pool.

    Returns:
        [B, H/c * 512], what `w_vc` reads, in the dtype of q_nope; 0 for a row without tokens.
    """
    comm = state.get_state().comm
    if q_nope.shape[1] == comm.num_heads:
        q = torch.cat([q_nope, q_pe], dim=-1)
        counters.count("replicated_q")
    else:
        q = comm.gather_q(q_nope, q_pe)
        counters.count("gather_q")
    o, lse = backend.attend_stripe(q, layer)
    counters.count("attend_stripe")
    merged = comm.exchange_merge(o, lse, backend.lse_base, backend.local_lens)
    counters.count("exchange_merge")
    return merged.flatten(1)
