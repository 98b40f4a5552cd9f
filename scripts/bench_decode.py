#!/usr/bin/env python3
"""Decode time per step of DCP against upstream TP, on one machine, through the real server.

    scripts/bench_decode.py --model k3ish --tp 2 --dcp-size 2 --json FILE --plot FILE.png
    scripts/bench_decode.py --native SITE_PACKAGES    # beside the DCP of a later SGLang
    scripts/bench_decode.py --model k3 --tp 8 --dcp-size 8 --shapes 64x16384 1x1000000 8x1000000
    scripts/bench_decode.py --url http://127.0.0.1:30000 --shapes 1x4096 8x131072

Each server gets the same random prompts of each shape (batch x context tokens); prefill is cached
by a first request, 32 tokens warm up, then 160 are decoded; a shape that a server's KV cache does
not hold is left out there. Step times of a self-started server come from its scheduler's "gen
throughput" log lines, weights are dummies: only shapes matter for time. Those of a running server
(--url) are taken from its stream, as a client sees them.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dcp.planner import GpuSpec, ModelShape, load_gpu, load_model
from sglang_dcp.planner.gpus import find_gpu
from sglang_dcp.planner.plot import import_pyplot
from sglang_dcp.planner.units import format_count
from sglang_dcp.testing import bench
from sglang_dcp.testing.bench import Shape
from sglang_dcp.testing.bench_servers import (
    MODELS,
    Board,
    Config,
    add_server_args,
    capacity_tokens,
    command_of,
    write_model,
)
from sglang_dcp.testing.client import Client, ServerError
from sglang_dcp.testing.plots import plot_decode
from sglang_dcp.testing.server import GpuSets, Server

NUM_DECODED_TOKENS = 160
NUM_WARM_UP_TOKENS = 32
NOT_PLANNED = {"floor_ms": None, "predicted_ms": None}


def read_log(server: Server, prompts: list[list[int]]) -> list[float]:
    """Step times of one decode of `prompts`, from the log of a server of ours."""
    mark = server.log_path.stat().st_size
    server.generate(prompts, NUM_DECODED_TOKENS, return_logprob=False)
    time.sleep(0.5)  # the scheduler's last line
    log = server.log_path.read_bytes()[mark:].decode(errors="replace")
    return bench.log_steps_ms(log, len(prompts))


def read_stream(client: Client, prompts: list[list[int]]) -> list[float]:
    """Step times of one decode of `prompts`, from the arrival of its tokens."""
    return bench.stream_steps_ms(client.stream(prompts, NUM_DECODED_TOKENS))


def measure(
    client: Client,
    read_steps: Callable[[Any, list[list[int]]], list[float]],
    shape: Shape,
    seed: int,
    vocab_size: int,
) -> dict[str, Any]:
    """Step times of one shape; tokens are decoded greedily from a cached prefix."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, vocab_size) for _ in range(shape.context_tokens)]
        for _ in range(shape.batch)
    ]
    began = time.monotonic()
    client.generate(prompts, 1, return_logprob=False)
    prefill_s = time.monotonic() - began
    client.generate(prompts, NUM_WARM_UP_TOKENS, return_logprob=False)
    steps_ms = read_steps(client, prompts)
    if len(steps_ms) < 3:
        raise ServerError(
            f"{client.url} gave {len(steps_ms)} step times of {shape}: at least 3 are needed, with "
            "all requests running. Use a shape that its KV cache and its batch limit hold."
        )
    return {**bench.step_row(shape, steps_ms), "prefill_s": prefill_s}


@dataclass(frozen=True)
class Ground:
    """What all servers of a run stand on; `model` and `gpu` are None where they are unknown."""

    model: ModelShape | None
    gpu: GpuSpec | None
    tp_size: int
    vocab_size: int

    def plan(self, shape: Shape, dcp_size: int, comm: str) -> dict[str, float | None]:
        """The planner's floor and prediction of a step, as far as it knows model and GPU."""
        if self.model is None or self.gpu is None:
            return NOT_PLANNED
        sizes = {"tp_size": self.tp_size, "dcp_size": dcp_size}
        return bench.planned(self.model, self.gpu, shape, comm=comm, **sizes)


def measure_all(
    client: Client,
    read_steps: Callable[[Any, list[list[int]]], list[float]],
    config: Config,
    args: argparse.Namespace,
    ground: Ground,
    board: Board,
    capacity: int | None,
) -> list[dict[str, Any]]:
    """Rows of every shape on one server of `capacity` KV tokens, where that is known."""
    rows = []
    for seed, shape in enumerate(args.shapes):
        board.doing(f"{config.label} {shape}")
        needed = shape.batch * (shape.context_tokens + NUM_DECODED_TOKENS)
        if capacity is not None and needed > capacity:
            rows.append(bench.unfit_row(shape) | {"prefill_s": None, **NOT_PLANNED})
            board.done(f"{config.label} {shape}: does not fit into {capacity:,} KV tokens")
            continue
        row = measure(client, read_steps, shape, seed, ground.vocab_size)
        rows.append(row | ground.plan(shape, config.dcp_size, config.comm))
        took = f"p50 {row['step_p50_ms']:.3f} ms, p95 {row['step_p95_ms']:.3f} ms"
        board.done(f"{config.label} {shape}: {took}, prefill {row['prefill_s']:.1f} s")
    return rows


def run_own(
    config: Config,
    folder: Path,
    gpus: GpuSets,
    args: argparse.Namespace,
    ground: Ground,
    board: Board,
) -> dict[str, Any]:
    """Serve one configuration and measure every shape."""
    module, command = command_of(
        config,
        folder,
        tp_size=args.tp,
        max_batch=args.max_batch,
        mem_fraction_static=args.mem_fraction_static,
    )
    if config.native_site is None and config.dcp_size > 1:
        command += args.server_args
    site = {"PYTHONPATH": config.native_site} if config.native_site else {}
    log = args.log_dir / f"bench-{config.label.replace(' ', '-')}.log"
    board.doing(f"{config.label} starts")
    with (
        gpus.take() as env,
        Server(command, log, module, env | site, args.start_timeout_s) as server,
    ):
        board.done(f"{config.label}: up in {server.startup_s:.0f} s")
        capacity = capacity_tokens(log.read_text(errors="replace"))
        # what a later release means by its number is not ours to say
        room = None if config.native_site else capacity
        rows = measure_all(server, read_log, config, args, ground, board, room)
    return entry_of(config, capacity, rows)


def run_running(args: argparse.Namespace, gpu: GpuSpec | None) -> tuple[int, dict[str, Any]]:
    """Measure every shape on the server at --url."""
    client = Client(args.url)
    info = client.get("/server_info")
    config = Config(
        info["attention_backend"], info.get("dcp_size", 1), info.get("dcp_comm_backend", "")
    )
    path = Path(info["model_path"]) / "config.json"
    vocab_size = json.loads(path.read_text())["vocab_size"] if path.is_file() else 4000
    ground = Ground(
        load_model(str(path)) if path.is_file() else None,
        gpu,
        info["tp_size"] // (info["dp_size"] if info["enable_dp_attention"] else 1),
        min(4000, vocab_size),
    )
    board = Board(len(args.shapes))
    with board.progress:
        capacity = info.get("max_total_num_tokens")
        rows = measure_all(client, read_stream, config, args, ground, board, capacity)
    return ground.tp_size, entry_of(config, capacity, rows)


def run_sweep(args: argparse.Namespace, gpu: GpuSpec | None) -> Iterator[dict[str, Any]]:
    """Start, measure and stop one server after the other (--parallel: so many at a time)."""
    folder = write_model(args.model, args.log_dir / args.model)
    ground = Ground(load_model(str(folder)), gpu, args.tp, vocab_size=4000)
    configs = [Config(backend, 1, "") for backend in args.baselines]
    configs += [Config(args.backend, args.dcp_size, comm) for comm in args.comm]
    if args.native:
        configs.append(Config(args.native_backend, args.dcp_size, "a2a", str(args.native)))
    board = Board(len(configs) * (1 + len(args.shapes)))
    with board.progress:
        gpus = GpuSets(args.parallel, args.tp, torch.cuda.device_count())
        with ThreadPoolExecutor(args.parallel) as pool:
            run = partial(run_own, folder=folder, gpus=gpus, args=args, ground=ground, board=board)
            yield from pool.map(run, configs)


def entry_of(config: Config, capacity: int | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of the result file."""
    return {
        "label": config.label,
        "backend": config.backend,
        "dcp_size": config.dcp_size,
        "comm": config.comm,
        "max_total_num_tokens": capacity,
        "rows": rows,
    }


def show(runs: list[dict[str, Any]], tp_size: int) -> None:
    """Step times as a table of at most 80 columns, on stderr."""
    title = f"Decode step, TP {tp_size}; p50 over: upstream's, planner's floor, its prediction"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("server, shape", no_wrap=True)
    for name in ("p50 ms", "p95 ms", "tokens/s", "/upstream", "/floor", "/predicted"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        capacity = run["max_total_num_tokens"]
        table.add_row(run["label"])
        if capacity:
            table.add_row(f"  {format_count(capacity)} KV tokens")
        for row in run["rows"]:
            ratios = [row[f"ratio_to_{to}"] for to in ("upstream", "floor", "predicted")]
            table.add_row(
                f"  {row['shape']}",
                "no room" if row["step_p50_ms"] is None else f"{row['step_p50_ms']:.3f}",
                "-" if row["step_p95_ms"] is None else f"{row['step_p95_ms']:.3f}",
                "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                end_section=row is run["rows"][-1],
            )
    Console(stderr=True, width=80).print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be before servers start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    own = parser.add_argument_group("self-started servers")
    own.add_argument("--model", choices=sorted(MODELS), default="k3ish", help="default k3ish")
    own.add_argument("--tp", type=int, default=2, metavar="N", help="GPUs (default 2)")
    own.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    own.add_argument(
        "--comm",
        nargs="*",
        default=["a2a"],
        metavar="NAME",
        help="communicators, one DCP server each (default a2a)",
    )
    own.add_argument(
        "--backend", default="flashmla", metavar="NAME", help="attention backend of the DCP servers"
    )
    own.add_argument(
        "--baselines",
        nargs="*",
        default=["flashmla", "flashinfer"],
        metavar="NAME",
        help="attention backends of servers without DCP (default flashmla flashinfer); ratios are "
        "to the first",
    )
    own.add_argument(
        "--native",
        type=Path,
        metavar="DIR",
        help="packages of SGLang 0.5.17 or later, whose own DCP (a2a) is measured too",
    )
    own.add_argument(
        "--native-backend", default="flashinfer", metavar="NAME", help="default flashinfer"
    )
    own.add_argument(
        "--mem-fraction-static", type=float, default=0.6, metavar="F", help="default 0.6"
    )
    own.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="largest captured graph (default 32)"
    )
    add_server_args(own, "DCP servers")
    own.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="servers at a time, each on GPUs of its own (default 1)",
    )
    own.add_argument("--start-timeout-s", type=float, default=300, metavar="S", help="default 300")
    own.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")
    parser.add_argument("--url", help="measure this running server instead of starting any")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="BxL",
        default=["1x4096", "1x131072", "32x16384", "8x131072"],
        help="batch x context tokens (default 1x4096 1x131072 32x16384 8x131072)",
    )
    parser.add_argument("--gpu", metavar="NAME", help="for the planner (default: this machine's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result")
    parser.add_argument("--git-hash", metavar="HASH", help="where the tree is no git checkout")
    args = parser.parse_args(argv)
    args.shapes = [Shape.parse(text) for text in args.shapes]
    if args.parallel > max(1, torch.cuda.device_count() // args.tp):
        raise ValueError(
            f"--parallel {args.parallel} with --tp {args.tp}: servers that are timed need GPUs of "
            f"their own, and this machine has {torch.cuda.device_count()}. Lower --parallel."
        )
    if args.native and not (args.native / "sglang").is_dir():
        raise ValueError(
            f"--native {args.native} was asked for: it must be a folder with the package sglang, "
            "and holds none. Give the site-packages of an environment with SGLang 0.5.17 or later."
        )
    args.log_dir = args.log_dir or Path(tempfile.mkdtemp())
    if args.plot:
        import_pyplot(f"--plot {args.plot}")
    return args


def save(args: argparse.Namespace, tp_size: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The result so far, written where --json says: a run cut short keeps what it measured."""
    bench.add_ratios(runs)
    hardware = f"{tp_size} x {args.gpu or bench.gpu_name()}"
    model = args.url or args.model
    result = bench.record("bench_decode.py", hardware, args.git_hash, model=model, runs=runs)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit code."""
    try:
        args = parse(argv)
        gpu = load_gpu(args.gpu) if args.gpu else find_gpu(bench.gpu_name())
        tp_size, runs = args.tp, []
        if args.url:
            tp_size, run = run_running(args, gpu)
            runs.append(run)
        else:
            for run in run_sweep(args, gpu):
                runs.append(run)
                save(args, tp_size, runs)
    except (ValueError, ServerError) as error:
        sys.exit(f"error: {error}")
    result = save(args, tp_size, runs)
    show(runs, tp_size)
    if args.plot:
        plot_decode(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
