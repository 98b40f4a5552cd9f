"""Shapes of MLA models: what the two ledgers need to know, from a preset or a ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dcp.planner.presets import PRESET_CONFIGS
from sglang_dcp.planner.weights import WeightBytes, estimate_weight_bytes


@dataclass(frozen=True)
class ModelShape:
    """One MLA model.

    Attributes:
        name: preset name or path.
        hidden_size, num_attention_heads, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
            v_head_dim: as in the Hugging Face config, in elements.
        q_lora_rank: None when the query has no low-rank projection.
        num_mla_layers: layers with a latent cache; fewer than ``num_hidden_layers`` in hybrids.
        num_hidden_layers: all layers; None when the source does not say.
        weights: estimated weight bytes; None when the source does not say enough.
        source: where the numbers come from.
    """

    name: str
    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None
    num_mla_layers: int
    num_hidden_layers: int | None
    weights: WeightBytes | None
    source: str

    @property
    def latent_dim(self) -> int:
        """Elements cached per token and layer: 512 + 64 = 576 for every MLA model so far."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def mha_elements_per_token_per_layer(self) -> int:
        """What plain MHA of the same heads would cache: K and V, ``2 * H * v_head_dim``."""
        return 2 * self.num_attention_heads * self.v_head_dim

    @property
    def compression_vs_mha(self) -> float:
        """Seed section 1: 24576 / 576 = 43 for Kimi K3."""
        return self.mha_elements_per_token_per_layer / self.latent_dim


# The first seed article's symbol table. It gives neither the other layers nor the weights.
_KIMI_K3 = ModelShape(
    name="kimi-k3",
    hidden_size=7168,
    num_attention_heads=96,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=1536,
    num_mla_layers=24,
    num_hidden_layers=None,
    weights=None,
    source="published walk-through of DCP for Kimi K3 (its symbol table)",
)
_SHAPE_KEYS = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def preset_names() -> list[str]:
    """Names that `load_model` knows without a file."""
    return [*PRESET_CONFIGS, _KIMI_K3.name]


def load_model(name_or_path: str) -> ModelShape:
    """Get a shape by preset name (any case), or from a ``config.json`` or the folder around it.

    Raises:
        ValueError: neither a preset nor an existing file or folder, not JSON, or not MLA.
    """
    preset = name_or_path.lower()
    if preset == _KIMI_K3.name:
        return _KIMI_K3
    if preset in PRESET_CONFIGS:
        return shape_from_config(PRESET_CONFIGS[preset], preset, "its config.json on Hugging Face")
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"--model {name_or_path} is neither a preset nor a file: presets are "
            f"{', '.join(preset_names())}. Name one of them, or give the path of a Hugging Face "
            "config.json or of the folder that holds it."
        )
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--model {name_or_path} is not JSON ({error}): a Hugging Face config.json is one "
            "object. Give the path of the config.json or of its folder."
        ) from error
    return shape_from_config(config, name_or_path, str(path))


def shape_from_config(config: dict[str, Any], name: str, source: str) -> ModelShape:
    """Read a Hugging Face config (multimodal ones through their ``text_config``).

    Raises:
        ValueError: the model caches no MLA latent, uses sparse attention, or lacks a key.
    """
    text = config.get("text_config", config) if isinstance(config, dict) else config
    _check_is_dense_mla(text, name)
    return ModelShape(
        name=name,
        kv_lora_rank=text["kv_lora_rank"],
        q_lora_rank=text.get("q_lora_rank"),
        num_mla_layers=num_mla_layers(text),
        weights=estimate_weight_bytes(text, config.get("quantization_config")),
        source=source,
        **{key: text[key] for key in _SHAPE_KEYS},
    )


def num_mla_layers(text_config: dict[str, Any]) -> int:
    """Layers with a latent cache: all of them, or ``full_attn_layers`` of a hybrid model."""
    linear = text_config.get("linear_attn_config") or {}
    if linear.get("kda_layers"):
        return len(linear["full_attn_layers"])
    return text_config["num_hidden_layers"]


def _check_is_dense_mla(text: dict[str, Any], name: str) -> None:
    if not isinstance(text, dict) or not text.get("kv_lora_rank"):
        kind = text.get("model_type", "unknown") if isinstance(text, dict) else "unknown"
        raise ValueError(
            f"--model {name} (model_type {kind}) has no kv_lora_rank: DCP stripes the MLA latent "
            f"cache and this model has none. Give an MLA model, e.g. {', '.join(preset_names())}."
        )
    if text.get("index_topk"):
        raise ValueError(
            f"--model {name} uses sparse attention (index_topk {text['index_topk']}): the ledgers "
            "assume that every cached token is read. Give a dense MLA model, e.g. deepseek-v3."
        )
    missing = [key for key in _SHAPE_KEYS if key not in text]
    if missing:
        raise ValueError(
            f"--model {name} lacks {', '.join(missing)}: the ledgers need every one of "
            f"{', '.join(_SHAPE_KEYS)}. Add them to the config.json."
        )
