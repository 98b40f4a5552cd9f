"""A plan as one JSON object, and the block of the start-up log. No rich, no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang_dcp.planner.advice import advice
from sglang_dcp.planner.article import article_prints
from sglang_dcp.planner.crossover import (
    META_CROSSOVER_TABLE,
    META_MEASURED_MISS_RATE,
    META_SOURCE,
    gqa_threshold_miss_rate,
    mla_crossover_flops_only_tokens,
)
from sglang_dcp.planner.plan import Plan, communicator_us
from sglang_dcp.planner.units import format_bytes, format_count, format_ms


def startup_block(
    *,
    dcp_size: int,
    logical_capacity_tokens: int,
    rows_per_rank: int,
    kv_bytes_per_rank: int,
    communicator: str,
    attention_backend: str,
    tpot_floor_ms: float | None,
    floor_batch: int,
    floor_context_tokens: int,
    replicated_q_bytes: int = 0,
) -> list[str]:
    """Lines of the start-up log that prove DCP is active, without logger prefixes.

    Args:
        dcp_size: ranks that share one copy of the KV cache.
        logical_capacity_tokens: tokens that scheduler and radix cache see.
        rows_per_rank: physical rows of each rank's pool, without padding rows.
        kv_bytes_per_rank: bytes of that pool over all layers.
        communicator, attention_backend: the chosen ones, not "auto".
        tpot_floor_ms: `DcpOption.tpot_floor_ms` at the batch and context of the next two, or None
            where the planner does not know the device.
        floor_batch, floor_context_tokens: what the floor was computed for.
        replicated_q_bytes: of each rank, for the other ranks' heads; 0 if queries are gathered.
    """
    at = f"at {floor_batch:,} x {format_count(floor_context_tokens)} tokens"
    floor = "not predicted on this device"
    if tpot_floor_ms is not None:
        floor = f"{format_ms(tpot_floor_ms)} {at} (KV read and exchange only)"
    rows: tuple[tuple[str, str], ...] = (
        ("logical capacity", f"{logical_capacity_tokens:,} tokens"),
        ("rows per rank", f"{rows_per_rank:,} (one latent row per token and layer)"),
        ("KV bytes per rank", f"{format_bytes(kv_bytes_per_rank)} ({kv_bytes_per_rank:,} bytes)"),
        ("communicator", communicator),
        ("attention backend", attention_backend),
        ("predicted TPOT floor", floor),
    )
    if replicated_q_bytes:
        cost = f"{format_bytes(replicated_q_bytes)} ({replicated_q_bytes:,} bytes) per rank"
        rows += (("replicated Q weights", cost),)
    width = max(len(label) for label, _ in rows)
    head = f"DCP is active: the KV cache is striped over {dcp_size} ranks"
    return [head, *(f"  {label:<{width}}  {value}" for label, value in rows)]


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; the unit of every number is in its key.

    Flat keys of the memory and communication ledgers use the seed's count; ``wire_*`` and
    ``communicators`` use the bytes that our communicators send.
    """
    request = plan.request
    chosen, wire = plan.chosen, plan.comm[request.chosen_communicator]
    seed = asdict(plan.seed_comm)
    for key in ("name", "kernels_per_layer", "collectives_per_layer"):
        del seed[key]
    return {
        **_request_json(plan),
        **asdict(plan.memory),
        **seed,
        "wire_exchange_bytes": wire.exchange_bytes,
        "wire_exchange_sent_bytes_per_rank": wire.exchange_sent_bytes_per_rank,
        "wire_step_bytes_per_rank": wire.step_bytes_per_rank,
        "wire_step_bytes_per_node": wire.step_bytes_per_node,
        "communicators": {name: _communicator_json(plan, name) for name in plan.comm},
        "kv_budget_bytes_per_gpu": request.kv_budget_bytes_per_gpu,
        "kv_budget_is_upper_bound": request.weight_bytes_per_gpu is None,
        "fits": chosen.fits,
        "short_bytes_per_rank": chosen.short_bytes_per_rank,
        "capacity_tokens": chosen.capacity_tokens,
        "capacity_rows_per_rank": chosen.capacity_tokens // chosen.dcp_size,
        "max_context_tokens": chosen.max_context_tokens,
        "max_batch": chosen.max_batch,
        "min_dcp_size": plan.min_dcp_size,
        "capacity_wall_ranks": plan.capacity_wall_ranks,
        "bandwidth_floor_ms": chosen.bandwidth_floor_ms,
        "compute_floor_ms": chosen.compute_floor_ms,
        "exchange_ms": chosen.exchange_ms,
        "tpot_floor_ms": chosen.tpot_floor_ms,
        "attention_step_ms": chosen.attention_step_ms,
        "predicted_step_ms": chosen.predicted_step_ms,
        "fastest_dcp_size": plan.fastest_dcp_size,
        "break_even_tokens": plan.break_even_tokens,
        "attention_flops_per_byte": plan.attention_flops_per_byte,
        "ridge_flops_per_byte": request.gpu.ridge_flops_per_byte,
        "options": [asdict(option) for option in plan.options],
        "crossover": _crossover_json(plan),
        "article_prints": article_prints(request, plan.dcp_size),
        "advice": advice(plan),
        "sources": _sources_json(plan),
    }


def _request_json(plan: Plan) -> dict[str, Any]:
    request = plan.request
    return {
        "model": request.model.name,
        "gpu": request.gpu.name,
        "num_gpus": request.num_gpus,
        "tp_size": request.tp_size,
        "dcp_size": plan.dcp_size,
        "num_mla_layers": request.model.num_mla_layers,
        "context_tokens": request.context_tokens,
        "batch": request.batch,
        "kv_dtype": request.kv_dtype,
        "communicator": request.chosen_communicator,
        "mem_fraction_static": request.mem_fraction_static,
        "weight_bytes_per_gpu": request.weight_bytes_per_gpu,
        "other_bytes_per_gpu": request.other_bytes,
    }


def _communicator_json(plan: Plan, name: str) -> dict[str, Any]:
    gather_us, exchange_us = communicator_us(plan.request, plan.dcp_size, name)
    return {
        **asdict(plan.comm[name]),
        "gather_us": gather_us,
        "exchange_us": exchange_us,
        "us_are_estimates": plan.request.constants.exchange[name].is_estimate,
    }


def _crossover_json(plan: Plan) -> dict[str, Any]:
    return {
        "pass_q_below_new_tokens": plan.pass_q_below_new_tokens,
        "pass_q_below_new_tokens_flops_only": mla_crossover_flops_only_tokens(plan.request.model),
        "gqa_threshold_miss_rate": gqa_threshold_miss_rate(num_kv_heads=8, num_heads=128),
        "gqa_measured_miss_rate": META_MEASURED_MISS_RATE,
        "gqa_measured": [asdict(row) for row in META_CROSSOVER_TABLE],
        "gqa_measured_source": META_SOURCE,
    }


def _sources_json(plan: Plan) -> dict[str, Any]:
    request = plan.request
    table = request.constants.exchange[request.chosen_communicator]
    weights = "given" if request.weight_bytes is not None else "estimated from the config"
    return {
        "model": request.model.source,
        "gpu": request.gpu.source,
        "weights": "unknown" if request.weight_bytes_per_gpu is None else weights,
        "exchange": table.source,
        "exchange_is_estimate": table.is_estimate,
        "step": request.constants.step.source,
    }
