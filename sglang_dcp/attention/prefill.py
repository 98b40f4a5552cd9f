"""How a prefill batch reads its striped prefixes: decided once a batch, before its first layer."""

from typing import Any

from sglang_dcp import state
from sglang_dcp.metrics import count_prefill
from sglang_dcp.prefill_policy import Variant


def prefill_variant(forward_batch: Any) -> Variant:
    """The variant of this extend batch, the same on all ranks of the group.

    Args:
        forward_batch: SGLang's ForwardBatch of an extend; keeps the answer, so that every layer
            does what the metadata was made for.
    """
    chosen: Variant | None = forward_batch.__dict__.get("dcp_prefill_variant")
    if chosen is None:
        # An idle replica under DP attention runs an extend of padding, without lengths
        new_lens = forward_batch.extend_seq_lens_cpu or ()
        prefix_lens = forward_batch.extend_prefix_lens_cpu or ()
        chosen = state.get_state().prefill_policy.choose(new_lens, prefix_lens)
        forward_batch.dcp_prefill_variant = chosen
        count_prefill(chosen)
    return chosen


def is_pass_q(forward_batch: Any) -> bool:
    """True for an extend batch that is prefilled by pass-Q."""
    is_extend = forward_batch.forward_mode.is_extend_without_speculative()
    return is_extend and prefill_variant(forward_batch) == "pass_q"
