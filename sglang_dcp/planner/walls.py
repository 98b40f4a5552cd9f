"""The walls: capacity, HBM bandwidth, compute of the gathered heads, and the exchange latency.

Second seed: ``N_d >= M_kv / (C_chip - W_chip)`` and ``TPOT >= M_kv / (N_d * B_hbm)``.
A *floor* uses peak rates and ideal kernels; a *prediction* uses `StepConstants`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from sglang_dcp.planner.constants import ExchangeTable, StepConstants
from sglang_dcp.planner.gpus import GpuSpec
from sglang_dcp.planner.ledgers import ACTIVATION_BYTES, LSE_BYTES, rows_per_rank
from sglang_dcp.planner.models import ModelShape

_MIB = 2**20


# --- capacity ---------------------------------------------------------------------------------


def default_mem_fraction(gpu: GpuSpec, tp_size: int) -> float:
    """SGLang 0.5.14's own ``--mem-fraction-static`` for an MLA model with default options.

    Of `ServerArgs._handle_gpu_memory_settings`: metadata, activations of one prefill chunk, decode
    graphs, parallel size and prefill graphs, at least 10 GiB on large GPUs.
    """
    gpu_mib = gpu.hbm_bytes / _MIB
    is_large = gpu_mib >= 160 * 1024
    chunked_prefill_tokens = 16384 if is_large else 8192
    max_graph_batch = 512 if is_large or tp_size >= 4 else 256
    reserved_mib = 512 + chunked_prefill_tokens * 1.5 + max_graph_batch * 2
    reserved_mib += tp_size / 8 * 1024 + 1.5 * 1024
    return round((gpu_mib - max(reserved_mib, 10 * 1024)) / gpu_mib, 3)


def kv_budget_bytes(
    gpu: GpuSpec,
    mem_fraction: float,
    weight_bytes_per_gpu: int,
    other_bytes: int,
    startup_bytes: int,
) -> int:
    """HBM left for the KV cache of one rank (``C_chip - W_chip``); may be negative.

    SGLang sizes the pool as ``free after loading - free before loading * (1 - fraction)``.
    """
    seen = gpu.hbm_bytes - startup_bytes
    return int(seen * mem_fraction) - weight_bytes_per_gpu - other_bytes


def min_ranks_for_capacity(kv_bytes: int, budget_bytes_per_rank: int) -> float | None:
    """The capacity wall ``N_d >= M_kv / (C_chip - W_chip)``; None without any room for KV."""
    return kv_bytes / budget_bytes_per_rank if budget_bytes_per_rank > 0 else None


# --- floors: peak rates -----------------------------------------------------------------------


def bandwidth_floor_ms(kv_bytes: int, num_ranks: int, hbm_bytes_per_s: float) -> float:
    """The bandwidth wall ``M_kv / (N_d * B_hbm)``."""
    return kv_bytes / (num_ranks * hbm_bytes_per_s) * 1e3


def attention_flops_per_head_per_token(model: ModelShape) -> int:
    """Absorbed attention: 576 multiply-adds for the logit, 512 for the value, 2 FLOP each."""
    return 2 * (model.latent_dim + model.kv_lora_rank)


def compute_floor_ms(
    model: ModelShape, num_heads: int, tokens_per_rank: int, bf16_flops_per_s: float
) -> float:
    """Tensor-core time of all MLA layers for ``num_heads`` gathered heads on one rank's tokens."""
    flops = attention_flops_per_head_per_token(model) * num_heads * tokens_per_rank
    return flops * model.num_mla_layers / bf16_flops_per_s * 1e3


def attention_flops_per_byte(
    model: ModelShape, num_heads: int, kv_bytes_per_token_per_layer: int
) -> float:
    """Arithmetic intensity of the 576-wide MQA; compare with `GpuSpec.ridge_flops_per_byte`."""
    return attention_flops_per_head_per_token(model) * num_heads / kv_bytes_per_token_per_layer


# --- measured times ---------------------------------------------------------------------------


def exchange_us(
    model: ModelShape,
    table: ExchangeTable,
    *,
    batch: int,
    num_heads: int,
    dcp_size: int,
    link_bytes_per_s: float,
) -> tuple[float, float]:
    """(gather, exchange + merge) per layer in microseconds; (0, 0) at dcp 1.

    The table is read by bytes sent per rank, so that other heads, widths and dcp sizes fall on the
    same line; the time on the wire scales with the link, the rest stays.
    """
    if dcp_size == 1:
        return 0.0, 0.0
    gather_width = model.latent_dim * ACTIVATION_BYTES
    exchange_width = model.kv_lora_rank * ACTIVATION_BYTES + LSE_BYTES
    items = batch * num_heads * (dcp_size - 1) / dcp_size
    table_share = table.num_heads * (table.dcp_size - 1) / table.dcp_size
    slower = 1 / link_bytes_per_s - 1 / table.link_bytes_per_s
    gather, exchange = (
        _interpolate(items, [b * table_share for b in table.batches], times)
        + items * width * slower * 1e6
        for times, width in (
            (table.gather_us, gather_width),
            (table.exchange_us, exchange_width),
        )
    )
    return gather, exchange


def _interpolate(x: float, xs: list[float], ys: tuple[float, ...]) -> float:
    """Piecewise linear; flat below the first point, the last slope beyond the last point."""
    if x <= xs[0]:
        return ys[0]
    segments = list(pairwise(zip(xs, ys, strict=True)))
    (x0, y0), (x1, y1) = segments[min(bisect_left(xs, x), len(segments)) - 1]
    return y0 + (x - x0) / (x1 - x0) * (y1 - y0)


def attention_us(
    model: ModelShape,
    gpu: GpuSpec,
    constants: StepConstants,
    *,
    num_heads: int,
    tokens_per_rank: int,
    kv_bytes_per_token_per_layer: int,
) -> float:
    """Predicted MLA attention of one layer on one rank, in microseconds."""
    read_s = tokens_per_rank * kv_bytes_per_token_per_layer / gpu.hbm_bytes_per_s
    padded = padded_heads(num_heads, constants)
    flops = attention_flops_per_head_per_token(model) * padded * tokens_per_rank
    compute_s = flops / gpu.bf16_flops_per_s
    busy_s = max(read_s / constants.hbm_efficiency, compute_s / constants.flops_efficiency)
    return constants.attention_launch_us + busy_s * 1e6


def padded_heads(num_heads: int, constants: StepConstants) -> int:
    """Heads the kernel computes for: the next multiple of its tile."""
    return -(-num_heads // constants.head_tile) * constants.head_tile


def base_step_ms(
    model: ModelShape, gpu: GpuSpec, constants: StepConstants, tp_size: int, batch: int
) -> float | None:
    """Predicted step without MLA attention and DCP: overhead per layer plus reading weights.

    Returns:
        None when the layers or the weights of the model are unknown.
    """
    if model.num_hidden_layers is None or model.weights is None:
        return None
    read_bytes = model.weights.read_bytes_per_gpu(tp_size, batch)
    read_ms = read_bytes / (gpu.hbm_bytes_per_s * constants.hbm_efficiency) * 1e3
    return model.num_hidden_layers * constants.layer_overhead_us * 1e-3 + read_ms


def tokens_on_fullest_rank(context_tokens: int, batch: int, dcp_size: int) -> int:
    """Cached tokens that rank 0 reads per layer and step."""
    return batch * rows_per_rank(context_tokens, dcp_size)
