#!/usr/bin/env python3
"""Serve mixed batches in shadow mode: every communicator call is repeated on a2a and compared.

    scripts/shadow_run.py --tp 2 --dcp-size 2 --steps 20000 --json FILE

Several clients send batches of random sizes, prompt lengths (shorter than dcp_size among them) and
output lengths; the pool is too small for all of them, and requests are aborted now and then. Exits
1 unless every rank compared that many decode steps and not one bit differed.
"""

import argparse
import json
import random
import re
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_dcp import envs
from sglang_dcp.testing import bench
from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import Server, ServerError
from sglang_dcp.testing.tiny_model import GPU_MODEL, TinyModel, write_tiny_model

CALLS = ("gather_q", "exchange_merge")
RUNNING = re.compile(r"Decode batch.*?#running-req: (\d+)")
POLL_S, ABORT_S = 2.0, 0.5
#: Heads of K3; transformers wants a hidden size that they divide.
MODELS = {"cuda": replace(GPU_MODEL, num_heads=96, hidden_size=1536), "cpu": TinyModel()}


@dataclass
class Load:
    """What the clients send, and what is on its way.

    Attributes:
        server: where to.
        dcp_size: c; a quarter of the prompts are shorter.
        max_batch, max_prompt_tokens, max_new_tokens: of a request to /generate.
        live: ids of requests without an answer yet.
        num_requests: prompts answered.
        errors: what ended a client.
    """

    server: Server
    dcp_size: int
    max_batch: int
    max_prompt_tokens: int
    max_new_tokens: int
    live: set[str] = field(default_factory=set)
    num_requests: int = 0
    errors: list[BaseException] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, num_clients: int) -> list[threading.Thread]:
        """Clients that send one batch after the other until `stop`."""
        threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        """No further batches; those on their way are answered."""
        self._over.set()

    def abort_one(self, rng: random.Random) -> None:
        """Abort one request that is on its way, if there is any."""
        with self._lock:
            rid = rng.choice(sorted(self.live)) if self.live else None
        if rid is not None:
            self.server.post("/abort_request", {"rid": rid})

    def _client(self, number: int) -> None:
        rng, sent = random.Random(number), 0
        try:
            while not self._over.is_set():
                body = self._batch(rng, f"{number}-{sent}")
                self._send(body)
                sent += 1
        except (ServerError, OSError) as error:
            self.errors.append(error)

    def _batch(self, rng: random.Random, name: str) -> dict[str, Any]:
        """Body of one request to /generate."""
        size = rng.choice([1, 2, 3, rng.randint(1, self.max_batch), self.max_batch])
        lengths = [
            rng.randint(1, max(self.dcp_size - 1, 1))
            if rng.random() < 0.25
            else rng.randint(1, self.max_prompt_tokens)
            for _ in range(size)
        ]
        return {
            "rid": [f"{name}-{i}" for i in range(size)],
            "input_ids": [[rng.randrange(3, 500) for _ in range(n)] for n in lengths],
            "sampling_params": [
                {
                    "temperature": 0,
                    "ignore_eos": True,
                    "max_new_tokens": rng.randint(2, self.max_new_tokens),
                }
                for _ in range(size)
            ],
        }

    def _send(self, body: dict[str, Any]) -> None:
        with self._lock:
            self.live.update(body["rid"])
        answers = self.server.post("/generate", body)
        with self._lock:
            self.live.difference_update(body["rid"])
            self.num_requests += len(answers)


def command_of(model: Path, args: argparse.Namespace) -> list[str]:
    """Arguments of the server."""
    command = [
        *("--model-path", str(model), "--tp", str(args.tp), "--dcp-size", str(args.dcp_size)),
        *("--dcp-comm-backend", args.comm, "--max-total-tokens", str(args.pool_tokens)),
        *("--max-running-requests", str(args.max_batch + args.max_batch // 2)),
        *("--chunked-prefill-size", "2048", "--schedule-conservativeness", "0.3"),
        *("--random-seed", "1", "--grammar-backend", "none", "--decode-log-interval", "10"),
        "--skip-server-warmup",
    ]
    if args.device == "cpu":
        return [*command, "--device", "cpu", "--dtype", "float32", "--context-length", "2048"]
    graphs = ["--cuda-graph-max-bs-decode", "32", "--cuda-graph-backend-prefill", "disabled"]
    backend = ["--attention-backend", args.backend, "--mem-fraction-static", "0.3"]
    return [*command, *graphs, *backend]


def compared(start: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each rank and call, what was compared between two readings of the counters."""
    return [
        {
            call: {
                name: value - before["shadow"][call][name]
                for name, value in after["shadow"][call].items()
            }
            for call in CALLS
        }
        for before, after in zip(start, now, strict=True)
    ]


def num_steps(ranks: list[dict[str, Any]], num_layers: int) -> int:
    """Decode steps that every rank compared in all layers."""
    return min(rank[call]["calls"] for rank in ranks for call in CALLS) // num_layers


def drive(
    server: Server, counters: Path, num_layers: int, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], Load]:
    """Load the server until it has run --steps decode steps, or --limit-s is over."""
    began, rng = time.monotonic(), random.Random(0)
    start = rank_counters(server, counters, args.tp)
    load = Load(server, args.dcp_size, args.max_batch, args.max_prompt_tokens, args.max_new_tokens)
    clients = load.start(args.clients)
    steps, polled = 0, began
    while steps < args.steps and time.monotonic() - began < args.limit_s and not load.errors:
        time.sleep(ABORT_S)
        load.abort_one(rng)
        if time.monotonic() - polled > POLL_S:
            steps = num_steps(compared(start, rank_counters(server, counters, args.tp)), num_layers)
            polled = time.monotonic()
            print(f"{polled - began:6.0f} s: {steps} steps", file=sys.stderr, flush=True)
    load.stop()
    for client in clients:
        client.join(120)
    if load.errors:
        raise load.errors[0]
    return compared(start, rank_counters(server, counters, args.tp)), load


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serve, load, stop; what was compared and what was served."""
    shape, counters = MODELS[args.device], args.log_dir / "counters"
    model = write_tiny_model(args.log_dir / "model", shape)
    env: dict[str, str | None] = {
        envs.COUNTERS_DIR: str(counters),
        envs.SHADOW: "1",
        envs.TRITON_INTERPRET: None,
    }
    log = args.log_dir / "server.log"
    server = Server(command_of(model, args), log, env=env, start_timeout_s=args.start_timeout_s)
    with server:
        ranks, load = drive(server, counters, shape.num_layers, args)
    text = log.read_text(errors="replace")
    sizes = {int(size) for size in RUNNING.findall(text)}
    steps = num_steps(ranks, shape.num_layers)
    return {
        "comm": args.comm,
        "reference": "a2a",
        "steps": steps,
        "num_layers": shape.num_layers,
        "layers_compared": steps * shape.num_layers,
        "differing_elements": sum(rank[call]["differing"] for rank in ranks for call in CALLS),
        "num_requests": load.num_requests,
        "num_retractions": text.count("Retract requests"),
        "batch_sizes_logged": sorted(sizes),
        "ranks": ranks,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--comm", default="nvlink", metavar="NAME", help="default nvlink")
    parser.add_argument("--backend", default="flashmla", metavar="NAME", help="default flashmla")
    parser.add_argument("--device", choices=sorted(MODELS), default="cuda", help="default cuda")
    load = parser.add_argument_group("load")
    load.add_argument("--steps", type=int, default=20000, metavar="N", help="default 20000")
    load.add_argument(
        "--limit-s", type=float, default=480, metavar="S", help="stop after (default 480)"
    )
    load.add_argument("--clients", type=int, default=3, metavar="N", help="default 3")
    load.add_argument("--max-batch", type=int, default=40, metavar="N", help="default 40")
    load.add_argument("--max-prompt-tokens", type=int, default=600, metavar="N", help="600")
    load.add_argument("--max-new-tokens", type=int, default=192, metavar="N", help="192")
    load.add_argument("--pool-tokens", type=int, default=16384, metavar="N", help="16384")
    return bench.parse_run(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Run, print, and write what was asked for; returns the exit code."""
    args = parse(argv)
    try:
        found = run(args)
    except (ServerError, OSError) as error:
        sys.exit(f"error: {error}")
    hardware = f"{args.tp} x {bench.gpu_name()}"
    if args.json:
        record = bench.record("shadow_run.py", hardware, args.git_hash, **found)
        args.json.write_text(json.dumps(record, indent=1))
    print(
        f"{args.comm} against a2a: {found['steps']} decode steps, {found['layers_compared']} layers"
        f" on each of {args.tp} ranks, {found['num_requests']} requests, "
        f"{found['num_retractions']} retractions; differing elements: "
        f"{found['differing_elements']}"
    )
    if found["steps"] < args.steps:
        print(f"fewer than the {args.steps} steps asked for", file=sys.stderr)
    return int(found["differing_elements"] != 0 or found["steps"] < args.steps)


if __name__ == "__main__":
    sys.exit(main())
