"""The part of the hook table that --dcp-replicate-q-proj adds."""

from sglang_dcp.hooks.registry import COMMON, HOOKS, Patch

REPLICATE_Q: tuple[Patch, ...] = (
    Patch(
        name="replicate-q-load",
        target=COMMON + "deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights",
        kind="after",
        params=("self", "is_nextn", "weight_names"),
        hook=HOOKS + "forward_mla:after_post_load_weights",
        why="q_b_proj and w_kc of all heads, as soon as the own ones are loaded",
        remove_when="never: it is ours",
        test="tests/test_all_heads.py",
    ),
    Patch(
        name="replicate-q",
        target=COMMON
        + "attention_forward_methods.forward_mla.DeepseekMLAForwardMixin.forward_absorb_prepare",
        kind="around",
        params=(
            "self",
            "positions",
            "hidden_states",
            "forward_batch",
            "zero_allocator",
            "llama_4_scaling",
            "prev_topk_indices",
        ),
        hook=HOOKS + "forward_mla:around_forward_absorb_prepare",
        why="in decode, the queries of all heads instead of the own ones",
        remove_when="never: it is ours",
        test="tests/test_all_heads.py",
    ),
)
