"""Both variants of prefill over striped prefixes, through real servers on CPU ranks.

Same tokens as the server without DCP; what the ranks counted says which variant ran.
"""

from pathlib import Path

import pytest
from serving import WORK, Farm, Outcome, Spec

from sglang_dcp import envs
from sglang_dcp.testing.compare import cached_tokens, compare_results

pytestmark = pytest.mark.slow

MAX_LOGPROB_DIFF = 1e-4  # float32
CHUNK_16 = ("--chunked-prefill-size", "16")
#: Two of the communicator's buffers here: what is left of a prompt of 201 tokens takes two slices.
CHUNK_128 = ("--chunked-prefill-size", "128")
#: Rates at which a prompt's first chunks are for pass-Q and its later ones for pass-KV.
BOTH_PAY = ((envs.PREFILL_CALIBRATION, str(Path(__file__).parent / "prefill_rates.json")),)
CHECKED_POOL = (("SGLANG_DEBUG_MEMORY_POOL", "1"),)

SPECS = {
    "tp2-dcp2-pass-q": Spec(dcp_size=2, prefill="pass-q", args=CHUNK_128, env=CHECKED_POOL),
    "tp4-dcp4-pass-q": Spec(
        tp=4,
        dcp_size=4,
        prefill="pass-q",
        args=(*CHUNK_16, "--dcp-comm-backend", "ag_rs", "--page-size", "2"),
        env=CHECKED_POOL,
    ),
    "tp4-dcp4-pass-kv": Spec(tp=4, dcp_size=4, prefill="pass-kv", args=CHUNK_16),
    # batches are padded to the other replica's: rows that belong to no request
    "dp-attention-pass-q": Spec(
        tp=4,
        dcp_size=2,
        prefill="pass-q",
        args=("--dp-size", "2", "--enable-dp-attention"),
        env=CHECKED_POOL,
    ),
    "tp2-dcp2-auto": Spec(dcp_size=2, prefill="auto", args=CHUNK_16, env=BOTH_PAY),
}


@pytest.fixture(scope="module", params=SPECS)
def served(request: pytest.FixtureRequest, farm: Farm) -> Outcome:
    """One configuration, served."""
    return farm.outcome(SPECS[request.param])


def test_same_tokens_as_without_dcp(served: Outcome, farm: Farm) -> None:
    want = farm.baseline(served.spec.model)
    names = list(WORK[served.spec.work])
    found = compare_results(
        [result for name in names for result in want.results[name]],
        [result for name in names for result in served.results[name]],
    )
    assert found.differences == ()
    assert found.tokens_equal
    assert found.max_logprob_diff < MAX_LOGPROB_DIFF


def test_the_variant_asked_for_ran(served: Outcome) -> None:
    mode = served.spec.prefill
    for counts in (rank["counts"] for rank in served.ranks):
        assert counts["prefill_none"] > 0
        ran = {name for name in ("pass_kv", "pass_q") if counts.get(f"prefill_{name}", 0)}
        assert ran == ({"pass_kv", "pass_q"} if mode == "auto" else {mode.replace("-", "_")})
        assert ("kv_gather" in counts) == ("pass_kv" in ran)
        assert ("attend_prefix" in counts) == ("pass_q" in ran)
    for name in ("prefill_pass_q", "attend_prefix"):  # the ranks of a group did alike
        counts, c = served.counts(name), served.spec.dcp_size
        for start in range(0, len(counts), c):
            assert len(set(counts[start : start + c])) == 1, (name, counts)


def test_large_batches_go_in_slices(farm: Farm) -> None:
    """Prefills with a prefix times layers would be the count of slices if none were cut."""
    outcome = farm.outcome(SPECS["tp2-dcp2-pass-q"])
    layers = 3
    for rank in outcome.ranks:
        assert rank["counts"]["attend_prefix"] > layers * rank["counts"]["prefill_pass_q"]


def test_prefixes_came_from_the_cache(served: Outcome) -> None:
    cached = cached_tokens(served.results["hit"])
    if "--enable-dp-attention" not in served.spec.args:  # the other replica may get the repeat
        assert all(tokens > 100 for tokens in cached)
    assert served.flushed
    assert "leak" not in served.log
