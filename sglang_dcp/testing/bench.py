"""What the benchmark scripts share: step times, the planner's word on them, and result records."""

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dcp.planner import GpuSpec, ModelShape, PlanRequest, make_plan

_ROOT = Path(__file__).resolve().parent.parent.parent
_STEP_LINE = re.compile(r"#running-req: (\d+).*?gen throughput \(token/s\): ([\d.]+)")


@dataclass(frozen=True)
class Shape:
    """A decode batch: `batch` requests of `context_tokens` tokens each; as text 8x131072."""

    batch: int
    context_tokens: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context_tokens}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read BxL.

        Raises:
            ValueError: not two positive numbers around an x.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if match is None:
            raise ValueError(
                f"shape {text!r} is not BxL: a batch and a context in tokens, both at least 1, "
                "around an x. Give for example 8x131072."
            )
        return cls(int(match.group(1)), int(match.group(2)))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    assert values
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def log_steps_ms(log: str, batch: int) -> list[float]:
    """Step times of full batches from the scheduler's decode lines, means over its log interval.

    The first such line is left out: its interval holds the prefill.
    """
    return [
        batch / float(rate) * 1e3
        for running, rate in _STEP_LINE.findall(log)
        if int(running) == batch
    ][1:]


def stream_steps_ms(arrivals: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """Step times as a client sees them, while all requests of the batch decode.

    Args:
        arrivals: for each request (seconds, output tokens so far), as `Client.stream` gives them.

    Returns:
        One value a token: its share of the time since the request's last event.
    """
    begin = max(events[0][0] for events in arrivals)
    end = min(events[-1][0] for events in arrivals)
    return [
        (now - before) / (tokens - had) * 1e3
        for events in arrivals
        for (before, had), (now, tokens) in zip(events, events[1:], strict=False)
        if begin <= before and now <= end
        for _ in range(tokens - had)
    ]


def step_row(shape: Shape, steps_ms: Sequence[float]) -> dict[str, Any]:
    """Summary of the step times of one shape."""
    median_ms = statistics.median(steps_ms)
    return {
        "shape": str(shape),
        "batch": shape.batch,
        "context_tokens": shape.context_tokens,
        "step_p50_ms": median_ms,
        "step_p95_ms": percentile(steps_ms, 0.95),
        "tokens_per_s": shape.batch / median_ms * 1e3,
        "num_samples": len(steps_ms),
    }


def unfit_row(shape: Shape) -> dict[str, Any]:
    """As `step_row`, of a shape that a server's KV cache does not hold: all figures are None."""
    measured = {"step_p50_ms": None, "step_p95_ms": None, "tokens_per_s": None, "num_samples": 0}
    return {
        "shape": str(shape),
        "batch": shape.batch,
        "context_tokens": shape.context_tokens,
        **measured,
    }


def planned(
    model: ModelShape, gpu: GpuSpec, shape: Shape, *, tp_size: int, dcp_size: int, comm: str
) -> dict[str, float | None]:
    """What the planner says about a decode step of `shape`.

    Args:
        model, gpu: what is served, and on what.
        shape: the batch.
        tp_size: attention-TP size.
        dcp_size: 1 is upstream.
        comm: communicator; not used at dcp_size 1.

    Returns:
        `floor_ms` (KV read and exchange only) and `predicted_ms` (the whole step, None where the
        planner does not know the weights).

    Raises:
        ValueError: the planner refuses the sizes.
    """
    request = PlanRequest(
        model=model,
        gpu=gpu,
        num_gpus=tp_size,
        tp_size=tp_size,
        dcp_size=dcp_size,
        context_tokens=shape.context_tokens,
        batch=shape.batch,
        communicator=comm if dcp_size > 1 else "auto",
    )
    option = make_plan(request).chosen
    return {"floor_ms": option.tpot_floor_ms, "predicted_ms": option.predicted_step_ms}


def add_ratios(runs: Sequence[dict[str, Any]]) -> None:
    """Put each row's ratios to upstream and to the planner into it; None where there is no such.

    Upstream is the first run, if that is one without DCP.
    """
    upstream = runs[0]["rows"] if runs[0]["dcp_size"] == 1 else [{}] * len(runs[0]["rows"])
    for run in runs:
        for row, base in zip(run["rows"], upstream, strict=True):
            others = {
                "ratio_to_upstream": base.get("step_p50_ms"),
                "ratio_to_floor": row.get("floor_ms"),
                "ratio_to_predicted": row.get("predicted_ms"),
            }
            step_ms = row["step_p50_ms"]
            row.update({k: step_ms and v and step_ms / v for k, v in others.items()})


def parse_run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv` with what a script that serves and records takes besides; `log_dir` exists."""
    parser.add_argument(
        "--start-timeout-s", type=float, default=300, metavar="S", help="default 300"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")
    parser.add_argument("--git-hash", metavar="HASH", help="where the tree is not a git checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    args = parser.parse_args(argv)
    args.log_dir = args.log_dir or Path(tempfile.mkdtemp())
    return args


def git_hash() -> str:
    """Short hash of the checkout that this package is in; empty outside of one."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def gpu_name() -> str:
    """What the driver calls this machine's GPU; "CPU" without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"


def hardware_of(num_gpus: int, share_gpu: bool) -> str:
    """The `hardware` of a record: number and name of the GPUs of a server."""
    return f"1 x {gpu_name()} (all ranks on one GPU)" if share_gpu else f"{num_gpus} x {gpu_name()}"


def record(script: str, hardware: str, known_hash: str | None, **results: Any) -> dict[str, Any]:
    """What a result file needs to be judged later.

    Args:
        script: name of the script in scripts/; its arguments are this process's.
        hardware: number and name of the devices.
        known_hash: git hash where the tree is not a checkout, else None.
        results: further entries.
    """
    import torch
    from sglang.version import __version__ as sglang_version

    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware,
        "versions": {"sglang": sglang_version, "torch": torch.__version__},
        "git_hash": known_hash or git_hash(),
        "command": " ".join([f"scripts/{script}", *sys.argv[1:]]),
        **results,
    }
