"""Deliberate bugs in a real server: each must be seen by the comparison that judges all servers."""

from pathlib import Path

import pytest
from mutated_server import MUTATIONS
from serving import MODULES_ENV, WORK, Batch, Farm, Spec, generate
from test_serve import MAX_LOGPROB_DIFF

from sglang_dcp.testing.compare import Comparison, compare_results
from sglang_dcp.testing.server import Server

pytestmark = pytest.mark.slow

BATCHES: dict[str, Batch] = {name: WORK["standard"][name] for name in ("short", "chunked")}


@pytest.fixture(scope="module")
def mutation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutation") / "name"
    path.write_text("none")
    return path


@pytest.fixture(scope="module")
def server(farm: Farm, mutation_file: Path):
    """A server whose bug is chosen through `mutation_file`."""
    spec = Spec(
        tp=4,  # with c = 2 no rank's stripe is ever empty in a decode step
        dcp_size=4,
        args=("--dcp-comm-backend", "a2a"),
        env=(("MUTATION_FILE", str(mutation_file)), *MODULES_ENV.items()),
        module="mutated_server",
    )
    mutated, _ = farm.server(spec)
    with mutated:
        yield mutated


def judge(farm: Farm, server: Server, mutation_file: Path, bug: str) -> Comparison:
    """Serve with `bug` from an empty radix cache and compare with the baseline."""
    mutation_file.write_text(bug)
    server.post("/flush_cache", {})
    got = [result for batch in BATCHES.values() for result in generate(server, batch)]
    mutation_file.write_text("none")
    baseline = farm.baseline("dense").results
    return compare_results([result for name in BATCHES for result in baseline[name]], got)


def fails(found: Comparison) -> bool:
    return not (found.tokens_equal and found.max_logprob_diff < MAX_LOGPROB_DIFF)


@pytest.mark.parametrize("bug", MUTATIONS)
def test_bug_is_seen(farm: Farm, server: Server, mutation_file: Path, bug: str) -> None:
    found = judge(farm, server, mutation_file, bug)
    assert fails(found)
    assert found.num_equal < found.num_prompts


def test_without_a_bug_the_same_server_passes(
    farm: Farm, server: Server, mutation_file: Path
) -> None:
    """Also after all the bugs: nothing of them stays."""
    assert not fails(judge(farm, server, mutation_file, "none"))
