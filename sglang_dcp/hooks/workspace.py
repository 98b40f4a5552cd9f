"""--dcp-workspace-mb of a set of server arguments: sizes of chunks and slices, what is refused."""

import logging
from dataclasses import replace
from typing import Any

from sglang.srt.environ import envs

from sglang_dcp.workspace import (
    MIB,
    PLAN_BYTES,
    ChunkBudget,
    PassQLimits,
    ReadShape,
    least_workspace_mb,
    pass_q_bytes,
    pass_q_limits,
)

logger = logging.getLogger(__name__)

#: Backends whose pass-KV plans its chunks (`attention.ragged_chunks`).
PLANNING_BACKENDS = ("flashinfer", "flashmla")


def read_shape(args: Any) -> ReadShape:
    """Sizes of a read by a rank of a server with `args` (dcp_size > 1)."""
    config = args.get_model_config()
    attn_tp = args.tp_size // (args.dp_size if args.enable_dp_attention else 1)
    return ReadShape(
        dcp_size=args.dcp_size,
        heads_local=config.num_attention_heads // attn_tp,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        element_bytes=config.dtype.itemsize,
    )


def chunk_budget(args: Any) -> ChunkBudget:
    """What --dcp-workspace-mb leaves a chunk of pass-KV."""
    plans = args.get_attention_backends()[0] in PLANNING_BACKENDS
    return ChunkBudget(
        workspace_bytes=args.dcp_workspace_mb * MIB,
        shape=read_shape(args),
        plan_bytes=PLAN_BYTES if plans else 0,
        page_tokens=args.page_size,
    )


def limit_prefix_chunks(args: Any) -> ChunkBudget:
    """Lower upstream's chunk capacity to what fits the workspace, in whole groups of dcp_size.

    A user's smaller SGLANG_MAX_KV_CHUNK_CAPACITY stays, whatever the page.
    """
    budget, asked = chunk_budget(args), envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get()
    if asked < budget.most_tokens:
        asked = max(asked // args.dcp_size, 1) * args.dcp_size
        budget = replace(budget, page_tokens=args.dcp_size, cap_tokens=asked)
    envs.SGLANG_MAX_KV_CHUNK_CAPACITY.set(budget.most_tokens)
    new_tokens = args.chunked_prefill_size
    logger.info(
        f"DCP: pass-KV reads prefixes in chunks of {budget.most_tokens} tokens, of "
        f"{budget.chunk_tokens([new_tokens], [budget.most_tokens + 1])} beside {new_tokens} new "
        f"ones (--dcp-workspace-mb {args.dcp_workspace_mb})."
    )
    return budget


def limit_pass_q(args: Any, most_slice_tokens: int) -> PassQLimits:
    """New tokens of a slice and of a batch of pass-Q that fit the workspace; one log line."""
    limits = pass_q_limits(args.dcp_workspace_mb * MIB, read_shape(args), most_slice_tokens)
    if args.dcp_prefill != "pass-kv":
        logger.info(
            f"DCP: pass-Q takes batches of up to {limits.batch_tokens} new tokens in slices of "
            f"{limits.slice_tokens}, larger ones go by pass-KV "
            f"(--dcp-workspace-mb {args.dcp_workspace_mb})."
        )
    return limits


def check_workspace(args: Any) -> None:
    """Raise ValueError unless the workspace holds the least work and the GPU holds the workspace.

    The least is a widened page beside the outputs of the largest batch for pass-KV, which every
    mode needs for large batches, and a token for pass-Q where it alone was asked for.

    Args:
        args: a ServerArgs with dcp_size > 1 after its own `__post_init__`.
    """
    asked = args.dcp_workspace_mb
    budget, new_tokens = chunk_budget(args), args.chunked_prefill_size
    if not budget.fits(new_tokens):
        least_mb = least_workspace_mb(budget, new_tokens)
        raise ValueError(
            f"--dcp-workspace-mb {asked} was asked for: a prefix is read in chunks of at least one "
            f"widened page, and {args.page_size} tokens of {budget.shape.heads_local} heads beside "
            f"the outputs of {new_tokens} new tokens need {least_mb} MiB. Use --dcp-workspace-mb "
            f"{least_mb} or more, or a smaller --chunked-prefill-size."
        )
    least_q_mb = -(-pass_q_bytes(1, 1, read_shape(args)) // MIB)
    if args.dcp_prefill == "pass-q" and asked < least_q_mb:
        raise ValueError(
            f"--dcp-prefill pass-q with --dcp-workspace-mb {asked} was asked for: one new token "
            f"and the partial outputs of split keys need {least_q_mb} MiB. Use --dcp-workspace-mb "
            f"{least_q_mb} or more, or --dcp-prefill auto."
        )
    share_mb = _free_share_mb(args)
    if share_mb is not None and asked > share_mb:
        raise ValueError(
            f"--dcp-workspace-mb {asked} with --mem-fraction-static {args.mem_fraction_static:.3f} "
            f"was asked for: the workspace comes from the memory that weights and KV cache leave, "
            f"{share_mb} MiB of this GPU. Use --dcp-workspace-mb {share_mb} at most, or a smaller "
            "--mem-fraction-static."
        )


def _free_share_mb(args: Any) -> int | None:
    """MiB of a GPU outside the static share; None where its memory is not known."""
    from sglang.srt import server_args  # its own name for the function is what tests replace

    if args.device != "cuda" or args.mem_fraction_static is None:
        return None
    total_mb = server_args.get_device_memory_capacity(args.device)
    return None if total_mb is None else int(total_mb * (1 - args.mem_fraction_static))
