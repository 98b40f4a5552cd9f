#!/usr/bin/env python3
"""Greedy tokens of DCP servers against upstream SGLang with the same attention backend, on GPUs.

    scripts/compare_upstream.py --tp 2 --dcp-size 2 --json FILE
    scripts/compare_upstream.py --tp 8 --dcp-size 8 --runs flashmla:a2a --json FILE

bf16 servers differ in the last bits, so a difference is judged where it first appears: upstream's
own gap between its two best tokens there must be below the largest logprob spread that two upstream
backends show on the same prompt, over the top tokens that both list. Exits 1 if one is not, or if a
radix hit, the reads of prefixes, the rows allocated or the pool are wrong. Logits are float32 on
both sides: bf16 logits are so coarse that unrelated tokens tie.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dcp import envs
from sglang_dcp.testing import bench
from sglang_dcp.testing.bench_servers import add_server_args
from sglang_dcp.testing.compare import (
    Comparison,
    cached_tokens,
    compare_results,
    logprob_spread,
)
from sglang_dcp.testing.compare_load import MAX_GRAPH_BATCH, MODEL, PAGE_SIZES, Workload
from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import GpuSets, Server, ServerError, on_shared_gpu
from sglang_dcp.testing.tiny_model import write_tiny_model

BASELINES = ("flashmla", "flashinfer", "triton")
NUM_TOP_TOKENS = 128  # of 4096; the fewer, the less of the noise is seen


@dataclass(frozen=True)
class Run:
    """One server: upstream if `comm` is None, else DCP with that communicator."""

    backend: str
    comm: str | None = None

    @property
    def tag(self) -> str:
        return f"{self.backend}-{self.comm or 'upstream'}"


@dataclass(frozen=True)
class Answers:
    """What one server answered: flat results, /server_info and each rank's counters."""

    results: list[dict[str, Any]]
    info: dict[str, Any]
    ranks: list[dict[str, Any]]


def command_of(run: Run, model: Path, args: argparse.Namespace) -> tuple[str, list[str]]:
    """Module and arguments of the server for `run`."""
    command = [
        *("--model-path", str(model), "--tp", str(args.tp), "--attention-backend", run.backend),
        *("--max-total-tokens", str(args.pool_tokens), "--mem-fraction-static", "0.3"),
        *("--cuda-graph-max-bs-decode", str(MAX_GRAPH_BATCH), "--max-running-requests", "64"),
        *("--chunked-prefill-size", str(args.chunk), "--random-seed", "1"),
        *("--cuda-graph-backend-prefill", "disabled", "--grammar-backend", "none"),
        *("--skip-server-warmup", "--enable-fp32-lm-head"),
    ]
    if run.comm is None:
        if run.backend == "flashinfer":
            # With overlap, its plan for the next step can replace one that the GPU has yet to read
            # (tests/gpu/test_flashinfer_plan.py), and its tokens are wrong now and then.
            command.append("--disable-overlap-schedule")
        return "sglang.launch_server", command
    command += ["--dcp-size", str(args.dcp_size), "--dcp-comm-backend", run.comm]
    return "sglang_dcp.launch_server", command + args.server_args


def ask(
    run: Run, model: Path, work: Workload, gpus: GpuSets, args: argparse.Namespace
) -> Answers | str:
    """Answers of the server of `run` to every batch of `work`, or why there are none.

    Answers are kept in `--log-dir`: a second call with the same folder asks only what is missing.
    """
    kept = args.log_dir / f"{run.tag}.json"
    if kept.exists():
        return Answers(**json.loads(kept.read_text()))
    try:
        with gpus.take() as env:
            answers = serve(run, model, work, {} if args.share_gpu else env, args)
    except ServerError as error:
        return str(error)
    kept.write_text(json.dumps(asdict(answers)))
    return answers


def serve(
    run: Run,
    model: Path,
    work: Workload,
    gpu_env: dict[str, str | None],
    args: argparse.Namespace,
) -> Answers:
    """Start the server of `run`, ask it everything, stop it."""
    module, command = command_of(run, model, args)
    if args.share_gpu:
        module, command = on_shared_gpu(module, command)
    counters = args.log_dir / f"{run.tag}.counters"
    env = {envs.COUNTERS_DIR: str(counters)} | gpu_env
    if args.parallel > 1:  # ranks see the memory that others take
        env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    server = Server(command, args.log_dir / f"{run.tag}.log", module, env, args.start_timeout_s)
    with server:
        began = time.monotonic()
        results: list[dict[str, Any]] = []
        for prompts in work.batches.values():
            results += server.generate(prompts, args.new_tokens, top_logprobs_num=NUM_TOP_TOKENS)
        info = server.get("/server_info")
        ranks = rank_counters(server, counters, args.tp) if run.comm else []
        took = f"up in {server.startup_s:.0f} s, answered in {time.monotonic() - began:.0f} s"
        print(f"{run.tag}: {took}", file=sys.stderr, flush=True)
    return Answers(results, info, ranks)


def ask_all(
    runs: Sequence[Run], model: Path, work: Workload, args: argparse.Namespace
) -> dict[Run, Answers]:
    """Answers of all `runs` that served, `--parallel` servers at a time; failures are printed."""
    gpus = GpuSets(args.parallel, args.tp, torch.cuda.device_count())
    with ThreadPoolExecutor(args.parallel) as pool:
        futures = {run: pool.submit(ask, run, model, work, gpus, args) for run in runs}
        outcomes = {run: future.result() for run, future in futures.items()}
    for run, outcome in outcomes.items():
        if isinstance(outcome, str):
            print(f"== {run.tag}: no answers: {outcome}", flush=True)
    return {run: out for run, out in outcomes.items() if isinstance(out, Answers)}


def judge(want: Answers, others: Sequence[Answers], got: Answers, work: Workload) -> dict[str, Any]:
    """Compare `got` with upstream's `want`; `others` are upstream's other backends.

    What bf16 leaves open on a prompt is the largest logprob spread of two upstream backends on it.
    The others are judged by the same rule, which says how much of it bf16 can meet.
    """
    comparison, differences = explain(want, others, got, work)
    between = [explain(want, others, other, work) for other in others]
    return {
        "num_prompts": comparison.num_prompts,
        "num_equal": comparison.num_equal,
        "upstream_num_equal": [other.num_equal for other, _ in between],
        "max_logprob_diff": comparison.max_logprob_diff,
        "upstream_max_logprob_diff": [other.max_logprob_diff for other, _ in between],
        "differences": differences,
        "problems": [f"not a tie: {d}" for d in differences if not d["is_tie"]],
        "upstream_num_not_a_tie": [sum(not d["is_tie"] for d in found) for _, found in between],
    }


def explain(
    want: Answers, others: Sequence[Answers], got: Answers, work: Workload
) -> tuple[Comparison, list[dict[str, Any]]]:
    """How `got` compares with `want`, and each difference beside upstream's spread there."""
    comparison = compare_results(want.results, got.results)
    differences = []
    for difference in comparison.differences:
        index = difference.prompt
        same_prompt = [answers.results[index] for answers in (want, *others)]
        spread = max(logprob_spread(*pair) for pair in itertools.combinations(same_prompt, 2))
        gap = difference.top2_gap
        differences.append(
            asdict(difference)
            | {
                "prompt": work.names[index],
                "upstream_spread": spread,
                "our_spread": logprob_spread(want.results[index], got.results[index]),
                "is_tie": gap is not None and gap < spread,
            }
        )
    return comparison, differences


def prefix_reads(got: Answers) -> list[dict[str, int]]:
    """Of every rank, how often a layer read a chunk (pass-KV) or sent a slice (pass-Q)."""
    names = {"pass_kv_chunks": "kv_gather", "pass_q_slices": "attend_prefix"}
    return [{k: rank["counts"].get(name, 0) for k, name in names.items()} for rank in got.ranks]


def check_server(run: Run, got: Answers, work: Workload, args: argparse.Namespace) -> list[str]:
    """Problems with what only a DCP server has: hits in whole widened pages, owners' rows."""
    problems = []
    expected = work.expected_hits(PAGE_SIZES.get(run.backend, 1) * args.dcp_size)
    found = dict(zip(work.names, cached_tokens(got.results), strict=True))
    if wrong := {name: found[name] for name in expected if found[name] != expected[name]}:
        problems.append(f"cached_tokens {wrong} on shared prefixes, of {expected}")
    reads = prefix_reads(got)
    if not any(reads[0].values()) or any(read != reads[0] for read in reads):
        problems.append(f"prefixes read {reads} times by the ranks: not at all, or not alike")
    sizes = [rank["kv_rows_allocated"] for rank in got.ranks]
    if sizes != [args.pool_tokens // args.dcp_size] * args.tp:
        problems.append(f"rows allocated {sizes} for {args.pool_tokens} logical tokens")
    if any(rank["pool"] != "DcpMLATokenToKVPool" for rank in got.ranks):
        problems.append("a rank's pool is not striped")
    return problems


def parse_run(text: str) -> Run:
    backend, _, comm = text.partition(":")
    return Run(backend, comm or "auto")


def record(args: argparse.Namespace, reports: dict[str, Any]) -> dict[str, Any]:
    """What a result file needs to be judged later."""
    hardware = bench.hardware_of(args.tp, args.share_gpu)
    return bench.record("compare_upstream.py", hardware, args.git_hash, reports=reports)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `log_dir` exists."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="ranks (default 2)")
    parser.add_argument("--dcp-size", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--runs",
        nargs="+",
        type=parse_run,
        metavar="BACKEND:COMM",
        default=[Run(b, c) for b, c in zip(("flashmla",) * 2, ("a2a", "ag_rs"), strict=True)]
        + [Run("flashinfer", "a2a"), Run("triton", "a2a")],
        help="attention backend and communicator of each DCP server (default flashmla:a2a "
        "flashmla:ag_rs flashinfer:a2a triton:a2a)",
    )
    load = parser.add_argument_group("load, in tokens")
    load.add_argument("--new-tokens", type=int, default=24, metavar="N", help="default 24")
    load.add_argument(
        "--long-tokens",
        type=int,
        default=100000,
        metavar="N",
        help="longest prompt (100000)",
    )
    load.add_argument(
        "--pool-tokens", type=int, default=131072, metavar="N", help="logical capacity (131072)"
    )
    load.add_argument(
        "--chunk", type=int, default=8192, metavar="N", help="chunked prefill size (default 8192)"
    )
    add_server_args(parser, "DCP servers")
    parser.add_argument(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="servers at a time, apart if GPUs suffice",
    )
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on GPU 0 (slow)")
    parser.add_argument(
        "--start-timeout-s", type=float, default=300, metavar="S", help="default 300"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="logs and answers; answers found there are not asked again (default: a new folder)",
    )
    parser.add_argument("--git-hash", metavar="HASH", help="where the tree is not a git checkout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports")
    args = parser.parse_args(argv)
    args.log_dir = args.log_dir or Path(tempfile.mkdtemp())
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, compare, print and write; returns the exit code."""
    args = parse(argv)
    work = Workload(args.dcp_size, args.long_tokens, args.pool_tokens)
    model = write_tiny_model(args.log_dir / "model", MODEL)
    baselines = [Run(backend) for backend in BASELINES]
    answers = ask_all([*baselines, *args.runs], model, work, args)
    reports = {}
    for run in args.runs:
        if not {run, *baselines} <= answers.keys():
            continue
        want = answers[Run(run.backend)]
        others = [answers[base] for base in baselines if base.backend != run.backend]
        report = judge(want, others, answers[run], work)
        report["problems"] += check_server(run, answers[run], work, args)
        report["prefix_reads"] = prefix_reads(answers[run])[0]
        reports[run.tag] = report
        print(f"== {run.tag}: {report['num_equal']}/{report['num_prompts']} prompts equal")
        print(json.dumps(report), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record(args, reports), indent=1))
    failed = len(reports) < len(args.runs)
    return int(failed or any(report["problems"] for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
