"""Prometheus series: what is counted, when it is published, and that a server shows all ranks."""

import functools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from simulated_ranks import as_rank

from sglang_dcp import metrics, state
from sglang_dcp.attention.prefill import prefill_variant
from sglang_dcp.comm.timer import ExchangeTimer
from sglang_dcp.hooks import table
from sglang_dcp.testing.server import Server


class Comm:
    """A communicator whose exchange takes a known time."""

    device = torch.device("cpu")
    name = "fake"

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls: list[Any] = []

    def exchange_merge(self, o: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls.append(o)
        time.sleep(self.seconds)
        return o * scale


# ---------------------------------------------------------------- exchange times


def test_every_nth_call_is_timed_and_all_are_passed_on() -> None:
    comm = Comm(seconds=0.002)
    timer = ExchangeTimer(comm, every=3)
    x = torch.randn(4)
    for number in range(1, 8):
        torch.testing.assert_close(comm.exchange_merge(x, scale=number), x * number)
    assert len(comm.calls) == 7
    samples = timer.take()
    assert len(samples) == 2
    assert all(2000 <= us < 200_000 for us in samples), samples
    assert timer.take() == []


def test_untaken_samples_are_bounded() -> None:
    timer = ExchangeTimer(comm := Comm(), every=1, max_pending=5)
    for _ in range(9):
        comm.exchange_merge(torch.zeros(1))
    assert len(timer.take()) == 5
    comm.exchange_merge(torch.zeros(1))
    assert len(timer.take()) == 1


class FakeEvent:
    """A CUDA event on a clock of its own; it has passed once the clock is beyond its record."""

    now = 0.0
    done_until = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.at <= FakeEvent.done_until

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.query(), "reading an event that has not passed would wait"
        return end.at - self.at


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda as far as the timer uses it; `capturing` is what the stream says."""
    gpu = SimpleNamespace(capturing=False)
    FakeEvent.now = FakeEvent.done_until = 0.0
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


class GpuComm(Comm):
    device = torch.device("cuda")

    def exchange_merge(self, o: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        FakeEvent.now += 0.005  # ms
        return super().exchange_merge(o, scale)


def test_gpu_samples_are_read_only_when_the_stream_has_passed(fake_gpu: SimpleNamespace) -> None:
    timer = ExchangeTimer(comm := GpuComm(), every=1)
    for _ in range(3):
        comm.exchange_merge(torch.zeros(1))
    assert timer.take() == []
    FakeEvent.done_until = 0.0101  # two of three have passed
    assert timer.take() == pytest.approx([5.0, 5.0])
    FakeEvent.done_until = 1.0
    assert timer.take() == pytest.approx([5.0])


def test_nothing_is_timed_under_capture(fake_gpu: SimpleNamespace) -> None:
    timer = ExchangeTimer(comm := GpuComm(), every=1)
    fake_gpu.capturing = True
    comm.exchange_merge(torch.zeros(1))
    fake_gpu.capturing, FakeEvent.done_until = False, 1.0
    assert timer.take() == []
    comm.exchange_merge(torch.zeros(1))
    assert len(timer.take()) == 1, "the test must be able to see a sample"
    assert len(comm.calls) == 2


# ---------------------------------------------------------------- the series of one rank


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """A registry of its own, and no prefill counted yet."""
    monkeypatch.setattr(metrics, "_prefill_batches", metrics.Counter())
    return prometheus_client.CollectorRegistry()


def classes_of(registry: prometheus_client.CollectorRegistry) -> metrics.MetricClasses:
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    return metrics.MetricClasses(*(functools.partial(kind, registry=registry) for kind in kinds))


def prefill(*prefix_lens: int) -> SimpleNamespace:
    new_lens = [1] * len(prefix_lens)
    return SimpleNamespace(extend_prefix_lens_cpu=list(prefix_lens), extend_seq_lens_cpu=new_lens)


def test_series(registry: prometheus_client.CollectorRegistry) -> None:
    comm = Comm(seconds=0.003)
    labels = {"model_name": "m", "tp_rank": 3}
    series = metrics.DcpMetrics(
        classes_of(registry),
        labels,
        dcp_rank=1,
        info={"dcp_size": 2, "comm_backend": "a2a"},
        capacity_tokens=2048,
        rows_per_rank=1024,
        timer=ExchangeTimer(comm, every=2),
    )
    own = {"model_name": "m", "tp_rank": "3", "dcp_rank": "1"}
    value = registry.get_sample_value
    first, second = prefill(0, 0), prefill(0, 5)
    with as_rank(1, 2):
        for batch in (first, first, second, second, second, prefill()):  # several layers ask
            prefill_variant(batch)
    metrics.count_prefill("pass_q")
    for _ in range(5):
        comm.exchange_merge(torch.zeros(1))
    series.publish(rows_used=17, rows_cached=4)
    series.publish(rows_used=16, rows_cached=5)  # nothing new: counters must not grow
    assert value("sglang:dcp_info", {**own, "dcp_size": "2", "comm_backend": "a2a"}) == 1
    assert value("sglang:dcp_capacity_tokens", own) == 2048
    assert value("sglang:dcp_kv_rows_capacity", own) == 1024
    assert value("sglang:dcp_kv_rows_used", own) == 16
    assert value("sglang:dcp_kv_rows_cached", own) == 5
    assert value("sglang:dcp_prefill_batches_total", {**own, "variant": "none"}) == 2
    assert value("sglang:dcp_prefill_batches_total", {**own, "variant": "pass_kv"}) == 1
    assert value("sglang:dcp_prefill_batches_total", {**own, "variant": "pass_q"}) == 1
    assert value("sglang:dcp_exchange_us_count", own) == 2
    assert value("sglang:dcp_exchange_us_sum", own) > 6000
    assert value("sglang:dcp_exchange_us_bucket", {**own, "le": "2048.0"}) == 0
    metrics.count_prefill("pass_kv")
    series.publish(0, 0)
    assert value("sglang:dcp_prefill_batches_total", {**own, "variant": "pass_kv"}) == 2


def test_documented_series_are_those_that_exist(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    metrics.DcpMetrics(
        classes_of(registry),
        {},
        dcp_rank=0,
        info={},
        capacity_tokens=1,
        rows_per_rank=1,
        timer=ExchangeTimer(Comm()),
    )
    found = {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}
    assert found == set(re.findall(r"sglang:dcp_\w+", metrics.__doc__ or ""))


# ---------------------------------------------------------------- when it is published


class Mode:
    """SGLang's ForwardMode as far as the hook asks it."""

    def __init__(self, name: str) -> None:
        self.is_extend = lambda: name == "extend"
        self.is_decode = lambda: name == "decode"


@pytest.fixture
def reporter(
    monkeypatch: pytest.MonkeyPatch, registry: prometheus_client.CollectorRegistry
) -> Iterator[SimpleNamespace]:
    """SGLang's reporter on rank 1 of 2: widened pages of 8 tokens, 40 tokens used, 16 cached."""
    from sglang_dcp.hooks import metrics_reporter

    monkeypatch.setattr(metrics_reporter, "_metrics", None)
    monkeypatch.setattr(metrics_reporter, "_is_stale", True)
    classes = classes_of(registry)
    pool = SimpleNamespace(page_size=4, size=512)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(decode_log_interval=40, attention_backend="torch_mla"),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        max_total_num_tokens=1024,
        pool_stats=SimpleNamespace(full_num_used=40, full_evictable_size=16),
    )
    scheduler.pool_stats_observer = SimpleNamespace(get_pool_stats=lambda: scheduler.pool_stats)
    collector = SimpleNamespace(
        labels={"tp_rank": 1},
        _gauge_cls=classes.gauge,
        _counter_cls=classes.counter,
        _histogram_cls=classes.histogram,
    )
    with as_rank(1, 2):
        vars(state.get_state().comm).update(name="fake", device=Comm.device, exchange_merge=None)
        yield SimpleNamespace(scheduler=scheduler, metrics_collector=collector, forward_ct_decode=0)


def test_published_when_sglang_logs_and_when_work_ends(
    plugin: None, reporter: SimpleNamespace, registry: prometheus_client.CollectorRegistry
) -> None:
    from sglang_dcp.hooks.metrics_reporter import (
        after_log_batch_result_stats,
        after_maybe_log_idle_metrics,
    )

    def used() -> float | None:
        return registry.get_sample_value(
            "sglang:dcp_kv_rows_used", {"tp_rank": "1", "dcp_rank": "1"}
        )

    def batch(mode: str, steps: int, tokens: int) -> float | None:
        reporter.forward_ct_decode = steps
        reporter.scheduler.pool_stats.full_num_used = tokens
        after_log_batch_result_stats(None, reporter, SimpleNamespace(forward_mode=Mode(mode)), None)
        return used()

    def idle(tokens: int) -> float | None:
        reporter.scheduler.pool_stats.full_num_used = tokens
        after_maybe_log_idle_metrics(None, reporter)
        return used()

    assert used() is None
    assert idle(40) == 20, "series exist before the first request"
    assert batch("extend", 0, 48) == 24
    assert batch("decode", 39, 56) == 24, "not between two intervals"
    assert batch("decode", 40, 64) == 32
    assert batch("idle", 40, 72) == 32, "an idle batch of DP attention is no decode step"
    assert idle(8) == 4
    assert idle(16) == 4, "published once, then no more work while idle"


@pytest.mark.parametrize(("enable", "dcp_size"), [(True, 2), (True, 1), (False, 2)])
def test_hooked_only_for_dcp_with_metrics(enable: bool, dcp_size: int) -> None:
    args = SimpleNamespace(
        device="cpu", dcp_size=dcp_size, enable_metrics=enable, dcp_replicate_q_proj=False
    )
    hooked = [patch for patch in table.phase_two(args) if patch in table.METRICS]
    assert hooked == (list(table.METRICS) if enable and dcp_size > 1 else [])


# ---------------------------------------------------------------- a real server


PREFILLS = "sglang:dcp_prefill_batches_total"


def series_of(text: str, name: str) -> dict[tuple[str, str], list[float]]:
    """Values of a series by (tp_rank, dcp_rank), from the text format."""
    found: dict[tuple[str, str], list[float]] = {}
    for labels, value in re.findall(rf"^{re.escape(name)}\{{(.*?)\}} (\S+)$", text, re.M):
        pairs = dict(re.findall(r'(\w+)="(.*?)"', labels))
        found.setdefault((pairs["tp_rank"], pairs["dcp_rank"]), []).append(float(value))
    return found


def sorted_by_variant(text: str) -> dict[tuple[str, str], list[float]]:
    """Prefill batches of every rank: none, pass_kv, pass_q."""
    lines = text.splitlines()
    of_variant = [
        series_of("\n".join(line for line in lines if f'variant="{name}"' in line), PREFILLS)
        for name in ("none", "pass_kv", "pass_q")
    ]
    return {rank: [values[rank][0] for values in of_variant] for rank in of_variant[0]}


@pytest.mark.slow
def test_series_of_a_server(tiny_model: Path, tmp_path: Path) -> None:
    command = ["--model-path", str(tiny_model), "--device", "cpu", "--dtype", "float32"]
    command += ["--tp", "2", "--dcp-size", "2", "--page-size", "4", "--enable-metrics"]
    command += ["--max-total-tokens", "2048", "--context-length", "1024", "--random-seed", "0"]
    command += ["--chunked-prefill-size", "64", "--max-running-requests", "8"]
    command += ["--skip-server-warmup", "--grammar-backend", "none", "--dcp-prefill", "pass-q"]
    env = {"TRITON_INTERPRET": None, "PROMETHEUS_MULTIPROC_DIR": None}
    with Server(command, tmp_path / "log", env=env) as server:
        before = server.get("/metrics")
        rng = random.Random()
        prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (150, 23)]
        server.generate(prompts, 60)
        time.sleep(1)  # idle ranks publish what is left
        after = server.get("/metrics")
    ranks = {("0", "0"), ("1", "1")}
    fixed = {"info": 1, "capacity_tokens": 2048, "kv_rows_capacity": 1024}
    for name, value in fixed.items():
        assert series_of(before, f"sglang:dcp_{name}") == dict.fromkeys(ranks, [value]), name
    # A request leaves its whole widened pages of 8 tokens in the radix tree
    cached = sum((n + 60) // 8 * 8 for n in (150, 23)) // 2
    assert series_of(after, "sglang:dcp_kv_rows_cached") == dict.fromkeys(ranks, [cached])
    assert series_of(after, "sglang:dcp_kv_rows_used") == dict.fromkeys(ranks, [0])
    assert series_of(before, "sglang:dcp_kv_rows_cached") == dict.fromkeys(ranks, [0])
    for rank in ranks:
        none, pass_kv, pass_q = sorted_by_variant(after)[rank]
        assert none >= 1
        assert pass_kv == 0
        assert pass_q >= 1, "the second chunk of the long prompt has a prefix"
        assert series_of(after, "sglang:dcp_exchange_us_count")[rank][0] >= 1
    assert 'comm_backend="a2a"' in after
    assert "sglang:num_running_reqs{" in after
