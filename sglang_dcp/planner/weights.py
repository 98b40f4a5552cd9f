"""Weight bytes of an MLA model from its config: how much HBM they take, how much a step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WeightBytes:
    """Weights in bytes, by how tensor parallelism and a decode step treat them.

    Attributes:
        replicated_bytes: on every rank (down-projections, router).
        sharded_bytes: dense weights divided by TP (up-projections, o_proj, dense and shared MLP,
            lm_head).
        embedding_bytes: divided by TP; a step reads only a row per token.
        routed_bytes: all routed experts, divided by TP (or EP).
        num_experts, num_experts_per_tok: 0 when the model has no routed experts.
    """

    replicated_bytes: int
    sharded_bytes: int
    embedding_bytes: int
    routed_bytes: int
    num_experts: int
    num_experts_per_tok: int

    @property
    def total_bytes(self) -> int:
        """One whole copy."""
        return self.replicated_bytes + self.sharded_bytes + self.embedding_bytes + self.routed_bytes

    def bytes_per_gpu(self, tp_size: int) -> int:
        """HBM taken on each rank of a TP group."""
        return self.replicated_bytes + (self.total_bytes - self.replicated_bytes) // tp_size

    def read_bytes_per_gpu(self, tp_size: int, batch: int) -> float:
        """Bytes a decode step of ``batch`` tokens reads on each rank.

        Each token picks its experts independently and evenly: a share ``1 - (1 - k/E)^batch`` of
        the routed experts is touched.
        """
        touched = 0.0
        if self.num_experts:
            touched = 1 - (1 - self.num_experts_per_tok / self.num_experts) ** batch
        return self.replicated_bytes + (self.sharded_bytes + self.routed_bytes * touched) / tp_size


def estimate_weight_bytes(
    text: dict[str, Any], quantization: dict[str, Any] | None
) -> WeightBytes | None:
    """Count parameters from a Hugging Face (text) config and price them in bytes.

    SGLang keeps the absorbed ``w_kc`` and ``w_vc`` beside ``kv_b_proj``, so that one counts twice.
    Norms, biases and quantization scales of whole blocks are below 0.1 % and left out.

    Returns:
        None when the config lacks the MLP or vocabulary sizes.
    """
    if not {"intermediate_size", "vocab_size"} <= text.keys():
        return None
    quantization = quantization or text.get("quantization_config")
    linear_width, expert_width = _bytes_per_parameter(quantization)
    hidden, num_layers = text["hidden_size"], text["num_hidden_layers"]
    num_experts = text.get("n_routed_experts") or text.get("num_experts") or 0
    num_dense = text.get("first_k_dense_replace", 0) if num_experts else num_layers
    num_moe = num_layers - num_dense
    mixers_replicated, mixers_sharded = _token_mixer_parameters(text)
    expert = 3 * hidden * (text.get("moe_intermediate_size") or 0)
    num_shared = text.get("n_shared_experts") or text.get("num_shared_experts") or 0
    dense_mlp = 3 * hidden * text["intermediate_size"] * num_dense
    sharded = mixers_sharded + dense_mlp + expert * num_shared * num_moe
    router = hidden * num_experts * num_moe
    vocabulary_bytes = 2 * text["vocab_size"] * hidden
    return WeightBytes(
        replicated_bytes=int(mixers_replicated * linear_width + 2 * router),
        sharded_bytes=int(sharded * linear_width + vocabulary_bytes),
        embedding_bytes=0 if text.get("tie_word_embeddings") else vocabulary_bytes,
        routed_bytes=int(expert * num_experts * num_moe * expert_width),
        num_experts=num_experts,
        num_experts_per_tok=text.get("num_experts_per_tok")
        or text.get("num_experts_per_token")
        or 0,
    )


def _token_mixer_parameters(text: dict[str, Any]) -> tuple[int, int]:
    """(replicated, sharded) parameters of all attention layers, MLA and linear."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q_rank, kv_rank = text.get("q_lora_rank"), text["kv_lora_rank"]
    down = hidden * (kv_rank + rope + (q_rank or 0))
    q_up = (q_rank or hidden) * heads * (nope + rope)
    kv_up = kv_rank * heads * (nope + value)
    mla = q_up + 2 * kv_up + heads * value * hidden

    linear = text.get("linear_attn_config") or {}
    num_linear = len(linear.get("kda_layers") or ())
    num_mla = text["num_hidden_layers"] - num_linear
    width = linear.get("num_heads", 0) * linear.get("head_dim", 0)
    # KDA: q, k, v, o and two low-rank gates of rank head_dim
    kda = 4 * hidden * width + 2 * linear.get("head_dim", 0) * (hidden + width)
    return num_mla * down, num_mla * mla + num_linear * kda


def _bytes_per_parameter(quantization: dict[str, Any] | None) -> tuple[float, float]:
    """(dense linear layers, routed experts) in bytes, scales of small groups included."""
    if not quantization:
        return 2.0, 2.0
    if quantization.get("quant_method") == "fp8":
        return 1.0, 1.0
    width = _compressed_width(quantization)
    attention_is_ignored = any("attn" in str(entry) for entry in quantization.get("ignore") or ())
    return (2.0 if attention_is_ignored else width), width


def _compressed_width(quantization: dict[str, Any]) -> float:
    groups = quantization.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        bits = weights.get("num_bits", 16)
        group_size = weights.get("group_size") or 0
        scale_bytes = 1 if weights.get("type") == "float" else 2
        return bits / 8 + (scale_bytes / group_size if group_size > 0 else 0.0)
    bits = quantization.get("bits") or quantization.get("w_bit") or 8
    return bits / 8
