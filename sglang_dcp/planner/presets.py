"""The fields of public config.json files that the planner reads, one preset per model."""

from __future__ import annotations

from typing import Any

_MLA: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
}
_FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}

_DEEPSEEK_V3 = _MLA | _FP8 | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}  # fmt: skip

PRESET_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": _MLA | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "deepseek-v2": _MLA | {
        "hidden_size": 5120,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 102400,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "kimi-k2": _DEEPSEEK_V3 | {
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    "kimi-linear-48b": _MLA | {
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "q_lora_rank": None,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 256,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [n for n in range(1, 27) if n % 4],
            "num_heads": 32,
        },
    },
}  # fmt: skip
