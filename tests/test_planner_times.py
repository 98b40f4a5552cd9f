"""The planner's predictions beside measured times, and what it recommends by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_requests import H200, K3, ask

from sglang_dcp.planner import (
    Constants,
    PlanRequest,
    StepConstants,
    advice,
    make_plan,
    shape_from_config,
    walls,
)
from sglang_dcp.planner.plan import attention_step_ms, break_even_context_tokens, dcp_option
from sglang_dcp.planner.presets import PRESET_CONFIGS


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
