"""What sglang-dcp changes in SGLang 0.5.14 for prefill over a striped prefix; part of table.py."""

from sglang_dcp.hooks.registry import COMMON, HOOKS, NATIVE, SRT, Patch

_MHA = COMMON + "attention_forward_methods.forward_mha."
_MLA = SRT + "models.deepseek_v2.DeepseekV2AttentionMLA."

PREFILL: tuple[Patch, ...] = (
    Patch(
        name="prefix-read",
        target=_MHA + "DeepseekMHAForwardMixin._chunked_prefix_attn_mha",
        kind="around",
        params=("self", "q", "accum_output", "accum_lse", "forward_batch"),
        hook=HOOKS + "forward_mha:around_chunked_prefix_attn_mha",
        why="pass-KV reads prefixes, which lie on all ranks, and stays inside the workspace",
        remove_when=NATIVE,
        test="tests/test_prefill_rows.py",
    ),
    Patch(
        name="prefix-chunks",
        target=SRT + "model_executor.forward_batch_deepseek_mha_mixin."
        "ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info",
        kind="around",
        params=("self", "device"),
        hook=HOOKS + "forward_mha:around_prepare_chunked_prefix_cache_info",
        why="upstream's chunks start inside groups of c tokens and shrink with the batch",
        remove_when=NATIVE,
        test="tests/test_prefix_gather.py::test_chunks_of_a_batch",
    ),
    Patch(
        name="no-one-shot",
        target=SRT + "models.deepseek_common.attention_backend_handler._support_mha_one_shot",
        kind="around",
        params=("attn", "forward_batch", "backend_name"),
        hook=HOOKS + "forward_mha:around_support_mha_one_shot",
        why="the one-shot form would gather fresh tokens, which are on every rank",
        remove_when=NATIVE,
        test="tests/test_prefix_plans.py::test_every_prefix_is_read_in_chunks",
    ),
    Patch(
        name="prefill-dispatch",
        target=_MLA + "dispatch_attn_forward_method",
        kind="around",
        params=("self", "forward_batch"),
        hook=HOOKS + "deepseek_v2:around_dispatch_attn_forward_method",
        why="pass-Q prefills absorbed and pass-KV in chunks, whatever upstream does on a backend",
        remove_when=NATIVE,
        test="tests/test_prefill_rows.py",
    ),
)
