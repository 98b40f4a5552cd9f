"""Judge the demo's two runs; the outcome as a dataclass and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dcp.testing.compare import Comparison, Result, cached_tokens, compare_results
from sglang_dcp.testing.observe import row_problems
from sglang_dcp.testing.workload import Batch

#: Largest logprob difference (natural log) between two correct servers. bfloat16 keeps 8 bits of
#: logits of about 20, and the kernels of the two servers round at different places.
MAX_LOGPROB_DIFF = {"float32": 1e-4, "bfloat16": 0.5}
#: What a rank counts in stages 2, 4, 5, 6 and 7 of the decode step (captures, under CUDA graphs).
STAGES = ("kv_write", "gather_q", "attend_stripe", "exchange_merge")


@dataclass(frozen=True)
class Served:
    """What one server did.

    Attributes:
        results: /generate results, one list for each batch.
        ranks: counters of every rank.
        startup_s, generate_s: seconds until /health, and for all prompts.
    """

    results: list[list[Result]]
    ranks: list[dict[str, Any]]
    startup_s: float
    generate_s: float

    def each_rank(self, key: str) -> list[Any]:
        """One counter of every rank."""
        return [rank[key] for rank in self.ranks]

    @property
    def all_results(self) -> list[Result]:
        """Results of all batches, one after another."""
        return [result for batch in self.results for result in batch]


@dataclass(frozen=True)
class Report:
    """The demo's outcome; `problems` is empty if everything agrees."""

    workload: Sequence[Batch]
    upstream: Served
    ours: Served
    tp_size: int
    dcp_size: int
    device: str
    dtype: str
    widened_page_tokens: int
    total: Comparison
    batches: tuple[Comparison, ...]
    problems: tuple[str, ...]

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Logical KV tokens without DCP and with it."""
        return self.upstream.ranks[0]["kv_tokens"], self.ours.ranks[0]["kv_tokens"]

    def as_json(self) -> dict[str, Any]:
        """One flat object; lists are by rank or by prompt."""
        upstream, ours = self.upstream, self.ours
        return {
            "ok": not self.problems,
            "problems": list(self.problems),
            "tokens_equal": self.total.tokens_equal,
            "max_logprob_diff": self.total.max_logprob_diff,
            "differences": [asdict(d) for d in self.total.differences],
            "num_prompts": self.total.num_prompts,
            "num_tokens": self.total.num_tokens,
            "kv_tokens_upstream": self.kv_tokens[0],
            "kv_tokens_dcp": self.kv_tokens[1],
            "kv_rows_per_rank": ours.each_rank("kv_rows_allocated"),
            "kv_rows_written_per_rank": ours.each_rank("kv_rows_written"),
            "kv_bytes_per_rank": ours.each_rank("kv_bytes"),
            "kv_rows_per_rank_upstream": upstream.each_rank("kv_rows_allocated"),
            "kv_rows_written_per_rank_upstream": upstream.each_rank("kv_rows_written"),
            "kv_bytes_per_rank_upstream": upstream.each_rank("kv_bytes"),
            "cached_tokens": cached_tokens(ours.all_results),
            "cached_tokens_upstream": cached_tokens(upstream.all_results),
            "stage_counts_per_rank": [
                {stage: rank["counts"].get(stage, 0) for stage in STAGES} for rank in ours.ranks
            ],
            "tp_size": self.tp_size,
            "dcp_size": self.dcp_size,
            "device": self.device,
            "dtype": self.dtype,
            "attention_backend": ours.ranks[0]["attention_backend"],
            "comm_backend": ours.ranks[0]["comm_backend"],
            "startup_s": [upstream.startup_s, ours.startup_s],
            "generate_s": [upstream.generate_s, ours.generate_s],
        }


def make_report(
    workload: Sequence[Batch],
    upstream: Served,
    ours: Served,
    *,
    tp_size: int,
    dcp_size: int,
    device: str,
    dtype: str,
    widened_page_tokens: int,
) -> Report:
    """Compare two runs of `workload` and collect what is wrong."""
    total = compare_results(upstream.all_results, ours.all_results)
    problems = [
        *_token_problems(total, dtype),
        *_pool_problems(upstream, ours, dcp_size, widened_page_tokens),
        *_row_problems(workload, ours, dcp_size, widened_page_tokens),
        *_cache_problems(workload, ours),
        *_stage_problems(ours),
    ]
    return Report(
        workload=workload,
        upstream=upstream,
        ours=ours,
        tp_size=tp_size,
        dcp_size=dcp_size,
        device=device,
        dtype=dtype,
        widened_page_tokens=widened_page_tokens,
        total=total,
        batches=tuple(map(compare_results, upstream.results, ours.results)),
        problems=tuple(problems),
    )


def _token_problems(total: Comparison, dtype: str) -> list[str]:
    limit = MAX_LOGPROB_DIFF[dtype]
    # float32 servers agree to 1e-5, so there no near tie excuses a different token
    unexplained = total.differences if dtype == "float32" else total.unexplained(limit)
    problems = [
        f"prompt {d.prompt}: token {d.position} is {d.got}, without DCP {d.want} (its gap to the "
        f"second best: {d.top2_gap})"
        for d in unexplained
    ]
    if not total.max_logprob_diff <= limit:
        problems.append(f"logprobs differ by {total.max_logprob_diff:.2g}, limit {limit:g}")
    return problems


def _pool_problems(upstream: Served, ours: Served, dcp_size: int, page_tokens: int) -> list[str]:
    problems = []
    theirs, held = upstream.each_rank("kv_bytes"), ours.each_rank("kv_bytes")
    row_bytes = theirs[0] / upstream.ranks[0]["kv_rows_allocated"]
    if any(abs(a - b) > page_tokens * row_bytes for a, b in zip(theirs, held, strict=True)):
        problems.append(f"pool bytes per rank differ by more than a widened page: {theirs}, {held}")
    want = dcp_size * upstream.ranks[0]["kv_tokens"]
    if any(tokens < want for tokens in ours.each_rank("kv_tokens")):
        problems.append(f"KV tokens {ours.each_rank('kv_tokens')}, expected {want} on every rank")
    return problems


def _row_problems(
    workload: Sequence[Batch], ours: Served, dcp_size: int, page_tokens: int
) -> list[str]:
    prompts = [prompt for batch in workload for prompt in batch.prompts]
    stored = sum(
        # the last token is returned, not stored
        len(prompt) + len(result["output_ids"]) - 1 - result["meta_info"]["cached_tokens"]
        for prompt, result in zip(prompts, ours.all_results, strict=True)
    )
    rows = ours.each_rank("kv_rows_written")
    return row_problems(rows, dcp_size, len(prompts), stored, page_tokens)


def _cache_problems(workload: Sequence[Batch], ours: Served) -> list[str]:
    return [
        f"'{batch.name}': the radix cache gave {cached_tokens(results)} tokens"
        for batch, results in zip(workload, ours.results, strict=True)
        if batch.repeats_last and not all(cached_tokens(results))
    ]


def _stage_problems(ours: Served) -> list[str]:
    return [
        f"rank {rank['rank']} never ran {stage}"
        for rank in ours.ranks
        for stage in STAGES
        if not rank["counts"].get(stage)
    ]
