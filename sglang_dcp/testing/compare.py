"""Compare what two servers answered to the same prompts: token ids first, then logprobs.

Pure functions on /generate results; nothing here talks to a server. Reports are dataclasses of
plain values: `dataclasses.asdict` makes them JSON.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Where one prompt's tokens part for the first time.

    Attributes:
        prompt: index of the prompt in the lists.
        position: index of the output token.
        want, got: the two token ids; None where that output has already ended.
        top2_gap: logprob gap between the two best tokens of the reference there (how far it was
            from a tie), or None if the request did not ask for top_logprobs_num >= 2.
    """

    prompt: int
    position: int
    want: int | None
    got: int | None
    top2_gap: float | None


@dataclass(frozen=True)
class Comparison:
    """Outcome for a list of prompts.

    Attributes:
        num_prompts, num_tokens: prompts, and output tokens of the reference, that were compared.
        num_equal: prompts whose output ids are equal.
        max_logprob_diff: largest |logprob difference| over the tokens before each prompt's first
            difference; inf if either side holds a NaN. Natural logarithm.
        differences: one entry for each prompt that differs.
    """

    num_prompts: int
    num_tokens: int
    num_equal: int
    max_logprob_diff: float
    differences: tuple[Difference, ...]

    @property
    def tokens_equal(self) -> bool:
        """True if every output id of every prompt is equal."""
        return self.num_equal == self.num_prompts

    def unexplained(self, max_gap: float) -> tuple[Difference, ...]:
        """Differences at which the reference was not within `max_gap` of a tie (unknown: not)."""
        return tuple(d for d in self.differences if d.top2_gap is None or d.top2_gap > max_gap)


def compare_results(want: Sequence[Result], got: Sequence[Result]) -> Comparison:
    """Compare /generate results of the same prompts in the same order.

    Args:
        want: the reference's results, with logprobs (and top 2 logprobs, for `top2_gap`).
        got: the results to judge, with logprobs.

    Raises:
        ValueError: the lists have different lengths, or there is nothing to compare.
    """
    if len(want) != len(got) or not want:
        raise ValueError(
            f"{len(want)} reference results and {len(got)} others were given: a comparison needs "
            "the same prompts on both sides, at least one. Send both servers the same batches."
        )
    differences = [
        first_difference(i, w, g) for i, (w, g) in enumerate(zip(want, got, strict=True))
    ]
    parted = tuple(d for d in differences if d is not None)
    return Comparison(
        num_prompts=len(want),
        num_tokens=sum(len(token_ids(w)) for w in want),
        num_equal=len(want) - len(parted),
        max_logprob_diff=max(
            max_logprob_diff(w, g, None if d is None else d.position)
            for w, g, d in zip(want, got, differences, strict=True)
        ),
        differences=parted,
    )


def token_ids(result: Result) -> list[int]:
    """Output ids of one result."""
    return list(result["output_ids"])


def logprobs(result: Result) -> list[float]:
    """Natural logprob of every output token of one result; JSON has null for a NaN."""
    entries = result["meta_info"]["output_token_logprobs"]
    return [math.nan if entry[0] is None else float(entry[0]) for entry in entries]


def cached_tokens(results: Sequence[Result]) -> list[int]:
    """Prompt tokens that each result took from the radix cache."""
    return [int(result["meta_info"]["cached_tokens"]) for result in results]


def first_difference(prompt: int, want: Result, got: Result) -> Difference | None:
    """The first output position at which two results differ, or None; lengths count too."""
    ids, others = token_ids(want), token_ids(got)
    position = next((i for i, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), None)
    if position is None:
        if len(ids) == len(others):
            return None
        position = min(len(ids), len(others))
    return Difference(
        prompt=prompt,
        position=position,
        want=ids[position] if position < len(ids) else None,
        got=others[position] if position < len(others) else None,
        top2_gap=top2_gap(want, position),
    )


def max_logprob_diff(want: Result, got: Result, end: int | None = None) -> float:
    """Largest |logprob difference| of output tokens [0, end); 0 if none, inf for a NaN."""
    pairs = zip(logprobs(want)[:end], logprobs(got)[:end], strict=end is None)
    largest = 0.0
    for a, b in pairs:
        difference = abs(a - b)
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def logprob_spread(one: Result, two: Result) -> float:
    """Largest |logprob difference| of any token that both results list as a top token.

    Positions up to and including the first difference count: both servers had read the same tokens
    there. Needs top logprobs; 0 without common tokens, inf for a NaN.
    """
    parted = first_difference(0, one, two)
    end = None if parted is None else parted.position + 1
    tops = (result["meta_info"].get("output_top_logprobs") or [] for result in (one, two))
    largest = 0.0
    for mine, others in zip(*(top[:end] for top in tops), strict=False):
        known = {entry[1]: entry[0] for entry in others}
        for value, token, *_ in mine:
            if token in known:
                pair = (value, known[token])
                largest = max(largest, math.inf if None in pair else abs(pair[0] - pair[1]))
    return largest


def top2_gap(result: Result, position: int) -> float | None:
    """Logprob gap between the two best tokens at an output position, if they were asked for."""
    top = result["meta_info"].get("output_top_logprobs") or []
    if position >= len(top) or not top[position] or len(top[position]) < 2:
        return None
    best, second = top[position][:2]
    return None if None in (best[0], second[0]) else float(best[0]) - float(second[0])
