"""Hooks on sglang.srt.managers.scheduler_components.metrics_reporter: our series beside SGLang's.

Both run on every rank, after a batch's results are out: not in the path of the next launch.
"""

from typing import Any

from sglang_dcp import state
from sglang_dcp.comm.timer import ExchangeTimer
from sglang_dcp.metrics import DcpMetrics, MetricClasses

_metrics: DcpMetrics | None = None
_is_stale = True  # something was computed since the last publication


def _make_metrics(reporter: Any) -> DcpMetrics:
    """The series of this rank, with the labels and the backend of SGLang's own."""
    # Late, as in SGLang: the multiprocess folder must be in the environment by then
    import prometheus_client

    collector, scheduler, dcp = reporter.metrics_collector, reporter.scheduler, state.get_state()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return DcpMetrics(
        MetricClasses(
            collector._gauge_cls or prometheus_client.Gauge,
            collector._counter_cls or prometheus_client.Counter,
            collector._histogram_cls or prometheus_client.Histogram,
        ),
        collector.labels,
        dcp_rank=dcp.dcp_rank,
        info={
            "dcp_size": dcp.dcp_size,
            "comm_backend": dcp.comm.name,
            "attention_backend": scheduler.server_args.attention_backend,
            "physical_page_size": pool.page_size,
        },
        capacity_tokens=scheduler.max_total_num_tokens,
        rows_per_rank=pool.size,
        timer=ExchangeTimer(dcp.comm),
    )


def _publish(reporter: Any) -> None:
    global _metrics, _is_stale
    _metrics = _metrics or _make_metrics(reporter)
    stats = reporter.scheduler.pool_stats_observer.get_pool_stats()
    # The allocator counts widened pages, of which each rank holds 1 / dcp_size
    dcp_size = state.get_state().dcp_size
    _metrics.publish(stats.full_num_used // dcp_size, stats.full_evictable_size // dcp_size)
    _is_stale = False


def after_log_batch_result_stats(none: None, self: Any, batch: Any, result: Any) -> None:
    """AFTER SchedulerMetricsReporter.log_batch_result_stats: publish when SGLang would log.

    That is after each prefill batch and every --decode-log-interval decode steps; SGLang's own
    reports return early on ranks that do not log, so they are not hooked.
    """
    global _is_stale
    mode, interval = batch.forward_mode, self.scheduler.server_args.decode_log_interval
    if mode.is_extend() or (mode.is_decode() and self.forward_ct_decode % interval == 0):
        _publish(self)
    else:
        _is_stale = True


def after_maybe_log_idle_metrics(none: None, self: Any) -> None:
    """AFTER SchedulerMetricsReporter._maybe_log_idle_metrics: when work ends, and at the start."""
    if _is_stale:
        _publish(self)
