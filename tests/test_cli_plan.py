"""``sglang-dcp plan`` as a user meets it: JSON on stdout, tables in 80 columns, refusals."""

from __future__ import annotations

import argparse
import builtins
import json
import sys
from pathlib import Path

import pytest

from sglang_dcp.cli_plan import add_plan_parser, main, run_plan
from sglang_dcp.planner import GPUS, preset_names

ARTICLE = "--model kimi-k3 --gpus 8 --gpu h200 --context 1M --batch 64 --tp 8 --dcp-size 8"
DEMANDED_KEYS = {
    "kv_bytes_per_token_per_layer": 1152,
    "kv_bytes_total": 27_648_000_000,
    "kv_bytes_per_rank": 3_456_000_000,
    "gather_q_bytes": 7_077_888,
    "gather_q_sent_bytes_per_rank": 6_193_152,
    "exchange_bytes": 6_340_608,
    "exchange_sent_bytes_per_rank": 5_548_032,
    "all_reduce_bytes": 917_504,
    "all_reduce_sent_bytes_per_rank": 1_605_632,
    "step_bytes_per_rank": 320_323_584,
    "step_bytes_per_node": 2_562_588_672,
}


def run(capsys, command: str) -> tuple[int, str, str]:
    code = main(command.split())
    out, err = capsys.readouterr()
    return code, out, err


def test_json_of_the_article(capsys):
    code, out, err = run(capsys, ARTICLE + " --json")
    got = json.loads(out)
    assert (code, err) == (0, "")
    assert {key: got[key] for key in DEMANDED_KEYS} == DEMANDED_KEYS
    assert got["kv_bytes_batch"] == 1_769_472_000_000
    assert got["fits"] is False
    assert got["min_dcp_size"] is None
    assert 46 < got["tpot_floor_ms"] < 50


def test_json_numbers_carry_units(capsys):
    """Every float in the flat part names its unit, so nobody has to guess."""
    _, out, _ = run(capsys, "--model deepseek-v3 --context 128K --batch 16 --json")
    for key, value in json.loads(out).items():
        if isinstance(value, float):
            assert key.endswith(
                ("_ms", "_us", "_ranks", "_tokens", "_per_byte", "_mha", "_static")
            ), key


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "command",
    [
        ARTICLE,
        "--model deepseek-v3 --context 128K --batch 16",
        "--model deepseek-v2-lite --context 4K --gpus 1",
        "--model kimi-k2 --context 10M --batch 200 --gpu h100 --gpus 16 --dcp-comm-backend ag_rs",
        "--model kimi-linear-48b --context 1M --batch 4 --gpu h20 --tp 4 --kv-dtype fp8_e4m3",
    ],
)
def test_table_fits_the_terminal_and_truncates_nothing(capsys, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(capsys, command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= width
    assert "\u2026" not in out  # rich's ellipsis
    for heading in ("Ledger 1", "Walls", "Choices", "Advice"):
        assert heading in out


def test_table_shows_both_counts_and_the_articles_rounding(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, ARTICLE)
    for figure in ("1,152 B", "27.6 GB", "3.46 GB", "3.45 GB", "7.08 MB", "6.19 MB", "6.34 MB",
                   "5.55 MB", "6.32 MB", "5.53 MB", "918 kB", "1.61 MB", "320 MB", "2.56 GB",
                   "43x"):  # fmt: skip
        assert figure in out, figure


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("--model nope --context 1M", ["--model nope", "presets are", "Name one"]),
        ("--model kimi-k3 --context 1M --gpu rtx", ["--gpu rtx", "the table holds", "Name one"]),
        ("--model kimi-k3 --context 1X", ["--context 1X", "suffix K, M, G", "Write"]),
        ("--model kimi-k3 --context 1M --batch 0", ["--batch 0", "at least 1", "Write"]),
        ("--model kimi-k3 --context 1M --tp 4 --dcp-size 8", ["--dcp-size 8", "4 % 8 = 4", "Use"]),
        ("--model kimi-k3 --context 1M --dcp-size 3", ["--dcp-size 3", "8 % 3 = 2", "Use"]),
        ("--model kimi-k3 --context 1M --mem-fraction x", ["--mem-fraction x", "share", "Give"]),
        ("--model kimi-k3 --context 1M --constants nope", ["--constants nope", "JSON", "Give"]),
        ("--model kimi-k3 --context 1M --weight-bytes 5Q", ["--weight-bytes 5Q", "GiB", "Write"]),
    ],
)
@pytest.mark.parametrize("json_flag", ["", " --json"])
def test_user_errors_have_three_parts_and_exit_2(capsys, command, parts, json_flag):
    code, out, err = run(capsys, command + json_flag)
    assert (code, out) == (2, "")
    assert err.startswith("sglang-dcp plan: error: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def test_config_that_is_not_json(capsys, tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{")
    code, out, err = run(capsys, f"--model {tmp_path} --context 1M")
    assert (code, out) == (2, "")
    assert "is not JSON" in err


def test_missing_required_options_exit_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--model", "kimi-k3"])
    assert caught.value.code == 2
    assert "--context" in capsys.readouterr().err


def test_help_names_every_preset_and_gpu(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for name in (*preset_names(), *GPUS):
        assert name in text


def test_as_a_sub_command(capsys):
    parser = argparse.ArgumentParser(prog="sglang-dcp")
    add_plan_parser(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["plan", *ARTICLE.split(), "--json"])
    assert args.run is run_plan
    assert args.run(args) == 0
    assert json.loads(capsys.readouterr().out)["kv_bytes_total"] == 27_648_000_000


def test_server_spellings_of_the_options(capsys):
    _, plain, _ = run(capsys, "--model deepseek-v3 --context 64K --tp 4 --dcp-size 2 --json "
                      "--kv-dtype fp8_e4m3 --mem-fraction 0.9")  # fmt: skip
    _, server, _ = run(capsys, "--model deepseek-v3 --context 64K --tp-size 4 --json "
                       "--decode-context-parallel-size 2 --kv-cache-dtype fp8_e4m3 "
                       "--mem-fraction-static 0.9")  # fmt: skip
    assert json.loads(plain) == json.loads(server)


def test_plot_without_matplotlib_is_a_user_error(capsys, monkeypatch, tmp_path):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    target = tmp_path / "plan.png"
    code, out, err = run(capsys, f"{ARTICLE} --plot {target}")
    assert (code, out) == (2, "")
    assert "needs matplotlib" in err
    assert "sglang-dcp[plot]" in err
    assert not target.exists()


def test_plot_writes_a_png(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    target = tmp_path / "plan.png"
    code, out, err = run(capsys, f"{ARTICLE} --json --plot {target}")
    assert code == 0
    assert json.loads(out)["dcp_size"] == 8
    assert str(target) in err
    assert target.read_bytes().startswith(b"\x89PNG")
    code, out, err = run(capsys, f"{ARTICLE} --plot {tmp_path / 'no' / 'folder.png'}")
    assert (code, out) == (2, "")
    assert "cannot be written" in err


def test_json_needs_neither_rich_nor_matplotlib(capsys, monkeypatch):
    for name in ("rich", "rich.console", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, _ = run(capsys, ARTICLE + " --json")
    assert code == 0
    assert json.loads(out)["batch"] == 64


def test_source_files_are_ascii():
    root = Path(__file__).resolve().parents[1] / "sglang_dcp"
    for path in [root / "cli_plan.py", *(root / "planner").glob("*.py")]:
        path.read_text(encoding="ascii")
