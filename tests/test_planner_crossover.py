"""Pass-KV against pass-Q: the published thresholds, and prices from scratch."""

from __future__ import annotations

import pytest
from planner_requests import H200, K3

from sglang_dcp.planner import StepConstants, crossover


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
