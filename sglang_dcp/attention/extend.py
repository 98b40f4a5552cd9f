"""Pass-Q: new tokens on a striped prefix, stages 4-7 of a prefill (arXiv 2411.01783, seed 2).

As in decode the query moves and the cache stays; two things differ. A request has several new
tokens, which all see its whole prefix (no mask, so every rank attends to its stripe as it lies)
and are causal among themselves. And every rank has their K and V anyway, so that part is attended
at home, with own heads, and merged at the end:

    fresh   attend to the new tokens, causally       own heads, no communication
    4       gather the query heads of a slice        comm/
    5       attend to the stripe of the prefix       attention/<backend>.py, `attend_prefix`
    6, 7    exchange, merge the stripes              comm/, with the merged LSE
    merge   prefix into fresh, exactly               kernels/state_merge.py

A slice is at most as many tokens as the communicator's buffers hold. Tokens of requests without a
prefix never leave. Nothing here depends on how the new tokens came to be: verification of drafted
tokens is an extend of few tokens on a long prefix.

c = dcp_size, H = heads of the DCP group, T = new tokens of the batch, n = those of a slice.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_dcp import counters, state
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.kernels.state_merge import merge_state_into


@dataclass(frozen=True)
class PrefixSlice:
    """New tokens that go through stages 4-7 together; the same on all ranks but for `kernel`.

    Attributes:
        tokens: their rows in the batch: a slice, or [n] int64 where other requests lie between.
        local_lens: [c, n] int32, tokens of each one's prefix on every rank, unclamped.
        kernel: the backend's metadata for them, shared by all layers.
    """

    tokens: slice | torch.Tensor
    local_lens: torch.Tensor
    kernel: Any


class ExtendAttention(Protocol):
    """What pass-Q needs from an attention backend.

    Attributes:
        lse_base: base of the LSE that `attend_prefix` returns.
        extend_lse_base: base of the LSE that `attend_fresh` returns.
        prefix_slices: of this batch; together every token whose request has a prefix, once.
    """

    lse_base: LseBase
    extend_lse_base: LseBase
    prefix_slices: list[PrefixSlice]

    def attend_fresh(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Own heads over the new tokens, causal -> o [T, H/c, 512] contiguous, lse [T, H/c]."""
        ...

    def attend_prefix(
        self, q: torch.Tensor, layer: Any, kernel: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [n, H, 576] over the stripe of each one's prefix -> o [n, H, 512], lse [n, H]."""
        ...


def extend_over_stripes(
    backend: ExtendAttention,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    layer: Any,
) -> torch.Tensor:
    """Attention of an extend batch whose prefixes are striped.

    Args:
        backend: the fresh part and stage 5.
        q_nope: [T, H/c, 512] absorbed queries of this rank's heads, any strides.
        q_pe: [T, H/c, 64] their rope parts, any strides.
        k_nope, k_pe: [T, 1, 512] and [T, 1, 64] latent rows of the new tokens, any strides.
        layer: the RadixAttention, for its scale and its layer of the pool.

    Returns:
        [T, H/c * 512], what `w_vc` reads, in the dtype of q_nope.
    """
    comm = state.get_state().comm
    out, fresh_lse = backend.attend_fresh(q_nope, q_pe, k_nope, k_pe, layer)
    for part in backend.prefix_slices:
        q = comm.gather_q(q_nope[part.tokens], q_pe[part.tokens])
        o, lse = backend.attend_prefix(q, layer, part.kernel)
        prefix_lse = lse.new_empty((q.shape[0], out.shape[1]))
        prefix = comm.exchange_merge(o, lse, backend.lse_base, part.local_lens, prefix_lse)
        bases = (backend.extend_lse_base, backend.lse_base)
        _merge(out, fresh_lse, prefix, prefix_lse, bases, part.tokens)
        counters.count("attend_prefix")
    return out.flatten(1)


def _merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    prefix: torch.Tensor,
    prefix_lse: torch.Tensor,
    bases: tuple[LseBase, LseBase],
    tokens: slice | torch.Tensor,
) -> None:
    """Merge a slice's attention to its prefixes into its rows of out; bases of lse, prefix_lse."""
    if isinstance(tokens, slice):
        merge_state_into(out[tokens], lse[tokens], bases[0], prefix, prefix_lse, bases[1])
    else:
        merge_state_into(out, lse, bases[0], prefix, prefix_lse, bases[1], tokens)
