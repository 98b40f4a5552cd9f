"""The benchmark scripts: step times, ratios, result files, and a run against a real server."""

import contextlib
import importlib.util
import json
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dcp.planner import GPUS, load_model
from sglang_dcp.testing import bench
from sglang_dcp.testing.bench import Shape
from sglang_dcp.testing.client import Client, ServerError
from sglang_dcp.testing.server import GpuSets, Server, free_port

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- pure parts


def test_percentile_by_counting() -> None:
    values = [random.random() for _ in range(random.randrange(1, 50))]
    for share in (0.01, 0.5, 0.95, 1.0):
        covered = [v for v in values if sum(w <= v for w in values) >= share * len(values)]
        assert bench.percentile(values, share) == min(covered)


def test_log_steps_are_those_of_full_batches_after_the_first() -> None:
    def line(running: int, rate: float) -> str:
        return f"Decode batch, #running-req: {running}, x, gen throughput (token/s): {rate:.2f}, y"

    log = [line(8, 100), line(8, 4000), line(7, 10), "Prefill batch", line(8, 2000)]
    assert bench.log_steps_ms("\n".join(log), 8) == [2.0, 4.0]


def test_stream_steps_only_while_all_requests_decode() -> None:
    early = [(0.0, 1), (0.9, 2), (1.0, 3), (1.010, 4), (1.030, 6)]  # two tokens in one event
    late = [(1.0, 1), (1.010, 2), (1.030, 4), (1.5, 5)]
    assert bench.stream_steps_ms([early, late]) == pytest.approx([10.0] * 6)


@pytest.mark.parametrize("text", ["8", "x8", "8x", "0x4", "4x0", "8x128K", "-1x4"])
def test_wrong_shapes_are_user_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not BxL"):
        Shape.parse(text)
    assert Shape.parse("8x131072") == Shape(8, 131072)


def test_planned_floor_is_the_read_of_the_stripe_and_the_exchange() -> None:
    model, gpu, shape = load_model("kimi-k3"), GPUS["h200"], Shape(8, 131072)
    without = bench.planned(model, gpu, shape, tp_size=8, dcp_size=1, comm="")
    read_ms = 8 * 131072 * 1152 * 24 / gpu.hbm_bytes_per_s * 1e3
    assert without["floor_ms"] == pytest.approx(read_ms, rel=0.01)
    striped = bench.planned(model, gpu, shape, tp_size=8, dcp_size=8, comm="a2a")
    assert read_ms / 8 < striped["floor_ms"] < read_ms


def run_of(dcp_size: int, *steps_ms: float, floor_ms: float | None = None) -> dict[str, Any]:
    shapes = [Shape(2 ** (2 * i), 4096 << i) for i in range(len(steps_ms))]
    rows = [
        bench.step_row(shape, [step, step, 2 * step]) | {"floor_ms": floor_ms, "predicted_ms": None}
        for shape, step in zip(shapes, steps_ms, strict=True)
    ]
    label = f"dcp{dcp_size} flashmla nvlink" if dcp_size > 1 else "upstream flashinfer"
    sizes = {"dcp_size": dcp_size, "max_total_num_tokens": 12_500_000}
    return {"label": label, "backend": "flashmla", "comm": "", **sizes, "rows": rows}


def test_ratios_are_to_upstream_of_the_same_run_and_to_the_floor() -> None:
    runs = [run_of(1, 4.0, 8.0), run_of(2, 5.0, 6.0, floor_ms=2.0)]
    bench.add_ratios(runs)
    assert [row["ratio_to_upstream"] for row in runs[1]["rows"]] == [1.25, 0.75]
    assert [row["ratio_to_floor"] for row in runs[1]["rows"]] == [2.5, 3.0]
    assert runs[0]["rows"][0]["ratio_to_floor"] is None
    assert runs[1]["rows"][0]["step_p95_ms"] == 10.0
    bench.add_ratios(runs[1:])
    assert runs[1]["rows"][0]["ratio_to_upstream"] is None, "no baseline in this run"


def test_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(1, 3.37, 18.123), run_of(2, 3.9, 111.5, floor_ms=0.0311)]
    runs[0]["rows"][0] |= bench.unfit_row(Shape(1, 4096))
    bench.add_ratios(runs)
    load_script("bench_decode").show(runs, tp_size=2)
    text = capsys.readouterr().err
    assert max(map(len, text.splitlines())) <= 80
    assert chr(0x2026) not in text, "rich cut a cell"
    for cell in (
        "/upstream",
        "/predicted",
        "12.5M KV tokens",
        "111.500",
        "223.000",
        "1x4096",
        "no room",
    ):
        assert cell in text


# ---------------------------------------------------------------- streams


class Streamer(BaseHTTPRequestHandler):
    """Answers /generate with the events that the server object holds."""

    def do_POST(self) -> None:  # noqa: N802  the base class names it
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        for event in self.server.events:  # type: ignore[attr-defined]
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args: Any) -> None:
        """Nothing: a test's output is its own."""


@pytest.fixture
def streamer() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Streamer)
    server.events, server.bodies = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_stream_sorts_events_by_prompt(streamer: Any) -> None:
    order = [(0, 1), (1, 1), (0, 2), (1, 3), (0, 3)]
    streamer.events = [{"index": i, "meta_info": {"completion_tokens": n}} for i, n in order]
    client = Client(f"http://127.0.0.1:{streamer.server_port}/")
    arrivals = client.stream([[5, 6], [7]], 3)
    assert [[n for _, n in events] for events in arrivals] == [[1, 2, 3], [1, 3]]
    times = [t for events in arrivals for t, _ in events]
    assert all(t > 0 for t in times)
    (body,) = streamer.bodies
    assert (body["input_ids"], body["stream"]) == ([[5, 6], [7]], True)
    assert body["sampling_params"]["max_new_tokens"] == 3


def test_an_error_in_the_stream_is_raised(streamer: Any) -> None:
    streamer.events = [{"error": {"message": "out of memory"}}]
    client = Client(f"http://127.0.0.1:{streamer.server_port}")
    with pytest.raises(ServerError, match="out of memory"):
        client.stream([[5]], 3)


# ---------------------------------------------------------------- figures


def exchange_record() -> dict[str, Any]:
    rows = [
        {
            "backend": backend,
            "batch": batch,
            "num_heads": heads,
            "p50_us": 5 * factor + batch / 8,
            "p95_us": 6 * factor + batch / 8,
            "gbps": 100.0,
            "gather_p50_us": 4 * factor,
        }
        for factor, backend in enumerate(("nvlink", "a2a", "ag_rs", "peer"), 1)
        for batch in (1, 16, 64)
        for heads in (96, 128)
    ]
    record = {"hardware": "H200", "num_gpus": 2, "date": "2026-01-01T00:00:00+00:00"}
    return {**record, "link_gbps": 383.0, "rows": rows}


def test_figures_of_result_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    script = load_script("plot_results")
    decode = {"hardware": "2 x H200", "model": "m", "date": "2026-01-01"}
    decode["runs"] = [run_of(1, 4.0, 8.0, 3.0, 5.0, 6.0), run_of(2, 5.0, 6.0, 3.0, 5.0, 6.0)]
    decode["runs"][0]["rows"][0] |= bench.unfit_row(Shape(1, 4096))
    for name, record in (("decode", decode), ("exchange", exchange_record())):
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "compare.json").write_text(json.dumps({"reports": {}}))
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert script.main([]) == 0
    for name in ("decode", "exchange"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "compare.png").exists()
    assert "compare.json: no figure" in capsys.readouterr().err


def test_a_result_without_a_figure_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"reports": {}}))
    with pytest.raises(SystemExit, match="there are figures of bench_decode.py"):
        load_script("plot_results").main([str(file)])


# ---------------------------------------------------------------- bench_decode.py as a whole


class FakeServer(Client):
    """A server that writes the scheduler's lines: 2 ms a step at batch 2, half of it with DCP."""

    def __init__(
        self, command: list[str], log: Path, module: str, env: Any, start_timeout_s: float
    ) -> None:
        super().__init__("http://nowhere")
        native = "PYTHONPATH" in env
        assert env == {"CUDA_VISIBLE_DEVICES": "0,1"} | (
            {"PYTHONPATH": str(log.parent / "site")} if native else {}
        )
        self.log_path, self.startup_s = log, 1.0
        self.step_ms = 1.0 if "--dcp-size" in command else 2.0
        ours = "--dcp-size" in command and not native
        assert module == ("sglang_dcp" if ours else "sglang") + ".launch_server"
        assert (command[-2:] == ["--dcp-replicate-q-proj", "--odd=1"]) == ours
        log.write_text("max_total_num_tokens=123456, x\n")

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *args: Any) -> None:
        self.log_path = Path("/stopped")

    def generate(self, prompts: Any, max_new_tokens: int, **extra: Any) -> list[dict[str, Any]]:
        rate = len(prompts) / self.step_ms * 1e3
        line = f"#running-req: {len(prompts)}, gen throughput (token/s): {rate:.2f}\n"
        with self.log_path.open("a") as log:
            log.write(line * (max_new_tokens // 16))
        return []


def test_sweep_over_own_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("bench_decode")
    monkeypatch.setattr(script, "Server", FakeServer)
    monkeypatch.setattr(script.time, "sleep", lambda _: None)
    result = tmp_path / "result.json"
    sizes = ["--tp", "2", "--dcp-size", "2", "--comm", "a2a", "--baselines", "flashmla"]
    shapes = ["--shapes", "2x64", "1x8", "1x200000", "--gpu", "h200", "--git-hash", "abc"]
    files = ["--log-dir", str(tmp_path), "--json", str(result)]
    (tmp_path / "site" / "sglang").mkdir(parents=True)
    more = ["--native", str(tmp_path / "site"), "--server-args=--dcp-replicate-q-proj"]
    more.append("--server-args=--odd=1")
    assert script.main([*sizes, *shapes, *files, *more]) == 0
    record = json.loads(result.read_text())
    assert (record["git_hash"], record["hardware"]) == ("abc", "2 x h200")
    upstream, ours, native = record["runs"]
    assert (upstream["dcp_size"], ours["dcp_size"], ours["comm"]) == (1, 2, "a2a")
    assert native["label"] == "native dcp2 flashinfer a2a"
    assert ours["max_total_num_tokens"] == 123456
    too_long = [run["rows"].pop() for run in (upstream, ours, native)]
    assert [row["step_p50_ms"] for row in too_long] == [None, None, pytest.approx(1.0)]
    assert too_long[1]["ratio_to_upstream"] is too_long[1]["ratio_to_floor"] is None
    for row in ours["rows"]:
        assert row["step_p50_ms"] == row["step_p95_ms"] == pytest.approx(1.0)
        assert row["ratio_to_upstream"] == pytest.approx(0.5)
        assert row["ratio_to_floor"] == pytest.approx(1 / row["floor_ms"])
        assert row["ratio_to_predicted"] > 0


def test_servers_get_gpus_of_their_own_where_there_are_enough() -> None:
    def taken(num_servers: int, num_gpus: int) -> list[Any]:
        sets = GpuSets(num_servers, 2, num_gpus)
        with contextlib.ExitStack() as stack:
            return [
                stack.enter_context(sets.take())["CUDA_VISIBLE_DEVICES"] for _ in range(num_servers)
            ]

    assert taken(2, 4) == ["0,1", "2,3"]
    assert taken(3, 4) == ["0,1", "2,3", "0,1"]
    assert taken(2, 0) == ["0,1", "0,1"]


def test_ports_are_not_those_of_outgoing_connections() -> None:
    """Any connection of the host may take one of those while a server loads."""
    lowest = 32768
    with contextlib.suppress(OSError):
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(200)) < min(lowest, 32768)


def test_wrong_arguments_start_nothing() -> None:
    script = load_script("bench_decode")
    for wrong in (["--shapes", "8x128K"], ["--gpu", "h9000"], ["--native", "/nowhere"]):
        with pytest.raises(SystemExit, match="error: "):
            script.main(wrong)


@pytest.mark.parametrize(
    "name", ["bench_decode", "bench_prefill", "compare_upstream", "peak_prefill", "trace_decode"]
)
def test_server_args_add_up(name: str, tmp_path: Path) -> None:
    script, log_dir = load_script(name), ["--log-dir", str(tmp_path)]
    args = script.parse([*log_dir, "--server-args=--odd", "--server-args", "b", "--server-args=-c"])
    assert args.server_args == ["--odd", "b", "-c"]
    assert script.parse(log_dir).server_args == []


def test_dcp_servers_of_the_comparison_get_further_arguments(tmp_path: Path) -> None:
    script = load_script("compare_upstream")
    args = script.parse(["--log-dir", str(tmp_path), "--server-args=--odd=1", "--server-args=-b"])
    for comm, module in (("a2a", "sglang_dcp"), (None, "sglang")):
        found, command = script.command_of(script.Run("flashmla", comm), tmp_path, args)
        assert found == f"{module}.launch_server"
        assert (command[-2:] == ["--odd=1", "-b"]) == (comm is not None)
        assert ("-b" in command) == (comm is not None)


def test_the_comparison_needs_hits_and_equal_reads(tmp_path: Path) -> None:
    """Of every cached prefix, at every page size; ranks read alike, and something."""
    script = load_script("compare_upstream")
    work = script.Workload(2, 9000, 2048)
    args = script.parse(["--log-dir", str(tmp_path), "--pool-tokens", "2048"])

    def problems(backend="flashmla", reads=((3, 0), (3, 0)), forget=None):
        hits = work.expected_hits(128 if backend == "flashmla" else 2) | {forget: 0}
        results = [{"meta_info": {"cached_tokens": hits.get(name, 0)}} for name in work.names]
        ranks = [
            {"kv_rows_allocated": 1024, "pool": "DcpMLATokenToKVPool"}
            | {"counts": {"kv_gather": chunks, "attend_prefix": slices}}
            for chunks, slices in reads
        ]
        got = script.Answers(results, {}, ranks)
        return script.check_server(script.Run(backend, "a2a"), got, work, args)

    assert problems() == problems("triton") == problems(reads=((0, 5), (0, 5))) == []
    assert len({hit for hit in work.expected_hits(128).values() if hit}) == 3
    for wrong in ({"reads": ((0, 0), (0, 0))}, {"reads": ((3, 1), (3, 2))}):
        assert "prefixes read" in problems(**wrong)[0]
    (name, *_) = work.expected_hits(2)
    assert name in problems(forget=name)[0]


@pytest.mark.slow
def test_against_a_running_server(tiny_model: Path, tmp_path: Path) -> None:
    command = ["--model-path", str(tiny_model), "--device", "cpu", "--dtype", "float32"]
    command += ["--tp", "2", "--dcp-size", "2", "--max-total-tokens", "2048"]
    command += ["--context-length", "1024", "--max-running-requests", "8"]
    command += ["--skip-server-warmup", "--grammar-backend", "none"]
    result = tmp_path / "result.json"
    with Server(command, tmp_path / "log", env={"TRITON_INTERPRET": None}) as server:
        args = ["--url", server.url, "--shapes", "2x40", "--gpu", "h200", "--json", str(result)]
        assert load_script("bench_decode").main(args) == 0
    (run,) = json.loads(result.read_text())["runs"]
    assert (run["backend"], run["dcp_size"], run["comm"]) == ("torch_mla", 2, "a2a")
    assert run["max_total_num_tokens"] == 2048
    (row,) = run["rows"]
    assert row["num_samples"] > 200, "two requests of 160 tokens"
    # a starved client sees tokens in bursts, so the median has no lower bound here
    assert 0 < row["step_p50_ms"] <= row["step_p95_ms"] < 10_000
    assert row["ratio_to_floor"] == row["step_p50_ms"] / row["floor_ms"]
    assert row["tokens_per_s"] == pytest.approx(2e3 / row["step_p50_ms"])
    assert row["ratio_to_upstream"] is None
