"""The planner's numbers in and out, its start-up block, and what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dcp.planner import startup_block, units


@pytest.mark.parametrize(
    ("text", "value"),
    [("1M", 10**6), ("128k", 128_000), ("128Ki", 131_072), ("1.5M", 1_500_000), ("7", 7),
     ("1_000", 1000), ("2Mi", 2**21), ("1G", 10**9)],
)  # fmt: skip
def test_counts_with_suffixes(text, value):
    assert units.parse_count(text, "--context") == value


@pytest.mark.parametrize("text", ["1X", "", "M", "-1", "0", "1.5", "1e6", "nan", "1 M M", "0.1K1"])
def test_counts_that_are_refused(text):
    with pytest.raises(ValueError, match="--context"):
        units.parse_count(text, "--context")


def test_bytes_with_suffixes():
    assert units.parse_bytes("689G", "-w") == units.parse_bytes("689GB", "-w") == 689 * 10**9
    assert units.parse_bytes("2GiB", "-w") == 2 * 2**30
    assert units.parse_bytes("0", "-w") == 0
    with pytest.raises(ValueError, match="-w 5Q"):
        units.parse_bytes("5Q", "-w")


def test_numbers_out():
    assert units.format_bytes(1152) == "1,152 B"
    assert units.format_bytes(27_648_000_000) == "27.6 GB"
    assert units.format_bytes(999_990_000) == "1 GB"
    assert units.format_count(999_900) == "1M"
    assert units.format_count(131_072) == "131K"
    assert units.format_capacity(592_999) == "592K"
    assert units.format_capacity(12) == "12"
    assert [units.format_ms(x) for x in (0.0259, 1.5, 47.2, 369, 61_220)] == [
        "25.9 us", "1.5 ms", "47.2 ms", "369 ms", "61.2 s",
    ]  # fmt: skip


def test_startup_block_names_every_number():
    values = dict(  # noqa: C408
        dcp_size=8,
        logical_capacity_tokens=37_922_304,
        rows_per_rank=4_740_288,
        kv_bytes_per_rank=4_740_288 * 27_648,
        communicator="nvlink",
        attention_backend="flashmla",
        tpot_floor_ms=0.94,
        floor_batch=1,
        floor_context_tokens=1_000_000,
    )
    lines = startup_block(**values)
    text = "\n".join(lines)
    for part in (
        "DCP is active", "8 ranks", "37,922,304 tokens", "4,740,288", "131 GB", "131,059,482,624",
        "nvlink", "flashmla", "0.94 ms at 1 x 1M tokens",
    ):  # fmt: skip
        assert part in text
    assert "replicated" not in text
    lines = startup_block(**values, replicated_q_bytes=3_456_000_000)
    assert re.search(r"replicated Q weights +3.46 GB \(3,456,000,000 bytes\) per rank", lines[-1])
    starts = {re.search(r"\S {2,}(\S)", line).start(1) for line in lines[1:]}
    assert len(starts) == 1  # values aligned
    assert max(map(len, lines)) <= 100


def test_planner_imports_neither_torch_nor_sglang():
    code = (
        "import sys, sglang_dcp.planner, sglang_dcp.cli_plan\n"
        "bad = {'torch', 'sglang', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
