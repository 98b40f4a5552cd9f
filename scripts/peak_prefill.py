#!/usr/bin/env python3
"""GPU memory that prefill over a long prefix needs, against --dcp-workspace-mb.

    scripts/peak_prefill.py --model k3ish --tp 2 --dcp-size 2 --prompt-tokens 1000000 --json FILE

Two prompts of random tokens: one chunk without a prefix, then a long one, whose later chunks attend
to what the earlier ones cached. What the second one's peak has more than the first one's is what
reading prefixes takes. Exits 1 if that is more than the workspace on any rank. A prompt of 1M
tokens takes minutes on two GPUs.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from sglang_dcp import envs
from sglang_dcp.testing import bench
from sglang_dcp.testing.bench_servers import MODELS, add_server_args, write_model
from sglang_dcp.testing.client import ServerError
from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import Server, on_shared_gpu

VOCAB_SIZE = 4000
TIMEOUT_S = 3600.0


def command_of(model: Path, args: argparse.Namespace) -> list[str]:
    """Arguments of the server."""
    pool_tokens = args.prompt_tokens + 4 * args.chunk_tokens
    return [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--tp", str(args.tp), "--dcp-size", str(args.dcp_size)),
        *("--attention-backend", args.backend, "--dcp-prefill", args.prefill),
        *("--dcp-workspace-mb", str(args.workspace_mb), "--max-total-tokens", str(pool_tokens)),
        *("--chunked-prefill-size", str(args.chunk_tokens), "--random-seed", "1"),
        *("--mem-fraction-static", str(args.mem_fraction_static), "--grammar-backend", "none"),
        *("--cuda-graph-max-bs-decode", "8", "--cuda-graph-backend-prefill", "disabled"),
        "--skip-server-warmup",
        *args.server_args,
    ]


def peak_bytes(
    server: Server, num_tokens: int, rng: random.Random, counters: Path, args: argparse.Namespace
) -> tuple[list[int], float]:
    """Each rank's peak over what it held, while it prefills a new prompt; and the seconds."""
    before = rank_counters(server, counters, args.tp)  # a reading begins a new peak
    prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(num_tokens)]
    took_s, _ = server.first_token(prompt, TIMEOUT_S)
    after = rank_counters(server, counters, args.tp)
    pairs = zip(before, after, strict=True)
    return [new["gpu_bytes_peak"] - old["gpu_bytes"] for old, new in pairs], took_s


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve, prefill both prompts, stop."""
    model, counters = write_model(args.model, args.log_dir / args.model), args.log_dir / "counters"
    env: dict[str, str | None] = {envs.COUNTERS_DIR: str(counters)}
    log = args.log_dir / "peak-prefill.log"
    module, command = "sglang_dcp.launch_server", command_of(model, args)
    if args.share_gpu:
        module, command = on_shared_gpu(module, command)
    with Server(command, log, module, env, args.start_timeout_s) as server:
        rng = random.Random(0)
        peak_bytes(server, args.chunk_tokens, rng, counters, args)  # kernels load
        fresh_bytes, _ = peak_bytes(server, args.chunk_tokens, rng, counters, args)
        long_bytes, took_s = peak_bytes(server, args.prompt_tokens, rng, counters, args)
    read_bytes = [long - fresh for long, fresh in zip(long_bytes, fresh_bytes, strict=True)]
    return {
        "model": args.model,
        "prefill": args.prefill,
        "prompt_tokens": args.prompt_tokens,
        "chunk_tokens": args.chunk_tokens,
        "workspace_bytes": args.workspace_mb << 20,
        "fresh_peak_bytes": fresh_bytes,
        "long_peak_bytes": long_bytes,
        "read_bytes": read_bytes,
        "prefill_s": took_s,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="k3ish", help="default k3ish")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="GPUs (default 2)")
    parser.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--backend", default="flashmla", metavar="NAME", help="default flashmla")
    parser.add_argument("--prefill", default="pass-kv", metavar="NAME", help="default pass-kv")
    parser.add_argument("--prompt-tokens", type=int, default=1_000_000, metavar="N", help="1000000")
    parser.add_argument("--chunk-tokens", type=int, default=8192, metavar="N", help="default 8192")
    parser.add_argument("--workspace-mb", type=int, default=512, metavar="N", help="default 512")
    parser.add_argument("--mem-fraction-static", type=float, default=0.6, metavar="F", help="0.6")
    add_server_args(parser, "the server")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0 (slow)")
    return bench.parse_run(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit code."""
    args = parse(argv)
    try:
        found = run(args)
    except (ServerError, OSError) as error:
        sys.exit(f"error: {error}")
    if args.json:
        hardware = bench.hardware_of(args.tp, args.share_gpu)
        record = bench.record("peak_prefill.py", hardware, args.git_hash, **found)
        args.json.write_text(json.dumps(record, indent=1))
    read_mb = [f"{num_bytes / 2**20:.0f}" for num_bytes in found["read_bytes"]]
    print(
        f"{args.prompt_tokens} tokens by {args.prefill} in {found['prefill_s']:.0f} s: reading the "
        f"prefix took {', '.join(read_mb)} MiB on the ranks, of {args.workspace_mb}"
    )
    return int(max(found["read_bytes"]) > found["workspace_bytes"])


if __name__ == "__main__":
    sys.exit(main())
