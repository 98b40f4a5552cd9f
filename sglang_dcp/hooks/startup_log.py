"""The block that a DCP server logs once it is ready: what it holds and what it can reach."""

from typing import Any

import torch

from sglang_dcp import state
from sglang_dcp.attention.all_heads import replicated_bytes
from sglang_dcp.planner.gpus import find_gpu
from sglang_dcp.planner.models import shape_from_config
from sglang_dcp.planner.plan import make_plan
from sglang_dcp.planner.report import startup_block
from sglang_dcp.planner.request import PlanRequest


def _tpot_floor_ms(scheduler: Any, context_tokens: int) -> float | None:
    """The planner's floor for one sequence of `context_tokens`, or None on an unknown device."""
    args, dcp = scheduler.server_args, state.get_state()
    if args.device != "cuda":
        return None
    gpu = find_gpu(torch.cuda.get_device_name())
    if gpu is None:
        return None
    config = scheduler.model_config.hf_config.to_dict()
    request = PlanRequest(
        model=shape_from_config(config, name=args.served_model_name, source=args.model_path),
        gpu=gpu,
        num_gpus=args.tp_size,
        tp_size=args.tp_size // (args.dp_size if args.enable_dp_attention else 1),
        dcp_size=dcp.dcp_size,
        context_tokens=context_tokens,
        batch=1,
        communicator=dcp.comm.name,
    )
    return make_plan(request).chosen.tpot_floor_ms


def startup_lines(scheduler: Any, pool: Any) -> list[str]:
    """Lines of the block for this scheduler and its striped pool."""
    dcp = state.get_state()
    context_tokens = min(scheduler.model_config.context_len, scheduler.max_total_num_tokens)
    return startup_block(
        dcp_size=dcp.dcp_size,
        logical_capacity_tokens=scheduler.max_total_num_tokens,
        rows_per_rank=pool.size,
        kv_bytes_per_rank=int(pool.get_kv_size_bytes()),
        communicator=dcp.comm.name,
        attention_backend=scheduler.server_args.attention_backend,
        tpot_floor_ms=_tpot_floor_ms(scheduler, context_tokens),
        floor_batch=1,
        floor_context_tokens=context_tokens,
        replicated_q_bytes=replicated_bytes(scheduler.tp_worker.model_runner.model),
    )
