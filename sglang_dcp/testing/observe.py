"""Read what the ranks of a server counted and hold, and judge the rows of their pools."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dcp.testing.server import Server, ServerError


def rank_counters(
    server: Server, folder: Path, num_ranks: int, timeout_s: float = 30.0
) -> list[dict[str, Any]]:
    """Counters of every world rank, in rank order, as of now.

    Args:
        server: a running server whose environment has SGLANG_DCP_COUNTERS_DIR set to `folder`.
        folder: that folder.
        num_ranks: world ranks that must answer.
        timeout_s: seconds until all of them must have written.

    Raises:
        ServerError: a rank did not write; with the end of the server's log.
    """
    for stale in folder.glob("rank-*.json"):
        stale.unlink()
    server.get("/server_info")  # only rank 0 answers, but every rank writes its file
    files = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            missing = [file.name for file in files if not file.exists()]
            raise ServerError(f"ranks did not write {missing}:\n{server.log_tail()}")
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def row_problems(
    rows_written: Sequence[int],
    dcp_size: int,
    num_requests: int,
    stored_tokens: int,
    page_size: int,
) -> list[str]:
    """What is wrong with the rows that the ranks of a striped server hold; empty if nothing.

    Every widened page is filled from its start, so in each page the ranks hold equally many rows
    up to one, the lower rank more. Pages may be reused (by at most one page a request), so tokens
    bound the rows from above, and from below up to that page.

    Args:
        rows_written: rows of each world rank that are not zero; groups are consecutive.
        dcp_size: c.
        num_requests: requests that were served.
        stored_tokens: tokens that these had to store in each group, prefix hits left out.
        page_size: widened page, tokens.
    """
    problems = []
    for start in range(0, len(rows_written), dcp_size):
        rows = list(rows_written[start : start + dcp_size])
        who = f"ranks {start}..{start + dcp_size - 1} hold {rows} rows"
        if rows != sorted(rows, reverse=True):
            problems.append(f"{who}: a lower rank must not hold fewer")
        if rows[0] - rows[-1] > num_requests:
            problems.append(
                f"{who}: they differ by more than one for each of {num_requests} requests"
            )
        most = stored_tokens + num_requests  # overlap scheduling may store one token too many
        least = stored_tokens - num_requests * page_size
        if not least <= sum(rows) <= most:
            problems.append(f"{who}: {sum(rows)} in all, expected {least} to {most}")
    return problems
