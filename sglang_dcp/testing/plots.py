"""Figures of benchmark results, from the JSON of `bench_decode.py` and its siblings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dcp.planner.plot import import_pyplot
from sglang_dcp.testing.bench import Shape

_COLORS = ("#4c566a", "#9aa5b8", "#2e7ab8", "#2a9d6f", "#d1495b", "#8f5fbf", "#c98a1b")
_EXCHANGE_COLORS = {"peer": "#9aa5b8", "ag_rs": "#c98a1b", "a2a": "#2e7ab8", "nvlink": "#2a9d6f"}
_EXCHANGE_LABELS = {"peer": "SGLang 0.5.17 (peer)"}


def plot_record(record: dict[str, Any], path: Path) -> None:
    """Draw a result file into `path`; the suffix picks the format.

    Raises:
        ValueError: the record is of no benchmark, matplotlib is missing, or the file cannot
            be written.
    """
    if "crossover" in record:
        plot_prefill(record, path)
    elif "runs" in record:
        plot_decode(record, path)
    elif record.get("rows") and "gather_p50_us" in record["rows"][0]:
        plot_exchange(record, path)
    else:
        raise ValueError(
            f"a figure {path} was asked for of a result with the keys {', '.join(record)}: there "
            "are figures of bench_decode.py, bench_prefill.py (runs) and bench_exchange.py (rows). "
            "Give one of these."
        )


def plot_decode(record: dict[str, Any], path: Path) -> None:
    """Bars of the p50 step of each shape and server, p95 as whiskers, the planner's floor as ticks.

    Args:
        record: what `bench_decode.py --json` writes.
        path: file to write.
    """
    pyplot = import_pyplot(f"--plot {path}")
    runs = record["runs"]
    shapes = [row["shape"] for row in runs[0]["rows"]]
    columns = min(len(shapes), 4)
    lines = -(-len(shapes) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(2.9 * columns, 3.4 * lines), squeeze=False
    )
    panels = [axes for line in grid for axes in line]
    for axes in panels[len(shapes) :]:
        axes.set_visible(False)
    for index, (axes, shape) in enumerate(zip(panels, shapes, strict=False)):
        _decode_panel(axes, shape, [run["rows"][index] for run in runs])
    panels[0].set_ylabel("decode step, ms (p50; whisker p95)")
    colors = [_color(index) for index in range(len(runs))]
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    labels = [run["label"] for run in runs]
    figure.legend(patches, labels, loc="lower center", ncols=min(4, len(runs)), frameon=False)
    figure.suptitle(f"{record['hardware']}, {record['model']}, {record['date']}", fontsize=11)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    _save(pyplot, figure, path)


def plot_exchange(record: dict[str, Any], path: Path) -> None:
    """Exchange + merge above, Q gather below, over the batch; one column a number of heads.

    Args:
        record: what `bench_exchange.py --json` writes: `link_gbps` and `rows` with `backend`,
            `batch`, `num_heads`, `p50_us`, `p95_us`, `gbps`, `gather_p50_us`.
        path: file to write.
    """
    pyplot = import_pyplot(f"--plot {path}")
    head_counts = sorted({row["num_heads"] for row in record["rows"]})
    size = (max(6.0, 3.4 * len(head_counts)), 6.2)
    options = {"squeeze": False, "sharex": True, "sharey": "row"}
    figure, grid = pyplot.subplots(2, len(head_counts), figsize=size, **options)
    for column, num_heads in enumerate(head_counts):
        rows = [row for row in record["rows"] if row["num_heads"] == num_heads]
        exchange, gather = grid[0][column], grid[1][column]
        for backend in _EXCHANGE_COLORS:
            own = sorted((r for r in rows if r["backend"] == backend), key=lambda r: r["batch"])
            _exchange_line(exchange, own, "p50_us", backend)
            _exchange_line(gather, own, "gather_p50_us", backend)
        _link_limit(exchange, rows, record["link_gbps"])
        for axes, key in ((exchange, "p50_us"), (gather, "gather_p50_us")):
            _finish_exchange(axes, sorted({row["batch"] for row in rows}))
            values = [row[key] for row in record["rows"]]
            axes.set_ylim(0.5 * min(values), 1.5 * max(values))
        exchange.set_title(f"{num_heads} heads", fontsize=10)
        gather.set_xlabel("tokens per step (batch)")
    grid[0][0].set_ylabel("exchange + merge, us")
    grid[1][0].set_ylabel("Q gather, us")
    handles, labels = grid[0][0].get_legend_handles_labels()
    columns = min(len(labels), 3 * len(head_counts))  # as many as the width has room for
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
    hardware = f"{record['num_gpus']} x {record['hardware']}"
    figure.suptitle(
        f"{hardware}, one layer, bf16; p50, band to p95; {record['date'][:10]}", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.05 * -(-len(labels) // columns), 1, 1))
    _save(pyplot, figure, path)


def plot_prefill(record: dict[str, Any], path: Path) -> None:
    """Time to the first token over new tokens (left) and over the prefix (right), by server.

    Args:
        record: what `bench_prefill.py --json` writes.
        path: file to write.
    """
    pyplot = import_pyplot(f"--plot {path}")
    figure, (by_new, by_prefix) = pyplot.subplots(1, 2, figsize=(9.6, 4.4))
    for index, run in enumerate(record["runs"]):
        one_prompt = [row for row in run["rows"] if row["sweep"] != "prefix"]
        prefixes = [row for row in run["rows"] if row["sweep"] == "prefix"]
        style = {"color": _color(index), "marker": "o", "ms": 3.5, "label": run["label"]}
        _ttft_line(by_new, one_prompt, "new_tokens", style)
        _ttft_line(by_prefix, prefixes, "prefix_tokens", style)
    for name, line in (("measured", "-"), ("predicted", ":")):
        tokens = record["crossover"][f"{name}_new_tokens"]
        if tokens is not None:
            by_new.axvline(tokens, color="black", lw=0.8, ls=line, label=f"crossover, {name}")
    for axes, label in ((by_new, "new tokens on one prompt"), (by_prefix, "cached prefix, tokens")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}" if axes is by_prefix else "")
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    by_new.set_ylabel("time to first token, ms (p50)")
    by_new.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{record['hardware']}, {record['model']}, {record['date']}", fontsize=11)
    figure.tight_layout()
    _save(pyplot, figure, path)


def _ttft_line(axes: Any, rows: Sequence[dict[str, Any]], key: str, style: dict[str, Any]) -> None:
    ordered = sorted(rows, key=lambda row: row[key])
    axes.plot([row[key] for row in ordered], [row["ttft_p50_ms"] for row in ordered], **style)


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _decode_panel(axes: Any, shape: str, rows: Sequence[dict[str, Any]]) -> None:
    top = max((row["step_p95_ms"] for row in rows if row["step_p95_ms"]), default=1.0)
    for x, row in enumerate(rows):
        step_ms = row["step_p50_ms"]
        if step_ms is None:
            axes.text(x, 0.03 * top, "does not fit", rotation=90, ha="center", fontsize=8)
            continue
        whisker = max(0.0, row["step_p95_ms"] - step_ms)
        axes.bar(x, step_ms, color=_color(x), yerr=[[0], [whisker]], ecolor="#333333", capsize=3)
        axes.text(x, row["step_p95_ms"] + 0.02 * top, f"{step_ms:.2f}", ha="center", fontsize=8)
        if row.get("floor_ms"):
            axes.hlines(row["floor_ms"], x - 0.4, x + 0.4, colors="black", linestyles=":")
    parsed = Shape.parse(shape)
    axes.set_title(f"{parsed.batch} x {parsed.context_tokens:,} tokens", fontsize=9)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15 * top)
    if any(row.get("floor_ms") for row in rows):
        axes.set_xlabel("dotted: planner's floor", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _exchange_line(axes: Any, rows: Sequence[dict[str, Any]], key: str, backend: str) -> None:
    if not rows:
        return
    batches = [row["batch"] for row in rows]
    color = _EXCHANGE_COLORS[backend]
    label = _EXCHANGE_LABELS.get(backend, backend)
    axes.plot(batches, [row[key] for row in rows], color=color, marker="o", ms=3.5, label=label)
    if key == "p50_us":
        low, high = ([row[name] for row in rows] for name in ("p50_us", "p95_us"))
        axes.fill_between(batches, low, high, color=color, alpha=0.2, linewidth=0)


def _link_limit(axes: Any, rows: Sequence[dict[str, Any]], link_gbps: float) -> None:
    """The time that the bytes of the exchange take at the link's measured rate."""
    limit_us = {row["batch"]: row["gbps"] * row["p50_us"] / link_gbps for row in rows}
    batches = sorted(limit_us)
    times = [limit_us[batch] for batch in batches]
    axes.plot(batches, times, color="black", linestyle=":", label="link limit")


def _finish_exchange(axes: Any, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches], fontsize=8)
    axes.set_yticks([n * m for n in (0.1, 1, 10, 100, 1000) for m in (1, 2, 5)])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.25)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"figure {path} cannot be written ({error}): the folder must exist and the suffix be "
            "one that matplotlib writes. Give for example decode.png."
        ) from error
    finally:
        pyplot.close(figure)
