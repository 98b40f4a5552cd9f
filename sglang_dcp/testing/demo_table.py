"""Print the demo's report as tables of at most 80 columns."""

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dcp.testing.compare import cached_tokens
from sglang_dcp.testing.demo_report import Report
from sglang_dcp.testing.workload import Batch


def print_report(report: Report) -> None:
    """Print the tables to stdout, in at most 80 columns."""
    console = Console(width=80, highlight=False)
    backend = report.ours.ranks[0]["attention_backend"]
    comm = report.ours.ranks[0]["comm_backend"]
    console.print(
        f"[bold]tp {report.tp_size}, DCP {report.dcp_size}[/] on {report.device}, {report.dtype}, "
        f"attention {backend}, communicator {comm}"
    )
    for table in (_prompt_table(report), _server_table(report), _rank_table(report)):
        console.print()
        console.print(table)
    console.print()
    _print_verdict(report, console)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _lengths(batch: Batch) -> str:
    lengths = sorted(len(prompt) for prompt in batch.prompts)
    return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"


def _prompt_table(report: Report) -> Table:
    table = _table(
        "Same prompts to both servers",
        "prompts",
        "tokens in",
        "from cache",
        "tokens out",
        "equal",
        "|dlogprob|",
    )
    rows = zip(report.workload, report.batches, report.ours.results, strict=True)
    for batch, found, results in rows:
        table.add_row(
            batch.name,
            _lengths(batch),
            str(sum(cached_tokens(results))),
            str(found.num_tokens),
            "yes" if found.tokens_equal else f"{found.num_equal} of {found.num_prompts}",
            f"{found.max_logprob_diff:.1e}",
        )
    return table


def _server_table(report: Report) -> Table:
    upstream, ours = report.upstream, report.ours
    table = _table("Servers", "", "without DCP", f"DCP {report.dcp_size}")
    table.add_row("KV tokens it holds", *(f"{tokens:,}" for tokens in report.kv_tokens))
    table.add_row(
        "KV bytes per rank", *(f"{max(s.each_rank('kv_bytes')):,}" for s in (upstream, ours))
    )
    table.add_row("start-up", f"{upstream.startup_s:.1f} s", f"{ours.startup_s:.1f} s")
    table.add_row("all prompts", f"{upstream.generate_s:.1f} s", f"{ours.generate_s:.1f} s")
    return table


def _rank_table(report: Report) -> Table:
    with_dcp = f"DCP {report.dcp_size}"
    table = _table(
        "KV rows of each rank, read from its tensors",
        "rank",
        "without DCP: held",
        "written",
        f"{with_dcp}: held",
        "written",
    )
    columns = [
        served.each_rank(key)
        for served in (report.upstream, report.ours)
        for key in ("kv_rows_allocated", "kv_rows_written")
    ]
    for rank, row in enumerate(zip(*columns, strict=True)):
        table.add_row(str(rank), *(f"{value:,}" for value in row))
    return table


def _print_verdict(report: Report, console: Console) -> None:
    if report.problems:
        console.print(f"[bold red]FAIL[/] {len(report.problems)} difference(s)")
        for problem in report.problems:
            console.print(f"  {problem}", markup=False)
        return
    total = report.total
    near_ties = len(total.differences)
    same = (
        f"{total.num_tokens} tokens equal"
        if not near_ties
        else f"{total.num_equal}/{total.num_prompts} prompts equal, the others part at near ties"
    )
    gain = report.kv_tokens[1] / report.kv_tokens[0]
    console.print(
        f"[bold green]PASS[/] {same}, largest logprob difference {total.max_logprob_diff:.1e};\n"
        f"     {gain:.1f} x the KV tokens in the same bytes per rank"
    )
