"""The planner against the articles' figures, and against counting by hand or by brute force."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dcp.planner import (
    GPUS,
    Constants,
    ExchangeTable,
    PlanRequest,
    StepConstants,
    advice,
    crossover,
    ledgers,
    load_constants,
    load_gpu,
    load_model,
    make_plan,
    plan_json,
    preset_names,
    shape_from_config,
    startup_block,
    units,
    walls,
)
from sglang_dcp.planner.article import ARTICLE_EXAMPLE
from sglang_dcp.planner.plan import attention_step_ms, break_even_context_tokens, dcp_option
from sglang_dcp.planner.presets import PRESET_CONFIGS

K3 = load_model("kimi-k3")
H200 = GPUS["h200"]


def ask(model: str = "kimi-k3", **changes) -> PlanRequest:
    fields = {
        "model": load_model(model), "gpu": H200, "num_gpus": 8, "tp_size": 8,
        "context_tokens": 10**6, "batch": 64,
    }  # fmt: skip
    return PlanRequest(**(fields | changes))


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


# --- walls ------------------------------------------------------------------------------------


def test_bandwidth_wall_is_the_articles_formula():
    option = make_plan(ask(dcp_size=8)).chosen
    assert option.bandwidth_floor_ms == pytest.approx(1.769472e12 / (8 * 4.8e12) * 1e3)
    expected = max(option.bandwidth_floor_ms, option.compute_floor_ms) + option.exchange_ms
    assert option.tpot_floor_ms == pytest.approx(expected)


def test_capacity_wall_and_smallest_dcp():
    request = ask("deepseek-v3", context_tokens=128_000, batch=16)
    plan = make_plan(request)
    wall = plan.memory.kv_bytes_batch / request.kv_budget_bytes_per_gpu
    assert plan.capacity_wall_ranks == pytest.approx(wall)
    assert 2 < wall <= 4
    assert plan.min_dcp_size == 4
    assert [option.fits for option in plan.options] == [False, False, True, True]


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite", "kimi-linear-48b"])
def test_limits_are_tight(model):
    """Longest context and largest batch fit; one more does not."""
    request = ask(model, batch=random.randint(1, 40), context_tokens=random.randint(5_000, 50_000))
    for dcp_size in request.dcp_sizes:
        option = dcp_option(request, dcp_size)
        at_limit = replace(request, context_tokens=option.max_context_tokens)
        assert dcp_option(at_limit, dcp_size).fits is True
        over = replace(request, context_tokens=option.max_context_tokens + 1)
        assert dcp_option(over, dcp_size).fits is False
        assert dcp_option(replace(request, batch=option.max_batch), dcp_size).fits is True
        assert dcp_option(replace(request, batch=option.max_batch + 1), dcp_size).fits is False
        assert option.capacity_tokens == dcp_option(request, 1).capacity_tokens * dcp_size


def test_gathered_heads_stand_near_the_ridge():
    """96 heads: 2176 FLOP per head and 1152 bytes, 181 FLOP/B against 206 of H200."""
    plan = make_plan(ask(dcp_size=8))
    assert plan.attention_flops_per_byte == pytest.approx(2176 * 96 / 1152)
    assert 0.8 < plan.attention_flops_per_byte / H200.ridge_flops_per_byte < 1
    assert "memory bound" in advice(plan)[2]
    assert "compute bound" in advice(make_plan(ask(dcp_size=8, gpu=GPUS["h20"])))[2]


def test_unknown_weights_leave_fits_open_and_given_ones_decide():
    open_plan = make_plan(ask(batch=1))
    assert {option.fits for option in open_plan.options} == {None}
    assert open_plan.min_dcp_size is None
    assert "Give --weight-bytes" in advice(open_plan)[0]
    assert make_plan(ask(batch=1, weight_bytes=8 * 100 * 10**9)).min_dcp_size == 1
    assert make_plan(ask(batch=1, weight_bytes=8 * 125 * 10**9)).min_dcp_size == 8


def test_weights_too_large_is_an_answer_with_numbers():
    plan = make_plan(ask("kimi-k2", gpu=GPUS["h100"], batch=1))
    assert plan.capacity_wall_ranks is None
    assert plan.chosen.fits is False
    assert plan.chosen.capacity_tokens == plan.chosen.max_batch == 0
    assert "TP 32" in advice(plan)[0]
    json.loads(json.dumps(plan_json(plan), allow_nan=False))


def test_default_memory_fraction_is_sglangs():
    """(143771 - (512 + 8192 * 1.5 + 512 * 2 + 1024 + 1536)) / 143771 on 8 H200."""
    assert walls.default_mem_fraction(H200, 8) == round((143771 - 16384) / 143771, 3)


# --- measured times ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nvlink", "a2a", "ag_rs"])
def test_exchange_table_returns_its_own_points(name):
    table = Constants().exchange[name]
    for index, batch in enumerate(table.batches):
        got = walls.exchange_us(
            K3, table, batch=batch, num_heads=96, dcp_size=2, link_bytes_per_s=450e9
        )
        assert got == pytest.approx((table.gather_us[index], table.exchange_us[index]))


def test_exchange_grows_with_bytes_and_with_a_slower_link():
    table = Constants().exchange["nvlink"]

    def total(batch, dcp_size, link=450e9):
        heads = 12 * dcp_size
        return sum(
            walls.exchange_us(
                K3, table, batch=batch, num_heads=heads, dcp_size=dcp_size, link_bytes_per_s=link
            )
        )

    times = [total(batch, 8) for batch in (1, 3, 16, 40, 64, 100, 128, 512)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    assert total(64, 1) == 0
    # 64 tokens, 84 heads' worth sent, 2180 bytes each
    slower = 64 * 96 * 7 / 8 * 2180 * (1 / 200e9 - 1 / 450e9) * 1e6
    assert total(64, 8, 200e9) == pytest.approx(total(64, 8) + slower)


# us of one FlashMLA call on one H200: heads, batch, context
MEASURED_ATTENTION = [(48, 8, 131072, 288), (96, 8, 65536, 215), (96, 8, 131072, 411),
                      (12, 8, 131072, 282)]  # fmt: skip


@pytest.mark.parametrize(("heads", "batch", "context", "measured_us"), MEASURED_ATTENTION)
def test_attention_prediction_against_measured_kernels(heads, batch, context, measured_us):
    got = walls.attention_us(
        K3,
        H200,
        StepConstants(),
        num_heads=heads,
        tokens_per_rank=batch * context,
        kv_bytes_per_token_per_layer=1152,
    )
    assert got == pytest.approx(measured_us, rel=0.1)


# 12 layers, hidden 6144, 96 heads, all MLPs dense; ms per step of SGLang 0.5.14 with TP 2, no DCP
K3ISH = PRESET_CONFIGS["deepseek-v2-lite"] | {
    "hidden_size": 6144, "num_hidden_layers": 12, "num_attention_heads": 96, "q_lora_rank": 1536,
    "intermediate_size": 2048, "moe_intermediate_size": 512, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 12,
    "vocab_size": 4096,
}  # fmt: skip


# (dcp 1, dcp 2 with nvlink), scripts/results/bench_decode_tp2_dcp2.json
MEASURED_STEPS = {(1, 4096): (2.099, 2.216), (1, 131072): (2.253, 2.028),
                  (32, 16384): (3.384, 3.054), (8, 131072): (5.028, 4.147)}  # fmt: skip


@pytest.mark.parametrize("dcp_size", [1, 2])
@pytest.mark.parametrize("shape", MEASURED_STEPS)
def test_step_prediction_against_measured_steps(shape, dcp_size):
    model = shape_from_config(K3ISH, "12 layers", "test")
    batch, context = shape
    request = PlanRequest(
        model, H200, 2, 2, context, batch, mem_fraction=0.6, communicator="nvlink"
    )
    measured_ms = MEASURED_STEPS[shape][dcp_size - 1]
    assert dcp_option(request, dcp_size).predicted_step_ms == pytest.approx(measured_ms, rel=0.15)


def test_a_short_step_is_the_hosts():
    model = shape_from_config(K3ISH, "12 layers", "test")
    request = PlanRequest(model, H200, 2, 2, 1024, 1, mem_fraction=0.6)
    plan = make_plan(request)
    assert {option.predicted_step_ms for option in plan.options} == {2.29}
    assert plan.fastest_dcp_size == 1
    assert any("the host needs" in line for line in advice(plan))


def test_capacity_against_a_server():
    """The same model and memory fraction 0.6 gave 6.26M tokens on two H200."""
    request = PlanRequest(shape_from_config(K3ISH, "m", "test"), H200, 2, 2, 4096, 1,
                          mem_fraction=0.6)  # fmt: skip
    assert dcp_option(request, 1).capacity_tokens == pytest.approx(6.26e6, rel=0.01)


def test_break_even_is_where_the_prediction_crosses():
    request = ask("deepseek-v3", batch=4)
    for dcp_size in (2, 4, 8):
        context = break_even_context_tokens(request, dcp_size)
        assert context is not None
        assert attention_step_ms(request, dcp_size, context) <= attention_step_ms(
            request, 1, context
        )
        assert attention_step_ms(request, dcp_size, context - 1) > attention_step_ms(
            request, 1, context - 1
        )
    assert break_even_context_tokens(request, 1) is None


def test_fastest_dcp_is_1_when_short_and_8_when_long():
    assert make_plan(ask("deepseek-v3", context_tokens=1000, batch=1)).fastest_dcp_size == 1
    assert make_plan(ask("deepseek-v3", context_tokens=200_000, batch=8)).fastest_dcp_size == 8


def test_dcp_is_chosen_when_not_asked_for():
    plan = make_plan(ask("deepseek-v3", context_tokens=200_000, batch=8))
    assert plan.dcp_size == plan.fastest_dcp_size
    assert make_plan(replace(plan.request, dcp_size=2)).dcp_size == 2


# --- crossover --------------------------------------------------------------------------------


def test_gqa_threshold_and_measured_table():
    assert crossover.gqa_threshold_miss_rate(num_kv_heads=8, num_heads=128) == 0.125
    rows = {row.miss_rate: row for row in crossover.META_CROSSOVER_TABLE}
    wins = {rate: row.pass_q_ttft_ms - row.pass_kv_ttft_ms for rate, row in rows.items()}
    assert wins == {
        0.01: -124, 0.025: -64, 0.0325: -19, 0.05: -4, 0.1: 124, 0.2: 264, 0.5: 523, 1.0: 899,
    }  # fmt: skip
    assert [row.new_tokens for row in rows.values()] == [
        round(128_000 * rate) for rate in rows
    ]  # of a context of 128,000
    assert crossover.META_MEASURED_MISS_RATE == 0.05


def test_mla_crossover_by_flops_is_171_for_every_prefix():
    assert crossover.mla_crossover_flops_only_tokens(K3) == pytest.approx(131072 / 768)


@pytest.mark.parametrize("prefix", [4_000, 100_000, 1_000_000])
def test_mla_crossover_balances_both_variants(prefix):
    """Price both variants at the returned number of new tokens, from scratch."""
    constants, dcp_size, heads = StepConstants(), 8, 96
    new = crossover.mla_crossover_tokens(
        K3, H200, constants, prefix_tokens=prefix, num_heads=heads, dcp_size=dcp_size
    )
    rate, link, sent = 989e12 * constants.flops_efficiency, 450e9, 7 / 8
    own = heads / dcp_size
    pass_q = new * 2176 * heads * prefix / dcp_size / rate
    pass_q += new * heads * (576 * 2 + 512 * 2 + 4) * sent / link
    pass_kv = (new * 640 + 2 * 512 * 256) * own * prefix / rate + prefix * 1152 * sent / link
    assert pass_q == pytest.approx(pass_kv)


def test_mla_crossover_for_long_prefixes_is_a_few_hundred_new_tokens():
    """Short prefixes favour pass-KV: little to gather, while a query is 2180 bytes a head."""
    at = [
        crossover.mla_crossover_tokens(
            K3, H200, StepConstants(), prefix_tokens=prefix, num_heads=96, dcp_size=8
        )
        for prefix in (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    ]
    assert at == sorted(at)
    assert at[0] < 30
    assert 200 < at[2] < at[4] < 300


# --- models, weights, GPUs, constants ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "published_parameters", "bytes_per_parameter"),
    [
        ("deepseek-v2-lite", 15.7e9, 2),
        ("deepseek-v2", 236e9, 2),
        ("deepseek-v3", 671e9, 1),
        ("kimi-k2", 1.03e12, 1),
        ("kimi-linear-48b", 49e9, 2),
    ],
)
def test_weights_against_published_parameter_counts(
    name, published_parameters, bytes_per_parameter
):
    weights = load_model(name).weights
    assert weights.total_bytes == pytest.approx(
        published_parameters * bytes_per_parameter, rel=0.02
    )
    assert weights.bytes_per_gpu(1) == weights.total_bytes
    assert weights.bytes_per_gpu(8) > weights.total_bytes / 8  # some weights are on every rank


def test_a_step_reads_more_experts_with_more_tokens():
    weights = load_model("deepseek-v3").weights
    reads = [weights.read_bytes_per_gpu(8, batch) for batch in (1, 8, 64, 4096)]
    assert reads == sorted(reads)
    one_token = weights.routed_bytes * 8 / 256 / 8
    rest = weights.replicated_bytes + weights.sharded_bytes / 8
    assert reads[0] == pytest.approx(one_token + rest)
    assert reads[-1] == pytest.approx(weights.routed_bytes / 8 + rest, rel=1e-6)


def test_quantized_experts_keep_bf16_attention_when_ignored():
    config = PRESET_CONFIGS["deepseek-v3"] | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
            "ignore": ["re:.*self_attn.*", "lm_head"],
        }
    }
    narrow = shape_from_config(config, "int4", "test").weights
    fp8 = load_model("deepseek-v3").weights
    assert narrow.routed_bytes == pytest.approx(fp8.routed_bytes * (0.5 + 2 / 32))
    assert narrow.replicated_bytes > fp8.replicated_bytes


@pytest.mark.parametrize("as_folder", [False, True])
def test_model_from_a_config_file_or_folder(tmp_path, as_folder):
    config = PRESET_CONFIGS["deepseek-v3"] | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model(str(tmp_path if as_folder else tmp_path / "config.json"))
    assert shape.num_mla_layers == 7
    assert shape.latent_dim == 576


def test_hybrid_and_multimodal_configs():
    hybrid = load_model("kimi-linear-48b")
    assert (hybrid.num_mla_layers, hybrid.num_hidden_layers) == (7, 27)
    nested = shape_from_config({"text_config": PRESET_CONFIGS["kimi-k2"]}, "vl", "test")
    assert nested.num_attention_heads == 64
    assert nested.weights == load_model("kimi-k2").weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "hidden_size": 1}, "no kv_lora_rank"),
        ([], "no kv_lora_rank"),
        (PRESET_CONFIGS["deepseek-v3"] | {"index_topk": 2048}, "sparse attention"),
        ({"kv_lora_rank": 512, "hidden_size": 1}, "lacks num_attention_heads"),
    ],
)
def test_configs_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        shape_from_config(config, "m", "test")


def test_presets_all_plan():
    for name in preset_names():
        plan = make_plan(ask(name, context_tokens=64_000, batch=4))
        assert len(advice(plan)) >= 3
        assert plan.options[-1].dcp_size == 8


def test_gpu_rows_are_sane_and_sourced():
    for gpu in GPUS.values():
        assert gpu.source
        assert 70 * 2**30 < gpu.hbm_bytes < 300 * 10**9
        assert gpu.link_bytes_per_s < gpu.hbm_bytes_per_s < gpu.bf16_flops_per_s
    assert load_gpu("H200") is H200


def test_gpu_from_a_file(tmp_path):
    path = tmp_path / "x.json"
    data = {key: getattr(H200, key) for key in H200.__dataclass_fields__}
    path.write_text(json.dumps(data | {"name": "mine", "hbm_bytes": 5}))
    assert load_gpu(str(path)) == replace(H200, name="mine", hbm_bytes=5)
    for broken in (data | {"more": 1}, data | {"hbm_bytes": "5"}, data | {"hbm_bytes": 0}, [1]):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="--gpu"):
            load_gpu(str(path))


def test_constants_from_a_file_change_the_prediction(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps(
            {
                "step": {"layer_overhead_us": 10.0},
                "exchange": {"nvlink": {"batches": [1, 64], "gather_us": [1, 2],
                                        "exchange_us": [3, 4], "source": "here"}},
            }
        )
    )  # fmt: skip
    got = load_constants(path)
    assert got.step == replace(StepConstants(), layer_overhead_us=10.0)
    assert got.exchange["nvlink"] == ExchangeTable((1, 64), (1, 2), (3, 4), source="here")
    assert got.exchange["a2a"] == Constants().exchange["a2a"]
    request = ask("deepseek-v3", context_tokens=1000, batch=1)
    faster = make_plan(replace(request, constants=got))
    assert faster.chosen.predicted_step_ms < make_plan(request).chosen.predicted_step_ms


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"steps": {}},
        {"step": {"layer_us": 1}},
        {"step": {"layer_overhead_us": "1"}},
        {"step": {"hbm_efficiency": 0}},
        {"exchange": {"nccl": {}}},
        {"exchange": {"nvlink": {"batches": [1, 2]}}},
        {"exchange": {"nvlink": {"batches": [64, 1, 2, 3]}}},
    ],
)
def test_broken_constants_are_refused(tmp_path, data):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="constants|exchange table"):
        load_constants(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 3}, r"--tp 3 does not divide --gpus 8: 8 % 3 = 2. Use --tp 1, 2, 4 or 8"),
        ({"num_gpus": 7, "tp_size": 7}, "does not divide the 96 query heads"),
        ({"dcp_size": 3}, r"8 % 3 = 2. Use --dcp-size 1, 2, 4 or 8"),
        ({"tp_size": 4, "dcp_size": 8}, r"--dcp-size 8 does not fit --tp 4"),
        ({"batch": 0}, "--batch 0"),
        ({"kv_dtype": "int3"}, "--kv-dtype int3"),
        ({"communicator": "mpi"}, "--dcp-comm-backend mpi"),
        ({"mem_fraction": 1.5}, "--mem-fraction 1.5"),
    ],
)
def test_requests_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(ask(**changes))


def test_auto_communicator_follows_the_node():
    assert ask().chosen_communicator == "nvlink"
    assert ask(num_gpus=16, tp_size=16).chosen_communicator == "a2a"
    assert ask(communicator="ag_rs").chosen_communicator == "ag_rs"


# --- units and report -------------------------------------------------------------------------


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
