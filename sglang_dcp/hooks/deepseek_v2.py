"""Hooks on sglang.srt.models.deepseek_v2: which form of attention a prefill batch takes."""

from collections.abc import Callable
from typing import Any

from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_dcp.attention.prefill import prefill_variant
from sglang_dcp.prefill_policy import Variant

_METHODS: dict[Variant, Any] = {
    "pass_q": AttnForwardMethod.MLA,
    "pass_kv": AttnForwardMethod.MHA_CHUNKED_KV,
}


def around_dispatch_attn_forward_method(
    original: Callable[..., Any], self: Any, forward_batch: Any
) -> Any:
    """AROUND DeepseekV2AttentionMLA.dispatch_attn_forward_method: by variant, on every backend.

    Pass-Q is absorbed MLA: upstream projects with w_kc and w_vc and calls the backend's
    `forward_extend` with q_nope and q_pe apart, which is all that it needs of the model. Pass-KV is
    MHA in chunks, which upstream's triton has only without a prefix.
    """
    method = original(self, forward_batch)
    if not forward_batch.forward_mode.is_extend_without_speculative():
        return method
    return _METHODS.get(prefill_variant(forward_batch), method)
