"""--dcp-workspace-mb of a set of server arguments: sizes of chunks and slices, what is refused."""

import logging
from typing import Any

from sglang.srt.environ import envs

from sglang_dcp.workspace import (
    PassQLimits,
    ReadShape,
    pass_q_bytes,
    pass_q_limits,
    workspace_bytes,
    workspace_tokens,
)

logger = logging.getLogger(__name__)

MIB = 2**20


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


def prefix_chunk_tokens(args: Any) -> int:
    """Prefix tokens of a chunk of `args`: what fits the workspace, in whole widened pages."""
    tokens = workspace_tokens(args.dcp_workspace_mb * MIB, read_shape(args))
    return tokens // args.page_size * args.page_size


def limit_prefix_chunks(args: Any) -> None:
    """Lower upstream's chunk capacity to what fits the workspace, in whole groups of dcp_size."""
    tokens = min(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get(), prefix_chunk_tokens(args))
    tokens = max(tokens // args.dcp_size, 1) * args.dcp_size
    envs.SGLANG_MAX_KV_CHUNK_CAPACITY.set(tokens)
    logger.info(
        f"DCP: pass-KV reads prefixes in chunks of {tokens} tokens "
        f"(--dcp-workspace-mb {args.dcp_workspace_mb})."
    )


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

    The least is a widened page for pass-KV, which every mode needs for large batches, and a token
    for pass-Q where it alone was asked for.

    Args:
        args: a ServerArgs with dcp_size > 1 after its own `__post_init__`.
    """
    asked = args.dcp_workspace_mb
    if prefix_chunk_tokens(args) < args.page_size:
        shape = read_shape(args)
        least_mb = -(-workspace_bytes(args.page_size, shape) // MIB)
        raise ValueError(
            f"--dcp-workspace-mb {asked} was asked for: a prefix is read in chunks of at least one "
            f"widened page, and {args.page_size} tokens of {shape.heads_local} heads need "
            f"{least_mb} MiB. Use --dcp-workspace-mb {least_mb} or more."
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
