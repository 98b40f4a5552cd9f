#!/usr/bin/env python3
"""Decode time per step of DCP against upstream TP, on one machine, through the real server.

    scripts/bench_decode.py --model models/k3ish --tp 2 --dcp-size 2 --json FILE

Each server gets the same random prompts of each shape (batch x context tokens); prefill is cached
by a first request, then 160 tokens are decoded and the step time is read from the scheduler's own
"gen throughput" log lines. Weights are dummies: only shapes matter for time.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dcp.testing.server import Server, ServerError

ROOT = Path(__file__).resolve().parent.parent
NUM_DECODED_TOKENS = 160
LOG_INTERVAL_STEPS = 16
STEP_LINE = re.compile(r"#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")
CAPACITY_LINE = re.compile(r"max_total_num_tokens=(\d+)")
#: Shapes of the models that can be named instead of a folder, with K3's latent geometry.
MODELS: dict[str, dict[str, Any]] = {
    "k3ish": {"num_hidden_layers": 12, "hidden_size": 6144, "num_attention_heads": 96},
    "small": {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32},
}


@dataclass(frozen=True)
class Config:
    """One server to measure; `dcp_size` 1 is upstream."""

    backend: str
    dcp_size: int
    comm: str

    @property
    def label(self) -> str:
        if self.dcp_size == 1:
            return f"upstream {self.backend}"
        return f"dcp{self.dcp_size} {self.backend} {self.comm}"


@dataclass(frozen=True)
class Shape:
    """A decode batch: `batch` requests of `context_tokens` tokens each."""

    batch: int
    context_tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context_tokens}"


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


def command_of(config: Config, model: Path, args: argparse.Namespace) -> tuple[str, list[str]]:
    command = [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--tp", str(args.tp), "--attention-backend", config.backend),
        *("--mem-fraction-static", str(args.mem_fraction_static), "--random-seed", "1"),
        *("--cuda-graph-max-bs-decode", str(args.max_batch), "--grammar-backend", "none"),
        *("--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup"),
        *("--decode-log-interval", str(LOG_INTERVAL_STEPS)),
    ]
    if config.dcp_size == 1:
        return "sglang.launch_server", command
    dcp = ["--dcp-size", str(config.dcp_size), "--dcp-comm-backend", config.comm]
    return "sglang_dcp.launch_server", command + dcp


def measure(server: Server, shape: Shape, seed: int) -> dict[str, Any]:
    """Step times of one shape; ids are decoded greedily from a cached prefix."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, 4000) for _ in range(shape.context_tokens)] for _ in range(shape.batch)
    ]
    began = time.monotonic()
    server.generate(prompts, 1, return_logprob=False)
    prefill_s = time.monotonic() - began
    mark = server.log_path.stat().st_size
    results = server.generate(prompts, NUM_DECODED_TOKENS, return_logprob=False)
    time.sleep(0.5)  # the scheduler's last line
    log = server.log_path.read_bytes()[mark:].decode(errors="replace")
    steps_ms = [
        shape.batch / float(rate) * 1e3
        for running, rate in STEP_LINE.findall(log)
        if int(running) == shape.batch
    ][1:]  # the first interval holds the prefill
    if len(steps_ms) < 3:
        raise ServerError(f"only {len(steps_ms)} step times for {shape} in {server.log_path}")
    ordered = sorted(steps_ms)
    return {
        "shape": str(shape),
        "step_p50_ms": statistics.median(steps_ms),
        "step_p95_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "tokens_per_s": shape.batch / statistics.median(steps_ms) * 1e3,
        "num_samples": len(steps_ms),
        "prefill_s": prefill_s,
        "cached_tokens": results[0]["meta_info"]["cached_tokens"],
    }


def run(config: Config, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve one configuration and measure every shape."""
    module, command = command_of(config, model, args)
    log = args.log_dir / f"bench-{config.label.replace(' ', '-')}.log"
    with Server(command, log, module, start_timeout_s=args.start_timeout_s) as server:
        print(f"{config.label}: up in {server.startup_s:.0f} s", file=sys.stderr, flush=True)
        rows = []
        for index, shape in enumerate(args.shapes):
            rows.append(measure(server, shape, seed=index))
            print(f"{config.label} {rows[-1]}", file=sys.stderr, flush=True)
    capacity = CAPACITY_LINE.findall(log.read_text(errors="replace"))
    return {
        "label": config.label,
        "backend": config.backend,
        "dcp_size": config.dcp_size,
        "comm": config.comm,
        "max_total_num_tokens": int(capacity[0]) if capacity else None,
        "rows": rows,
    }


def show(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Step times as a table, with the ratio to the first upstream run."""
    table = Table(title=f"decode step, p50 in ms (ratio to {runs[0]['label']}), TP {args.tp}")
    table.add_column("server")
    for shape in args.shapes:
        table.add_column(str(shape), justify="right")
    table.add_column("KV tokens", justify="right")
    for entry in runs:
        cells = [
            f"{row['step_p50_ms']:.3f} ({row['step_p50_ms'] / base['step_p50_ms']:.2f})"
            for row, base in zip(entry["rows"], runs[0]["rows"], strict=True)
        ]
        table.add_row(entry["label"], *cells, f"{entry['max_total_num_tokens'] or 0:,}")
    Console(stderr=True).print(table)


def record(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from sglang.version import __version__ as sglang_version

    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{args.tp} x {torch.cuda.get_device_name(0)}",
        "versions": {"sglang": sglang_version, "torch": torch.__version__},
        "git_hash": args.git_hash or head,
        "command": " ".join(["scripts/bench_decode.py", *sys.argv[1:]]),
        "model": args.model,
        "runs": runs,
    }


def parse_shape(text: str) -> Shape:
    batch, _, context_tokens = text.partition("x")
    return Shape(int(batch), int(context_tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="k3ish")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp-size", type=int, default=2)
    parser.add_argument("--comm", nargs="+", default=["a2a"])
    parser.add_argument("--backend", default="flashmla", help="of the DCP servers")
    parser.add_argument("--baselines", nargs="+", default=["flashmla", "flashinfer"])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        metavar="BxL",
        default=[Shape(1, 4096), Shape(1, 131072), Shape(32, 16384), Shape(8, 131072)],
    )
    parser.add_argument("--mem-fraction-static", type=float, default=0.6)
    parser.add_argument("--max-batch", type=int, default=32, help="largest captured graph")
    parser.add_argument("--start-timeout-s", type=float, default=300)
    parser.add_argument("--log-dir", type=Path, default=Path(tempfile.mkdtemp()))
    parser.add_argument("--git-hash", help="where the tree is not a git checkout")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    model = write_model(args.model, args.log_dir / args.model)
    configs = [Config(backend, 1, "") for backend in args.baselines]
    configs += [Config(args.backend, args.dcp_size, comm) for comm in args.comm]
    runs = [run(config, model, args) for config in configs]
    show(runs, args)
    if args.json:
        args.json.write_text(json.dumps(record(runs, args), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
