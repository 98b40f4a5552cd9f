#!/usr/bin/env python3
"""Kernels of a served decode step, counted per layer from a profiler trace: DCP against upstream.

    scripts/trace_decode.py --model k3ish --tp 2 --dcp-size 2 --comm nvlink a2a --json FILE
    scripts/trace_decode.py --trace RANK.trace.json.gz --layers 12

Each server decodes one shape from a cached prefix under CUDA graphs while SGLang's profiler records
a few steps. Counted is what runs between q_b_proj and o_proj (the w_kc and w_vc products included),
and per layer in all; the kernels of the middle layer are listed in order, so that the boundaries
can be checked by eye. Times are those of rank 0; ranks wait for each other inside an exchange.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dcp.testing import bench, trace
from sglang_dcp.testing.bench import Shape
from sglang_dcp.testing.bench_servers import (
    MODELS,
    Config,
    add_server_args,
    command_of,
    write_model,
)
from sglang_dcp.testing.server import Server, ServerError

NUM_DECODED_TOKENS = 2000  # more than pass before the profiler has its steps
PROFILE_TIMEOUT_S = 240.0
VOCAB_SIZE = 4000


def wait_until(what: str, condition: Callable[[], bool], server: Server) -> None:
    """Poll; raises ServerError with the log's end after PROFILE_TIMEOUT_S."""
    deadline = time.monotonic() + PROFILE_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{what}: not in {PROFILE_TIMEOUT_S:.0f} s\n{server.log_tail()}")
        time.sleep(0.05)


def profile(server: Server, shape: Shape, folder: Path, args: argparse.Namespace) -> list[Path]:
    """Traces of all ranks, in rank order, of steps that decode `shape` in full."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(2, VOCAB_SIZE) for _ in range(shape.context_tokens)]
        for _ in range(shape.batch)
    ]
    server.generate(prompts, 1, return_logprob=False)
    mark = server.log_path.stat().st_size

    def log() -> str:
        return server.log_path.read_bytes()[mark:].decode(errors="replace")

    errors: list[Exception] = []

    def decode() -> None:
        try:
            server.generate(prompts, NUM_DECODED_TOKENS, return_logprob=False)
        except (ServerError, OSError) as error:
            errors.append(error)

    decoding = threading.Thread(target=decode, daemon=True)
    decoding.start()
    full = re.compile(rf"Decode batch.*?#running-req: {shape.batch}\b")
    wait_until("a full batch", lambda: bool(full.search(log()) or errors), server)
    if errors:  # an abort comes later
        raise errors[0]
    body = {
        "output_dir": str(folder),
        "num_steps": args.steps,
        "activities": args.activities,
        "with_stack": False,
        "record_shapes": False,
    }
    server.post("/start_profile", body)
    wait_until("a profile", lambda: "Profiling done" in log(), server)
    server.post("/abort_request", {"rid": "", "abort_all": True})
    decoding.join(60)
    files = [path for rank in range(args.tp) for path in folder.glob(f"*-TP-{rank}[-.]*json.gz")]
    if len(files) != args.tp:
        raise ServerError(f"{len(files)} traces in {folder}, expected one of each of {args.tp}")
    return files


def run_own(config: Config, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve one configuration, trace the shape, and count."""
    name = config.label.replace(" ", "-")
    module, command = command_of(
        config,
        model,
        tp_size=args.tp,
        max_batch=args.max_batch,
        mem_fraction_static=args.mem_fraction_static,
    )
    command += args.server_args if config.dcp_size > 1 else []
    folder = args.log_dir / f"trace-{name}"
    log = args.log_dir / f"trace-{name}.log"
    with Server(command, log, module, start_timeout_s=args.start_timeout_s) as server:
        print(f"{config.label}: up in {server.startup_s:.0f} s", file=sys.stderr, flush=True)
        files = profile(server, args.shape, folder, args)
    num_layers = MODELS[args.model]["num_hidden_layers"]
    ranks = [trace.summarize(trace.read_kernels(file), num_layers) for file in files]
    return {
        "label": config.label,
        "backend": config.backend,
        "dcp_size": config.dcp_size,
        "comm": config.comm,
        "traces": [str(file) for file in files],
        **ranks[0],
        "other_ranks": [
            {key: rank[key] for key in ("step_us", "layer_us", "core_us")} for rank in ranks[1:]
        ],
    }


def add_differences(runs: list[dict[str, Any]]) -> None:
    """Put what a layer of each run has more than one of the first, if that is upstream, into it."""
    upstream = runs[0] if runs[0]["dcp_size"] == 1 else None
    for run in runs:
        for key in ("core_kernels", "kernels_per_layer"):
            base = upstream and upstream[key]
            run[f"{key}_more"] = run[key]["median"] - base["median"] if base and run[key] else None


def show(runs: list[dict[str, Any]]) -> None:
    """Counts and times of all runs, then the middle layer of each; at most 80 columns, stderr."""
    console = Console(stderr=True, width=80)
    table = Table(box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    table.title = (
        "Kernels (+ over upstream) and us of a decode step, rank 0; core: q_b_proj..o_proj"
    )
    table.add_column("server", no_wrap=True)
    for name in ("core", "layer", "core us", "layer us", "step us", "period", "NCCL/core"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run["label"],
            *(counted(run, key) for key in ("core_kernels", "kernels_per_layer")),
            *(number(run[key]) for key in ("core_us", "layer_us", "step_us", "step_period_us")),
            f"{sum(run['core_nccl'].values()) / run['num_layers']:g}",
        )
    console.print(table)
    for run in runs:
        show_layer(console, run)
        show_names(console, run)


def counted(run: dict[str, Any], key: str) -> str:
    """A number of kernels with its difference to upstream's."""
    if run[key] is None:
        return "-"
    more = run.get(f"{key}_more")
    return f"{run[key]['median']:g}" + ("" if more is None else f" ({more:+g})")


def number(value: float | None) -> str:
    """Microseconds, or a dash."""
    return "-" if value is None else f"{value:.1f}"


def show_layer(console: Console, run: dict[str, Any]) -> None:
    """The middle layer in order."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    table.title = f"{run['label']}: layer {run['num_layers'] // 2} in order, from the o_proj before"
    for name, justify in (("at us", "right"), ("us", "right"), ("stream", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("role", no_wrap=True)
    table.add_column("kernel", no_wrap=True, max_width=44)
    for row in run["layer"]:
        at, took = f"{row['start_us']:.1f}", f"{row['us']:.1f}"
        table.add_row(at, took, str(row["stream"]), row["role"], row["short_name"])
    console.print(table)


def show_names(console: Console, run: dict[str, Any]) -> None:
    """The kernels that make up most of a step."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    table.title = (
        f"{run['label']}: {run['kernels_per_step']} kernels a step, {run['num_steps']} steps"
    )
    for name in ("a step", "mean us", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kernel", no_wrap=True, max_width=52)
    for row in run["kernels"][:12]:
        short = trace.Kernel(row["name"], 0, 0, 0, 0).short_name
        table.add_row(f"{row['per_step']:g}", f"{row['mean_us']:.2f}", f"{row['share']:.1%}", short)
    console.print(table)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="count this trace, start nothing"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model of --trace")
    own = parser.add_argument_group("self-started servers")
    own.add_argument("--model", choices=sorted(MODELS), default="k3ish", help="default k3ish")
    own.add_argument("--tp", type=int, default=2, metavar="N", help="GPUs (default 2)")
    own.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    own.add_argument(
        "--comm", nargs="*", default=["nvlink"], metavar="NAME", help="one DCP server each (nvlink)"
    )
    own.add_argument("--backend", default="flashmla", metavar="NAME", help="default flashmla")
    own.add_argument(
        "--baselines",
        nargs="*",
        default=["flashmla"],
        metavar="NAME",
        help="attention backends of servers without DCP; differences are to the first (flashmla)",
    )
    own.add_argument("--shape", type=Shape.parse, default="1x4096", metavar="BxL", help="1x4096")
    own.add_argument("--steps", type=int, default=12, metavar="N", help="steps to record (12)")
    own.add_argument("--activities", nargs="+", default=["GPU"], metavar="A", help="GPU, CPU (GPU)")
    add_server_args(own, "DCP servers")
    own.add_argument("--mem-fraction-static", type=float, default=0.6, metavar="F", help="0.6")
    own.add_argument("--max-batch", type=int, default=32, metavar="N", help="largest graph (32)")
    own.add_argument("--start-timeout-s", type=float, default=300, metavar="S", help="default 300")
    own.add_argument("--log-dir", type=Path, metavar="DIR", help="logs and traces (temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--git-hash", metavar="HASH", help="where the tree is no git checkout")
    args = parser.parse_args(argv)
    if args.trace and not args.layers:
        parser.error("--trace needs --layers, the number of layers of the model that was traced")
    args.log_dir = args.log_dir or Path(tempfile.mkdtemp())
    return args


def save(args: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """The result so far, where --json says."""
    add_differences(runs)
    hardware = f"{args.tp} x {bench.gpu_name()}"
    sizes = {"model": args.model, "shape": str(args.shape)}
    result = bench.record("trace_decode.py", hardware, args.git_hash, **sizes, runs=runs)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def main(argv: list[str] | None = None) -> int:
    """Trace, print, and write what was asked for; returns the exit code."""
    args = parse(argv)
    try:
        if args.trace:
            found = trace.summarize(trace.read_kernels(args.trace), args.layers)
            show([{"label": args.trace.name, **found}])
            return 0
        model = write_model(args.model, args.log_dir / args.model)
        configs = [Config(backend, 1, "") for backend in args.baselines]
        configs += [Config(args.backend, args.dcp_size, comm) for comm in args.comm]
        runs: list[dict[str, Any]] = []
        for config in configs:
            runs.append(run_own(config, model, args))
            save(args, runs)
    except (ValueError, ServerError) as error:
        sys.exit(f"error: {error}")
    show(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
