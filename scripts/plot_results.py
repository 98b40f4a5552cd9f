#!/usr/bin/env python3
"""Draw the figures of the README from the result files of the benchmarks.

scripts/plot_results.py                      # scripts/results/*.json, a PNG beside each
scripts/plot_results.py FILE.json --output-dir figures --format svg
"""

import argparse
import json
import sys
from pathlib import Path

from sglang_dcp.testing.plots import plot_record

RESULTS = Path(__file__).resolve().parent / "results"


def has_figure(record: dict) -> bool:
    """False for results that are text by nature, such as comparisons of tokens."""
    return "runs" in record or "rows" in record


def main(argv: list[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE.json",
        help="results of bench_*.py (default scripts/results/*.json)",
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="default: beside each file")
    parser.add_argument("--format", default="png", metavar="SUFFIX", help="default png")
    args = parser.parse_args(argv)
    for file in args.files or sorted(RESULTS.glob("*.json")):
        target = (args.output_dir or file.parent) / f"{file.stem}.{args.format}"
        try:
            record = json.loads(file.read_text())
            if not args.files and not has_figure(record):
                print(f"{file}: no figure of such a result", file=sys.stderr)
                continue
            plot_record(record, target)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {file}: {error}")
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
