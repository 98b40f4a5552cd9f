#!/usr/bin/env python3
"""Time to the first token of pass-KV, pass-Q, auto and upstream TP, over a cached prefix.

    scripts/bench_prefill.py --model k3ish --tp 2 --dcp-size 2 --json FILE --plot FILE.png
    scripts/bench_prefill.py --servers pass-kv pass-q --new-tokens 16 64 256 --miss-rates --prefixes

Each server caches the prefix by a first request; then the median over fresh random tails of new
tokens is taken. Three sweeps: new tokens on a prefix of --prompt-tokens, miss rates of a prompt of
--prompt-tokens (the share that is new), and prefixes at --prefix-new-tokens new tokens. Weights are
dummies: only shapes matter for time.

The whole grid takes long: a prefix of 1M tokens alone prefills for minutes on two GPUs, and on each
server anew. In 9 minutes fit four servers with --prefixes 8192 32768 (or none) and --point-s 2.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dcp.planner import load_gpu, load_model
from sglang_dcp.planner.gpus import find_gpu
from sglang_dcp.planner.plot import import_pyplot
from sglang_dcp.testing import bench, prefill
from sglang_dcp.testing.bench_servers import (
    MODELS,
    Board,
    add_server_args,
    capacity_tokens,
    write_model,
)
from sglang_dcp.testing.client import ServerError
from sglang_dcp.testing.plots import plot_prefill
from sglang_dcp.testing.prefill import Point, Prompts
from sglang_dcp.testing.server import Server

SERVERS = ("upstream", "pass-kv", "pass-q", "auto")
#: Largest physical page of the backends (FlashMLA's); prefixes are multiples of it on all ranks.
PAGE_SIZE = 64
VOCAB_SIZE = 4000


@dataclass(frozen=True)
class Config:
    """One server to measure; `prefill` is one of SERVERS."""

    prefill: str
    backend: str
    dcp_size: int

    @property
    def label(self) -> str:
        """Name in figures and log files."""
        if self.prefill == "upstream":
            return f"upstream {self.backend}"
        return f"dcp{self.dcp_size} {self.backend} {self.prefill}"


def command_of(config: Config, model: Path, args: argparse.Namespace) -> tuple[str, list[str]]:
    """Module and arguments of the server of `config`."""
    command = [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--tp", str(args.tp), "--attention-backend", config.backend),
        *("--mem-fraction-static", str(args.mem_fraction_static), "--random-seed", "1"),
        # A first token leaves when the next decode step is launched: that must be a graph's replay.
        # The largest graph sizes pass-Q's slices; 256 is the default for two GPUs.
        *("--cuda-graph-bs-decode", "1", "256", "--cuda-graph-backend-prefill", "disabled"),
        *("--skip-server-warmup", "--grammar-backend", "none", *args.server_args),
    ]
    if config.dcp_size == 1:
        return "sglang.launch_server", command
    dcp = ["--dcp-size", str(config.dcp_size), "--dcp-prefill", config.prefill]
    return "sglang_dcp.launch_server", command + dcp


def measure_all(
    server: Server, config: Config, page_tokens: int, args: argparse.Namespace, board: Board
) -> list[dict[str, Any]]:
    """Rows of every point on one server, in the grid's order."""
    prompts, rows, cached = Prompts(VOCAB_SIZE, seed=1), [], -1
    for prefix_tokens in (0, args.page_tokens):  # kernels load
        prefill.cache_prefix(server, prompts, prefix_tokens)
        server.first_token(prompts.with_tail(Point("new", prefix_tokens, PAGE_SIZE)))
    for point in args.points:
        if point.prefix_tokens > cached:
            board.doing(f"{config.label}: prefix of {point.prefix_tokens} tokens")
            prefill.cache_prefix(server, prompts, point.prefix_tokens)
            cached = point.prefix_tokens
        board.doing(f"{config.label} {point}")
        row = prefill.measure_point(server, prompts, point, page_tokens, args.repeats, args.point_s)
        rows.append(row)
        took = f"p50 {row['ttft_p50_ms']:.1f} ms of {row['num_samples']}"
        board.done(f"{config.label} {point}: {took}, {row['cached_tokens']} cached")
    return rows


def check_capacity(capacity: int | None, points: list[Point], config: Config) -> None:
    """Raise ServerError if the server cannot hold the longest prompt."""
    longest = max(point.prefix_tokens + point.new_tokens for point in points)
    if capacity is not None and capacity < longest + PAGE_SIZE:
        raise ServerError(
            f"{config.label} holds {capacity} KV tokens, but the longest prompt has {longest}: "
            "prefix and new tokens must fit. Raise --mem-fraction-static, or shorten the grid."
        )


def run_own(config: Config, folder: Path, args: argparse.Namespace, board: Board) -> dict[str, Any]:
    """Serve one configuration and measure every point."""
    module, command = command_of(config, folder, args)
    log = args.log_dir / f"bench-prefill-{config.label.replace(' ', '-')}.log"
    board.doing(f"{config.label} starts")
    with Server(command, log, module, start_timeout_s=args.start_timeout_s) as server:
        board.done(f"{config.label}: up in {server.startup_s:.0f} s")
        capacity = capacity_tokens(log.read_text(errors="replace"))
        check_capacity(capacity, args.points, config)
        page_tokens = int(server.get("/server_info")["page_size"])  # widened under DCP
        rows = measure_all(server, config, page_tokens, args, board)
    return {
        "label": config.label,
        "prefill": config.prefill,
        "backend": config.backend,
        "dcp_size": config.dcp_size,
        "page_tokens": page_tokens,
        "max_total_num_tokens": capacity,
        "rows": rows,
    }


def run_sweep(folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Start, measure and stop one server after the other.

    Returns:
        Runs of those that could be measured, as GPU time is dear, and what went wrong with others.
    """
    sizes = {name: 1 if name == "upstream" else args.dcp_size for name in args.servers}
    configs = [Config(name, args.backend, sizes[name]) for name in args.servers]
    board = Board(len(configs) * (1 + len(args.points)))
    runs, failures = [], []
    with board.progress:
        for config in configs:
            try:
                runs.append(run_own(config, folder, args, board))
            except ServerError as error:
                failures.append(f"{config.label}: {error}")
                board.done(f"{config.label} failed")
    return runs, failures


def show(runs: list[dict[str, Any]], crossover: dict[str, Any], tp_size: int) -> None:
    """TTFT of every point as a table of at most 80 columns, on stderr, and the crossover."""
    title = f"Time to first token, p50 ms, TP {tp_size}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for name in ("prefix", "new", "miss %", *(run["prefill"] for run in runs)):
        table.add_column(name, justify="right", no_wrap=True)
    by_mode = {run["prefill"]: run["rows"] for run in runs}
    auto = by_mode.get("auto")
    for name in ("auto/best", "auto/up") if auto else ():
        table.add_column(name, justify="right", no_wrap=True)
    for index, row in enumerate(runs[0]["rows"]):
        ratios = [auto[index][f"ratio_to_{to}"] for to in ("better", "upstream")] if auto else []
        table.add_row(
            f"{row['prefix_tokens']}",
            f"{row['new_tokens']}",
            f"{row['miss_rate']:.2%}"[:-1],
            *(f"{run['rows'][index]['ttft_p50_ms']:.1f}" for run in runs),
            *("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
        )
    console = Console(stderr=True, width=80)
    console.print(table)
    found = {name: "none" if v is None else f"{v:.0f}" for name, v in crossover.items()}
    console.print(
        f"Crossover in new tokens: measured {found['measured_new_tokens']}, predicted "
        f"{found['predicted_new_tokens']} ({found['flops_only_new_tokens']} by FLOPs alone)",
        highlight=False,
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """What is served."""
    own = parser.add_argument_group("servers")
    own.add_argument(
        "--servers",
        nargs="+",
        choices=SERVERS,
        default=list(SERVERS),
        metavar="NAME",
        help=f"subset of {', '.join(SERVERS)} (default all)",
    )
    own.add_argument("--model", choices=sorted(MODELS), default="k3ish", help="default k3ish")
    own.add_argument("--tp", type=int, default=2, metavar="N", help="GPUs (default 2)")
    own.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    own.add_argument("--backend", default="flashmla", metavar="NAME", help="default flashmla")
    own.add_argument(
        "--mem-fraction-static", type=float, default=0.6, metavar="F", help="default 0.6"
    )
    add_server_args(own, "all servers")
    own.add_argument("--start-timeout-s", type=float, default=300, metavar="S", help="default 300")
    own.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """What is measured."""
    grid = parser.add_argument_group("grid (a list may be empty)")
    grid.add_argument("--prompt-tokens", type=int, default=128000, metavar="N")
    grid.add_argument(
        "--new-tokens", nargs="*", type=int, default=[1, 16, 64, 128, 256, 512], metavar="N"
    )
    rates = [1, 2.5, 3.25, 5, 10, 20, 50, 100]
    grid.add_argument("--miss-rates", nargs="*", type=float, default=rates, metavar="PERCENT")
    prefixes = [8192, 32768, 131072, 262144, 524288, 1_000_000]
    grid.add_argument("--prefixes", nargs="*", type=int, default=prefixes, metavar="N")
    grid.add_argument("--prefix-new-tokens", type=int, default=64, metavar="N", help="default 64")
    grid.add_argument("--repeats", type=int, default=5, metavar="N", help="samples (default 5)")
    grid.add_argument(
        "--point-s", type=float, default=3, metavar="S", help="time for a point's samples"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it can be before servers start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    add_grid_options(parser)
    parser.add_argument("--gpu", metavar="NAME", help="for the planner (default: this machine's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result")
    parser.add_argument("--git-hash", metavar="HASH", help="where the tree is no git checkout")
    args = parser.parse_args(argv)
    args.page_tokens = PAGE_SIZE * args.dcp_size
    args.points = prefill.make_points(
        args.prompt_tokens,
        args.new_tokens,
        args.miss_rates,
        args.prefixes,
        args.prefix_new_tokens,
        args.page_tokens,
    )
    args.log_dir = args.log_dir or Path(tempfile.mkdtemp())
    if args.plot:
        import_pyplot(f"--plot {args.plot}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit code, 1 if a server failed."""
    try:
        args = parse(argv)
        gpu = load_gpu(args.gpu) if args.gpu else find_gpu(bench.gpu_name())
        folder = write_model(args.model, args.log_dir / args.model)
        runs, failures = run_sweep(folder, args)
        sizes = {"tp_size": args.tp, "dcp_size": args.dcp_size}
        crossover = prefill.crossovers(
            runs, load_model(str(folder)), gpu, prefix_tokens=args.prompt_tokens, **sizes
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    if runs:
        report(runs, crossover, args)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def report(runs: list[dict[str, Any]], crossover: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table; write what was asked for."""
    prefill.add_ratios(runs)
    show(runs, crossover, args.tp)
    hardware = f"{args.tp} x {args.gpu or bench.gpu_name()}"
    known = {"model": args.model, "runs": runs, "crossover": crossover}
    result = bench.record("bench_prefill.py", hardware, args.git_hash, **known)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if args.plot:
        plot_prefill(result, args.plot)


if __name__ == "__main__":
    sys.exit(main())
