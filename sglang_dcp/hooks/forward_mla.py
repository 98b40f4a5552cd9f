"""Hooks on SGLang's DeepSeek models for --dcp-replicate-q-proj: queries of all heads."""

from collections.abc import Callable
from typing import Any

from sglang_dcp import state
from sglang_dcp.attention.all_heads import ATTRIBUTE, replicate


def after_post_load_weights(
    result: None, self: Any, is_nextn: bool = False, weight_names: Any = None
) -> None:
    """AFTER DeepseekV2WeightLoaderMixin.post_load_weights: gather q_b_proj and w_kc.

    Upstream comes here whenever weights were loaded, on all ranks, also in a running server.
    """
    assert not is_nextn, "speculative decoding is refused under DCP"
    layers = self.model.layers[self.model.start_layer : self.model.end_layer]
    replicate(layers, state.get_state().comm.transport)


def around_forward_absorb_prepare(
    original: Callable[..., Any],
    self: Any,
    positions: Any,
    hidden_states: Any,
    forward_batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND DeepseekMLAForwardMixin.forward_absorb_prepare: in decode, for all heads.

    Returns:
        Upstream's tuple; q_pe [B, H, 64] and q_nope_out [B, H, 512] have the group's H heads, and
        the attention that follows gathers nothing.
    """
    decode = forward_batch.forward_mode.is_decode_or_idle()
    attn = getattr(self, ATTRIBUTE) if decode else self
    return original(attn, positions, hidden_states, forward_batch, *args, **kwargs)
