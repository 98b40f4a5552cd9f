"""The part of the hook table that applies on --device cpu only, with and without DCP."""

from sglang_dcp.hooks.registry import CPU_GONE, HOOKS, SRT, Patch

_ATTENTION = "sglang_dcp.attention."
_BACKENDS = SRT + "layers.attention.attention_registry.ATTENTION_BACKENDS"
_MHA = SRT + "models.deepseek_common.attention_forward_methods.forward_mha."
_MHA_MIXIN = SRT + "model_executor.forward_batch_deepseek_mha_mixin."
_APART = SRT + "models.deepseek_common.utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"
_RUNNER = SRT + "model_executor.model_runner."
_DISPATCH = SRT + "models.deepseek_common.attention_backend_handler."


def _cpu_kernel(name: str, module: str, why: str) -> Patch:
    return Patch(
        name=f"cpu-{name}",
        target=f"{module}{name}",
        kind="attr",
        params=None,
        hook=f"{HOOKS}cpu:{name}",
        why=why,
        remove_when=CPU_GONE,
        test=f"tests/test_cpu_kernels.py::test_{name}",
        missing_upstream=name == "merge_state_v2",
    )


_NO_DRIVER = "a Triton kernel cannot be launched without a GPU"
CPU: tuple[Patch, ...] = (
    Patch(
        name="cpu-backend",
        target=f"{_BACKENDS}[torch_mla]",
        kind="item",
        params=None,
        hook=_ATTENTION + "torch_mla:create_backend",
        why="no upstream backend attends to MLA caches on CPU at tp > 1 and returns an LSE",
        remove_when=CPU_GONE,
        test="tests/test_serve.py",
        missing_upstream=True,
    ),
    Patch(
        name="cpu-apart",
        target=f"{_APART}[torch_mla]",
        kind="append",
        params=None,
        hook="",
        why="torch_mla takes q_nope and q_pe apart, as the GPU backends do",
        remove_when=CPU_GONE,
        test="tests/test_serve.py",
    ),
    Patch(
        name="cpu-chunked",
        target=_RUNNER + "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS[torch_mla]",
        kind="append",
        params=None,
        hook="",
        why="upstream turns the chunked prefix path off for backends it does not know",
        remove_when=CPU_GONE,
        test="tests/test_serve.py",
    ),
    Patch(
        name="cpu-dispatch",
        target=_DISPATCH + "AttentionBackendRegistry._handlers[torch_mla]",
        kind="item",
        params=None,
        hook=HOOKS + "cpu:handle_attention_torch_mla",
        why="unknown names are dispatched as triton, which attends absorbed to every prefix",
        remove_when=CPU_GONE,
        test="tests/test_serve.py",
        missing_upstream=True,
    ),
    Patch(
        name="cpu-support-triton",
        target=SRT + "utils.common.support_triton",
        kind="around",
        params=("backend",),
        hook=HOOKS + "cpu:around_support_triton",
        why=_NO_DRIVER,
        remove_when=CPU_GONE,
        test="tests/test_serve.py",
    ),
    Patch(
        name="cpu-experts",
        target=SRT + "layers.moe.fused_moe_native.moe_forward_native",
        kind="around",
        params=("layer", "x", "topk_output", "moe_runner_config"),
        hook=HOOKS + "cpu:around_moe_forward_native",
        why="with --ep-size, upstream's torch experts index by the id -1 of other ranks' experts",
        remove_when=CPU_GONE,
        test="tests/test_cpu_kernels.py::test_experts_of_other_ranks_add_nothing",
    ),
    Patch(
        name="cpu-tensor",
        target="torch.tensor",
        kind="attr",
        params=None,
        hook=HOOKS + "cpu:tensor_unpinned",
        why="DP attention pins memory, which needs a CUDA driver",
        remove_when=CPU_GONE,
        test="tests/test_cpu_kernels.py::test_tensor_unpinned",
    ),
    *(
        Patch(
            name=f"cpu-{name}",
            target=f"{SRT}distributed.parallel_state.{name}",
            kind="attr",
            params=None,
            hook=f"{HOOKS}cpu:{name}",
            why="DP attention's collectives are custom operators that exist on CUDA only",
            remove_when=CPU_GONE,
            test="tests/test_serve.py",
        )
        for name in ("reg_all_gather_into_tensor", "reg_reduce_scatter_tensor")
    ),
    _cpu_kernel("merge_state_v2", _MHA, "upstream imports it on CUDA only"),
)

#: Stand-ins for Triton kernels, left out where Triton interprets the real ones.
CPU_KERNELS: tuple[Patch, ...] = (
    _cpu_kernel("alloc_extend_kernel", SRT + "mem_cache.allocator.paged.", _NO_DRIVER),
    _cpu_kernel("alloc_decode_kernel", SRT + "mem_cache.allocator.paged.", _NO_DRIVER),
    _cpu_kernel("create_chunked_prefix_cache_kv_indices", _MHA_MIXIN, _NO_DRIVER),
    _cpu_kernel("create_flashinfer_kv_indices_triton", _MHA_MIXIN, _NO_DRIVER),
    Patch(
        name="cpu-memcpy",
        target=SRT + "layers.dp_attention.memcpy_triton",
        kind="attr",
        params=None,
        hook=HOOKS + "cpu:memcpy_rows",
        why=_NO_DRIVER,
        remove_when=CPU_GONE,
        test="tests/test_cpu_kernels.py::test_memcpy_rows",
    ),
)
