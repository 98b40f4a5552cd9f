"""`sglang-dcp demo`: serve a small model without DCP and with it, and show that nothing changed.

Makes a random MLA model in a temporary folder (no network), starts SGLang's real HTTP server on
it twice, sends both the same prompts, and compares tokens, logprobs, capacity and what the ranks
really stored. Both servers get the same pool bytes per rank.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dcp.comm import comm_backend_names
from sglang_dcp.layout import dcp_groups
from sglang_dcp.testing.demo_report import Report, Served, make_report
from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import Server, ServerError
from sglang_dcp.testing.tiny_model import GPU_MODEL, TinyModel, write_tiny_model
from sglang_dcp.testing.workload import Batch, stripe_workload

_DESCRIPTION = (
    "Serve a small random MLA model through SGLang's HTTP server without DCP and with it, send "
    "both the same prompts and compare tokens, logprobs, capacity and the rows that ranks stored."
)
_EPILOG = (
    "Exits 0 if everything agrees, 1 if not, 2 for a wrong request. On CPU (float32) tokens must "
    "be equal. On GPUs (bfloat16) two correct servers may part where the model itself is near a "
    "tie; such a place is reported, any other fails."
)


def add_demo_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `demo` command; the parsed namespace carries `run=run_demo`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="same tokens, c times the KV capacity: shown on a small model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.set_defaults(run=run_demo)
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--dcp-size", type=int, metavar="N", help="c (default: --tp)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if it has --tp GPUs, else cpu"
    )
    parser.add_argument("--moe", action="store_true", help="a model with experts")
    parser.add_argument("--attention-backend", metavar="NAME", help="default: the device's best")
    parser.add_argument(
        "--dcp-comm-backend",
        choices=comm_backend_names(),
        default="auto",
        help="communicator (default auto)",
    )
    parser.add_argument("--new-tokens", type=int, default=12, metavar="N", help="per prompt")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default 0)")
    parser.add_argument("--folder", type=Path, help="keep model, logs and counters there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


@dataclass(frozen=True)
class Setup:
    """What both servers share.

    Attributes:
        tp_size, dcp_size, device, attention_backend, comm_backend: as asked or resolved.
        page_tokens: physical page P.
        pool_rows: rows of one rank's pool, the same in both servers.
        chunk_tokens: prefill chunk, a multiple of the widened page.
        shape: the model.
    """

    tp_size: int
    dcp_size: int
    device: str
    attention_backend: str
    comm_backend: str
    page_tokens: int
    pool_rows: int
    chunk_tokens: int
    shape: TinyModel

    def server_args(self, model: Path, dcp_size: int) -> list[str]:
        """Command line of a server with `dcp_size`; --max-total-tokens counts logical tokens."""
        return [
            *("--model-path", str(model), "--device", self.device, "--dtype", self.shape.dtype),
            *("--tp", str(self.tp_size), "--dcp-size", str(dcp_size)),
            *("--dcp-comm-backend", self.comm_backend),
            *("--attention-backend", self.attention_backend),
            *("--page-size", str(self.page_tokens)),
            *("--max-total-tokens", str(self.pool_rows * dcp_size)),
            *("--chunked-prefill-size", str(self.chunk_tokens)),
            *("--context-length", str(self.shape.max_position_embeddings)),
            *("--max-running-requests", "16", "--cuda-graph-max-bs", "16"),
            *("--random-seed", "0", "--grammar-backend", "none", "--skip-server-warmup"),
        ]


def make_setup(args: argparse.Namespace) -> Setup:
    """Resolve defaults.

    Raises:
        ValueError: sizes that cannot be served; three parts, before anything starts.
    """
    from sglang_dcp.hooks.guards import check_dcp_size  # loads SGLang

    dcp_size = args.tp if args.dcp_size is None else args.dcp_size
    if args.tp not in (2, 4, 8, 16):
        raise ValueError(
            f"--tp {args.tp} was asked for: the demo's model splits over 2, 4, 8 or 16 ranks. Use "
            "one of these."
        )
    check_dcp_size(dcp_size)
    dcp_groups(args.tp, args.tp, dcp_size)
    if dcp_size == 1:
        raise ValueError(
            "--dcp-size 1 was asked for: it turns DCP off, so the demo would compare a server with "
            f"itself. Use a power of two from 2 to {args.tp}."
        )
    device = args.device or _default_device(args.tp)
    backend = args.attention_backend or _default_backend(device)
    page_tokens = 64 if backend == "flashmla" else 1
    widened = page_tokens * dcp_size
    return Setup(
        tp_size=args.tp,
        dcp_size=dcp_size,
        device=device,
        attention_backend=backend,
        comm_backend=args.dcp_comm_backend,
        page_tokens=page_tokens,
        pool_rows=4096,
        chunk_tokens=max(64, widened),
        shape=_model_shape(device, args.moe, args.seed),
    )


def _default_device(tp_size: int) -> str:
    import torch

    return "cuda" if torch.cuda.device_count() >= tp_size else "cpu"


def _default_backend(device: str) -> str:
    import torch

    if device == "cpu":
        return "torch_mla"
    return "flashmla" if torch.cuda.get_device_capability()[0] == 9 else "flashinfer"


def _model_shape(device: str, moe: bool, seed: int) -> TinyModel:
    if device == "cpu":
        return TinyModel(moe=moe, seed=seed)
    return replace(
        GPU_MODEL,
        num_layers=3,
        max_position_embeddings=4096,
        moe=moe,
        moe_intermediate_size=1024,
        seed=seed,
    )


def serve(
    setup: Setup, dcp_size: int, model: Path, workload: Sequence[Batch], new_tokens: int
) -> Served:
    """Start a server, send it every batch in order, read its ranks' counters, stop it."""
    folder = model.parent
    counters = folder / f"counters-dcp{dcp_size}"
    server = Server(
        setup.server_args(model, dcp_size),
        folder / f"server-dcp{dcp_size}.log",
        env={"SGLANG_DCP_COUNTERS_DIR": str(counters), "TRITON_INTERPRET": None},
        start_timeout_s=900,
    )
    name = f"with DCP {dcp_size}" if dcp_size > 1 else "without DCP"
    _progress(f"server {name}: starting tp {setup.tp_size} on {setup.device} ...")
    with server:
        _progress(f"server {name}: up in {server.startup_s:.0f} s, sending prompts ...")
        began = time.monotonic()
        results = [
            server.generate(batch.prompts, new_tokens, top_logprobs_num=2) for batch in workload
        ]
        generate_s = time.monotonic() - began
        ranks = rank_counters(server, counters, setup.tp_size)
    _progress(f"server {name}: done in {generate_s:.1f} s")
    return Served(results, ranks, server.startup_s, generate_s)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_demo(args: argparse.Namespace) -> int:
    """Run both servers and report; returns 0, 1 for a difference or a failed server, 2."""
    try:
        setup = make_setup(args)
    except ValueError as error:
        print(f"sglang-dcp demo: error: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="sglang-dcp-demo-") as temporary:
        folder = args.folder or Path(temporary)
        try:
            report = _serve_twice(setup, folder, args.new_tokens, args.seed)
        except ServerError as error:
            print(f"sglang-dcp demo: error: {error}", file=sys.stderr)
            return 1
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        from sglang_dcp.testing.demo_table import print_report  # rich loads only where it draws

        print_report(report)
    return 1 if report.problems else 0


def _serve_twice(setup: Setup, folder: Path, new_tokens: int, seed: int) -> Report:
    widened = setup.page_tokens * setup.dcp_size
    workload = stripe_workload(
        setup.dcp_size, widened, setup.chunk_tokens, setup.shape.vocab_size, seed
    )
    model = write_tiny_model(folder / "model", setup.shape)
    upstream = serve(setup, 1, model, workload, new_tokens)
    ours = serve(setup, setup.dcp_size, model, workload, new_tokens)
    return make_report(
        workload,
        upstream,
        ours,
        tp_size=setup.tp_size,
        dcp_size=setup.dcp_size,
        device=setup.device,
        dtype=setup.shape.dtype,
        widened_page_tokens=widened,
    )
