"""End to end on CPU ranks: servers with DCP give the tokens of servers without it.

Every configuration is one real HTTP server, shared by all checks of this file; what the ranks
counted and hold says that the striped path really ran.
"""

import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from serving import (
    BARE_CPU_ENV,
    FIRST,
    MODULES_ENV,
    WORK,
    Background,
    Farm,
    Outcome,
    Results,
    Spec,
    generate,
)

from sglang_dcp.layout import local_len
from sglang_dcp.testing.compare import Comparison, cached_tokens, compare_results
from sglang_dcp.testing.server import Server, ServerError

pytestmark = pytest.mark.slow

MAX_LOGPROB_DIFF = 1e-4  # float32
MANY_PREFIX_CHUNKS = (("SGLANG_MAX_KV_CHUNK_CAPACITY", "50"),)
CHECKED_POOL = (("SGLANG_DEBUG_MEMORY_POOL", "1"),)
INTERPRETED = (("TRITON_INTERPRET", "1"),)

SPECS = {
    "tp2-dcp2-a2a": Spec(
        dcp_size=2,
        args=("--dcp-comm-backend", "a2a"),
        env=MANY_PREFIX_CHUNKS + CHECKED_POOL,
    ),
    "tp2-dcp2-ag_rs-page4": Spec(
        dcp_size=2,
        args=("--dcp-comm-backend", "ag_rs", "--page-size", "4"),
        env=CHECKED_POOL,
    ),
    "tp2-dcp2-page64": Spec(dcp_size=2, args=("--page-size", "64"), pool_tokens=4096),
    "tp4-dcp4": Spec(tp=4, dcp_size=4, env=CHECKED_POOL),
    "tp4-dcp2": Spec(tp=4, dcp_size=2, env=MANY_PREFIX_CHUNKS),
    "tp8-dcp8": Spec(tp=8, dcp_size=8),
    "moe-ep2": Spec("moe", dcp_size=2, args=("--ep-size", "2")),
    "v3": Spec("v3", dcp_size=2, args=("--dcp-comm-backend", "ag_rs")),
    "pp2": Spec(dcp_size=2, pp=2),
    "interpreted": Spec(dcp_size=2, env=INTERPRETED, work="few"),
    "dp-attention": Spec(
        tp=4,
        dcp_size=2,
        args=("--dp-size", "2", "--enable-dp-attention"),
        env=CHECKED_POOL,
    ),
}


@pytest.fixture(scope="module", params=SPECS)
def served(request: pytest.FixtureRequest, farm: Farm) -> Outcome:
    """One configuration with DCP, served."""
    return farm.outcome(SPECS[request.param])


def compare(want: Outcome, got: Outcome) -> Comparison:
    """All batches of `got` against the same batches of the baseline."""
    names = list(got.results)
    return compare_results(
        [result for name in names for result in want.results[name]],
        [result for name in names for result in got.results[name]],
    )


def assert_same(found: Comparison) -> None:
    assert found.differences == ()
    assert found.tokens_equal
    assert found.max_logprob_diff < MAX_LOGPROB_DIFF


def test_same_tokens_as_without_dcp(served: Outcome, farm: Farm) -> None:
    found = compare(farm.baseline(served.spec.model), served)
    assert found.num_tokens == sum(
        len(batch.prompts) * batch.new_tokens for batch in WORK[served.spec.work].values()
    )
    assert_same(found)


def test_stages_ran_on_every_rank(served: Outcome) -> None:
    spec = served.spec
    assert len(served.ranks) == spec.tp * spec.pp
    for name in ("kv_write", "gather_q", "attend_stripe", "exchange_merge", "kv_gather"):
        assert min(served.counts(name)) > 0, name
    assert served.counts("gather_q") == served.counts("exchange_merge")
    if spec.dcp_size > 2:  # a decode step sees two tokens at least, so rank 1 always owns one
        assert min(served.counts("empty_stripe")[spec.dcp_size - 1 :: spec.dcp_size]) > 0
    assert {rank["dcp_size"] for rank in served.ranks} == {spec.dcp_size}
    assert {rank["pool"] for rank in served.ranks} == {"DcpMLATokenToKVPool"}


def test_only_owners_stored_rows(served: Outcome) -> None:
    c = served.spec.dcp_size
    (prompt,) = FIRST.prompts
    stored = 0
    for rank in served.first_ranks:
        rows = rank["kv_rows_written"]
        # overlap scheduling may store the one token that was returned
        allowed = {local_len(len(prompt) + more, rank["dcp_rank"], c) for more in (0, 1)}
        stored += rows
        if "--enable-dp-attention" in served.spec.args:
            allowed.add(0)  # the other replica got the request
        assert rows in allowed, (rank["rank"], rows, allowed)
    assert stored > 0


def test_pages_fill_from_the_lowest_rank(served: Outcome) -> None:
    c = served.spec.dcp_size
    rows = [rank["kv_rows_written"] for rank in served.ranks]
    for start in range(0, len(rows), c):
        group = rows[start : start + c]
        assert group == sorted(group, reverse=True)
        assert group[-1] > 0


def test_capacity_is_c_times_the_rows(served: Outcome) -> None:
    c = served.spec.dcp_size
    for rank in served.ranks:
        assert rank["kv_tokens"] == served.spec.pool_tokens
        assert rank["kv_rows_allocated"] * c == rank["kv_tokens"]


def test_prefix_comes_from_the_cache_in_widened_pages(served: Outcome) -> None:
    page = served.spec.dcp_size
    if "--page-size" in served.spec.args:
        page *= int(served.spec.args[served.spec.args.index("--page-size") + 1])
    name = "few hit" if served.spec.work == "few" else "hit"
    cached = cached_tokens(served.results[name])
    if "--enable-dp-attention" in served.spec.args:
        assert all(tokens % page == 0 for tokens in cached)  # the other replica may get the repeat
        return
    lengths = [len(prompt) for prompt in WORK[served.spec.work][name].prompts]
    assert cached == [(n - 1) // page * page for n in lengths]


def test_pool_is_balanced(served: Outcome) -> None:
    assert served.flushed
    assert "leak" not in served.log


def test_several_prefix_chunks(farm: Farm) -> None:
    many, few = farm.outcome(SPECS["tp2-dcp2-a2a"]), farm.outcome(SPECS["tp2-dcp2-page64"])
    assert min(many.counts("prefix_chunk")) > 1.5 * max(few.counts("prefix_chunk"))


def test_communicators_were_the_ones_asked_for(farm: Farm) -> None:
    for name in ("a2a", "ag_rs"):
        specs = [spec for spec in SPECS.values() if name in spec.args]
        assert specs
        for spec in specs:
            assert {rank["comm_backend"] for rank in farm.outcome(spec).ranks} == {name}


def test_this_comparison_can_fail(farm: Farm) -> None:
    found = compare(farm.baseline("moe"), farm.outcome(SPECS["tp2-dcp2-a2a"]))
    assert found.num_equal < found.num_prompts / 2


def test_capacity_without_max_total_tokens(farm: Farm) -> None:
    """The flag would hide the hook on pool sizing. From the same free memory: the same rows."""
    rows = set()
    for c in (1, 2):
        spec = Spec(
            dcp_size=c,
            args=("--mem-fraction-static", "0.05"),
            env=tuple(MODULES_ENV.items()),
            pool_tokens=None,
            module="fixed_memory_server",
            work="none",
        )
        for rank in farm.outcome(spec).ranks:
            assert rank["kv_tokens"] == c * rank["kv_rows_allocated"]
            rows.add(rank["kv_rows_allocated"])
    assert len(rows) == 1, rows


def test_torch_mla_equals_upstream_triton(farm: Farm) -> None:
    """The baseline is not only ours: upstream without the plugin, on its own attention kernels."""
    kernels = ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1")
    upstream = Spec(
        "lk288",
        tp=1,
        args=(*kernels, "--cuda-graph-backend-decode", "disabled"),
        env=(*BARE_CPU_ENV.items(), *INTERPRETED),
        module="sglang.launch_server",
        work="few",
    )
    ours = farm.outcome(Spec("lk288", tp=1, work="few"))
    assert ours.ranks[0]["attention_backend"] == "torch_mla"
    assert_same(compare(farm.outcome(upstream), ours))


# A server whose pool holds less than what is asked of it at once.
SMALL_POOL_TOKENS = 640
SMALL_POOL = Spec(
    dcp_size=2,
    args=("--chunked-prefill-size", "16", "--schedule-conservativeness", "0.1"),
    env=(*CHECKED_POOL, ("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")),
    pool_tokens=SMALL_POOL_TOKENS,
    work="small_pool",
)


@pytest.fixture(scope="module")
def small_pool(farm: Farm) -> Iterator[Server]:
    """A running server, used by the tests below in their order."""
    server, _ = farm.server(SMALL_POOL)
    with server:
        yield server


def assert_same_and_balanced(farm: Farm, server: Server, name: str, got: Results) -> None:
    assert_same(compare_results(farm.baseline("dense").results[name], got))
    assert "flushed" in str(server.post("/flush_cache", {}))
    assert server.process is not None
    assert server.process.poll() is None


def test_retraction(farm: Farm, small_pool: Server) -> None:
    batch = WORK["small_pool"]["retract"]
    assert sum(len(p) + batch.new_tokens for p in batch.prompts) > SMALL_POOL_TOKENS
    got = generate(small_pool, batch)
    assert "KV cache pool is full. Retract requests." in small_pool.log_path.read_text()
    assert_same_and_balanced(farm, small_pool, "retract", got)


def test_request_above_one_ranks_share(farm: Farm, small_pool: Server) -> None:
    batch = WORK["small_pool"]["large"]
    assert len(batch.prompts[0]) > SMALL_POOL_TOKENS // SMALL_POOL.dcp_size
    got = generate(small_pool, batch)
    assert_same_and_balanced(farm, small_pool, "large", got)


def test_abort_in_mid_prefill_then_the_same_prompt(farm: Farm, small_pool: Server) -> None:
    batch = WORK["small_pool"]["aborted"]

    def num_chunks() -> int:
        return small_pool.log_path.read_text().count("Prefill batch")

    before = num_chunks()
    asked = Background(lambda: generate(small_pool, batch, rid=["aborted"]))
    wait_for(lambda: num_chunks() > before + 2)
    small_pool.post("/abort_request", {"rid": "aborted"})
    (result,) = asked.join(60)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert result["output_ids"] == []
    again = generate(small_pool, batch)
    assert 0 < cached_tokens(again)[0] < len(batch.prompts[0]) - 16  # it was in the middle
    assert_same_and_balanced(farm, small_pool, "aborted", again)


def test_killed_rank_ends_the_server(small_pool: Server) -> None:
    """Last of them: the server does not survive it."""
    assert small_pool.process is not None
    asked = Background(lambda: generate(small_pool, WORK["small_pool"]["retract"]))
    ranks = psutil.Process(small_pool.process.pid).children(recursive=True)
    (victim,) = [p for p in ranks if any("scheduler_TP1" in word for word in p.cmdline())]
    time.sleep(1)  # in the middle of serving
    victim.kill()
    wait_for(lambda: small_pool.process is None or small_pool.process.poll() is not None, 120)
    with pytest.raises((OSError, ServerError)):
        asked.join(30)
    log = small_pool.log_path.read_text()
    assert "one child failed" in log
    assert "Connection" in log  # what the surviving rank says of its peer


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {timeout_s} s"
        time.sleep(0.02)
