"""What scripts share about servers: dummy models to serve, further arguments, and progress."""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_CAPACITY_LINE = re.compile(r"max_total_num_tokens=(\d+)")
#: Decode steps between two of the scheduler's "gen throughput" lines.
LOG_INTERVAL_STEPS = 16
#: Shapes of the models that can be named instead of a folder, with K3's latent geometry; k3 has as
#: many layers as K3 has with MLA.
MODELS: dict[str, dict[str, Any]] = {
    "k3": {"num_hidden_layers": 24, "hidden_size": 6144, "num_attention_heads": 96},
    "k3ish": {"num_hidden_layers": 12, "hidden_size": 6144, "num_attention_heads": 96},
    "small": {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32},
}


def write_model(name: str, folder: Path) -> Path:
    """A config.json for dummy weights; DeepSeek-V2 architecture, latent 512 + 64."""
    heads = MODELS[name]["num_attention_heads"]
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_key_value_heads": heads,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": MODELS[name]["num_hidden_layers"],
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 4096,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Config:
    """One server to measure; `dcp_size` 1 is upstream.

    Attributes:
        backend, dcp_size, comm: of attention, and of DCP.
        native_site: packages of a later SGLang whose own DCP is measured, or None.
    """

    backend: str
    dcp_size: int
    comm: str
    native_site: str | None = None

    @property
    def label(self) -> str:
        """Name in tables, figures and log files."""
        if self.dcp_size == 1:
            return f"upstream {self.backend}"
        native = "native " if self.native_site else ""
        return f"{native}dcp{self.dcp_size} {self.backend} {self.comm}"


def command_of(
    config: Config, model: Path, *, tp_size: int, max_batch: int, mem_fraction_static: float
) -> tuple[str, list[str]]:
    """Module and arguments of the server of `config`.

    Args:
        model: folder with config.json.
        tp_size: GPUs.
        max_batch: largest captured decode batch.
        mem_fraction_static: as for SGLang.
    """
    command = [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--tp", str(tp_size), "--attention-backend", config.backend),
        *("--mem-fraction-static", str(mem_fraction_static), "--random-seed", "1"),
        *("--cuda-graph-max-bs-decode", str(max_batch), "--grammar-backend", "none"),
        *("--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup"),
        *("--decode-log-interval", str(LOG_INTERVAL_STEPS)),
    ]
    if config.dcp_size == 1:
        return "sglang.launch_server", command
    dcp = ["--dcp-size", str(config.dcp_size), "--dcp-comm-backend", config.comm]
    module = "sglang.launch_server" if config.native_site else "sglang_dcp.launch_server"
    return module, command + dcp


def add_server_args(parser: argparse._ActionsContainer, whose: str) -> None:
    """`--server-args` for further arguments of the servers named by `whose`.

    One argument each time: of a list, a second --server-args would silently replace the first.
    """
    parser.add_argument(
        "--server-args",
        action="append",
        default=[],
        metavar="ARG",
        help=f"further argument of {whose}, as --server-args=--chunked-prefill-size=4096; may be "
        "given several times",
    )


class Board:
    """Progress on stderr: one unit for each server start and each shape."""

    def __init__(self, num_units: int) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self.progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
        self.task = self.progress.add_task("", total=num_units)

    def doing(self, what: str) -> None:
        """Show what is running now."""
        self.progress.update(self.task, description=what)

    def done(self, line: str) -> None:
        """One unit is through; `line` stays above the bar."""
        self.progress.console.print(line, highlight=False)
        self.progress.advance(self.task)


def capacity_tokens(log: str) -> int | None:
    """KV tokens that a server holds, from its log; None if it does not say."""
    found = _CAPACITY_LINE.search(log)
    return int(found.group(1)) if found else None
