"""The two ledgers of the seed (section 5): bytes kept, and bytes moved.

Legend: B batch, H query heads, c dcp_size, D latent width 576, V value width 512.

The seed prices an exchanged head at ``(512 + 4) * 2`` bytes; on our wire it is ``512 * 2 + 4``,
bf16 output plus one float32 LSE. Every function below says which of the two it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dcp.planner.models import ModelShape

KV_DTYPE_BYTES: dict[str, int] = {
    "auto": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float32": 4,
}
ACTIVATION_BYTES = 2
LSE_BYTES = 4
COMMUNICATORS = ("nvlink", "a2a", "ag_rs")


# --- ledger 1: bytes kept ---------------------------------------------------------------------


def kv_bytes_per_token_per_layer(model: ModelShape, kv_element_bytes: int) -> int:
    """One latent row: ``576 * 2 = 1152`` bytes in bf16."""
    return model.latent_dim * kv_element_bytes


def kv_bytes_per_token(model: ModelShape, kv_element_bytes: int) -> int:
    """One token over all MLA layers."""
    return kv_bytes_per_token_per_layer(model, kv_element_bytes) * model.num_mla_layers


def rows_per_rank(context_tokens: int, dcp_size: int) -> int:
    """Rows of one sequence on the fullest rank (rank 0): ``ceil(L / c)``."""
    return -(-context_tokens // dcp_size)


@dataclass(frozen=True)
class MemoryLedger:
    """Ledger 1. ``total`` and ``per_rank`` are for one sequence, ``batch*`` for all of them."""

    kv_bytes_per_token_per_layer: int
    kv_bytes_per_token: int
    kv_bytes_total: int
    kv_bytes_per_rank: int
    kv_bytes_per_rank_without_dcp: int
    kv_bytes_batch: int
    kv_bytes_batch_per_rank: int
    mha_bytes_per_token_per_layer: int
    compression_vs_mha: float


def memory_ledger(
    model: ModelShape, context_tokens: int, batch: int, dcp_size: int, kv_element_bytes: int
) -> MemoryLedger:
    """Ledger 1 for ``batch`` sequences of ``context_tokens``; per rank = the fullest rank."""
    per_token = kv_bytes_per_token(model, kv_element_bytes)
    total = per_token * context_tokens
    per_rank = per_token * rows_per_rank(context_tokens, dcp_size)
    return MemoryLedger(
        kv_bytes_per_token_per_layer=kv_bytes_per_token_per_layer(model, kv_element_bytes),
        kv_bytes_per_token=per_token,
        kv_bytes_total=total,
        kv_bytes_per_rank=per_rank,
        kv_bytes_per_rank_without_dcp=total,
        kv_bytes_batch=total * batch,
        kv_bytes_batch_per_rank=per_rank * batch,
        mha_bytes_per_token_per_layer=model.mha_elements_per_token_per_layer * kv_element_bytes,
        compression_vs_mha=model.compression_vs_mha,
    )


# --- ledger 2: bytes moved --------------------------------------------------------------------


def gathered_heads(model: ModelShape, tp_size: int, dcp_size: int) -> int:
    """Query heads a rank attends with after stage 4: its own ``H / tp``, times c."""
    return model.num_attention_heads // tp_size * dcp_size


def gather_q_bytes(model: ModelShape, batch: int, num_heads: int) -> int:
    """Stage 4, the whole gathered query ``[B, H, 576]`` in bf16; the seed and our wire agree."""
    return batch * num_heads * model.latent_dim * ACTIVATION_BYTES


def exchange_bytes_seed(model: ModelShape, batch: int, num_heads: int) -> int:
    """Stage 6 as the seed counts it: ``B * H * (512 + 4) * 2``."""
    return batch * num_heads * (model.kv_lora_rank + 4) * ACTIVATION_BYTES


def exchange_bytes_wire(model: ModelShape, batch: int, num_heads: int) -> int:
    """Stage 6 as we send it: ``B * H * (512 * 2 + 4)``, bf16 output and float32 LSE."""
    return batch * num_heads * (model.kv_lora_rank * ACTIVATION_BYTES + LSE_BYTES)


def all_reduce_bytes(model: ModelShape, batch: int) -> int:
    """Stage 8, the partial sums ``[B, hidden]`` of o_proj in bf16; upstream's, DCP or not."""
    return batch * model.hidden_size * ACTIVATION_BYTES


def sent_share_bytes(num_bytes: int, group_size: int) -> int:
    """What a rank sends of a buffer that a group assembles: ``(c - 1) / c`` of it."""
    return num_bytes * (group_size - 1) // group_size


def ring_all_reduce_sent_bytes(num_bytes: int, group_size: int) -> int:
    """What a rank sends in a ring all-reduce: ``2 * (n - 1) / n``."""
    return 2 * num_bytes * (group_size - 1) // group_size


@dataclass(frozen=True)
class CommLedger:
    """Ledger 2 for one way of counting; layer figures are per layer and step.

    Attributes:
        name: "seed" or a communicator.
        gather_q_bytes, exchange_bytes, all_reduce_bytes: the whole buffers of stages 4, 6, 8.
        *_sent_bytes_per_rank: what one rank sends of each.
        step_bytes_per_rank: the three sent figures times the MLA layers.
        step_bytes_per_node: the same over all GPUs of the node.
        kernels_per_layer, collectives_per_layer: launches of stages 4, 6, 7; 0 where dcp is 1
            and for the seed's count.
    """

    name: str
    gather_q_bytes: int
    gather_q_sent_bytes_per_rank: int
    exchange_bytes: int
    exchange_sent_bytes_per_rank: int
    all_reduce_bytes: int
    all_reduce_sent_bytes_per_rank: int
    step_bytes_per_rank: int
    step_bytes_per_node: int
    kernels_per_layer: int
    collectives_per_layer: int


# stage 4 + stage 6 + stage 7: kernels of our own, NCCL collectives
_LAUNCHES = {
    "nvlink": (2, 0),  # gather; exchange with merge
    "a2a": (2, 2),  # pack, merge; all-gather, all-to-all
    "ag_rs": (2, 3),  # correct, cast; all-gather Q, all-gather LSE, reduce-scatter
    "seed": (0, 0),
}


def comm_ledger(
    name: str, model: ModelShape, batch: int, tp_size: int, dcp_size: int, num_gpus: int
) -> CommLedger:
    """Ledger 2 by the seed's count (``name="seed"``) or by one communicator's wire format."""
    heads = gathered_heads(model, tp_size, dcp_size)
    gather = gather_q_bytes(model, batch, heads)
    exchange, exchange_sent = _exchange(name, model, batch, heads, dcp_size)
    reduce = all_reduce_bytes(model, batch)
    gather_sent = sent_share_bytes(gather, dcp_size)
    reduce_sent = ring_all_reduce_sent_bytes(reduce, tp_size)
    per_rank = (gather_sent + exchange_sent + reduce_sent) * model.num_mla_layers
    kernels, collectives = _LAUNCHES[name] if dcp_size > 1 else (0, 0)
    return CommLedger(
        name=name,
        gather_q_bytes=gather,
        gather_q_sent_bytes_per_rank=gather_sent,
        exchange_bytes=exchange,
        exchange_sent_bytes_per_rank=exchange_sent,
        all_reduce_bytes=reduce,
        all_reduce_sent_bytes_per_rank=reduce_sent,
        step_bytes_per_rank=per_rank,
        step_bytes_per_node=per_rank * num_gpus,
        kernels_per_layer=kernels,
        collectives_per_layer=collectives,
    )


def _exchange(
    name: str, model: ModelShape, batch: int, heads: int, dcp_size: int
) -> tuple[int, int]:
    """(whole, sent per rank) of stage 6, in bytes."""
    if name == "ag_rs":
        # reduce-scatter of corrected float32 outputs, plus an all-gather of every rank's LSE
        scatter = batch * heads * model.kv_lora_rank * 4
        lse = batch * heads * LSE_BYTES * dcp_size
        return scatter + lse, sent_share_bytes(scatter, dcp_size) + sent_share_bytes(lse, dcp_size)
    count = exchange_bytes_seed if name == "seed" else exchange_bytes_wire
    whole = count(model, batch, heads)
    return whole, sent_share_bytes(whole, dcp_size)
