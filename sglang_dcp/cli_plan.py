"""``sglang-dcp plan``: what DCP would buy for a model, a node, a context and a batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dcp.planner import (
    GPUS,
    Constants,
    Plan,
    PlanRequest,
    load_constants,
    load_gpu,
    load_model,
    make_plan,
    plan_json,
    preset_names,
)
from sglang_dcp.planner.ledgers import COMMUNICATORS, KV_DTYPE_BYTES
from sglang_dcp.planner.units import parse_bytes, parse_count

_DESCRIPTION = (
    "Say what Decode Context Parallelism buys before a node is rented: KV memory, bytes moved per "
    "step, the walls of capacity, bandwidth and compute, and the dcp size to take."
)
_EPILOG = (
    "K, M, G are powers of 1000, Ki, Mi, Gi of 1024. Example: sglang-dcp plan --model kimi-k3 "
    "--gpus 8 --gpu h200 --context 1M --batch 64"
)


def add_plan_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``plan`` command; the parsed namespace carries ``run=run_plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="capacity and communication calculator",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    _add_arguments(parser)
    return parser


def run_plan(args: argparse.Namespace) -> int:
    """Answer one request on stdout.

    Returns:
        0, also when nothing fits (that is an answer); 2 when the request itself is wrong, with
        the reason on stderr and nothing on stdout.
    """
    try:
        plan = make_plan(_request(args))
        if args.plot:
            _plot(plan, Path(args.plot))
    except ValueError as error:
        print(f"sglang-dcp plan: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(plan_json(plan), indent=2))
    else:
        _print_table(plan)
    if args.plot:
        print(f"drew {args.plot}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command alone: ``python -m sglang_dcp.cli_plan --model ...``."""
    parser = argparse.ArgumentParser(
        prog="sglang-dcp plan", description=_DESCRIPTION, epilog=_EPILOG
    )
    _add_arguments(parser)
    return run_plan(parser.parse_args(argv))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    # Values stay strings here, so that every refusal is ours: asked, rule, way out
    parser.set_defaults(run=run_plan)
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help=f"preset ({', '.join(preset_names())}), config.json, or its folder",
    )
    node = parser.add_argument_group("node")
    node.add_argument("--gpus", default="8", metavar="N", help="GPUs of the node (default 8)")
    node.add_argument(
        "--gpu",
        default="h200",
        metavar="NAME",
        help=f"{', '.join(GPUS)}, or a JSON file (default h200)",
    )
    node.add_argument("--tp", "--tp-size", metavar="N", help="attention-TP size (default: --gpus)")
    node.add_argument(
        "--dcp-size",
        "--decode-context-parallel-size",
        metavar="N",
        help="power of two that divides --tp (default: the fastest that fits)",
    )
    node.add_argument(
        "--dcp-comm-backend",
        default="auto",
        metavar="NAME",
        help=f"auto, {', '.join(COMMUNICATORS)} (default auto)",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--context",
        required=True,
        metavar="TOKENS",
        help="cached tokens per sequence: 1M, 128K, 128Ki",
    )
    load.add_argument(
        "--batch", default="1", metavar="N", help="sequences per replica and step (default 1)"
    )
    load.add_argument(
        "--kv-dtype",
        "--kv-cache-dtype",
        default="bf16",
        metavar="TYPE",
        help=f"{', '.join(KV_DTYPE_BYTES)} (default bf16)",
    )
    memory = parser.add_argument_group("memory and constants")
    memory.add_argument(
        "--weight-bytes",
        metavar="BYTES",
        help="all weights of one copy, e.g. 689G (default: estimated)",
    )
    memory.add_argument(
        "--other-bytes",
        default="0",
        metavar="BYTES",
        help="more memory per GPU, e.g. 4GiB (default 0)",
    )
    memory.add_argument(
        "--mem-fraction",
        "--mem-fraction-static",
        metavar="F",
        help="share of GPU memory for weights and KV (default: SGLang's)",
    )
    memory.add_argument("--constants", metavar="FILE", help="JSON with measured times of a machine")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument("--plot", metavar="FILE.png", help="draw memory and step over the context")


def _request(args: argparse.Namespace) -> PlanRequest:
    num_gpus = parse_count(args.gpus, "--gpus", "GPUs")
    return PlanRequest(
        model=load_model(args.model),
        gpu=load_gpu(args.gpu),
        num_gpus=num_gpus,
        tp_size=parse_count(args.tp, "--tp", "GPUs") if args.tp else num_gpus,
        dcp_size=parse_count(args.dcp_size, "--dcp-size", "ranks") if args.dcp_size else None,
        context_tokens=parse_count(args.context, "--context"),
        batch=parse_count(args.batch, "--batch", "sequences"),
        kv_dtype=args.kv_dtype,
        communicator=args.dcp_comm_backend,
        weight_bytes=parse_bytes(args.weight_bytes, "--weight-bytes")
        if args.weight_bytes
        else None,
        other_bytes=parse_bytes(args.other_bytes, "--other-bytes"),
        mem_fraction=_fraction(args.mem_fraction) if args.mem_fraction else None,
        constants=load_constants(args.constants) if args.constants else Constants(),
    )


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--mem-fraction {text} is not a number: it is the share of GPU memory for weights and "
            "KV, between 0 and 1. Give for example 0.85."
        ) from None


def _print_table(plan: Plan) -> None:
    # rich and matplotlib load only where they draw: --json stays light
    from rich.console import Console

    from sglang_dcp.planner.table import print_plan

    print_plan(plan, Console())


def _plot(plan: Plan, path: Path) -> None:
    from sglang_dcp.planner.plot import plot_plan

    plot_plan(plan, path)


if __name__ == "__main__":
    sys.exit(main())
