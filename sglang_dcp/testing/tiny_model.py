"""Small random-weight DeepSeek checkpoints with a word-level tokenizer, made without a network."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class TinyModel:
    """Shape of a small MLA model; widths are elements.

    The defaults are the smallest that exercise every part: several layers, more heads than any
    test has ranks, a rope part. Weights have a scale at which greedy tokens differ from each other
    and logits are well apart; dummy weights would repeat two tokens forever. The
    gains scale the projections of queries, latents and attention outputs.
    """

    architecture: str = "DeepseekV2ForCausalLM"
    num_layers: int = 3
    num_heads: int = 16
    hidden_size: int = 128
    kv_lora_rank: int = 64
    q_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_experts: int = 8
    moe: bool = False
    vocab_size: int = 512
    max_position_embeddings: int = 4096
    dtype: str = "float32"
    q_gain: float = 2.0
    kv_gain: float = 1.5
    o_gain: float = 2.0
    seed: int = 0


#: Latent widths of the real models and bf16, as GPU kernels want them, with few layers.
GPU_MODEL = TinyModel(
    num_layers=4,
    num_heads=32,
    hidden_size=1024,
    kv_lora_rank=512,
    q_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=1024,
    vocab_size=4096,
    max_position_embeddings=131072,
    dtype="bfloat16",
)


def config_of(shape: TinyModel) -> dict[str, Any]:
    """The Hugging Face config.json of `shape`."""
    is_v3 = shape.architecture == "DeepseekV3ForCausalLM"
    return {
        "architectures": [shape.architecture],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": shape.q_lora_rank or None,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "v_head_dim": shape.v_head_dim,
        "n_routed_experts": shape.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1 if shape.moe else shape.num_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "greedy",
        "norm_topk_prob": is_v3,
        "n_group": 1,
        "topk_group": 1,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {  # the only rotary embedding that upstream has on CPU
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 32,
            "original_max_position_embeddings": shape.max_position_embeddings // 32,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": shape.dtype,
    }


class _Weights:
    """Random tensors under Hugging Face names, drawn from one seeded generator."""

    def __init__(self, shape: TinyModel) -> None:
        self.shape = shape
        self.dtype = getattr(torch, shape.dtype)
        self.generator = torch.Generator().manual_seed(shape.seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def linear(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        weight = torch.randn(rows, cols, generator=self.generator) * gain / cols**0.5
        self.tensors[name + ".weight"] = weight.to(self.dtype)

    def norm(self, name: str, width: int) -> None:
        weight = 1 + 0.05 * torch.randn(width, generator=self.generator)
        self.tensors[name + ".weight"] = weight.to(self.dtype)

    def mlp(self, prefix: str, width: int) -> None:
        hidden = self.shape.hidden_size
        self.linear(prefix + "gate_proj", width, hidden)
        self.linear(prefix + "up_proj", width, hidden)
        self.linear(prefix + "down_proj", hidden, width)

    def attention(self, prefix: str) -> None:
        s = self.shape
        qk_head_dim = s.qk_nope_head_dim + s.qk_rope_head_dim
        if s.q_lora_rank:
            self.linear(prefix + "q_a_proj", s.q_lora_rank, s.hidden_size)
            self.norm(prefix + "q_a_layernorm", s.q_lora_rank)
            self.linear(prefix + "q_b_proj", s.num_heads * qk_head_dim, s.q_lora_rank, s.q_gain)
        else:
            self.linear(prefix + "q_proj", s.num_heads * qk_head_dim, s.hidden_size, s.q_gain)
        latent = s.kv_lora_rank + s.qk_rope_head_dim
        self.linear(prefix + "kv_a_proj_with_mqa", latent, s.hidden_size, s.kv_gain)
        self.norm(prefix + "kv_a_layernorm", s.kv_lora_rank)
        expanded = s.num_heads * (s.qk_nope_head_dim + s.v_head_dim)
        self.linear(prefix + "kv_b_proj", expanded, s.kv_lora_rank)
        self.linear(prefix + "o_proj", s.hidden_size, s.num_heads * s.v_head_dim, s.o_gain)

    def experts(self, prefix: str) -> None:
        s = self.shape
        self.linear(prefix + "gate", s.num_experts, s.hidden_size)
        if s.architecture == "DeepseekV3ForCausalLM":
            bias = 0.1 * torch.randn(s.num_experts, generator=self.generator)
            self.tensors[prefix + "gate.e_score_correction_bias"] = bias
        for expert in range(s.num_experts):
            self.mlp(f"{prefix}experts.{expert}.", s.moe_intermediate_size)
        self.mlp(prefix + "shared_experts.", s.moe_intermediate_size)

    def layer(self, index: int) -> None:
        prefix = f"model.layers.{index}."
        self.norm(prefix + "input_layernorm", self.shape.hidden_size)
        self.norm(prefix + "post_attention_layernorm", self.shape.hidden_size)
        self.attention(prefix + "self_attn.")
        if self.shape.moe and index >= 1:
            self.experts(prefix + "mlp.")
        else:
            self.mlp(prefix + "mlp.", self.shape.intermediate_size)

    def model(self) -> dict[str, torch.Tensor]:
        s = self.shape
        embed = torch.randn(s.vocab_size, s.hidden_size, generator=self.generator)
        self.tensors["model.embed_tokens.weight"] = embed.to(self.dtype)
        head = 0.2 * torch.randn(s.vocab_size, s.hidden_size, generator=self.generator)
        self.tensors["lm_head.weight"] = head.to(self.dtype)
        self.norm("model.norm", s.hidden_size)
        for index in range(s.num_layers):
            self.layer(index)
        return self.tensors


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_model(folder: Path, shape: TinyModel | None = None) -> Path:
    """Write checkpoint, config and tokenizer of `shape` into `folder` and return it.

    The same shape and seed give the same bytes.
    """
    from safetensors.torch import save_file

    shape = shape or TinyModel()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "shape.json").write_text(json.dumps(asdict(shape), indent=1))
    save_file(_Weights(shape).model(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(folder, shape.vocab_size)
    return folder
