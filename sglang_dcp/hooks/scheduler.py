"""Hooks on sglang.srt.managers.scheduler: the second phase of activation, and its proof."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dcp import counters, state
from sglang_dcp.comm import SERVING_WAIT_S
from sglang_dcp.hooks import registry, table
from sglang_dcp.hooks.startup_log import startup_lines

logger = logging.getLogger(__name__)


def activate(server_args: Any) -> None:
    """Apply every patch that `server_args` calls for in this scheduler process, or raise.

    Raises:
        PatchError: a target is missing, changed or patched by others. It propagates out of the
            scheduler's start and ends the server.
    """
    patches = table.phase_two(server_args)
    try:
        registry.apply(patches)
    except registry.PatchError as error:
        # The registry logs a traceback of its own for each hook; ours comes last and alone.
        logger.error(str(error))
        raise
    if server_args.dcp_size > 1:
        from sglang_dcp.hooks.forward_mha import force_expanded_prefill

        force_expanded_prefill()


def before_configure_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE configure_scheduler_process: where a scheduler first knows its arguments."""
    activate(server_args)


def after_get_init_info(result: dict[str, Any], self: Any) -> dict[str, Any]:
    """AFTER Scheduler.get_init_info: tell the launcher that this scheduler really is striped."""
    dcp = state.get_state()
    dcp.comm.set_wait_limit(SERVING_WAIT_S)  # loading and capturing are over
    pool = self.token_to_kv_pool_allocator.get_kvcache()
    if torch.distributed.get_rank() == 0:
        logger.info("\n".join(startup_lines(self, pool)))
    return {
        **result,
        "dcp_size": dcp.dcp_size,
        "dcp_comm_backend": dcp.comm.name,
        "dcp_kv_rows_per_rank": pool.size,
        "dcp_physical_page_size": pool.page_size,
    }


def around_run_event_loop(original: Callable[..., None], self: Any) -> None:
    """AROUND Scheduler.run_event_loop: name the peer if a wait for it ended the CUDA context.

    The exception goes on to upstream, which logs it and ends the server.
    """
    try:
        original(self)
    except Exception:
        reason = state.get_state().comm.failure()
        if reason is not None:
            logger.error(reason)
        raise


def after_get_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    """AFTER Scheduler.get_internal_state, which runs on every rank: flush this rank's counters.

    Only rank 0's answer reaches the client of /server_info.
    """
    info: dict[str, Any] = {}
    if self.server_args.device == "cuda":
        info["gpu_bytes"] = torch.cuda.memory_allocated()
        info["gpu_bytes_peak"] = torch.cuda.max_memory_allocated()
    pool = self.token_to_kv_pool_allocator.get_kvcache()
    first_layer = pool.kv_buffer[0]
    in_use = first_layer[pool.page_size :].flatten(1).any(dim=1)  # page 0 is the dummy page
    info |= {
        "kv_rows_allocated": pool.size,
        "kv_rows_written": int(in_use.sum()),
        "kv_bytes": int(pool.get_kv_size_bytes()),
        "kv_tokens": self.max_total_num_tokens,
        "attention_backend": self.server_args.attention_backend,
        "pool": type(pool).__name__,
    }
    if state.is_initialized():
        dcp = state.get_state()
        info.update(dcp_size=dcp.dcp_size, dcp_rank=dcp.dcp_rank, comm_backend=dcp.comm.name)
        if dcp.shadow is not None:
            info["shadow"] = dcp.shadow.report()
    counters.flush(torch.distributed.get_rank(), info)
    if self.server_args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the next reading is of what comes
    return result
