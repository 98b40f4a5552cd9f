"""Time to the first token of new tokens on a cached prefix: what to measure, and how to judge it.

The radix cache also keeps what was measured, so every repetition gets a fresh tail of new tokens;
tails on one prefix start with different tokens, so that none finds another.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_dcp.planner import GpuSpec, ModelShape, StepConstants
from sglang_dcp.planner.crossover import mla_crossover_flops_only_tokens, mla_crossover_tokens
from sglang_dcp.testing.client import ServerError


@dataclass(frozen=True)
class Point:
    """One cell of the grid: `new_tokens` behind `prefix_tokens` that the cache holds.

    Attributes:
        sweep: "new" (new tokens on one prefix), "miss" (share of one prompt), or "prefix".
    """

    sweep: str
    prefix_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.prefix_tokens}+{self.new_tokens}"

    @property
    def miss_rate(self) -> float:
        """New tokens over all tokens of the prompt, 0 to 1."""
        return self.new_tokens / (self.prefix_tokens + self.new_tokens)


def make_points(
    prompt_tokens: int,
    new_tokens: Sequence[int],
    miss_rates: Sequence[float],
    prefixes: Sequence[int],
    prefix_new_tokens: int,
    page_tokens: int,
) -> list[Point]:
    """The grid, in the order of measurement: prefixes ascend, as each is cached on the last.

    Args:
        prompt_tokens: prefix of the sweep over new tokens, whole prompt of that over miss rates.
        new_tokens: of the sweep over new tokens.
        miss_rates: percent of the prompt, above 0 to 100.
        prefixes: of the sweep over prefixes, at `prefix_new_tokens` new tokens each.
        page_tokens: prefixes are rounded down to it, the widened page of all servers.

    Raises:
        ValueError: a number is out of its range, or no point is left.
    """
    lengths = [prompt_tokens, prefix_new_tokens, *new_tokens, *prefixes]
    if min(lengths) < 1 or not all(0 < rate <= 100 for rate in miss_rates):
        raise ValueError(
            f"tokens {lengths} and miss rates {list(miss_rates)} were asked for: tokens are at "
            "least 1, miss rates above 0 and at most 100 percent. Correct the grid."
        )
    points = [Point("new", _round_down(prompt_tokens, page_tokens), n) for n in new_tokens]
    for rate in miss_rates:
        cached = _round_down(round(prompt_tokens * (1 - rate / 100)), page_tokens)
        points.append(Point("miss", cached, prompt_tokens - cached))
    points += [Point("prefix", _round_down(n, page_tokens), prefix_new_tokens) for n in prefixes]
    if not points:
        raise ValueError(
            "a grid without points was asked for: it needs new tokens, miss rates or prefixes. "
            "Give at least one of --new-tokens, --miss-rates and --prefixes."
        )
    return sorted(points, key=lambda point: (point.prefix_tokens, point.new_tokens))


def _round_down(tokens: int, page_tokens: int) -> int:
    return tokens // page_tokens * page_tokens


@dataclass
class Prompts:
    """Random prompts over one common text, the same on every server of a run.

    Attributes:
        vocab_size: ids are drawn from 2 up to it.
        seed: of the draws.
    """

    vocab_size: int
    seed: int
    _text: list[int] = field(default_factory=list)
    _starts: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._text_rng = random.Random(self.seed)
        self._tail_rng = random.Random(self.seed + 1)

    def prefix(self, num_tokens: int) -> list[int]:
        """The first `num_tokens` of the text."""
        while len(self._text) < num_tokens + 1:
            self._text.append(self._text_rng.randrange(2, self.vocab_size))
        return self._text[:num_tokens]

    def with_tail(self, point: Point) -> list[int]:
        """The prefix of `point` and a tail whose first token no other prompt has there."""
        prefix = self.prefix(point.prefix_tokens)
        if point.prefix_tokens not in self._starts:
            starts = set(range(2, self.vocab_size)) - {self._text[point.prefix_tokens]}
            ordered = sorted(starts)
            self._tail_rng.shuffle(ordered)
            self._starts[point.prefix_tokens] = ordered
        first = self._starts[point.prefix_tokens].pop()
        rest = (self._tail_rng.randrange(2, self.vocab_size) for _ in range(point.new_tokens - 1))
        return [*prefix, first, *rest]


class Asked(Protocol):
    """A server as `measure_point` needs it (`Client`)."""

    url: str

    def first_token(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and its meta_info."""


def cache_prefix(server: Asked, prompts: Prompts, num_tokens: int) -> float:
    """Put the prefix into the server's radix cache; returns the seconds it took.

    One token more is sent, one that no tail starts with: the last of a prompt is never looked up.
    """
    return server.first_token([*prompts.prefix(num_tokens), 1])[0] if num_tokens else 0.0


def measure_point(
    server: Asked,
    prompts: Prompts,
    point: Point,
    page_tokens: int,
    repeats: int,
    point_s: float,
) -> dict[str, Any]:
    """Times to the first token of `point`, whose prefix has been cached.

    Args:
        page_tokens: page of this server, widened under DCP.
        repeats: number of samples, each with a fresh tail, after one that does not count.
        point_s: no further sample once they took so long; if the first took it all, it counts.

    Raises:
        ServerError: the server did not find just the prefix, rounded down to its page.
    """
    want = _round_down(point.prefix_tokens, page_tokens)
    samples: list[tuple[float, float]] = []
    began = time.monotonic()
    while not samples or (len(samples) <= repeats and time.monotonic() - began < point_s):
        seconds, meta = server.first_token(prompts.with_tail(point))
        if meta["cached_tokens"] != want:
            raise ServerError(
                f"{server.url} found {meta['cached_tokens']} tokens of {point} in its cache: it "
                f"must find {want}, the prefix rounded down to pages of {page_tokens} tokens. Use "
                "a larger --mem-fraction-static or shorter prompts if it has evicted the prefix."
            )
        samples.append((seconds * 1e3, meta["e2e_latency"] * 1e3))
    samples = samples[1:] or samples
    ttfts_ms = [ttft_ms for ttft_ms, _ in samples]
    return {
        "sweep": point.sweep,
        "prefix_tokens": point.prefix_tokens,
        "new_tokens": point.new_tokens,
        "miss_rate": point.miss_rate,
        "cached_tokens": want,
        "ttft_p50_ms": statistics.median(ttfts_ms),
        "ttft_min_ms": min(ttfts_ms),
        "ttft_max_ms": max(ttfts_ms),
        "server_p50_ms": statistics.median(ms for _, ms in samples),
        "num_samples": len(samples),
    }


def add_ratios(runs: Sequence[dict[str, Any]]) -> None:
    """Each row's TTFT over upstream's and over the better of pass-KV and pass-Q; None without."""
    by_mode = {run["prefill"]: run["rows"] for run in runs}
    for index in range(len(runs[0]["rows"])):
        times_ms = {mode: rows[index]["ttft_p50_ms"] for mode, rows in by_mode.items()}
        both = [times_ms[mode] for mode in ("pass-kv", "pass-q") if mode in times_ms]
        base_ms, better_ms = times_ms.get("upstream"), min(both) if len(both) == 2 else None
        for mode, rows in by_mode.items():
            rows[index]["ratio_to_upstream"] = base_ms and times_ms[mode] / base_ms
            rows[index]["ratio_to_better"] = better_ms and times_ms[mode] / better_ms


def measured_crossover_tokens(
    pass_kv: Sequence[dict[str, Any]], pass_q: Sequence[dict[str, Any]]
) -> float | None:
    """New tokens at which pass-KV becomes faster, between the points where it does.

    Args:
        pass_kv, pass_q: rows of one grid; those over about one prompt ("new" and "miss") count,
            as the crossover hardly depends on the prefix, and those without a prefix do not.

    Returns:
        Linear interpolation of the difference, None if it does not change its sign.
    """
    gains = sorted(
        (kv["new_tokens"], q["ttft_p50_ms"] - kv["ttft_p50_ms"])
        for kv, q in zip(pass_kv, pass_q, strict=True)
        if kv["sweep"] != "prefix" and kv["prefix_tokens"]
    )
    for (tokens, gain), (next_tokens, next_gain) in zip(gains, gains[1:], strict=False):
        if gain < 0 <= next_gain:
            return tokens + (next_tokens - tokens) * -gain / (next_gain - gain)
    return None


def crossovers(
    runs: Sequence[dict[str, Any]],
    model: ModelShape,
    gpu: GpuSpec | None,
    *,
    prefix_tokens: int,
    tp_size: int,
    dcp_size: int,
) -> dict[str, float | None]:
    """New tokens at the crossover: measured, predicted by the planner, and by FLOPs alone."""
    by_mode = {run["prefill"]: run["rows"] for run in runs}
    measured = predicted = None
    if "pass-kv" in by_mode and "pass-q" in by_mode:
        measured = measured_crossover_tokens(by_mode["pass-kv"], by_mode["pass-q"])
    if gpu is not None:
        num_heads = model.num_attention_heads // tp_size * dcp_size
        predicted = mla_crossover_tokens(
            model,
            gpu,
            StepConstants(),
            prefix_tokens=prefix_tokens,
            num_heads=num_heads,
            dcp_size=dcp_size,
        )
    return {
        "measured_new_tokens": measured,
        "predicted_new_tokens": predicted,
        "flops_only_new_tokens": mla_crossover_flops_only_tokens(model),
    }
