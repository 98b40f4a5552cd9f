"""The planner's ledgers against the articles' figures and against counting by hand."""

from __future__ import annotations

import random

import pytest
from planner_requests import K3, ask

from sglang_dcp.planner import ledgers, load_model, make_plan, plan_json
from sglang_dcp.planner.article import ARTICLE_EXAMPLE

# --- the article's example --------------------------------------------------------------------


def test_article_example_exactly():
    got = plan_json(make_plan(ask(dcp_size=8)))
    exact = {
        "kv_bytes_per_token_per_layer": 1152,
        "kv_bytes_total": 576 * 2 * 24 * 10**6,  # 27.648 GB
        "kv_bytes_per_rank": 576 * 2 * 24 * 125_000,  # 3.456 GB
        "gather_q_bytes": 64 * 96 * 576 * 2,
        "gather_q_sent_bytes_per_rank": 64 * 96 * 576 * 2 * 7 // 8,
        "exchange_bytes": 64 * 96 * (512 + 4) * 2,
        "exchange_sent_bytes_per_rank": 64 * 96 * (512 + 4) * 2 * 7 // 8,
        "all_reduce_bytes": 64 * 7168 * 2,
        "all_reduce_sent_bytes_per_rank": 64 * 7168 * 2 * 2 * 7 // 8,
        "step_bytes_per_rank": 320_323_584,
        "step_bytes_per_node": 2_562_588_672,
    }
    assert {key: got[key] for key in exact} == exact


# The article rounds early: 3.45 is 27.6 / 8, 2.5 is 8 x 320 MB cut off, "1.125 KB" is KiB.
@pytest.mark.parametrize("key", list(ARTICLE_EXAMPLE))
def test_article_prints_what_we_compute(key):
    got = plan_json(make_plan(ask(dcp_size=8)))
    assert got["article_prints"][key] == ARTICLE_EXAMPLE[key]
    assert got[key] == pytest.approx(ARTICLE_EXAMPLE[key], rel=0.03)


def test_wire_count_beside_the_article_count():
    got = plan_json(make_plan(ask(dcp_size=8)))
    assert got["exchange_bytes"] == 6_340_608
    assert got["wire_exchange_bytes"] == 64 * 96 * (512 * 2 + 4) == 6_316_032
    assert got["wire_exchange_sent_bytes_per_rank"] == 6_316_032 * 7 // 8
    assert got["wire_step_bytes_per_rank"] == (6_193_152 + 5_526_528 + 1_605_632) * 24
    assert got["wire_step_bytes_per_node"] == 8 * got["wire_step_bytes_per_rank"]


def test_article_prints_only_for_its_own_example():
    assert plan_json(make_plan(ask(dcp_size=4)))["article_prints"] is None
    assert plan_json(make_plan(ask(dcp_size=8, batch=63)))["article_prints"] is None


def test_batch_of_the_article_does_not_fit_eight_h200():
    plan = make_plan(ask(dcp_size=8))
    got = plan_json(plan)
    assert got["kv_bytes_batch"] == 64 * got["kv_bytes_total"] == 1_769_472_000_000
    assert got["fits"] is False
    assert got["min_dcp_size"] is None
    assert got["short_bytes_per_rank"] == 64 * 3_456_000_000 - got["kv_budget_bytes_per_gpu"]
    assert "short by" in got["advice"][0]
    assert "would fit" in got["advice"][0]
    assert make_plan(ask(batch=plan.chosen.max_batch, dcp_size=8)).chosen.short_bytes_per_rank == 0
    assert make_plan(ask(batch=plan.chosen.max_batch + 1, dcp_size=8)).chosen.fits is False


def test_compression_and_seventy_gigabytes():
    assert K3.mha_elements_per_token_per_layer == 24576
    assert K3.latent_dim == 576
    assert round(K3.compression_vs_mha) == 43
    v3 = load_model("deepseek-v3")
    assert v3.num_mla_layers == 61
    per_token = ledgers.kv_bytes_per_token(v3, 2)
    assert per_token * 10**6 == pytest.approx(70e9, rel=0.005)


# --- ledgers ----------------------------------------------------------------------------------


def test_rows_on_the_fullest_rank_by_counting_owners():
    for _ in range(200):
        length, dcp_size = random.randint(1, 300), random.choice([1, 2, 4, 8, 16])
        owners = [position % dcp_size for position in range(length)]
        most = max(owners.count(rank) for rank in range(dcp_size))
        assert ledgers.rows_per_rank(length, dcp_size) == most


@pytest.mark.parametrize("dcp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["nvlink", "a2a"])
def test_sent_bytes_by_walking_over_peers(name, dcp_size):
    """Every rank pushes its heads to each peer, and to each peer the partials of its heads."""
    batch, tp_size = random.randint(1, 99), 8
    own = 96 // tp_size
    q_bytes = sum(batch * own * 576 * 2 for peer in range(dcp_size) if peer != 0)
    o_bytes = sum(batch * own * (512 * 2 + 4) for peer in range(dcp_size) if peer != 0)
    got = ledgers.comm_ledger(name, K3, batch, tp_size, dcp_size, 8)
    assert got.gather_q_sent_bytes_per_rank == q_bytes
    assert got.exchange_sent_bytes_per_rank == o_bytes


def test_ag_rs_moves_float32_and_every_lse():
    """128 heads on 8 ranks: 262,144 bytes into the reduce-scatter, 512 of LSE from each rank."""
    got = ledgers.comm_ledger("ag_rs", load_model("deepseek-v3"), 1, 8, 8, 8)
    assert got.exchange_sent_bytes_per_rank == 262_144 * 7 // 8 + 512 * 7
    assert got.gather_q_bytes == 147_456
    wire = ledgers.comm_ledger("a2a", load_model("deepseek-v3"), 1, 8, 8, 8)
    assert wire.exchange_bytes == 131_584


def test_dcp_smaller_than_tp_gathers_fewer_heads():
    assert [ledgers.gathered_heads(K3, 8, c) for c in (1, 2, 4, 8)] == [12, 24, 48, 96]
    half = ledgers.comm_ledger("seed", K3, 64, 8, 4, 8)
    whole = ledgers.comm_ledger("seed", K3, 64, 8, 8, 8)
    assert half.gather_q_bytes * 2 == whole.gather_q_bytes
    assert half.all_reduce_sent_bytes_per_rank == whole.all_reduce_sent_bytes_per_rank


def test_fp8_halves_the_cache_and_not_the_query():
    narrow, wide = (make_plan(ask(dcp_size=8, kv_dtype=d)) for d in ("fp8_e4m3", "bf16"))
    assert narrow.memory.kv_bytes_total * 2 == wide.memory.kv_bytes_total
    assert narrow.comm == wide.comm


def test_dcp_1_moves_only_the_all_reduce():
    ledger = ledgers.comm_ledger("nvlink", K3, 64, 8, 1, 8)
    assert ledger.gather_q_sent_bytes_per_rank == ledger.exchange_sent_bytes_per_rank == 0
    assert ledger.kernels_per_layer == 0
    assert ledger.step_bytes_per_rank == 24 * ledger.all_reduce_sent_bytes_per_rank > 0
