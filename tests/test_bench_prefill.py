"""scripts/bench_prefill.py: the grid, fresh tails, what the cache must find, and the crossover."""

import argparse
import importlib.util
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dcp.planner import GPUS, load_model
from sglang_dcp.testing import prefill
from sglang_dcp.testing.client import ServerError
from sglang_dcp.testing.plots import plot_record
from sglang_dcp.testing.prefill import Point, Prompts

ROOT = Path(__file__).resolve().parent.parent
#: Milliseconds of the fake servers: fixed part, and per new token.
TIMES_MS = {"upstream": (50, 0.1), "pass-kv": (80, 0.1), "pass-q": (20, 0.4), "auto": (21, 0.1)}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "bench_prefill", ROOT / "scripts/bench_prefill.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_prefill"] = module
    spec.loader.exec_module(module)
    return module


class FakeServer:
    """A radix cache with pages; times follow from the mode and the tokens that are not cached."""

    capacity = 10_000_000

    def __init__(self, command: list[str], log: Path, module: str, start_timeout_s: float) -> None:
        self.url, self.startup_s = "http://nowhere", 1.0
        self.mode, self.page_tokens = "upstream", 64
        if "--dcp-prefill" in command:
            self.mode = command[command.index("--dcp-prefill") + 1]
            self.page_tokens *= int(command[command.index("--dcp-size") + 1])
        assert module == ("sglang" if self.mode == "upstream" else "sglang_dcp") + ".launch_server"
        log.write_text(f"max_total_num_tokens={self.capacity}, x\n")
        self.seen: list[list[int]] = []

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *args: Any) -> None:
        self.url = "stopped"

    def get(self, path: str) -> dict[str, Any]:
        return {"page_size": self.page_tokens}

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        best = 0
        for other in self.seen:
            common = next(
                (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b),
                min(len(prompt), len(other)),
            )
            best = max(best, min(common, len(prompt) - 1) // self.page_tokens * self.page_tokens)
        return best

    def first_token(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        cached = self.cached_tokens(prompt)
        self.seen.append(list(prompt))
        fixed_ms, per_token_ms = TIMES_MS[self.mode]
        seconds = (fixed_ms + per_token_ms * (len(prompt) - cached)) / 1e3
        return seconds, {"cached_tokens": cached, "e2e_latency": seconds - 0.001}


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("mode", ["upstream", "auto"])
def test_a_first_token_waits_for_no_eager_step(tmp_path: Path, mode: str) -> None:
    """It leaves when the next decode step was launched: by a graph, in servers and here."""
    script = load_script()
    args = argparse.Namespace(tp=2, mem_fraction_static=0.5, server_args=[])
    config = script.Config(mode, "flashmla", 1 if mode == "upstream" else 2)
    _, command = script.command_of(config, tmp_path, args)
    assert "--cuda-graph-backend-decode" not in command
    assert "--disable-cuda-graph" not in command
    at = command.index("--cuda-graph-bs-decode")
    assert command[at + 1 : at + 3] == ["1", "256"]  # one request; pass-Q's slices as by default


def test_points_are_on_pages_of_all_servers_and_ascend() -> None:
    prompt, page = random.randrange(2000, 9000), random.choice([64, 128, 512])
    points = prefill.make_points(prompt, [1, 64], [2.5, 50, 100], [page * 3 + 5], 16, page)
    assert points == sorted(points, key=lambda p: (p.prefix_tokens, p.new_tokens))
    assert all(point.prefix_tokens % page == 0 for point in points)
    by_sweep = {s: [p for p in points if p.sweep == s] for s in ("new", "miss", "prefix")}
    assert [p.new_tokens for p in by_sweep["new"]] == [1, 64]
    assert all(prompt - page < p.prefix_tokens <= prompt for p in by_sweep["new"])
    assert all(p.prefix_tokens + p.new_tokens == prompt for p in by_sweep["miss"])
    for point, rate in zip(by_sweep["miss"], [1.0, 0.5, 0.025], strict=True):
        assert rate <= point.miss_rate < rate + page / prompt
    assert [(p.prefix_tokens, p.new_tokens) for p in by_sweep["prefix"]] == [(3 * page, 16)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": [0]}, "at least 1"),
        ({"miss_rates": [101]}, "at most 100"),
        ({"new_tokens": [], "miss_rates": [], "prefixes": []}, "without points"),
    ],
)
def test_wrong_grids_are_user_errors(changes: dict[str, Any], message: str) -> None:
    grid = {"new_tokens": [1], "miss_rates": [1], "prefixes": [128], **changes}
    with pytest.raises(ValueError, match=message):
        prefill.make_points(1280, prefix_new_tokens=64, page_tokens=64, **grid)


def test_tails_are_fresh() -> None:
    """No tail finds another one or the text behind the prefix, even with pages of one token."""
    prompts = Prompts(vocab_size=60, seed=random.randrange(1000))
    text = prompts.prefix(101)
    points = [Point("new", prefix, new) for prefix in (0, 100) for new in (1, 9)]
    made = [(point, prompts.with_tail(point)) for _ in range(20) for point in points]
    assert prompts.prefix(101) == text
    for point, prompt in made:
        assert prompt[: point.prefix_tokens] == text[: point.prefix_tokens]
        assert len(prompt) == point.prefix_tokens + point.new_tokens
    for prefix in (0, 100):
        firsts = [p[prefix] for point, p in made if point.prefix_tokens == prefix]
        assert len(set(firsts)) == len(firsts) == 40
        assert not {text[prefix], 1} & set(firsts)


def test_same_prompts_on_every_server() -> None:
    one, other = (Prompts(4000, seed=1) for _ in range(2))
    point = Point("new", 50, 7)
    assert [one.with_tail(point) for _ in range(3)] == [other.with_tail(point) for _ in range(3)]


# ---------------------------------------------------------------- measuring


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(["--dcp-size", "2", "--dcp-prefill", "pass-q"], tmp_path / "log",
                      "sglang_dcp.launch_server", 1.0)  # fmt: skip


def test_a_point_is_the_median_over_fresh_tails(server: FakeServer) -> None:
    prompts, point = Prompts(4000, seed=1), Point("new", 256, 100)
    prefill.cache_prefix(server, prompts, 256)
    row = prefill.measure_point(server, prompts, point, 128, repeats=3, point_s=60)
    assert (row["num_samples"], row["cached_tokens"]) == (3, 256)
    assert len(server.seen) == 1 + 4, "one sample more, which does not count"
    assert row["ttft_p50_ms"] == pytest.approx(20 + 0.4 * 100)
    assert row["server_p50_ms"] == pytest.approx(row["ttft_p50_ms"] - 1)
    row = prefill.measure_point(server, prompts, point, 128, repeats=3, point_s=0)
    assert row["num_samples"] == 1


def test_what_the_cache_finds_is_checked(server: FakeServer) -> None:
    """Nothing cached, and a tail that was there before: both end the run."""
    prompts, point = Prompts(4000, seed=1), Point("new", 256, 200)
    with pytest.raises(ServerError, match=r"found 0 tokens of 256\+200.*must find 256"):
        prefill.measure_point(server, prompts, point, 128, repeats=1, point_s=60)
    server.seen.clear()
    prefill.cache_prefix(server, prompts, 256)
    prefill.measure_point(server, Prompts(4000, seed=1), point, 128, repeats=1, point_s=0)
    with pytest.raises(ServerError, match="found 384 tokens"):
        prefill.measure_point(server, Prompts(4000, seed=1), point, 128, repeats=1, point_s=0)


def rows_of(mode: str, points: Sequence[tuple[str, int, int]]) -> list[dict[str, Any]]:
    fixed, each = TIMES_MS[mode]
    return [
        {"sweep": s, "prefix_tokens": p, "new_tokens": n, "ttft_p50_ms": fixed + each * n}
        for s, p, n in points
    ]


def test_crossover_is_interpolated() -> None:
    points = [("new", 512, n) for n in (1, 64, 300)] + [("miss", 256, 150), ("miss", 0, 900)]
    points += [("prefix", 64, 250)]
    kv, q = (rows_of(mode, points) for mode in ("pass-kv", "pass-q"))
    assert prefill.measured_crossover_tokens(kv, q) == pytest.approx(200)  # 80 + .1 n = 20 + .4 n
    assert prefill.measured_crossover_tokens(q, kv) is None, "pass-Q never loses"
    few = slice(0, 2)
    assert prefill.measured_crossover_tokens(kv[few], q[few]) is None


def test_prediction_is_the_planners() -> None:
    model, gpu = load_model("kimi-k3"), GPUS["h200"]
    sizes = {"prefix_tokens": 128000, "tp_size": 2, "dcp_size": 2}
    found = prefill.crossovers([], model, gpu, **sizes)
    assert found["measured_new_tokens"] is None
    assert found["flops_only_new_tokens"] == pytest.approx(131072 / 768)
    assert found["predicted_new_tokens"] is not None
    assert 170 < found["predicted_new_tokens"] < 260
    assert prefill.crossovers([], model, None, **sizes)["predicted_new_tokens"] is None


# ---------------------------------------------------------------- the whole script


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, code: int = 0
) -> dict[str, Any]:
    script = load_script()
    monkeypatch.setattr(script, "Server", FakeServer)
    result = tmp_path / "result.json"
    grid = [
        "--prompt-tokens",
        "1024",
        "--new-tokens",
        "1",
        "64",
        "256",
        "--miss-rates",
        "50",
        "100",
    ]
    grid += ["--prefixes", "256", "512", "--repeats", "2"]
    files = ["--log-dir", str(tmp_path), "--json", str(result), "--gpu", "h200"]
    assert script.main([*grid, *files, "--git-hash", "abc", *options]) == code
    return json.loads(result.read_text())


def test_four_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(tmp_path, monkeypatch)
    assert (record["git_hash"], record["hardware"]) == ("abc", "2 x h200")
    assert [r["prefill"] for r in record["runs"]] == ["upstream", "pass-kv", "pass-q", "auto"]
    assert [r["dcp_size"] for r in record["runs"]] == [1, 2, 2, 2]
    assert [r["page_tokens"] for r in record["runs"]] == [64, 128, 128, 128]
    assert [len(r["rows"]) for r in record["runs"]] == [7] * 4
    auto = {(r["prefix_tokens"], r["new_tokens"]): r for r in record["runs"][3]["rows"]}
    assert auto[1024, 64]["ratio_to_better"] == pytest.approx(27.4 / 45.6)
    assert auto[0, 1024]["ratio_to_upstream"] == pytest.approx((21 + 102.4) / (50 + 102.4))
    assert record["crossover"]["measured_new_tokens"] == pytest.approx(200)
    text = capsys.readouterr().err
    table = text[text.index("Time to first token") :]
    assert max(map(len, table.splitlines())) <= 80
    assert chr(0x2026) not in table, "rich cut a cell"
    assert "measured 200, predicted" in table
    for cell in ("auto/best", "auto/up", "1024", "100.00", "0.601"):
        assert cell in table


def test_a_subset_of_servers_has_fewer_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(tmp_path, monkeypatch, "--servers", "pass-kv", "auto")
    (kv, auto) = record["runs"]
    assert kv["rows"][0]["ratio_to_upstream"] is auto["rows"][0]["ratio_to_better"] is None
    assert record["crossover"]["measured_new_tokens"] is None


def test_a_server_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(self: FakeServer) -> FakeServer:
        if self.mode == "pass-q":
            raise ServerError("server ended with 1")
        return self

    monkeypatch.setattr(FakeServer, "__enter__", start)
    record = run(tmp_path, monkeypatch, code=1)
    assert [r["prefill"] for r in record["runs"]] == ["upstream", "pass-kv", "auto"]
    assert record["crossover"]["measured_new_tokens"] is None
    text = capsys.readouterr().err
    assert "error: dcp2 flashmla pass-q: server ended with 1" in text
    assert "auto/best" in text


def test_a_pool_that_is_too_small_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeServer, "capacity", 1279)
    with pytest.raises(FileNotFoundError):
        run(tmp_path, monkeypatch, code=1)
    assert "holds 1279 KV tokens, but the longest prompt has 1280" in capsys.readouterr().err


def test_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    record = run(tmp_path, monkeypatch)
    plot_record(record, tmp_path / "prefill.png")
    assert (tmp_path / "prefill.png").read_bytes().startswith(b"\x89PNG")
