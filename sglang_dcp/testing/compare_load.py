"""The prompts on which `scripts/compare_upstream.py` compares servers, and the model for them."""

import random
from dataclasses import dataclass, field, replace

from sglang_dcp.testing.tiny_model import GPU_MODEL

PAGE_SIZES = {"flashmla": 64}
MAX_GRAPH_BATCH = 32
# sharper attention would magnify bf16's noise
MODEL = replace(GPU_MODEL, q_gain=1.0, kv_gain=1.0, o_gain=4.0)
#: New tokens behind a cached prefix: one, a few, and more than one slice of pass-Q.
TAILS = (1, 7, 64, 200, 600)


@dataclass
class Workload:
    """Named batches of prompts, each batch one request to /generate.

    `prefix<n>-warm` caches n tokens and `prefix<n>-hit` has tails behind them; `prefix-mixed` has
    tails behind all of these prefixes and prompts without one in one batch.

    Attributes:
        dcp_size: c; prompt lengths around P * c are included for every page size P in use.
        long_tokens: length of the longest prompt; the longest cached prefix is half of it.
        pool_tokens: logical capacity; the waves write it about three times over.
    """

    dcp_size: int
    long_tokens: int
    pool_tokens: int
    batches: dict[str, list[list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = random.Random(11)

        def prompt(num_tokens: int) -> list[int]:
            return [rng.randrange(3, MODEL.vocab_size) for _ in range(num_tokens)]

        pages = {size * self.dcp_size for size in (1, *PAGE_SIZES.values())}
        edges = {page + d for page in pages for d in (-1, 0, 1) if page + d > 0}
        for num_tokens in sorted({1, 2, 3, 4096, self.long_tokens} | edges):
            self.batches[f"len{num_tokens}"] = [prompt(num_tokens)]
        for size in (2, 3, MAX_GRAPH_BATCH, MAX_GRAPH_BATCH + 16):
            self.batches[f"batch{size}"] = [prompt(rng.randrange(1, 400)) for _ in range(size)]
        # each ends inside every widened page
        whole = max(pages), 4096, self.long_tokens // 2 // max(pages) * max(pages)
        prefixes = [prompt(n + max(pages) // 2 + 1) for n in whole]
        for prefix in prefixes:
            self.batches[f"prefix{len(prefix)}-warm"] = [prefix]
            self.batches[f"prefix{len(prefix)}-hit"] = [prefix + prompt(n) for n in TAILS]
        tails = [prefix + prompt(n) for prefix in prefixes for n in (3, 90)]
        self.batches["prefix-mixed"] = [*tails, *(prompt(n) for n in (5, 300))]
        for wave in range(3 * self.pool_tokens // (16 * 2048)):
            self.batches[f"wave{wave}"] = [prompt(2048) for _ in range(16)]

    @property
    def names(self) -> list[str]:
        """Names of all prompts, in the order of a server's flat results."""
        return [f"{name}[{i}]" for name, batch in self.batches.items() for i in range(len(batch))]

    def expected_hits(self, page_tokens: int) -> dict[str, int]:
        """Tokens that each prompt of the `-hit` batches finds cached, in whole pages, by name."""
        return {
            f"{name}[{i}]": len(self.batches[name.replace("hit", "warm")][0])
            // page_tokens
            * page_tokens
            for name, batch in self.batches.items()
            if name.endswith("-hit")
            for i in range(len(batch))
        }
