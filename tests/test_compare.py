"""The comparison that judges every end-to-end test: it must see each kind of difference."""

import json
import math
import random
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import pytest

from sglang_dcp.testing.compare import cached_tokens, compare_results, logprob_spread, top2_gap


def make_result(num_tokens: int, rng: random.Random) -> dict[str, Any]:
    """One /generate result as SGLang shapes it: entries are (logprob, token id, text)."""
    ids = [rng.randrange(512) for _ in range(num_tokens)]
    best = [-rng.random() for _ in ids]
    return {
        "output_ids": ids,
        "meta_info": {
            "cached_tokens": rng.randrange(9),
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(best, ids, strict=True)
            ],
            "output_top_logprobs": [
                [[value, token, None], [value - 0.25, token + 1, None]]
                for value, token in zip(best, ids, strict=True)
            ],
        },
    }


@pytest.fixture
def results() -> list[dict[str, Any]]:
    rng = random.Random()
    return [make_result(n, rng) for n in (1, 5, 8)]


def test_equal_results(results):
    found = compare_results(results, deepcopy(results))
    assert found.tokens_equal
    assert (found.num_prompts, found.num_equal, found.num_tokens) == (3, 3, 14)
    assert found.max_logprob_diff == 0
    assert found.differences == ()


def test_first_difference_and_gap(results):
    got = deepcopy(results)
    got[1]["output_ids"][2:] = [600, 601, 602]
    got[1]["meta_info"]["output_token_logprobs"][1][0] += 1e-3  # before: counts
    got[1]["meta_info"]["output_token_logprobs"][2][0] += 5  # another token's logprob: does not
    found = compare_results(results, got)
    assert not found.tokens_equal
    assert found.num_equal == 2
    (difference,) = found.differences
    assert (difference.prompt, difference.position, difference.got) == (1, 2, 600)
    assert difference.want == results[1]["output_ids"][2]
    assert difference.top2_gap == pytest.approx(0.25)
    assert found.max_logprob_diff == pytest.approx(1e-3)
    assert found.unexplained(0.3) == ()
    assert found.unexplained(0.2) == (difference,)


def test_shorter_output_is_a_difference(results):
    got = deepcopy(results)
    got[2]["output_ids"].pop()
    got[2]["meta_info"]["output_token_logprobs"].pop()
    (difference,) = compare_results(results, got).differences
    assert (difference.prompt, difference.position, difference.got) == (2, 7, None)


@pytest.mark.parametrize("change", [0.5, -0.5])
def test_logprob_difference_without_a_token_difference(results, change):
    got = deepcopy(results)
    got[2]["meta_info"]["output_token_logprobs"][7][0] += change
    found = compare_results(results, got)
    assert found.tokens_equal
    assert found.max_logprob_diff == pytest.approx(0.5)


@pytest.mark.parametrize("nan", [math.nan, None])
def test_nan_never_passes(results, nan):
    got = deepcopy(results)
    got[0]["meta_info"]["output_token_logprobs"][0][0] = nan
    assert compare_results(results, got).max_logprob_diff == math.inf


def test_gap_unknown_explains_nothing(results):
    want, got = deepcopy(results), deepcopy(results)
    for result in want:
        del result["meta_info"]["output_top_logprobs"]
    got[0]["output_ids"][0] += 1
    found = compare_results(want, got)
    assert top2_gap(want[0], 0) is None
    assert len(found.unexplained(math.inf)) == 1


def test_report_is_json_and_cached_tokens(results):
    got = deepcopy(results)
    got[0]["output_ids"][0] += 1
    found = compare_results(results, got)
    assert json.loads(json.dumps(asdict(found)))["differences"][0]["position"] == 0
    assert cached_tokens(results) == [r["meta_info"]["cached_tokens"] for r in results]


@pytest.mark.parametrize("cut", [0, 2])
def test_lists_must_match(results, cut):
    with pytest.raises(ValueError, match="same prompts on both sides"):
        compare_results(results[:cut], results if cut else [])


def test_spread_of_common_top_tokens_up_to_the_first_difference(results):
    one, two = results[2], deepcopy(results[2])
    assert logprob_spread(one, two) == 0
    top = two["meta_info"]["output_top_logprobs"]
    top[1][1][0] += 0.125  # the second best token counts
    top[3][0][0] += 0.25  # and the position of the first difference
    top[4][0][0] += 3.0  # behind it they read different tokens
    top[2][1] = [-9.0, 700, None]  # a token that only one lists
    two["output_ids"][3] = 700
    assert logprob_spread(one, two) == pytest.approx(0.25)
    top[0][0][0] = None
    assert logprob_spread(one, two) == math.inf
