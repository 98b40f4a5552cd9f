#!/usr/bin/env python3
"""Greedy tokens of a DCP server against upstream SGLang with the same backend, on GPUs.

    scripts/compare_upstream.py --tp 2 --dcp-size 2 --backend flashmla --comm a2a --json FILE

bf16 servers differ in the last bits, so a difference is judged where it first appears: upstream's
own gap between its two best tokens there must be below the logprob spread that two upstream
backends show on the same prompt. Prints one line a prompt that differs; exits 1 if any difference
is not explained in that way, or if a radix hit or the capacity is wrong.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dcp.testing.server import Server
from sglang_dcp.testing.tiny_model import TinyModel, write_tiny_model

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


@dataclass
class Workload:
    """Named batches of prompts, each batch one request to /generate; lengths are tokens."""

    widened_page_tokens: int
    long_tokens: int
    pool_tokens: int
    batches: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(11)
        page = self.widened_page_tokens

        def prompt(num_tokens: int) -> list[int]:
            return [rng.randrange(3, GPU_MODEL.vocab_size) for _ in range(num_tokens)]

        for num_tokens in (1, 2, 3, page - 1, page, page + 1, 4096, self.long_tokens):
            self.batches[f"len{num_tokens}"] = [prompt(num_tokens)]
        for size in (2, 3, 32, 48):  # 48 is above the largest captured graph
            self.batches[f"batch{size}"] = [prompt(rng.randrange(1, 400)) for _ in range(size)]
        shared = prompt(max(300, 3 * page) // page * page + page // 2)  # ends inside a page
        self.batches["prefix-warm"] = [shared]
        self.batches["prefix-hit"] = [shared + prompt(n) for n in (1, 7, 2 * page)]
        waves = 3 * self.pool_tokens // (16 * 2048)  # writes the pool full about three times
        for wave in range(waves):
            self.batches[f"wave{wave}"] = [prompt(2048) for _ in range(16)]


def server_args(model: Path, args: argparse.Namespace, backend: str) -> list[str]:
    """Arguments common to upstream and DCP servers."""
    return [
        *("--model-path", str(model), "--tp", str(args.tp), "--attention-backend", backend),
        *("--max-total-tokens", str(args.pool_tokens), "--mem-fraction-static", "0.4"),
        *("--cuda-graph-max-bs", "32", "--max-running-requests", "64"),
        *("--chunked-prefill-size", str(args.chunk), "--random-seed", "1"),
        *("--grammar-backend", "none", "--skip-server-warmup"),
    ]


def run(
    command: list[str], module: str, work: Workload, args: argparse.Namespace
) -> dict[str, Any]:
    """Serve every batch of `work`; returns results by batch name, and the server's info."""
    log = Path(args.log_dir) / f"{module.replace('.', '_')}-{args.log_tag}.log"
    env = {"SGLANG_DCP_COUNTERS_DIR": str(log.with_suffix(".counters"))}
    here = Path(__file__).resolve().parent.parent
    env["PYTHONPATH"] = os.pathsep.join(
        [str(here / "tests" / "gpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if args.share_gpu:
        module, command = "shared_gpu", [module, *command]
    server = Server(command, log, module, env, start_timeout_s=args.start_timeout_s)
    with server:
        results = {
            name: server.generate(prompts, args.new_tokens, top_logprobs_num=2)
            for name, prompts in work.batches.items()
        }
        info = server.get("/server_info")
    print(f"{args.log_tag}: up in {server.startup_s:.0f} s", file=sys.stderr, flush=True)
    return {"results": results, "info": info}


def tokens(result: dict[str, Any]) -> list[int]:
    return list(result["output_ids"])


def logprobs(result: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in result["meta_info"]["output_token_logprobs"]]


def spread(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest logprob difference over the tokens that two results share from the start."""
    largest = 0.0
    for x, y, p, q in zip(tokens(a), tokens(b), logprobs(a), logprobs(b), strict=True):
        largest = max(largest, abs(p - q))
        if x != y:
            break
    return largest


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> int | None:
    pairs = zip(tokens(a), tokens(b), strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), None)


def top2_gap(result: dict[str, Any], position: int) -> float:
    """Upstream's logprob gap between its two best tokens at an output position."""
    best, second = result["meta_info"]["output_top_logprobs"][position][:2]
    return float(best[0] - second[0])


def judge(upstream: dict[str, Any], other: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Compare all prompts; a difference is explained by a gap below upstream's own spread."""
    report: dict[str, Any] = {"num_prompts": 0, "num_equal": 0, "differences": []}
    for name, batch in upstream["results"].items():
        rows = zip(batch, other["results"][name], ours["results"][name], strict=True)
        for index, (want, second, got) in enumerate(rows):
            report["num_prompts"] += 1
            position = first_difference(want, got)
            if position is None:
                report["num_equal"] += 1
                continue
            own_spread, gap = spread(want, second), top2_gap(want, position)
            report["differences"].append(
                {
                    "prompt": f"{name}[{index}]",
                    "position": position,
                    "upstream_top2_gap": gap,
                    "upstream_spread": own_spread,
                    "our_spread": spread(want, got),
                    "explained": gap < own_spread,
                }
            )
    pairs = [
        (want, got)
        for name, batch in upstream["results"].items()
        for want, got in zip(batch, ours["results"][name], strict=True)
    ]
    report["max_logprob_diff"] = max(spread(want, got) for want, got in pairs)
    report["upstream_max_spread"] = max(
        spread(want, got)
        for name, batch in upstream["results"].items()
        for want, got in zip(batch, other["results"][name], strict=True)
    )
    return report


def check_prefix_hits(ours: dict[str, Any], work: Workload) -> list[str]:
    """A hit on a prefix that ends inside a widened page rounds down to whole pages."""
    page = work.widened_page_tokens
    want = len(work.batches["prefix-warm"][0]) // page * page
    got = [r["meta_info"]["cached_tokens"] for r in ours["results"]["prefix-hit"]]
    return [f"cached_tokens {got}, expected {want} each"] if set(got) != {want} else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dcp-size", type=int, default=2)
    parser.add_argument("--backend", default="flashmla")
    parser.add_argument("--other-backend", default="triton", help="second upstream backend")
    parser.add_argument("--comm", nargs="+", default=["a2a"])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--long-tokens", type=int, default=100000)
    parser.add_argument("--pool-tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0 (slow)")
    parser.add_argument("--start-timeout-s", type=float, default=300)
    parser.add_argument("--log-dir", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    page = {"flashmla": 64}.get(args.backend, 1) * args.dcp_size
    work = Workload(page, args.long_tokens, args.pool_tokens)
    model = write_tiny_model(Path(args.log_dir) / "compare-model", GPU_MODEL)
    runs = {}
    for tag, backend in (("upstream", args.backend), ("upstream-other", args.other_backend)):
        args.log_tag = f"{tag}-{backend}"
        command = server_args(model, args, backend)
        runs[tag] = run(command, "sglang.launch_server", work, args)
    reports = {}
    failed = False
    for comm in args.comm:
        args.log_tag = f"dcp-{args.backend}-{comm}"
        command = server_args(model, args, args.backend)
        command += ["--dcp-size", str(args.dcp_size), "--dcp-comm-backend", comm]
        ours = run(command, "sglang_dcp.launch_server", work, args)
        report = judge(runs["upstream"], runs["upstream-other"], ours)
        report["problems"] = check_prefix_hits(ours, work)
        report["problems"] += [
            f"unexplained difference: {d}" for d in report["differences"] if not d["explained"]
        ]
        reports[comm] = report
        failed = failed or bool(report["problems"])
        print(f"{args.backend} {comm}: {report['num_equal']}/{report['num_prompts']} prompts equal")
        print(json.dumps(report, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"args": vars(args) | {"json": None}, "reports": reports}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
