"""The plan in sentences: what fits, what is fastest, and why."""

from __future__ import annotations

from dataclasses import replace

from sglang_dcp.planner.crossover import mla_crossover_flops_only_tokens
from sglang_dcp.planner.plan import DcpOption, Plan
from sglang_dcp.planner.request import PlanRequest
from sglang_dcp.planner.units import format_bytes, format_capacity, format_count, format_ms
from sglang_dcp.planner.walls import padded_heads

# Above this nothing is left for activations and CUDA graphs
_HIGHEST_MEM_FRACTION = 0.95


def advice(plan: Plan) -> list[str]:
    """Sentences for a reader, most important first."""
    lines = [_capacity(plan), _speed(plan), _bound(plan)]
    return lines + [line for line in (_break_even(plan), _prefill(plan)) if line]


# --- memory -----------------------------------------------------------------------------------


def _capacity(plan: Plan) -> str:
    request, last = plan.request, plan.options[-1]
    asked = f"{request.batch:,} x {format_count(request.context_tokens)} tokens"
    ranks = plan.capacity_wall_ranks
    if ranks is None:
        return _weights_do_not_fit(request)
    if plan.min_dcp_size is not None:
        option = next(o for o in plan.options if o.dcp_size == plan.min_dcp_size)
        return (
            f"Smallest dcp that fits {asked}: {plan.min_dcp_size} "
            f"({format_bytes(option.kv_bytes_batch_per_rank)} of "
            f"{format_bytes(request.kv_budget_bytes_per_gpu)} per GPU; the capacity wall asks for "
            f"{_number(ranks)} ranks)."
        )
    if last.fits is None:
        return (
            f"Whether {asked} fits is unknown, because the weights of {request.model.name} are: KV "
            f"takes {format_bytes(last.kv_bytes_batch_per_rank)} per GPU at dcp {last.dcp_size}, "
            f"and {format_bytes(request.kv_budget_bytes_per_gpu)} minus weights are there. "
            "Give --weight-bytes."
        )
    return _does_not_fit(plan, asked, last, ranks)


def _does_not_fit(plan: Plan, asked: str, last: DcpOption, ranks: float) -> str:
    request = plan.request
    bound = "" if request.weight_bytes_per_gpu is not None else " before the unknown weights"
    narrower = f", {_number(ranks / 2)} with fp8 KV" if request.kv_element_bytes == 2 else ""
    return (
        f"{asked} fits at no dcp up to {last.dcp_size}: {format_bytes(plan.memory.kv_bytes_batch)} "
        f"of KV, {format_bytes(last.kv_bytes_batch_per_rank)} per GPU where "
        f"{format_bytes(request.kv_budget_bytes_per_gpu)} are free{bound}, short by "
        f"{format_bytes(last.short_bytes_per_rank)} per GPU. What would fit at dcp "
        f"{last.dcp_size}{bound}: {_what_fits(request, last)}. All of it needs {_number(ranks)} "
        f"such ranks{narrower}."
    )


def _what_fits(request: PlanRequest, option: DcpOption) -> str:
    context, batch = format_count(request.context_tokens), f"{request.batch:,}"
    shorter = f"{batch} x {format_capacity(option.max_context_tokens)} tokens"
    if option.max_batch:
        return f"{option.max_batch:,} x {context}, or {shorter}"
    return shorter if request.batch == 1 else f"not one sequence of {context}, but {shorter}"


def _weights_do_not_fit(request: PlanRequest) -> str:
    weights, budget = request.weight_bytes_per_gpu or 0, request.kv_budget_bytes_per_gpu
    usable = budget + weights + request.other_bytes
    return (
        f"{request.model.name} leaves no room for KV on {request.num_gpus} x {request.gpu.name} at "
        f"TP {request.tp_size}: weights take {format_bytes(weights)} and other memory "
        f"{format_bytes(request.other_bytes)} per GPU, {format_bytes(usable)} are usable, short by "
        f"{format_bytes(-budget)} before the first token. What would fit: {_more_room(request)}."
    )


def _more_room(request: PlanRequest) -> str:
    """The smallest change of one option after which some KV fits."""
    needed = (request.weight_bytes_per_gpu or 0) + request.other_bytes
    fraction = needed / (request.gpu.hbm_bytes - request.constants.step.startup_bytes)
    if fraction < _HIGHEST_MEM_FRACTION:
        return f"--mem-fraction above {fraction:.3f}, or more GPUs"
    for factor in (2, 4, 8, 16):
        tp_size = request.tp_size * factor
        wider = replace(request, tp_size=tp_size, num_gpus=tp_size)
        if wider.kv_budget_bytes_per_gpu > 0 and request.model.num_attention_heads % tp_size == 0:
            return f"TP {tp_size} on {tp_size} such GPUs, or weights of fewer bits"
    return "weights of fewer bits, or GPUs with more memory"


# --- time -------------------------------------------------------------------------------------


def _speed(plan: Plan) -> str:
    rows = {option.dcp_size: option for option in plan.options}
    best, plain = rows[plan.fastest_dcp_size], rows[1]
    what = "MLA attention and exchange" if best.predicted_step_ms is None else "step"
    head = f"Lowest predicted {what}: dcp {best.dcp_size}, {format_ms(_step_ms(best))}"
    if len(plan.options) == 1:
        return f"{head}; TP {plan.request.tp_size} leaves no other choice."
    if _step_ms(best) <= plan.request.constants.step.host_step_us * 1e-3:
        return f"{head}: what the host needs for a step; dcp makes no shorter one."
    if best.dcp_size == 1:
        return f"{head}: at this batch and context the exchange costs more than it saves."
    saved_ms = plain.attention_step_ms - best.attention_step_ms + best.exchange_ms
    return (
        f"{head} against {format_ms(_step_ms(plain))} at dcp 1: attention falls by "
        f"{format_ms(saved_ms)} because each GPU reads 1/{best.dcp_size} of the KV, the exchange "
        f"adds {format_ms(best.exchange_ms)}."
    )


def _step_ms(option: DcpOption) -> float:
    whole = option.predicted_step_ms
    return option.attention_step_ms if whole is None else whole


def _bound(plan: Plan) -> str:
    gpu, heads = plan.request.gpu, plan.chosen.num_heads
    ratio = plan.attention_flops_per_byte / gpu.ridge_flops_per_byte
    side = "memory bound" if ratio < 1 else "compute bound, more ranks do not shorten attention"
    text = (
        f"{heads} heads over one latent row are {plan.attention_flops_per_byte:.0f} FLOP/B, "
        f"{ratio:.0%} of the ridge of {gpu.name} ({gpu.ridge_flops_per_byte:.0f}): {side}."
    )
    padded = padded_heads(heads, plan.request.constants.step)
    if ratio < 1 <= ratio * padded / heads:
        text += f" The kernel pads them to {padded}, which the prediction finds compute bound."
    return text


def _break_even(plan: Plan) -> str | None:
    batch = f"batch {plan.request.batch:,}"
    if plan.dcp_size == 1:
        return None
    if plan.break_even_tokens is None:
        return (
            f"dcp {plan.dcp_size} is slower than dcp 1 at {batch} for any context; it buys "
            "capacity only."
        )
    if plan.break_even_tokens == 1:
        return f"dcp {plan.dcp_size} is no slower than dcp 1 at any context at {batch}."
    return (
        f"dcp {plan.dcp_size} is faster than dcp 1 from {format_count(plan.break_even_tokens)} "
        f"tokens of context at {batch}; below, it buys capacity only."
    )


def _prefill(plan: Plan) -> str | None:
    if plan.pass_q_below_new_tokens is None:
        return None
    return (
        f"Prefill on a cached prefix of {format_count(plan.request.context_tokens)}: pass-Q below "
        f"about {plan.pass_q_below_new_tokens:,.0f} new tokens, pass-KV above; by FLOPs alone "
        f"{mla_crossover_flops_only_tokens(plan.request.model):.0f}, whatever the prefix (GQA "
        "crosses at a miss rate instead: 12.5 % in theory, 5 % measured)."
    )


def _number(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
