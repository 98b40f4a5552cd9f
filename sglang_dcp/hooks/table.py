"""The one list of what sglang-dcp changes in SGLang 0.5.14 (parts of it: table_*.py).

ARGUMENTS apply in every process with the plugin (phase 1) and change argument handling only;
LAUNCH proves that the schedulers are what was asked for. The rest applies in scheduler processes
(phase 2): DCP when dcp_size > 1, then METRICS with --enable-metrics and REPLICATE_Q with
--dcp-replicate-q-proj; CPU on --device cpu; OBSERVE when counters are asked for.
"""

import importlib.util
from typing import Any

from sglang_dcp import envs
from sglang_dcp.hooks.registry import COMMON, CPU_GONE, HOOKS, NATIVE, SRT, Patch
from sglang_dcp.hooks.table_cpu import CPU, CPU_KERNELS
from sglang_dcp.hooks.table_prefill import PREFILL
from sglang_dcp.hooks.table_replicate_q import REPLICATE_Q

_ARGS = SRT + "server_args.ServerArgs."
_SCHEDULER = SRT + "managers.scheduler."
_ATTENTION = "sglang_dcp.attention."
_BACKENDS = SRT + "layers.attention.attention_registry.ATTENTION_BACKENDS"

ARGUMENTS: tuple[Patch, ...] = (
    *(
        Patch(
            name=f"field-{name}",
            target=_ARGS + name,
            kind="field",
            params=None,
            hook=HOOKS + "server_args:" + name.upper(),
            why="a real field travels through CLI, YAML, pickle, asdict, replace and server info",
            remove_when=NATIVE,
            test="tests/test_server_args.py::test_fields_travel",
            missing_upstream=True,
        )
        for name in (
            "dcp_size",
            "dcp_comm_backend",
            "dcp_replicate_q_proj",
            "dcp_prefill",
            "dcp_workspace_mb",
            "dcp_derived",
        )
    ),
    Patch(
        name="args-init",
        target=_ARGS + "__init__",
        kind="around",
        params=None,  # the generated signature lists every field of the release
        hook=HOOKS + "server_args:around_init",
        why="the generated __init__ rejects fields that were added after it",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_fields_travel",
    ),
    Patch(
        name="args-eq",
        target=_ARGS + "__eq__",
        kind="around",
        params=("self", "other"),
        hook=HOOKS + "server_args:around_eq",
        why="two argument sets that differ only in dcp_size must not compare equal",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_eq_and_repr_see_dcp",
    ),
    Patch(
        name="args-repr",
        target=_ARGS + "__repr__",
        kind="after",
        params=("self",),
        hook=HOOKS + "server_args:after_repr",
        why="the launcher logs its arguments by repr",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_eq_and_repr_see_dcp",
    ),
    Patch(
        name="args-cpu",
        target=_ARGS + "_handle_cpu_backends",
        kind="before",
        params=("self",),
        hook=HOOKS + "server_args:before_handle_cpu_backends",
        why="on CPU upstream picks a backend that needs AMX and has no MLA",
        remove_when=CPU_GONE,
        test="tests/test_server_args.py::test_cpu_default_backend",
    ),
    Patch(
        name="args-backend",
        target=_ARGS + "_handle_attention_backend_compatibility",
        kind="before",
        params=("self",),
        hook=HOOKS + "server_args:before_attention_backend",
        why="upstream's default on Hopper (fa3) cannot attend to a stripe",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_hopper_default_backend",
    ),
    Patch(
        name="args-graph",
        target=_ARGS + "_handle_cuda_graph_config",
        kind="after",
        params=("self",),
        hook=HOOKS + "server_args:after_handle_cuda_graph_config",
        why="under a prefill graph every extend attends absorbed over the paged pool",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_prefill_graph_is_off",
    ),
    Patch(
        name="args-page",
        target=_ARGS + "_handle_page_size",
        kind="after",
        params=("self",),
        hook=HOOKS + "server_args:after_handle_page_size",
        why="scheduler, allocator and radix tree work on virtual pages of P * c tokens",
        remove_when=NATIVE,
        test="tests/test_server_args.py::test_page_widening_survives_replace",
    ),
    Patch(
        name="args-check",
        target=_ARGS + "__post_init__",
        kind="after",
        params=("self",),
        hook=HOOKS + "server_args:after_post_init",
        why="a combination that no test exercises must not serve",
        remove_when=NATIVE,
        test="tests/test_guards.py",
    ),
)

LAUNCH: tuple[Patch, ...] = (
    Patch(
        name="launch-check",
        target=SRT + "entrypoints.engine.Engine._launch_scheduler_processes",
        kind="around",
        params=("cls", "server_args", "port_args", "run_scheduler_process_func"),
        hook=HOOKS + "engine:around_launch_scheduler_processes",
        why="a scheduler without the plugin would serve unstriped on widened pages",
        remove_when=NATIVE,
        test="tests/test_launch_refusals.py::test_scheduler_without_plugin",
    ),
)

SCHEDULER: tuple[Patch, ...] = (
    Patch(
        name="activate",
        target=_SCHEDULER + "configure_scheduler_process",
        kind="before",
        params=(
            "server_args",
            "gpu_id",
            "tp_rank",
            "attn_cp_rank",
            "moe_dp_rank",
            "moe_ep_rank",
            "pp_rank",
            "dp_rank",
        ),
        hook=HOOKS + "scheduler:before_configure_scheduler_process",
        why="phase 2 must know the arguments, and an error there must end the process",
        remove_when=NATIVE,
        test="tests/test_hooks_phases.py::test_plugin_unused_patches_arguments_only",
    ),
)

DCP: tuple[Patch, ...] = (
    Patch(
        name="ready-message",
        target=_SCHEDULER + "Scheduler.get_init_info",
        kind="after",
        params=("self",),
        hook=HOOKS + "scheduler:after_get_init_info",
        why="the launcher must see that this scheduler is striped",
        remove_when=NATIVE,
        test="tests/test_launch_refusals.py::test_scheduler_without_plugin",
    ),
    Patch(
        name="event-loop",
        target=_SCHEDULER + "Scheduler.run_event_loop",
        kind="around",
        params=("self",),
        hook=HOOKS + "scheduler:around_run_event_loop",
        why="a CUDA error alone does not say which peer a kernel waited for",
        remove_when=NATIVE,
        test="tests/test_launch_refusals.py::test_failed_wait_is_named",
    ),
    Patch(
        name="groups",
        target=SRT + "distributed.parallel_state.initialize_model_parallel",
        kind="after",
        params=(
            "tensor_model_parallel_size",
            "expert_model_parallel_size",
            "pipeline_model_parallel_size",
            "attention_data_parallel_size",
            "attention_context_model_parallel_size",
            "moe_data_model_parallel_size",
            "backend",
            "duplicate_tp_group",
            "enable_symm_mem",
            "recovered_rank",
        ),
        hook=HOOKS + "parallel_state:after_initialize_model_parallel",
        why="the DCP groups, inside TP, before memory is profiled",
        remove_when=NATIVE,
        test="tests/test_serve.py",
    ),
    Patch(
        name="groups-destroy",
        target=SRT + "distributed.parallel_state.destroy_model_parallel",
        kind="before",
        params=(),
        hook=HOOKS + "parallel_state:before_destroy_model_parallel",
        why="our communicator must go before the process groups that it uses",
        remove_when=NATIVE,
        test="tests/test_hooks_phases.py::test_destroy_clears_state",
    ),
    Patch(
        name="capacity",
        target=SRT
        + "model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes",
        kind="around",
        params=("self", "available_bytes", "page_size"),
        hook=HOOKS + "pool_configurator:around_calculate_pool_sizes",
        why="without it a striped pool would be filled to 1 / c",
        remove_when=NATIVE,
        test="tests/test_serve.py::test_capacity_without_max_total_tokens",
    ),
    Patch(
        name="target-pools",
        target=SRT + "model_executor.model_runner.ModelRunner._init_pools",
        kind="around",
        params=("self",),
        hook=HOOKS + "memory_pool:around_init_pools",
        why="only the target model's pool is striped",
        remove_when=NATIVE,
        test="tests/test_serve.py",
    ),
    Patch(
        name="pool",
        target=SRT + "mem_cache.memory_pool.MLATokenToKVPool.__init__",
        kind="around",
        params=(
            "self",
            "size",
            "page_size",
            "dtype",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "layer_num",
            "device",
            "enable_memory_saver",
            "start_layer",
            "end_layer",
            "use_dsa",
            "override_kv_cache_dim",
        ),
        hook=HOOKS + "memory_pool:around_mla_pool_init",
        why="narrow: C rows and pages of P instead of c * C slots and pages of P * c",
        remove_when=NATIVE,
        test="tests/test_pool.py",
    ),
    *PREFILL,
)

#: Makes the model hand q_nope and q_pe over apart (decode.py gathers them without a copy).
_APART = COMMON + "utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"


def _backend(name: str) -> tuple[Patch, ...]:
    """The patches that put our attention backend under an upstream name."""
    item = Patch(
        name=f"backend-{name}",
        target=f"{_BACKENDS}[{name}]",
        kind="item",
        params=None,
        hook=f"{_ATTENTION}{name}:create_backend",
        why="narrow: attention over the stripe, with an LSE",
        remove_when=NATIVE,
        test=f"tests/gpu/test_backends.py::test_{name}",
    )
    apart = Patch(
        name=f"apart-{name}",
        target=f"{_APART}[{name}]",
        kind="append",
        params=None,
        hook="",
        why="stage 4 takes q_nope and q_pe where they lie",
        remove_when=NATIVE,
        test=f"tests/gpu/test_backends.py::test_{name}",
    )
    return (item, apart)


OBSERVE: tuple[Patch, ...] = (
    Patch(
        name="counters",
        target=_SCHEDULER + "Scheduler.get_internal_state",
        kind="after",
        params=("self", "recv_req"),
        hook=HOOKS + "scheduler:after_get_internal_state",
        why="every rank handles /server_info, but only rank 0 answers: flush counters to a folder",
        remove_when="never: it is ours",
        test="tests/test_serve.py",
    ),
)

_REPORTER = SRT + "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter."
METRICS: tuple[Patch, ...] = (
    Patch(
        name="metrics",
        target=_REPORTER + "log_batch_result_stats",
        kind="after",
        params=("self", "batch", "result"),
        hook=HOOKS + "metrics_reporter:after_log_batch_result_stats",
        why="rows, prefill variants and exchange times of every rank for /metrics",
        remove_when="never: it is ours",
        test="tests/test_metrics.py::test_series_of_a_server",
    ),
    Patch(
        name="metrics-idle",
        target=_REPORTER + "_maybe_log_idle_metrics",
        kind="after",
        params=("self",),
        hook=HOOKS + "metrics_reporter:after_maybe_log_idle_metrics",
        why="series exist from the start and do not stay at the last busy value",
        remove_when="never: it is ours",
        test="tests/test_metrics.py::test_series_of_a_server",
    ),
)

#: Attention backends that DCP replaces, by device.
DCP_BACKENDS = {"cuda": ("flashmla", "flashinfer", "triton"), "cpu": ()}


def phase_two(server_args: Any) -> list[Patch]:
    """The patches that a scheduler process with these arguments needs."""
    patches: list[Patch] = []
    if server_args.device == "cpu":
        patches += CPU
        if not envs.triton_interpreted():
            patches += CPU_KERNELS
    if server_args.dcp_size > 1:
        patches += DCP
        if server_args.device == "cuda":
            patches += _backend(server_args.attention_backend)
        if server_args.enable_metrics:
            patches += METRICS
        if server_args.dcp_replicate_q_proj:
            patches += REPLICATE_Q
    if envs.counters_dir() is not None:
        patches += OBSERVE
    return patches


def everything() -> dict[str, tuple[Patch, ...]]:
    """All patches by the occasion on which they apply; for doctor, tests and patches/."""
    backends = sum((_backend(name) for name in DCP_BACKENDS["cuda"] if _importable(name)), ())
    return {
        "arguments": ARGUMENTS,
        "launch": LAUNCH,
        "scheduler": SCHEDULER,
        "dcp": DCP,
        "backends": backends,
        "cpu": CPU + CPU_KERNELS,
        "observe": OBSERVE,
        "metrics": METRICS,
        "replicate-q": REPLICATE_Q,
    }


def _importable(backend: str) -> bool:
    needs = {"flashmla": "sgl_kernel", "flashinfer": "flashinfer", "triton": "triton"}
    return importlib.util.find_spec(needs[backend]) is not None
