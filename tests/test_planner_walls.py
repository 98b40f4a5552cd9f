"""The planner's walls: what fits, and which of memory and arithmetic bounds a step."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from planner_requests import H200, ask

from sglang_dcp.planner import GPUS, advice, make_plan, plan_json, walls
from sglang_dcp.planner.plan import dcp_option


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
