"""Hooks on sglang.srt.models.deepseek_v2: which form of attention a prefill batch takes."""

from collections.abc import Callable
from typing import Any

from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)

from sglang_dcp.attention.prefill import is_pass_q


def around_dispatch_attn_forward_method(
    original: Callable[..., Any], self: Any, forward_batch: Any
) -> Any:
    """AROUND DeepseekV2AttentionMLA.dispatch_attn_forward_method: pass-Q is absorbed MLA.

    Upstream's absorbed form then projects with w_kc and w_vc and calls the backend's
    `forward_extend` with q_nope and q_pe apart, which is all that pass-Q needs of the model.
    """
    method = original(self, forward_batch)
    return AttnForwardMethod.MLA if is_pass_q(forward_batch) else method
