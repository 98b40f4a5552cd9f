"""Console script `sglang-dcp`: serve, demo, plan, doctor."""

import argparse
import sys
from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    from sglang_dcp.cli_plan import add_plan_parser
    from sglang_dcp.demo import add_demo_parser
    from sglang_dcp.doctor import add_doctor_parser

    parser = argparse.ArgumentParser(
        prog="sglang-dcp", description="Decode Context Parallelism for MLA models on SGLang."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "serve",
        add_help=False,
        help="start SGLang's server with DCP; takes SGLang's arguments, --dcp-size, --dry-run",
    )
    add_demo_parser(commands)
    add_plan_parser(commands)
    add_doctor_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:  # SGLang's own parser takes the rest, --help included
        from sglang_dcp.launch_server import main as serve

        return serve(arguments[1:])
    args = _parser().parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
