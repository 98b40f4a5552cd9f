"""The choice between pass-Q and pass-KV: counts, rates, and that all ranks decide alike."""

import dataclasses
import json
import logging
import random
import subprocess
import sys

import pytest
from support import clean_env

from sglang_dcp.planner.crossover import mla_crossover_flops_only_tokens
from sglang_dcp.planner.models import load_model
from sglang_dcp.prefill_policy import (
    HOST_TIMES,
    MODES,
    PrefillCosts,
    PrefillPolicy,
    PrefillRates,
    load_rates,
)
from sglang_dcp.workspace import ChunkBudget, PassQLimits, ReadShape

MODEL = load_model("kimi-k3")
NO_LIMIT = 1e30


def costs(dcp_size=2, num_heads=96, slice_tokens=256, chunk_tokens=10240, **rates):
    rates = PrefillRates(**rates)
    return PrefillCosts(MODEL, num_heads, dcp_size, slice_tokens, chunk_tokens, rates)


NO_HOST = dict.fromkeys(HOST_TIMES, 1e-9)

GPU_RATES = [f.name for f in dataclasses.fields(PrefillRates) if f.name.endswith("per_s")]
HOST_ONLY = PrefillRates(**dict.fromkeys(GPU_RATES, NO_LIMIT))
FLOPS_ONLY = {
    **dict.fromkeys(("absorbed_flops_per_s", "mha_flops_per_s", "gemm_flops_per_s"), 1e12),
    **dict.fromkeys(("hbm_bytes_per_s", "link_bytes_per_s"), NO_LIMIT),
    **NO_HOST,
}


@pytest.mark.parametrize("dcp_size", [2, 4, 8])
@pytest.mark.parametrize("prefix", [100_000, 1_000_000])
def test_with_flops_alone_the_crossover_is_the_planners(dcp_size, prefix):
    found = costs(dcp_size, 128, **FLOPS_ONLY).crossover_tokens(prefix)
    assert found == pytest.approx(mla_crossover_flops_only_tokens(MODEL), abs=2)


def test_hand_count_of_the_target_case():
    """64 new tokens on 128000 cached, 96 heads, c = 2; written out, in microseconds."""
    lens = [64], [128_000]
    q, kv = costs(**NO_HOST).pass_q_us(*lens), costs(**NO_HOST).pass_kv_us(*lens)
    rates = PrefillRates()
    attention = 2 * 1088 * 64 * 96 * 128_000 / 2 / rates.absorbed_flops_per_s
    moved = 64 * 96 * (576 * 2 + 512 * 2 + 4) / 2 / rates.link_bytes_per_s
    fresh = 2 * 1088 * 48 * 64 * 65 / 2 / rates.absorbed_flops_per_s
    assert q == pytest.approx((attention + moved + fresh) * 1e6)
    gathered = 128_000 * 576 * 2 / 2 / rates.link_bytes_per_s
    expanded = 2 * 512 * 256 * 48 * 128_000 / rates.gemm_flops_per_s
    written = 48 * 128_000 * (256 + 2 * 128 + 64) * 2 / rates.hbm_bytes_per_s
    read = 48 * 128_000 * 320 * 2 / rates.hbm_bytes_per_s
    fresh = 2 * 320 * 48 * 64 * 65 / 2 / rates.mha_flops_per_s
    total = gathered + expanded + written + read + fresh
    assert kv == pytest.approx(total * 1e6)
    assert q < kv / 2


def test_launches_bound_short_work():
    """One slice, and a chunk for every 10240 tokens of prefix; then the GPU takes longer."""
    assert costs().pass_q_us([64], [8192]) == 1080 + 85 + 200
    assert costs(slice_tokens=16).pass_q_us([64], [8192]) == 1080 + 85 + 4 * 200
    assert costs().pass_kv_us([64], [8192]) == 1080 + 440 + 420
    assert costs().pass_kv_us([64], [128_000]) == 1080 + 440 + 13 * 420
    gpu = costs(**NO_HOST)
    assert costs().pass_q_us([1280], [126_720]) == gpu.pass_q_us([1280], [126_720])
    assert costs().pass_kv_us([4096], [128_000]) == gpu.pass_kv_us([4096], [128_000])


def test_chunks_shrink_beside_many_new_tokens():
    """What the workspace holds of a chunk is what pass-KV is charged for."""
    shape = ReadShape(2, 48, 512, 128, 64, 128, 2)
    budget = ChunkBudget(512 << 20, shape, page_tokens=128)
    few, many = ([64], [128_000]), ([8192], [128_000])
    tight = dataclasses.replace(costs(chunk_tokens=12_000), budget=budget, rates=HOST_ONLY)
    for lens in (few, many):
        num_chunks = -(-128_000 // budget.chunk_tokens(*lens))
        assert tight.pass_kv_us(*lens) == 1080 + 440 + num_chunks * 420
    assert tight.pass_kv_us(*many) > tight.pass_kv_us(*few)


def test_a_slower_host_favours_fewer_launches():
    """Half as fast, short work takes twice as long, and pass-Q is the better one for longer."""
    slow = dataclasses.replace(costs(), rates=PrefillRates().on_host(2.0))
    assert slow.pass_kv_us([64], [128_000]) == 2 * costs().pass_kv_us([64], [128_000])
    assert slow.rates.absorbed_flops_per_s == PrefillRates().absorbed_flops_per_s
    assert slow.crossover_tokens(128_000) > 1.5 * costs().crossover_tokens(128_000)
    gpu_bound = [4096], [128_000]
    assert slow.pass_q_us(*gpu_bound) == costs().pass_q_us(*gpu_bound)


# (512 new tokens on 128000 cached are left out: what pass-KV took there was its old launches)
# prefix, new, which was faster where it was measured: on the host of 8192 and 32768 cached tokens
# (scripts/results/prefill_host_one_gpu.json), on the GPUs with more
# (scripts/results/bench_prefill_tp2_dcp2.json)
@pytest.mark.parametrize(
    ("prefix", "new", "want"),
    [
        (8192, 64, "pass_q"),
        (8192, 512, "pass_q"),
        (32768, 64, "pass_q"),
        *((128_000, new, "pass_q") for new in (1, 16, 64, 128, 256)),
        (126_720, 1280, "pass_kv"),
        (121_600, 6400, "pass_kv"),
        (64_000, 64_000, "pass_kv"),
    ],
)
def test_choice_against_measured_times(prefix, new, want):
    policy = PrefillPolicy("auto", costs(chunk_tokens=11904))
    assert policy.choose([new], [prefix]) == want


def test_few_new_tokens_move_and_many_do_not():
    policy = PrefillPolicy("auto", costs())
    for prefix in (32_000, 128_000, 1_000_000):
        assert policy.choose([1], [prefix]) == "pass_q"
        assert policy.choose([64], [prefix]) == "pass_q"
        assert policy.choose([2048], [prefix]) == "pass_kv"
        crossover = policy.costs.crossover_tokens(prefix)
        assert 100 < crossover < 800
        assert policy.choose([crossover - 1], [prefix]) == "pass_q"
        assert policy.choose([crossover], [prefix]) == "pass_kv"


def test_requests_without_a_prefix_do_not_move():
    base = costs(**NO_HOST).pass_q_us([64], [128_000])
    both = costs(**NO_HOST).pass_q_us([64, 512], [128_000, 0])
    assert base < both < base + 60  # their causal part only
    assert costs(slice_tokens=64).pass_q_us([64, 512], [1000, 0]) == 1080 + 85 + 200  # one slice


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    policy = PrefillPolicy(mode, costs())
    assert policy.choose([7, 3], [0, 0]) == "none"
    want = {"pass-kv": {"pass_kv"}, "pass-q": {"pass_q"}, "auto": {"pass_kv", "pass_q"}}[mode]
    assert {policy.choose([n, 3], [50_000, 0]) for n in (1, 4096)} == want


@pytest.mark.parametrize("mode", ["auto", "pass-q"])
def test_more_new_tokens_than_the_workspace_holds_go_by_pass_kv(mode):
    policy = PrefillPolicy(mode, costs(), PassQLimits(slice_tokens=8, batch_tokens=40))
    for new, variant in (([40], "pass_q"), ([20, 20], "pass_q"), ([41], "pass_kv")):
        assert policy.choose(new, [100_000] * len(new)) == variant
    assert policy.choose([41], [0]) == "none"


def test_ranks_decide_alike():
    """Two policies with a history of their own, over random batches."""
    first, second = PrefillPolicy("auto", costs()), PrefillPolicy("auto", costs())
    second.choose([1], [100_000])
    rng, seen = random.Random(), set()
    for _ in range(300):
        new = [rng.randrange(1, 600) for _ in range(rng.randrange(1, 5))]
        prefix = [rng.choice([0, 3, 5000, 200_000]) for _ in new]
        chosen = first.choose(new, prefix)
        assert chosen == second.choose(list(new), tuple(prefix)), (new, prefix)
        seen.add(chosen)
    assert seen == {"none", "pass_q", "pass_kv"}


def test_a_change_of_mind_is_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="sglang_dcp.prefill_policy")
    policy = PrefillPolicy("auto", costs())
    for new in (8, 16, 4096, 4096, 8):
        policy.choose([new], [128_000])
    policy.choose([8], [0])
    said = [record.getMessage() for record in caplog.records]
    assert ["pass_q from now" in text for text in said] == [True, False, True]
    assert "4096 new tokens on 128000 cached" in said[1]


def test_calibration(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"hbm_bytes_per_s": 3e12, "source": "this machine"}))
    want = dataclasses.replace(PrefillRates(), hbm_bytes_per_s=3e12, source="this machine")
    assert load_rates(path) == want


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds list"),
        ('{"hbm": 1}', "unknown key hbm"),
        ('{"hbm_bytes_per_s": -1}', "says -1 for hbm_bytes_per_s"),
        ('{"hbm_bytes_per_s": true}', "says True"),
        ('{"source": 3}', "says 3 for source"),
    ],
)
def test_bad_calibrations_are_refused(tmp_path, text, says):
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{says}.*it must be a JSON object.*Correct it"):
        load_rates(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_rates(tmp_path / "missing.json")


def test_imports_neither_torch_nor_sglang():
    code = "import sys, sglang_dcp.prefill_policy; print({'torch', 'sglang'} & set(sys.modules))"
    env = clean_env() | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
