"""The plan as a picture: memory and step time over the context, one line per dcp size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dcp.planner.ledgers import memory_ledger
from sglang_dcp.planner.plan import Plan, attention_step_ms, predicted_step_ms
from sglang_dcp.planner.units import format_count

_COLORS = ("#4c566a", "#2e7ab8", "#2a9d6f", "#d1495b", "#8f5fbf", "#c98a1b")


def import_pyplot(asked_by: str) -> Any:
    """Import matplotlib for drawing into files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            f"{asked_by} needs matplotlib, which is not installed: it is an extra of this package. "
            "Install it with: pip install 'sglang-dcp[plot]', or leave the option out."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw the plan into ``path``; the suffix picks the format (PNG, SVG, PDF).

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = import_pyplot(f"--plot {path}")
    figure, (memory_axes, step_axes) = pyplot.subplots(1, 2, figsize=(11, 4.4))
    contexts = _contexts(plan)
    _draw_memory(plan, memory_axes, contexts)
    _draw_step(plan, step_axes, contexts)
    request = plan.request
    figure.suptitle(
        f"{request.model.name}, {request.num_gpus} x {request.gpu.name}, TP {request.tp_size}, "
        f"batch {request.batch}, {request.kv_dtype} KV"
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--plot {path} cannot be written ({error}): the folder must exist and the suffix be "
            "one that matplotlib writes. Give for example plan.png."
        ) from error
    finally:
        pyplot.close(figure)


def _contexts(plan: Plan) -> list[int]:
    """Sixteen points per factor of ten, from 1/1000 of the asked context to 4 times of it."""
    asked = plan.request.context_tokens
    points = {max(1, round(asked * 10 ** (n / 16))) for n in range(-48, 11)}
    return sorted(points)


def _draw_memory(plan: Plan, axes: Any, contexts: list[int]) -> None:
    request = plan.request
    for option, color in zip(plan.options, _COLORS * 2, strict=False):
        kept = [
            memory_ledger(
                request.model, tokens, request.batch, option.dcp_size, request.kv_element_bytes
            ).kv_bytes_batch_per_rank
            / 1e9
            for tokens in contexts
        ]
        axes.plot(contexts, kept, color=color, label=f"dcp {option.dcp_size}")
    budget = request.kv_budget_bytes_per_gpu / 1e9
    unknown = request.weight_bytes_per_gpu is None
    label = "free HBM before weights" if unknown else "free HBM"
    axes.axhline(budget, color="black", linestyle="--", linewidth=1, label=label)
    axes.set_yscale("log")
    _finish(plan, axes, "KV cache per GPU", "GB")


def _draw_step(plan: Plan, axes: Any, contexts: list[int]) -> None:
    known = plan.chosen.predicted_step_ms is not None
    step_ms = predicted_step_ms if known else attention_step_ms
    for option, color in zip(plan.options, _COLORS * 2, strict=False):
        times = [step_ms(plan.request, option.dcp_size, tokens) for tokens in contexts]
        axes.plot(contexts, times, color=color, label=f"dcp {option.dcp_size}")
    axes.set_yscale("log")
    _finish(plan, axes, "Predicted step" if known else "Predicted MLA attention + exchange", "ms")


def _label_2_and_5(value: float, _: int) -> str:
    """Minor ticks of a log axis that are worth a number."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _finish(plan: Plan, axes: Any, title: str, unit: str) -> None:
    axes.set_xscale("log")
    axes.axvline(plan.request.context_tokens, color="black", linestyle=":", linewidth=1)
    axes.annotate(
        format_count(plan.request.context_tokens),
        (plan.request.context_tokens, 1.01),
        xycoords=("data", "axes fraction"),
        ha="center",
        fontsize=8,
    )
    axes.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(_label_2_and_5)
    axes.set_title(title, pad=14)
    axes.set_xlabel("context per sequence, tokens")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25, which="major")
    axes.legend(frameon=False, fontsize=8)
