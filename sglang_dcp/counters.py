"""Counts of what a rank really did, for tests and the demo.

Under CUDA graphs Python runs at capture only, so a count of calls is then a count of captures;
rows in the pool are read from the tensors and are right in both cases.
"""

import json
import os
from collections import Counter
from typing import Any

from sglang_dcp import envs

_counts: Counter[str] = Counter()
_enabled = envs.counters_dir() is not None


def count(name: str, by: int = 1) -> None:
    """Add `by` to counter `name`, if SGLANG_DCP_COUNTERS_DIR is set."""
    if _enabled:
        _counts[name] += by


def flush(rank: int, extra: dict[str, Any]) -> None:
    """Write this rank's counters to $SGLANG_DCP_COUNTERS_DIR/rank-<rank>.json in one step.

    Args:
        rank: world rank.
        extra: further entries, e.g. rows and bytes of the pool.
    """
    folder = envs.counters_dir()
    if folder is None:
        return
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"rank-{rank}.json")
    with open(path + ".part", "w") as f:
        json.dump({"rank": rank, "counts": dict(_counts), **extra}, f, indent=1, sort_keys=True)
    os.replace(path + ".part", path)
