"""Hooks on sglang.srt.model_executor.pool_configurator: logical capacity is dcp_size * C."""

from collections.abc import Callable
from typing import Any

from sglang_dcp import state


def around_calculate_pool_sizes(
    original: Callable[..., Any], self: Any, available_bytes: int, page_size: int
) -> Any:
    """AROUND DefaultPoolConfigurator.calculate_pool_sizes (seed: "physical C rows, logical 8C").

    A rank stores 1/dcp_size of every token's rows, so its bytes hold dcp_size times the tokens;
    `page_size` is already the widened one. A limit by --max-total-tokens needs no change: it is
    in logical tokens, as its help says.
    """
    return original(self, available_bytes * state.get_state().dcp_size, page_size)
