"""A plan as tables for a terminal of 80 columns or more."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sglang_dcp.planner.advice import advice
from sglang_dcp.planner.article import article_prints
from sglang_dcp.planner.plan import DcpOption, Plan, communicator_us
from sglang_dcp.planner.units import format_bytes, format_capacity, format_count, format_ms


def print_plan(plan: Plan, console: Console) -> None:
    """Write the whole plan to ``console``."""
    _print_header(plan, console)
    tables = [_memory_table(plan), _walls_table(plan), _options_table(plan)]
    if plan.dcp_size > 1:
        tables[1:1] = [_stage_table(plan), _communicator_table(plan)]
    for table in tables:
        console.print()
        console.print(table)
    _print_notes(plan, console)
    console.print()
    console.print("[bold]Advice[/]")
    for line in advice(plan):
        _print_bullet(console, line)


def _print_header(plan: Plan, console: Console) -> None:
    request = plan.request
    model = request.model
    console.print(
        f"[bold]{model.name}[/] on {request.num_gpus} x {request.gpu.name}, TP {request.tp_size}, "
        f"[bold]DCP {plan.dcp_size}[/], {request.batch:,} x {format_count(request.context_tokens)} "
        f"tokens, {request.kv_dtype} KV, communicator {request.chosen_communicator}",
        highlight=False,
    )
    weights = request.weight_bytes_per_gpu
    known = "weights unknown" if weights is None else f"weights {format_bytes(weights)}"
    console.print(
        f"{model.num_mla_layers} MLA layers, {model.num_attention_heads} heads, hidden "
        f"{model.hidden_size}; per GPU: {format_bytes(request.gpu.hbm_bytes)} HBM, memory fraction "
        f"{request.mem_fraction_static:g}, {known}",
        style="dim",
        highlight=False,
    )


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _memory_table(plan: Plan) -> Table:
    memory = plan.memory
    saved = "" if plan.dcp_size == 1 else f" / {plan.dcp_size}"
    table = _table("Ledger 1: KV cache", "", "one sequence", "batch")
    batch = plan.request.batch
    per_layer = memory.kv_bytes_per_token_per_layer
    table.add_row("per token and layer", format_bytes(per_layer), "")
    table.add_row(
        "  the same heads as MHA",
        format_bytes(memory.mha_bytes_per_token_per_layer),
        f"{memory.compression_vs_mha:.0f}x more",
    )
    table.add_row("per token", format_bytes(memory.kv_bytes_per_token), "")
    table.add_row(
        "whole model", format_bytes(memory.kv_bytes_total), format_bytes(memory.kv_bytes_batch)
    )
    table.add_row(
        "per GPU without DCP",
        format_bytes(memory.kv_bytes_per_rank_without_dcp),
        format_bytes(memory.kv_bytes_per_rank_without_dcp * batch),
    )
    table.add_row(
        f"per GPU with DCP{saved}",
        format_bytes(memory.kv_bytes_per_rank),
        format_bytes(memory.kv_bytes_batch_per_rank),
        style="bold",
    )
    return table


def _stage_table(plan: Plan) -> Table:
    """Seed's count and wire format of the three stages, per layer and step."""
    wire, seed = plan.comm[plan.request.chosen_communicator], plan.seed_comm
    table = _table(
        "Ledger 2: bytes per layer and step (bf16)",
        "stage",
        "article: whole",
        "sent/GPU",
        f"{wire.name}: whole",
        "sent/GPU",
    )
    for label, key in (
        ("4 gather Q", "gather_q"),
        ("6 exchange o, lse", "exchange"),
        ("8 all-reduce", "all_reduce"),
    ):
        figures = [
            format_bytes(getattr(ledger, key + suffix))
            for ledger in (seed, wire)
            for suffix in ("_bytes", "_sent_bytes_per_rank")
        ]
        table.add_row(label, *figures)
    table.add_section()
    table.add_row(
        f"step, {plan.request.model.num_mla_layers} layers",
        f"node {format_bytes(seed.step_bytes_per_node)}",
        format_bytes(seed.step_bytes_per_rank),
        f"node {format_bytes(wire.step_bytes_per_node)}",
        format_bytes(wire.step_bytes_per_rank),
    )
    return table


def _communicator_table(plan: Plan) -> Table:
    request = plan.request
    table = _table(
        "Communicators", "name", "sent/GPU, step", "node, step", "kernels + NCCL", "us per layer"
    )
    for name, ledger in plan.comm.items():
        times = sum(communicator_us(request, plan.dcp_size, name))
        about = "~" if request.constants.exchange[name].is_estimate else ""
        table.add_row(
            name + (" *" if name == request.chosen_communicator else ""),
            format_bytes(ledger.step_bytes_per_rank),
            format_bytes(ledger.step_bytes_per_node),
            f"{ledger.kernels_per_layer} + {ledger.collectives_per_layer}",
            f"{about}{times:.1f}",
        )
    table.caption = "* chosen; us per layer: gather, exchange and merge; ~ estimated, not measured"
    table.caption_justify = "left"
    return table


def _walls_table(plan: Plan) -> Table:
    request, option, wall = plan.request, plan.chosen, plan.capacity_wall_ranks
    table = _table(f"Walls at dcp {plan.dcp_size}", "wall", "value", "from")
    at_most = " at most" if request.weight_bytes_per_gpu is None else ""
    table.add_row(
        "capacity",
        "no room" if wall is None else f"N_d >= {wall:,.3g}",
        f"{format_bytes(plan.memory.kv_bytes_batch)} / "
        f"{format_bytes(request.kv_budget_bytes_per_gpu)}{at_most}",
    )
    table.add_row(
        "bandwidth",
        format_ms(option.bandwidth_floor_ms),
        f"{format_bytes(option.kv_bytes_batch_per_rank)} at "
        f"{format_bytes(request.gpu.hbm_bytes_per_s)}/s",
    )
    table.add_row(
        "compute",
        format_ms(option.compute_floor_ms),
        f"{option.num_heads} heads at {request.gpu.bf16_flops_per_s / 1e12:,.0f} TFLOP/s",
    )
    table.add_row(
        "exchange",
        format_ms(option.exchange_ms),
        f"{option.gather_us:.1f} + {option.exchange_us:.1f} us x "
        f"{request.model.num_mla_layers} layers",
    )
    table.add_row(
        "TPOT floor", format_ms(option.tpot_floor_ms), "larger wall + exchange", style="bold"
    )
    if option.predicted_step_ms is not None:
        table.add_row("predicted step", format_ms(option.predicted_step_ms), "measured constants")
    return table


def _options_table(plan: Plan) -> Table:
    request = plan.request
    step = "step" if plan.chosen.predicted_step_ms is not None else "attn. step"
    table = _table(
        f"Choices for {request.batch:,} x {format_count(request.context_tokens)} tokens",
        "dcp",
        "KV/GPU",
        "capacity",
        "context",
        "batch",
        "floor",
        step,
        "fits",
    )
    for option in plan.options:
        style = "bold" if option.dcp_size == plan.dcp_size else None
        table.add_row(*_option_row(option), style=style)
    table.caption = _options_caption(plan, step)
    table.caption_justify = "left"
    return table


def _option_row(option: DcpOption) -> tuple[str, ...]:
    step_ms = option.predicted_step_ms
    fits = {True: "[green]yes[/]", None: "unknown"}.get(
        option.fits, f"[red]-{format_bytes(option.short_bytes_per_rank)}[/]"
    )
    return (
        str(option.dcp_size),
        format_bytes(option.kv_bytes_batch_per_rank),
        format_capacity(option.capacity_tokens),
        format_capacity(option.max_context_tokens),
        f"{option.max_batch:,}",
        format_ms(option.tpot_floor_ms),
        format_ms(option.attention_step_ms if step_ms is None else step_ms),
        fits,
    )


def _options_caption(plan: Plan, step: str) -> str:
    text = (
        "capacity: tokens per replica; context: longest at this batch; batch: most at this context"
    )
    if plan.request.weight_bytes_per_gpu is None:
        text += ". Weights unknown: capacity, context and batch are upper bounds"
    if step != "step":
        text += "; attn. step: MLA attention and exchange only"
    return text


def _print_notes(plan: Plan, console: Console) -> None:
    printed = article_prints(plan.request, plan.dcp_size)
    if printed is None:
        return
    console.print()
    _print_bullet(
        console,
        f"The article this example comes from prints {format_bytes(printed['kv_bytes_per_rank'])} "
        f"per GPU (27.6 / 8, rounded first), {format_bytes(printed['step_bytes_per_node'])} per "
        "node and step, and counts an exchanged head as (512 + 4) x 2 bytes; our wire sends "
        "512 x 2 + 4.",
    )


def _print_bullet(console: Console, line: str) -> None:
    grid = Table.grid(padding=(0, 1))
    grid.add_row("-", Text(line))
    console.print(Padding(grid, (0, 0, 0, 0)))
