"""Pass-Q or pass-KV for new tokens on a cached prefix.

GQA (the second seed, Meta's measurements) crosses at a KV miss rate. MLA does not: absorbed pass-Q
costs 1088 multiply-adds per (new token, prefix token, head) against 320 for pass-KV, which in turn
pays ``kv_b_proj`` once per prefix token. The crossover is a number of NEW tokens, almost the same
for all long prefixes; below some ten thousand cached tokens moving the queries lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dcp.planner.constants import StepConstants
from sglang_dcp.planner.gpus import GpuSpec
from sglang_dcp.planner.ledgers import ACTIVATION_BYTES, LSE_BYTES
from sglang_dcp.planner.models import ModelShape


@dataclass(frozen=True)
class MetaCrossoverRow:
    """One row of the seed's table: time to first token by KV miss rate."""

    miss_rate: float
    new_tokens: int
    pass_kv_ttft_ms: int
    pass_q_ttft_ms: int


META_SOURCE = "H100, CP 4, Llama3-405B, arXiv 2411.01783, as the second seed quotes it"
META_CROSSOVER_TABLE: tuple[MetaCrossoverRow, ...] = (
    MetaCrossoverRow(0.010, 1_280, 1023, 899),
    MetaCrossoverRow(0.025, 3_200, 1110, 1046),
    MetaCrossoverRow(0.0325, 4_160, 1299, 1280),
    MetaCrossoverRow(0.050, 6_400, 1306, 1302),
    MetaCrossoverRow(0.100, 12_800, 2081, 2205),
    MetaCrossoverRow(0.200, 25_600, 3353, 3617),
    MetaCrossoverRow(0.500, 64_000, 6845, 7368),
    MetaCrossoverRow(1.000, 128_000, 11462, 12361),
)
META_MEASURED_MISS_RATE = 0.05


def gqa_threshold_miss_rate(num_kv_heads: int, num_heads: int) -> float:
    """``2 * N_KV / N_H``: below it a query is smaller than the K and V it saves (12.5 % for 8/128).

    Bytes only. The measured crossover is lower (5 %), because pass-KV hides its transfer.
    """
    return 2 * num_kv_heads / num_heads


def mla_crossover_flops_only_tokens(model: ModelShape) -> float:
    """New tokens at which pass-Q and pass-KV need equal FLOPs: ``131072 / 768 = 171``.

    Independent of the prefix and of the number of heads.
    """
    return kv_up_flops_per_head(model) / (pass_q_flops(model) - pass_kv_flops(model))


def mla_crossover_tokens(
    model: ModelShape,
    gpu: GpuSpec,
    constants: StepConstants,
    *,
    prefix_tokens: int,
    num_heads: int,
    dcp_size: int,
) -> float | None:
    """New tokens below which pass-Q is faster, transfers included; both transfers unhidden.

    Args:
        prefix_tokens: cached tokens of the request.
        num_heads: gathered heads, ``H / tp * c``.

    Returns:
        None at dcp 1, or when pass-Q stays faster for any number of new tokens.
    """
    if dcp_size == 1:
        return None
    flops_per_s = gpu.bf16_flops_per_s * constants.flops_efficiency
    sent = (dcp_size - 1) / dcp_size
    # Heads times rows is the same for both: H/tp*c heads on P/c rows, or H/tp heads on P rows
    pairs = num_heads / dcp_size * prefix_tokens
    per_new_token_s = (
        pass_q_flops(model) - pass_kv_flops(model)
    ) * pairs / flops_per_s + num_heads * pass_q_bytes(model) * sent / gpu.link_bytes_per_s
    fixed_s = (
        kv_up_flops_per_head(model) * pairs / flops_per_s
        + prefix_tokens * latent_bytes(model) * sent / gpu.link_bytes_per_s
    )
    return fixed_s / per_new_token_s if per_new_token_s > 0 else None


def kv_up_flops_per_head(model: ModelShape) -> int:
    """``kv_b_proj`` of one prefix token and head: ``2 * 512 * (128 + 128)``."""
    return 2 * model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim)


def pass_q_flops(model: ModelShape) -> int:
    """Per (new token, prefix token, head): ``2 * 1088``."""
    return 2 * (model.latent_dim + model.kv_lora_rank)


def pass_kv_flops(model: ModelShape) -> int:
    """Per (new token, prefix token, head): ``2 * 320``."""
    return 2 * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim)


def pass_q_bytes(model: ModelShape) -> int:
    """Moved per (new token, head): the query out, its partial output and LSE back (stages 4, 6)."""
    return (model.latent_dim + model.kv_lora_rank) * ACTIVATION_BYTES + LSE_BYTES


def latent_bytes(model: ModelShape) -> int:
    """One cached token of one layer: ``576 * 2``; pass-KV moves it, both read it."""
    return model.latent_dim * ACTIVATION_BYTES
