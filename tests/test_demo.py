"""`sglang-dcp demo`: what it refuses, what it calls a difference, and one run of the command."""

import copy
import io
import json
import random
from contextlib import redirect_stdout

import pytest
from test_compare import make_result

from sglang_dcp.cli import main
from sglang_dcp.layout import local_len
from sglang_dcp.testing.demo_report import STAGES, Served, make_report
from sglang_dcp.testing.demo_table import print_report
from sglang_dcp.testing.observe import row_problems
from sglang_dcp.testing.workload import stripe_workload

TP, C, NEW = 4, 2, 3


@pytest.fixture
def workload(fresh_seed):
    return stripe_workload(C, C, 64, 512, fresh_seed)


def fake_server(workload, dcp_size: int, results=None) -> Served:
    """A server as it should be; `results` are those of another one."""
    rng = random.Random(1)
    results = results or [[make_result(NEW, rng) for _ in batch.prompts] for batch in workload]
    lens = []
    for batch, answers in zip(workload, results, strict=True):
        for prompt, answer in zip(batch.prompts, answers, strict=True):
            hit = (len(prompt) - 1) // dcp_size * dcp_size if batch.repeats_last else 0
            answer["meta_info"]["cached_tokens"] = hit
            lens.append(len(prompt) + NEW - 1 - hit)
    ranks = [
        {
            "rank": rank,
            "kv_bytes": 4097 * 320,
            "kv_rows_allocated": 4096,
            "kv_tokens": 4096 * dcp_size,
            "kv_rows_written": sum(local_len(n, rank % dcp_size, dcp_size) for n in lens),
            "attention_backend": "torch_mla",
            "comm_backend": "a2a",
            "counts": dict.fromkeys(STAGES, 7),
        }
        for rank in range(TP)
    ]
    return Served(results, ranks, 1.0, 2.0)


def report_of(workload, upstream: Served, ours: Served, dtype: str = "float32"):
    return make_report(
        workload,
        upstream,
        ours,
        tp_size=TP,
        dcp_size=C,
        device="cpu",
        dtype=dtype,
        widened_page_tokens=C,
    )


@pytest.fixture
def pair(workload) -> tuple[Served, Served]:
    upstream = fake_server(workload, 1)
    return upstream, fake_server(workload, C, copy.deepcopy(upstream.results))


def test_agreement_passes_and_json_has_the_keys(workload, pair):
    report = report_of(workload, *pair)
    assert report.problems == ()
    found = json.loads(json.dumps(report.as_json()))
    assert found["ok"] is True
    assert found["tokens_equal"] is True
    assert found["kv_tokens_dcp"] == C * found["kv_tokens_upstream"]
    assert len(found["kv_rows_per_rank"]) == len(found["kv_bytes_per_rank"]) == TP
    assert set(found) >= {
        *("max_logprob_diff", "kv_rows_written_per_rank", "cached_tokens", "dcp_size", "device"),
        *("attention_backend", "comm_backend"),
    }


def test_table_fits_80_columns(workload, pair):
    with redirect_stdout(io.StringIO()) as out:
        print_report(report_of(workload, *pair))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("PASS") for line in lines)
    for batch in workload:  # no cell is broken over two lines
        assert any(line.startswith(batch.name) and "yes" in line for line in lines), batch.name


def change_token(ours: Served) -> None:
    ours.results[3][0]["output_ids"][1] += 1


def change_logprob(ours: Served) -> None:
    ours.results[3][0]["meta_info"]["output_token_logprobs"][1][0] += 0.01


def change_bytes(ours: Served) -> None:
    ours.ranks[1]["kv_bytes"] += 3 * C * 320


def change_capacity(ours: Served) -> None:
    ours.ranks[1]["kv_tokens"] //= 2


def lose_cache(ours: Served) -> None:
    ours.results[5][0]["meta_info"]["cached_tokens"] = 0


def store_everywhere(ours: Served) -> None:
    for rank in ours.ranks:
        rank["kv_rows_written"] *= C


def skip_stage(ours: Served) -> None:
    del ours.ranks[2]["counts"]["exchange_merge"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_token, "prompt 3: token 1 is"),
        (change_logprob, "logprobs differ by 0.01"),
        (change_bytes, "pool bytes per rank differ"),
        (change_capacity, "KV tokens"),
        (lose_cache, "the radix cache gave [0]"),
        (store_everywhere, "expected"),
        (skip_stage, "rank 2 never ran exchange_merge"),
    ],
)
def test_every_difference_is_a_problem(workload, pair, change, message):
    upstream, ours = pair
    change(ours)
    problems = report_of(workload, upstream, ours).problems
    assert any(message in problem for problem in problems), problems


def test_bfloat16_excuses_near_ties_only(workload, pair):
    upstream, ours = pair
    change_token(ours)
    assert report_of(workload, upstream, ours, "bfloat16").problems == ()  # its gap is 0.25
    top = upstream.results[3][0]["meta_info"]["output_top_logprobs"][1]
    top[1][0] -= 3
    assert len(report_of(workload, upstream, ours, "bfloat16").problems) == 1


def test_rows_of_every_group_are_judged():
    good = [5, 5, 4, 4]
    assert row_problems([*good, *good], 4, 1, 18, 4) == []
    for bad in ([5, 4, 5, 4], [9, 5, 4, 0], [5, 5, 5, 5], [2, 2, 1, 1]):
        assert row_problems([*good, *bad], 4, 1, 18, 4), bad


def test_workload_starts_with_different_tokens(workload):
    firsts = [p[0] for batch in workload if not batch.repeats_last for p in batch.prompts]
    assert len(set(firsts)) == len(firsts)
    again = [batch for batch in workload if batch.repeats_last]
    assert len(again[0].prompts[0]) > C


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dcp-size", "3"], "power of two"),
        (["--tp", "2", "--dcp-size", "4"], "does not fit"),
        (["--tp", "3"], "2, 4, 8 or 16"),
        (["--dcp-size", "1"], "turns DCP off"),
    ],
)
def test_wrong_sizes_exit_2(arguments, message, capsys):
    assert main(["demo", "--device", "cpu", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    assert main(["demo", "--device", "cpu", "--json", "--folder", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["tokens_equal"] is True
    assert found["max_logprob_diff"] < 1e-4
    assert found["kv_bytes_per_rank"] == found["kv_bytes_per_rank_upstream"]
    assert "server with DCP 2: up in" in captured.err
