"""Hooks on sglang.srt.distributed.parallel_state: the DCP groups live as long as its own."""

import dataclasses
import logging
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs as sglang_envs
from sglang.srt.server_args import get_global_server_args

from sglang_dcp import envs, state
from sglang_dcp.comm import (
    COMM_BACKENDS,
    Communicator,
    GroupInfo,
    PyncclTransport,
    TorchTransport,
    Transport,
    hangs_on_peer_access,
    resolve_auto,
)
from sglang_dcp.comm.shadow import Shadow
from sglang_dcp.comm.symmetric import probe_peers
from sglang_dcp.hooks.workspace import limit_pass_q, limit_prefix_chunks
from sglang_dcp.host_speed import slowest_host_ratio
from sglang_dcp.layout import dcp_groups
from sglang_dcp.planner.models import shape_from_config
from sglang_dcp.prefill_policy import PrefillCosts, PrefillPolicy, PrefillRates, load_rates
from sglang_dcp.workspace import ChunkBudget

logger = logging.getLogger(__name__)


def _max_decode_tokens(server_args: Any) -> int:
    """Tokens that the communicator's static buffers must hold: the largest captured batch."""
    decode = server_args.cuda_graph_config.decode
    sizes = [decode.max_bs or 0, *(decode.bs or [])]
    return max(max(sizes), 64)


def _choose_backend(server_args: Any, coordinator: Any, device: torch.device) -> str:
    """Name of the communicator, the same on every rank of the group; one log line says why."""
    requested = server_args.dcp_comm_backend
    info = GroupInfo(size=coordinator.world_size, device_type=device.type)
    if device.type == "cuda" and hangs_on_peer_access(requested, info):
        able, why = probe_peers(device, coordinator.cpu_group)  # maps memory: only where it matters
        info = dataclasses.replace(info, peer_access=able, peer_reason=why)
    name, reason = resolve_auto(requested, info)
    logger.info(f"DCP group {coordinator.ranks}: communicator {name} ({reason}).")
    return name


def _make_communicator(
    server_args: Any, coordinator: Any, device: torch.device
) -> tuple[Communicator, Shadow | None]:
    """The communicator of this rank, warm; in shadow mode with what compares it with `a2a`."""
    transport: Transport = (
        PyncclTransport(coordinator.pynccl_comm)
        if device.type == "cuda"
        else TorchTransport(coordinator.device_group)
    )
    model_config = server_args.get_model_config()
    attn_tp_size = parallel_state.get_attn_tp_group().world_size
    name = _choose_backend(server_args, coordinator, device)

    def make(name: str) -> Communicator:
        comm = COMM_BACKENDS[name](
            transport,
            num_heads=model_config.num_attention_heads // attn_tp_size * server_args.dcp_size,
            kv_lora_rank=model_config.kv_lora_rank,
            qk_rope_head_dim=model_config.qk_rope_head_dim,
            max_tokens=_max_decode_tokens(server_args),
            dtype=model_config.dtype,
            device=device,
        )
        comm.warm_up()
        return comm

    if not envs.shadow():
        return make(name), None
    check_shadow(name)
    logger.warning(f"DCP shadow mode: every call of {name} is repeated on a2a. For debugging only.")
    comm = make(name)
    return comm, Shadow(comm, make("a2a"))


def check_shadow(comm_backend: str) -> None:
    """Raise ValueError unless shadow mode has something to compare and somewhere to report it."""
    if comm_backend == "a2a" or envs.counters_dir() is None:
        raise ValueError(
            f"{envs.SHADOW}=1 was asked for with communicator {comm_backend} and "
            f"{envs.COUNTERS_DIR}={envs.counters_dir()}: it compares another communicator with a2a "
            "and reports through the counters' folder. Use --dcp-comm-backend nvlink and set "
            f"{envs.COUNTERS_DIR}, or unset {envs.SHADOW}."
        )


def _prefill_rates(server_args: Any, device: torch.device) -> PrefillRates:
    """An H200's GPU rates behind this host, under those of the file; the same on all ranks."""
    rates, path = PrefillRates(), envs.prefill_calibration()
    if device.type == "cuda" and server_args.dcp_prefill == "auto":
        # of the whole world, since DCP groups of one attention-TP group wait for each other
        ratio = slowest_host_ratio(device, parallel_state.get_world_group().cpu_group)
        logger.info(f"DCP: launches take the slowest host {ratio:.1f} times the reference's time.")
        rates = rates.on_host(ratio)
    return rates if path is None else load_rates(path, rates)


def _make_policy(
    server_args: Any, comm: Communicator, rates: PrefillRates, budget: ChunkBudget | None
) -> PrefillPolicy:
    """The policy of --dcp-prefill."""
    config = server_args.get_model_config().hf_config.to_dict()
    limits = limit_pass_q(server_args, comm.max_tokens)
    costs = PrefillCosts(
        model=shape_from_config(config, server_args.model_path, server_args.model_path),
        num_heads=comm.num_heads,
        dcp_size=comm.dcp_size,
        slice_tokens=max(limits.slice_tokens, 1),
        chunk_tokens=sglang_envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get(),  # fits the workspace by now
        rates=rates,
        budget=budget,
    )
    if server_args.dcp_prefill == "auto":
        source = envs.prefill_calibration() or rates.source
        logger.info(
            f"DCP: prefill by pass-Q below about {costs.crossover_tokens(128_000)} new tokens on "
            f"128000 cached ones, by pass-KV above (rates: {source})."
        )
    return PrefillPolicy(server_args.dcp_prefill, costs, limits)


def after_initialize_model_parallel(result: None, *args: Any, **kwargs: Any) -> None:
    """AFTER initialize_model_parallel: build TP x CP, before memory is measured.

    Every world rank calls this once, for the target model only; the communicator's buffers and
    NCCL's own are therefore outside the memory that is profiled for the KV cache.
    """
    server_args = get_global_server_args()
    world = parallel_state.get_world_group()
    attn_tp = parallel_state.get_attn_tp_group()
    groups = dcp_groups(world.world_size, attn_tp.world_size, server_args.dcp_size)
    coordinator = _coordinator(server_args, groups)
    on_gpu = server_args.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    comm, shadow = _make_communicator(server_args, coordinator, device)
    budget = limit_prefix_chunks(server_args)
    rates = _prefill_rates(server_args, device)
    state.set_state(
        state.DcpState(
            dcp_size=server_args.dcp_size,
            dcp_rank=coordinator.rank_in_group,
            group_ranks=tuple(coordinator.ranks),
            coordinator=coordinator,
            comm=comm,
            owns_coordinator=coordinator is not attn_tp,
            shadow=shadow,
            chunk_budget=budget,
            prefill_policy=_make_policy(server_args, comm, rates, budget),
        )
    )


def _coordinator(server_args: Any, groups: list[list[int]]) -> Any:
    """SGLang's group of this rank's DCP group: the attention-TP group itself where they are equal.

    NCCL takes hundreds of MB for a communicator. Sharing one is safe: our calls and upstream's
    all-reduces are on the one forward stream, in the same order on all ranks.
    """
    world, attn_tp = parallel_state.get_world_group(), parallel_state.get_attn_tp_group()
    can_carry = server_args.device != "cuda" or getattr(attn_tp, "pynccl_comm", None) is not None
    if attn_tp.ranks in groups and can_carry:
        return attn_tp
    return parallel_state.init_model_parallel_group(
        groups,
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        use_pynccl=server_args.device == "cuda",
        use_custom_allreduce=False,
        use_mscclpp_allreduce=False,
        use_torch_symm_mem_allreduce=False,
        group_name="dcp",
    )


def before_destroy_model_parallel() -> None:
    """BEFORE destroy_model_parallel: ours goes first, while its process group still exists."""
    state.clear_state()
