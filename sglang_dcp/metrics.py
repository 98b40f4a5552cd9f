"""Prometheus series of one rank, beside SGLang's own; all values come from the host.

    sglang:dcp_info                   1; labels say dcp_size, communicator, backend, page size
    sglang:dcp_capacity_tokens        logical tokens that the whole DCP group holds
    sglang:dcp_kv_rows_capacity       physical rows of this rank
    sglang:dcp_kv_rows_used           of these, rows in pages that running requests hold
    sglang:dcp_kv_rows_cached         rows in pages that only the radix cache holds
    sglang:dcp_prefill_batches_total  prefill batches by variant: none, pass_kv, pass_q
    sglang:dcp_exchange_us            sampled time of exchange + merge (stages 6, 7), one layer

Used rows count whole pages, as SGLang's token counts do, and are therefore equal on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dcp import counters
from sglang_dcp.comm.timer import ExchangeTimer
from sglang_dcp.prefill_policy import VARIANTS, Variant

EXCHANGE_BUCKETS_US = tuple(float(2**n) for n in range(1, 18))  # 2 us to 131 ms (CPU ranks)

_prefill_batches: Counter[str] = Counter()


def count_prefill(variant: Variant) -> None:
    """Count one prefill batch."""
    _prefill_batches[variant] += 1
    counters.count(f"prefill_{variant}")


@dataclass(frozen=True)
class MetricClasses:
    """Constructors with the signatures of prometheus_client's Gauge, Counter and Histogram."""

    gauge: Any
    counter: Any
    histogram: Any


class DcpMetrics:
    """The series of one rank.

    Args:
        classes: what makes the series.
        labels: SGLang's labels of this scheduler (model_name, tp_rank, ...).
        dcp_rank: index in the DCP group.
        info: further facts about the group, which become labels of `sglang:dcp_info`.
        capacity_tokens: logical capacity.
        rows_per_rank: physical rows of the pool, without the dummy page.
        timer: source of exchange times.
    """

    def __init__(
        self,
        classes: MetricClasses,
        labels: Mapping[str, Any],
        *,
        dcp_rank: int,
        info: Mapping[str, Any],
        capacity_tokens: int,
        rows_per_rank: int,
        timer: ExchangeTimer,
    ) -> None:
        self._classes = classes
        self._labels = {**labels, "dcp_rank": dcp_rank}
        self._timer = timer
        self._published: Counter[str] = Counter()
        self._gauge("info", "1; what the DCP group of this rank is.", **info).set(1)
        self._gauge("capacity_tokens", "Logical tokens of the DCP group.").set(capacity_tokens)
        self._gauge("kv_rows_capacity", "Physical KV rows of this rank.").set(rows_per_rank)
        self._used = self._gauge("kv_rows_used", "KV rows that running requests hold.")
        self._cached = self._gauge("kv_rows_cached", "KV rows that only the radix cache holds.")
        self._prefills = self._prefill_counters()
        self._exchange = classes.histogram(
            name="sglang:dcp_exchange_us",
            documentation="Exchange + merge of one layer in microseconds; sampled, eager only.",
            labelnames=[*self._labels],
            buckets=EXCHANGE_BUCKETS_US,
        ).labels(**self._labels)

    def publish(self, rows_used: int, rows_cached: int) -> None:
        """Set the series to what is known now; a few microseconds of host time."""
        self._used.set(rows_used)
        self._cached.set(rows_cached)
        for variant, counter in self._prefills.items():
            counter.inc(_prefill_batches[variant] - self._published[variant])
            self._published[variant] = _prefill_batches[variant]
        for exchange_us in self._timer.take():
            self._exchange.observe(exchange_us)

    def _gauge(self, name: str, documentation: str, **more_labels: Any) -> Any:
        labels = {**self._labels, **more_labels}
        return self._classes.gauge(
            name=f"sglang:dcp_{name}",
            documentation=documentation,
            labelnames=[*labels],
            multiprocess_mode="mostrecent",
        ).labels(**labels)

    def _prefill_counters(self) -> dict[str, Any]:
        family = self._classes.counter(
            name="sglang:dcp_prefill_batches_total",
            documentation="Prefill batches by how they read a cached prefix.",
            labelnames=[*self._labels, "variant"],
        )
        return {name: family.labels(**self._labels, variant=name) for name in VARIANTS}
