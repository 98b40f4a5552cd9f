"""The worked example of the first seed article, as it prints it.

It rounds early (3.45 = 27.6 / 8, 2.5 = 8 x 0.32 rounded down), so the planner shows its own exact
figure beside the printed one.
"""

from __future__ import annotations

from sglang_dcp.planner.request import PlanRequest

ARTICLE_EXAMPLE: dict[str, float] = {
    "kv_bytes_per_token_per_layer": 1.125 * 1024,
    "kv_bytes_total": 27.6e9,
    "kv_bytes_per_rank": 3.45e9,
    "gather_q_bytes": 7.1e6,
    "gather_q_sent_bytes_per_rank": 6.2e6,
    "exchange_bytes": 6.3e6,
    "exchange_sent_bytes_per_rank": 5.5e6,
    "all_reduce_bytes": 0.92e6,
    "all_reduce_sent_bytes_per_rank": 1.6e6,
    "step_bytes_per_rank": 320e6,
    "step_bytes_per_node": 2.5e9,
    "compression_vs_mha": 43.0,
}


def article_prints(request: PlanRequest, dcp_size: int) -> dict[str, float] | None:
    """The printed figures if the request is the article's (Kimi K3, 8 ranks, 64 x 1M, bf16)."""
    asked = (
        request.model.name,
        request.num_gpus,
        request.tp_size,
        dcp_size,
        request.context_tokens,
        request.batch,
        request.kv_element_bytes,
    )
    return dict(ARTICLE_EXAMPLE) if asked == ("kimi-k3", 8, 8, 8, 1_000_000, 64, 2) else None
