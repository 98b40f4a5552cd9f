"""From a request to a plan: both ledgers, the walls, one row per dcp size, and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dcp.planner.crossover import mla_crossover_tokens
from sglang_dcp.planner.ledgers import (
    COMMUNICATORS,
    CommLedger,
    MemoryLedger,
    comm_ledger,
    gathered_heads,
    kv_bytes_per_token,
    kv_bytes_per_token_per_layer,
    memory_ledger,
)
from sglang_dcp.planner.request import PlanRequest, check_request
from sglang_dcp.planner.walls import (
    attention_flops_per_byte,
    attention_us,
    bandwidth_floor_ms,
    base_step_ms,
    compute_floor_ms,
    exchange_us,
    min_ranks_for_capacity,
    tokens_on_fullest_rank,
)


@dataclass(frozen=True)
class DcpOption:
    """What one dcp size gives for the batch.

    Attributes:
        dcp_size, num_heads: the size, and the query heads a rank attends with.
        kv_bytes_batch_per_rank: KV of the whole batch on the fullest rank.
        capacity_tokens: logical tokens the node's KV pools hold (an upper bound when the weights
            are unknown); rows per rank times ``dcp_size``.
        max_context_tokens: longest context at the asked batch.
        max_batch: most sequences at the asked context.
        fits: None when it depends on weights that are unknown.
        short_bytes_per_rank: what the batch lacks per rank; 0 when it fits.
        bandwidth_floor_ms, compute_floor_ms: all MLA layers at peak rates.
        gather_us, exchange_us: per layer, for the chosen communicator.
        exchange_ms: both, over all MLA layers.
        tpot_floor_ms: the larger of the two floors plus ``exchange_ms``.
        attention_step_ms: predicted MLA attention plus ``exchange_ms``.
        predicted_step_ms: the whole decode step, host included; None when layers or weights are
            unknown.
    """

    dcp_size: int
    num_heads: int
    kv_bytes_batch_per_rank: int
    capacity_tokens: int
    max_context_tokens: int
    max_batch: int
    fits: bool | None
    short_bytes_per_rank: int
    bandwidth_floor_ms: float
    compute_floor_ms: float
    gather_us: float
    exchange_us: float
    exchange_ms: float
    tpot_floor_ms: float
    attention_step_ms: float
    predicted_step_ms: float | None


@dataclass(frozen=True)
class Plan:
    """The whole answer.

    Attributes:
        request: the checked question.
        dcp_size: asked for, or chosen by the planner.
        memory: ledger 1 at ``dcp_size``.
        seed_comm: ledger 2 by the seed's count; ``comm`` by every communicator's wire format.
        options: one row per possible dcp size.
        capacity_wall_ranks: ``M_kv / (C_chip - W_chip)`` for the batch; None when the weights
            leave no room.
        attention_flops_per_byte: intensity of the gathered heads at ``dcp_size``.
        min_dcp_size: smallest that fits the batch; None when none does or weights are unknown.
        fastest_dcp_size: lowest predicted step, among those that fit if any does.
        break_even_tokens: context from which ``dcp_size`` beats dcp 1 at this batch; None at
            dcp 1 or when it never does below 2^30.
        pass_q_below_new_tokens: prefill crossover at this context; None at dcp 1.
    """

    request: PlanRequest
    dcp_size: int
    memory: MemoryLedger
    seed_comm: CommLedger
    comm: dict[str, CommLedger]
    options: list[DcpOption]
    capacity_wall_ranks: float | None
    attention_flops_per_byte: float
    min_dcp_size: int | None
    fastest_dcp_size: int
    break_even_tokens: int | None
    pass_q_below_new_tokens: float | None

    @property
    def chosen(self) -> DcpOption:
        """The row of ``dcp_size``."""
        return next(option for option in self.options if option.dcp_size == self.dcp_size)


def make_plan(request: PlanRequest) -> Plan:
    """Answer a request.

    Raises:
        ValueError: `check_request` refuses it.
    """
    check_request(request)
    options = [dcp_option(request, dcp_size) for dcp_size in request.dcp_sizes]
    fastest = _fastest(options)
    dcp_size = request.dcp_size or fastest
    model, batch, tp_size = request.model, request.batch, request.tp_size
    heads = gathered_heads(model, tp_size, dcp_size)
    memory = memory_ledger(model, request.context_tokens, batch, dcp_size, request.kv_element_bytes)
    sizes = (model, batch, tp_size, dcp_size, request.num_gpus)
    return Plan(
        request=request,
        dcp_size=dcp_size,
        memory=memory,
        seed_comm=comm_ledger("seed", *sizes),
        comm={name: comm_ledger(name, *sizes) for name in COMMUNICATORS},
        options=options,
        capacity_wall_ranks=min_ranks_for_capacity(
            memory.kv_bytes_batch, request.kv_budget_bytes_per_gpu
        ),
        attention_flops_per_byte=attention_flops_per_byte(
            model, heads, memory.kv_bytes_per_token_per_layer
        ),
        min_dcp_size=next((option.dcp_size for option in options if option.fits), None),
        fastest_dcp_size=fastest,
        break_even_tokens=break_even_context_tokens(request, dcp_size),
        pass_q_below_new_tokens=mla_crossover_tokens(
            model,
            request.gpu,
            request.constants.step,
            prefix_tokens=request.context_tokens,
            num_heads=heads,
            dcp_size=dcp_size,
        ),
    )


def dcp_option(request: PlanRequest, dcp_size: int) -> DcpOption:
    """One row: capacity, floors and prediction of one dcp size."""
    model, gpu, batch = request.model, request.gpu, request.batch
    heads = gathered_heads(model, request.tp_size, dcp_size)
    ledger = memory_ledger(model, request.context_tokens, batch, dcp_size, request.kv_element_bytes)
    tokens = tokens_on_fullest_rank(request.context_tokens, batch, dcp_size)
    bandwidth_ms = bandwidth_floor_ms(ledger.kv_bytes_batch, dcp_size, gpu.hbm_bytes_per_s)
    compute_ms = compute_floor_ms(model, heads, tokens, gpu.bf16_flops_per_s)
    gather, exchange = communicator_us(request, dcp_size, request.chosen_communicator)
    exchange_ms = (gather + exchange) * model.num_mla_layers * 1e-3
    rows = _rows_per_rank(request)
    short = max(0, ledger.kv_bytes_batch_per_rank - request.kv_budget_bytes_per_gpu)
    return DcpOption(
        dcp_size=dcp_size,
        num_heads=heads,
        kv_bytes_batch_per_rank=ledger.kv_bytes_batch_per_rank,
        capacity_tokens=rows * dcp_size,
        max_context_tokens=rows // batch * dcp_size,
        max_batch=rows // (tokens // batch),
        fits=_fits(request, short),
        short_bytes_per_rank=short,
        bandwidth_floor_ms=bandwidth_ms,
        compute_floor_ms=compute_ms,
        gather_us=gather,
        exchange_us=exchange,
        exchange_ms=exchange_ms,
        tpot_floor_ms=max(bandwidth_ms, compute_ms) + exchange_ms,
        attention_step_ms=attention_step_ms(request, dcp_size, request.context_tokens),
        predicted_step_ms=predicted_step_ms(request, dcp_size, request.context_tokens),
    )


def attention_step_ms(request: PlanRequest, dcp_size: int, context_tokens: int) -> float:
    """Predicted MLA attention plus exchange of all MLA layers, at any context."""
    one_layer_us = attention_us(
        request.model,
        request.gpu,
        request.constants.step,
        num_heads=gathered_heads(request.model, request.tp_size, dcp_size),
        tokens_per_rank=tokens_on_fullest_rank(context_tokens, request.batch, dcp_size),
        kv_bytes_per_token_per_layer=kv_bytes_per_token_per_layer(
            request.model, request.kv_element_bytes
        ),
    )
    moved_us = sum(communicator_us(request, dcp_size, request.chosen_communicator))
    return (one_layer_us + moved_us) * request.model.num_mla_layers * 1e-3


def predicted_step_ms(request: PlanRequest, dcp_size: int, context_tokens: int) -> float | None:
    """Predicted decode step at any context: the GPU's, or the host's if that is longer.

    Returns:
        None when the layers or the weights of the model are unknown.
    """
    step = request.constants.step
    base_ms = base_step_ms(request.model, request.gpu, step, request.tp_size, request.batch)
    if base_ms is None:
        return None
    gpu_ms = base_ms + attention_step_ms(request, dcp_size, context_tokens)
    return max(gpu_ms, step.host_step_us * 1e-3)


def break_even_context_tokens(request: PlanRequest, dcp_size: int) -> int | None:
    """Shortest context at which ``dcp_size`` is no slower than dcp 1, by the prediction.

    Shorter contexts lose: the exchange costs more than the smaller read saves.
    """
    if dcp_size == 1:
        return None

    def pays(context: int) -> bool:
        return attention_step_ms(request, dcp_size, context) <= attention_step_ms(
            request, 1, context
        )

    high = 1
    while not pays(high):
        high *= 2
        if high > 2**30:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def communicator_us(request: PlanRequest, dcp_size: int, name: str) -> tuple[float, float]:
    """(gather, exchange + merge) per layer in microseconds, for one communicator."""
    return exchange_us(
        request.model,
        request.constants.exchange[name],
        batch=request.batch,
        num_heads=gathered_heads(request.model, request.tp_size, dcp_size),
        dcp_size=dcp_size,
        link_bytes_per_s=request.gpu.link_bytes_per_s,
    )


def _rows_per_rank(request: PlanRequest) -> int:
    """Rows that the pool of one rank holds."""
    per_row = kv_bytes_per_token(request.model, request.kv_element_bytes)
    return max(0, request.kv_budget_bytes_per_gpu) // per_row


def _fits(request: PlanRequest, short_bytes: int) -> bool | None:
    if short_bytes:
        return False
    return None if request.weight_bytes_per_gpu is None else True


def _fastest(options: list[DcpOption]) -> int:
    possible = [option for option in options if option.fits is not False] or options
    return min(possible, key=lambda option: option.attention_step_ms).dcp_size
