"""Prompts that take every path of a striped cache, as batches to be sent one after another."""

import random
from dataclasses import dataclass

Prompt = list[int]


@dataclass(frozen=True)
class Batch:
    """Prompts that are sent in one request.

    Attributes:
        name: what they exercise.
        prompts: token ids.
        repeats_last: the same prompts as the batch before, so the radix cache has them.
    """

    name: str
    prompts: tuple[Prompt, ...]
    repeats_last: bool = False


def stripe_workload(
    dcp_size: int, widened_page_tokens: int, chunk_tokens: int, vocab_size: int, seed: int
) -> list[Batch]:
    """The edge cases of striping: c, a widened page and a prefill chunk are the lengths to cross.

    Prompts are random and start with different tokens, so that only the repeated batch finds a
    prefix in the radix cache.

    Args:
        dcp_size: c.
        widened_page_tokens: P * c.
        chunk_tokens: size of a prefill chunk.
        vocab_size: ids are drawn from 3 up to it.
        seed: of the draw.
    """
    rng = random.Random(seed)
    first_tokens = iter(rng.sample(range(3, vocab_size), 64))

    def prompts(*lengths: int) -> tuple[Prompt, ...]:
        return tuple(
            [next(first_tokens), *(rng.randrange(3, vocab_size) for _ in range(n - 1))]
            for n in lengths
        )

    c, page = dcp_size, widened_page_tokens
    over_page = Batch("3 widened pages", prompts(3 * page + c // 2 + 1))
    return [
        Batch("one token", prompts(1)),
        Batch("shorter than c", prompts(max(c - 1, 1))),
        Batch("not a multiple of c", prompts(5 * c + 1)),
        Batch("3 prefill chunks", prompts(3 * chunk_tokens + c + 1)),
        over_page,
        Batch("  the same again", over_page.prompts, repeats_last=True),
        Batch("batch of 6", prompts(1, 2, c + 1, 4 * c - 1, page + 1, 2 * page + 3)),
    ]
