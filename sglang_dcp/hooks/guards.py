"""Start-up refusals: a combination of options that no test exercises does not serve under DCP.

Called in the launcher before weights load, for every ServerArgs with dcp_size > 1. Each message
says what was asked, the rule with its numbers, and the way out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.platforms import current_platform

from sglang_dcp import envs as dcp_envs
from sglang_dcp.hooks.workspace import check_workspace
from sglang_dcp.prefill_policy import MODES, load_rates

#: Architectures whose attention is DeepseekV2AttentionMLA and which a test serves.
SUPPORTED_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
#: Attention backends that return an LSE over the stripe, by device.
SUPPORTED_BACKENDS = {"cuda": ("flashmla", "flashinfer", "triton"), "cpu": ("torch_mla",)}
SUPPORTED_KV_DTYPES = ("auto", "bf16", "bfloat16")


@dataclass(frozen=True)
class Rule:
    """One option that DCP refuses.

    Attributes:
        option: the flag, or environment variable, as the user writes it.
        asked: its offending value in given arguments, or None if it does not offend. Also called
            before upstream fills in defaults, so values may still be None.
        why: the rule.
        way_out: what to do instead.
    """

    option: str
    asked: Callable[[Any], Any]
    why: str
    way_out: str


def _flag(name: str, why: str, way_out: str | None = None) -> Rule:
    option = "--" + name.replace("_", "-")
    return Rule(option, lambda args: getattr(args, name) or None, why, way_out or f"Drop {option}")


def _env(name: str, why: str) -> Rule:
    return Rule(name, lambda args: getattr(envs, name).get() or None, why, f"Unset {name}")


def _above_one(name: str, why: str) -> Rule:
    option = "--" + name.replace("_", "-")

    def asked(args: Any) -> int | None:
        value = getattr(args, name)
        return value if value and value > 1 else None

    return Rule(option, asked, why, f"Leave {option} at 1")


_INDEX = "it moves KV by logical slot, but a rank's pool holds physical rows (slot // dcp_size)"
_STREAMS = "it interleaves two streams, and collectives of one DCP group must not overtake another"
_ABSORBED = "it makes prefill attend absorbed over the paged pool, which holds only a stripe"
_UNTESTED = "no test serves this combination"
_PLAIN_WEIGHTS = "w_kc and w_vc are tested in bf16 and float32 only"

RULES: tuple[Rule, ...] = (
    _flag("speculative_algorithm", "draft pools and verify lengths are not striped"),
    _flag("dllm_algorithm", "block-wise diffusion writes and rewrites slots out of order"),
    Rule(
        "--disaggregation-mode",
        lambda args: None if args.disaggregation_mode == "null" else args.disaggregation_mode,
        f"PD transfer is not striped: {_INDEX}",
        "Serve prefill and decode in one server",
    ),
    _flag("disaggregation_decode_enable_offload_kvcache", _INDEX),
    _flag("enable_hierarchical_cache", f"HiCache is not striped: {_INDEX}"),
    _flag("hicache_storage_backend", f"HiCache is not striped: {_INDEX}"),
    _flag("enable_lmcache", _INDEX),
    _flag("enable_hisparse", _INDEX),
    _flag("enable_lora", "LoRA on kv_b_proj under DCP is not tested", "Merge the adapter first"),
    _flag("lora_paths", "LoRA on kv_b_proj under DCP is not tested", "Merge the adapter first"),
    _flag("enable_two_batch_overlap", _STREAMS),
    _flag("enable_single_batch_overlap", _UNTESTED),
    _flag("enable_pdmux", _STREAMS),
    _flag("enable_mixed_chunk", "a mixed batch would gather the whole context of its decodes"),
    _flag("enable_prefill_cp", "prefill context parallelism rebuilds the full KV on every rank"),
    _above_one("attn_cp_size", "prefill context parallelism rebuilds the full KV on every rank"),
    _flag("enable_attn_tp_input_scattered", _UNTESTED),
    _flag("enable_torch_compile", "torch.compile cannot trace the DCP collectives"),
    _flag("debug_cuda_graph", _UNTESTED),
    _flag("enable_deterministic_inference", _ABSORBED),
    _flag("flashinfer_mla_disable_ragged", _ABSORBED),
    _flag("disable_chunked_prefix_cache", _ABSORBED),
    _flag("use_ray", "Ray actors do not load SGLang plugins"),
    _flag("encoder_only", _UNTESTED),
    _flag("grpc_mode", _UNTESTED),
    _flag("enable_multimodal", "only the text model is tested"),
    _flag("elastic_ep_backend", _UNTESTED),
    _flag("enable_eplb", _UNTESTED),
    _flag("enable_symm_mem", "NCCL symmetric memory and CUDA graphs raced in public reports"),
    _flag("enable_mscclpp", _UNTESTED),
    _flag("enable_torch_symm_mem", _UNTESTED),
    _flag("enable_streaming_session", _UNTESTED),
    _flag("enable_return_routed_experts", _UNTESTED),
    _flag("enable_weights_cpu_backup", _UNTESTED),
    _flag("enable_memory_saver", _UNTESTED),
    _flag("cpu_offload_gb", _UNTESTED),
    _flag("kt_weight_path", _UNTESTED),
    _flag("radix_cache_backend", "other prefix caches have page rules of their own"),
    _env("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "other prefix caches have page rules of their own"),
    _env("SGLANG_ENABLE_UNIFIED_RADIX_TREE", "other prefix caches have page rules of their own"),
    _flag("prefill_only_disable_kv_cache", "there would be no cache to stripe"),
    _flag("enable_mis", _UNTESTED),
    _flag("enable_dynamic_chunking", _UNTESTED),
    _flag("rl_on_policy_target", _ABSORBED),
    _flag("torchao_config", _PLAIN_WEIGHTS),
    _flag("modelopt_quant", _PLAIN_WEIGHTS),
    _flag("quantization", _PLAIN_WEIGHTS),
    Rule(
        "--kv-canary",
        lambda args: args.kv_canary if args.kv_canary not in (None, "none") else None,
        "it patches the pool's methods and counts logical slots",
        "Drop --kv-canary",
    ),
    Rule(
        "--moe-a2a-backend",
        lambda args: args.moe_a2a_backend if args.moe_a2a_backend != "none" else None,
        _UNTESTED,
        "Leave --moe-a2a-backend at none",
    ),
    Rule(
        "--kv-cache-dtype",
        lambda args: (None if args.kv_cache_dtype in SUPPORTED_KV_DTYPES else args.kv_cache_dtype),
        f"the striped pool is tested with {', '.join(SUPPORTED_KV_DTYPES)} only",
        "Use --kv-cache-dtype auto with a bf16 model",
    ),
    Rule(
        "--chunked-prefill-size",
        lambda args: (None if (args.chunked_prefill_size or 1) > 0 else args.chunked_prefill_size),
        "without chunked prefill input buffers are sized by the logical capacity, dcp_size x more",
        "Use a positive --chunked-prefill-size",
    ),
    Rule(
        "--offload-group-size",
        lambda args: args.offload_group_size if args.offload_group_size > 0 else None,
        _UNTESTED,
        "Drop --offload-group-size",
    ),
    Rule(
        "--model-impl",
        lambda args: args.model_impl if args.model_impl not in ("auto", "sglang") else None,
        "only SGLang's own DeepSeek attention reads and writes the striped pool",
        "Leave --model-impl at auto",
    ),
    Rule(
        "SGLANG_PLATFORM",
        lambda args: type(current_platform).__name__ if current_platform.is_out_of_tree() else None,
        "a platform plugin brings pools and allocators of its own",
        "Uninstall the platform plugin",
    ),
    Rule(
        "--device",
        lambda args: args.device if args.device not in SUPPORTED_BACKENDS else None,
        f"DCP is tested on {' and '.join(SUPPORTED_BACKENDS)} only",
        "Serve without --dcp-size there",
    ),
)


def check_dcp_size(dcp_size: Any) -> None:
    """Raise ValueError unless `dcp_size` is a positive power of two (no other argument needed)."""
    if isinstance(dcp_size, bool) or not isinstance(dcp_size, int):
        raise ValueError(
            f"--dcp-size {dcp_size!r} was asked for: it is a number of ranks, an integer such as "
            "1, 2, 4 or 8. Use --dcp-size 1 to serve without DCP."
        )
    if dcp_size < 1 or dcp_size & (dcp_size - 1):
        raise ValueError(
            f"--dcp-size {dcp_size} was asked for: it must be a power of two of at least 1, "
            "because pages of page_size * dcp_size tokens are indexed by shifts in the kernels. "
            "Use --dcp-size 2, 4 or 8, or 1 to serve without DCP."
        )


def check_replicate_q_proj(args: Any) -> None:
    """Raise ValueError if the Q projection is to be replicated where there is nothing to gather."""
    if args.dcp_replicate_q_proj and args.dcp_size == 1:
        raise ValueError(
            "--dcp-replicate-q-proj with --dcp-size 1 was asked for: it spares a DCP group the "
            "gathering of queries, and a group of one rank gathers none. Use a --dcp-size of 2 or "
            "more, or drop --dcp-replicate-q-proj."
        )


def check_topology(args: Any) -> None:
    """Raise ValueError unless the groups of dcp_size ranks nest in attention TP and in a node."""
    dcp_size, attn_dp = args.dcp_size, args.dp_size if args.enable_dp_attention else 1
    attn_tp = args.tp_size // attn_dp // args.attn_cp_size
    if attn_tp % dcp_size:
        fits = ", ".join(str(1 << i) for i in range(attn_tp.bit_length()) if not attn_tp % (1 << i))
        raise ValueError(
            f"--dcp-size {dcp_size} does not divide the attention TP size: tp_size / attention dp "
            f"/ attention cp = {args.tp_size} / {attn_dp} / {args.attn_cp_size} = {attn_tp}, and "
            f"{attn_tp} % {dcp_size} = {attn_tp % dcp_size}. Use --dcp-size {fits}, or change --tp."
        )
    ranks_per_node = args.tp_size * args.pp_size // args.nnodes
    if ranks_per_node % dcp_size or args.tp_size % min(ranks_per_node, args.tp_size):
        raise ValueError(
            f"--dcp-size {dcp_size} with --nnodes {args.nnodes} was asked for: a group must lie "
            f"inside one node, and a node has {ranks_per_node} of the {args.tp_size} x "
            f"{args.pp_size} ranks. Use a --dcp-size that divides {ranks_per_node}."
        )
    if args.dp_size > 1 and not args.enable_dp_attention:
        raise ValueError(
            f"--dcp-size {dcp_size} with --dp-size {args.dp_size} was asked for: several whole "
            "replicas behind one launcher are not tested under DCP. Start one server a replica, or "
            "add --enable-dp-attention."
        )


def check_model(args: Any) -> None:
    """Raise ValueError unless the model is an MLA model that a test serves."""
    # Imported late: a patched server_args.py imports this module while model_config is loading.
    from sglang.srt.configs.model_config import is_deepseek_dsa

    config = args.get_model_config()
    architectures = config.hf_config.architectures or []
    supported = bool(set(architectures) & set(SUPPORTED_ARCHITECTURES))
    if not supported or not args.use_mla_backend() or is_deepseek_dsa(config.hf_config):
        raise ValueError(
            f"--dcp-size {args.dcp_size} with {args.model_path} was asked for: its architecture "
            f"{architectures} is not one of {list(SUPPORTED_ARCHITECTURES)} without sparse "
            "attention, the MLA models whose latent cache DCP stripes. Serve it without --dcp-size."
        )
    heads = config.num_attention_heads
    if heads % args.tp_size:
        raise ValueError(
            f"--dcp-size {args.dcp_size} with --tp {args.tp_size} was asked for: {heads} heads do "
            f"not divide over {args.tp_size} ranks. Use a --tp that divides {heads}."
        )
    # `quantization` is what upstream found in config.json or in the file hf_quant_config.json.
    if config.quantization or getattr(config.hf_config, "quantization_config", None):
        raise ValueError(
            f"--dcp-size {args.dcp_size} with a quantized checkpoint was asked for: "
            f"{_PLAIN_WEIGHTS}. Use an unquantized checkpoint, or serve without --dcp-size."
        )


def check_q_proj_dtype(args: Any) -> None:
    """Raise ValueError if the Q projection is to be replicated in a type that no test serves."""
    dtype = str(args.get_model_config().dtype).removeprefix("torch.")
    if args.dcp_replicate_q_proj and dtype not in ("bfloat16", "float32"):
        raise ValueError(
            f"--dcp-replicate-q-proj with a model in {dtype} was asked for: replicated weights are "
            "tested in bfloat16 and float32 only. Use --dtype bfloat16, or drop "
            "--dcp-replicate-q-proj."
        )


def check_backend(args: Any) -> None:
    """Raise ValueError unless prefill and decode use one backend that returns the stripe's LSE."""
    supported = SUPPORTED_BACKENDS[args.device]
    prefill, decode = args.get_attention_backends()
    if prefill != decode or decode not in supported:
        asked = decode if prefill == decode else f"{prefill} (prefill) and {decode} (decode)"
        raise ValueError(
            f"--dcp-size {args.dcp_size} with attention backend {asked} on {args.device} was asked "
            f"for: DCP needs one backend for both that returns the LSE of the stripe, one of "
            f"{', '.join(supported)}. Use --attention-backend {supported[0]}."
        )
    graph = args.cuda_graph_config.decode.backend
    if args.device == "cuda" and graph not in ("full", "disabled"):
        raise ValueError(
            f"--dcp-size {args.dcp_size} with decode CUDA graph backend {graph} was asked for: "
            "DCP is tested with full and disabled. Use --cuda-graph-backend-decode full."
        )


def check_prefill(args: Any) -> None:
    """Raise ValueError unless --dcp-prefill names a mode; keywords bypass the CLI's choices."""
    if args.dcp_prefill not in MODES:
        raise ValueError(
            f"--dcp-prefill {args.dcp_prefill} was asked for: it must be one of "
            f"{', '.join(MODES)}. Use --dcp-prefill auto, which picks the faster one per batch."
        )
    path = dcp_envs.prefill_calibration()
    if path is not None:
        load_rates(path)  # in the launcher, so that a bad file does not fail on every rank


def check_options(args: Any) -> None:
    """Raise ValueError for the first of RULES that `args` breaks."""
    for rule in RULES:
        asked = rule.asked(args)
        if asked is not None:
            raise ValueError(
                f"--dcp-size {args.dcp_size} with {rule.option} {asked} was asked for: {rule.why}. "
                f"{rule.way_out}, or serve without --dcp-size."
            )


def check_server_args(args: Any) -> None:
    """Raise ValueError for the first rule that `args` (dcp_size > 1) breaks.

    Args:
        args: a ServerArgs after its own `__post_init__`.
    """
    check_topology(args)
    check_prefill(args)
    check_options(args)
    check_model(args)
    check_q_proj_dtype(args)
    check_backend(args)
    check_workspace(args)
