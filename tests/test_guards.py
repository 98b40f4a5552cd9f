"""Start-up refusals: what no test serves ends in the launcher, in three parts, by name."""

import argparse
import copy
import json
import re

import pytest
from sglang_args import make_args, make_args_on

from sglang_dcp.testing.tiny_model import TinyModel, config_of, write_tiny_model

pytestmark = pytest.mark.usefixtures("plugin")

#: An offending value for every rule, by option.
OFFENDING = {
    "--speculative-algorithm": "EAGLE",
    "--dllm-algorithm": "LowConfidence",
    "--disaggregation-mode": "decode",
    "--disaggregation-decode-enable-offload-kvcache": True,
    "--enable-hierarchical-cache": True,
    "--hicache-storage-backend": "file",
    "--enable-lmcache": True,
    "--enable-hisparse": True,
    "--enable-lora": True,
    "--lora-paths": ["adapter"],
    "--enable-two-batch-overlap": True,
    "--enable-single-batch-overlap": True,
    "--enable-pdmux": True,
    "--enable-mixed-chunk": True,
    "--enable-prefill-cp": True,
    "--attn-cp-size": 2,
    "--enable-attn-tp-input-scattered": True,
    "--enable-torch-compile": True,
    "--debug-cuda-graph": True,
    "--enable-deterministic-inference": True,
    "--flashinfer-mla-disable-ragged": True,
    "--disable-chunked-prefix-cache": True,
    "--use-ray": True,
    "--encoder-only": True,
    "--grpc-mode": True,
    "--enable-multimodal": True,
    "--elastic-ep-backend": "mooncake",
    "--enable-eplb": True,
    "--enable-symm-mem": True,
    "--enable-mscclpp": True,
    "--enable-torch-symm-mem": True,
    "--enable-streaming-session": True,
    "--enable-return-routed-experts": True,
    "--enable-weights-cpu-backup": True,
    "--enable-memory-saver": True,
    "--cpu-offload-gb": 1,
    "--offload-group-size": 1,
    "--kt-weight-path": "weights",
    "--radix-cache-backend": "other",
    "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": True,
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": True,
    "--prefill-only-disable-kv-cache": True,
    "--enable-mis": True,
    "--enable-dynamic-chunking": True,
    "--rl-on-policy-target": "fsdp",
    "--torchao-config": "int8wo",
    "--modelopt-quant": "fp8",
    "--quantization": "fp8",
    "--kv-canary": "log",
    "--moe-a2a-backend": "deepep",
    "--kv-cache-dtype": "fp8_e4m3",
    "--chunked-prefill-size": -1,
    "--model-impl": "transformers",
    "SGLANG_PLATFORM": "OtherPlatform",
    "--device": "xpu",
}
#: Upstream judges these itself, before any hook of ours; what we refuse is their valid form.
UPSTREAM_FIRST = {
    "--disaggregation-decode-enable-offload-kvcache": {"disaggregation_mode": "decode"},
    "--enable-prefill-cp": {"cp_strategy": "zigzag"},
    "--prefill-only-disable-kv-cache": {
        "is_embedding": True,
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
    },
}


def rules():
    from sglang_dcp.hooks.guards import RULES

    return {rule.option: rule for rule in RULES}


def field_of(option):
    return option.removeprefix("--").replace("-", "_")


def assert_three_parts(message, option, value, dcp_size=2):
    """What was asked, the rule, the way out."""
    asked = f"--dcp-size {dcp_size} with {option} {value} was asked for: "
    assert message.startswith(asked), message
    why, _, way_out = message.removeprefix(asked).rpartition(". ")
    assert len(why) > 20, message
    assert re.fullmatch(r"[A-Z].{5,}, or serve without --dcp-size\.", way_out), message


def test_every_rule_has_a_case(plugin):
    assert OFFENDING.keys() == rules().keys()
    assert OFFENDING.keys() >= UPSTREAM_FIRST.keys()


def test_every_option_is_a_flag_of_sglang(plugin):
    """A message must name what the user can write."""
    from sglang.srt.environ import envs
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for option in OFFENDING:
        if option.startswith("--"):
            assert option in parser._option_string_actions, option
        else:
            assert hasattr(envs, option), option


@pytest.mark.parametrize("option", OFFENDING)
@pytest.mark.parametrize("machine", ["cpu", "hopper"])
def test_option_is_refused(tiny_model, monkeypatch, option, machine):
    """As a user asks for it: by keyword or flag, through all of upstream's own handling."""
    value, values = OFFENDING[option], UPSTREAM_FIRST.get(option, {})
    if option == "SGLANG_PLATFORM":
        from sglang_dcp.hooks import guards

        other = type(value, (), {"is_out_of_tree": lambda self: True})
        monkeypatch.setattr(guards, "current_platform", other())
    elif option.startswith("SGLANG_"):
        monkeypatch.setenv(option, "1")
    else:
        values = {**values, field_of(option): value}
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        make_args_on(machine, monkeypatch, tiny_model, dcp_size=2, **values)
    message = str(refused.value)
    if "disaggregation_mode" in values or option == "--prefill-only-disable-kv-cache":
        assert message.startswith("--dcp-size 2 with --"), message  # another rule may come first
    else:
        assert_three_parts(message, option, value)


@pytest.mark.parametrize("option", [o for o in OFFENDING if o.startswith("--")])
def test_rule_refuses_by_itself(tiny_model, option):
    """Each rule alone, on finished arguments: none hides behind another or behind upstream."""
    from sglang_dcp.hooks.guards import check_options, check_server_args

    args = copy.copy(make_args(tiny_model, dcp_size=2))
    check_server_args(args)
    setattr(args, field_of(option), OFFENDING[option])
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        check_options(args)
    assert_three_parts(str(refused.value), option, OFFENDING[option])
    with pytest.raises(ValueError, match="--dcp-size 2"):
        check_server_args(args)


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_rules_pass_upstreams_defaults(plugin, device):
    """Unset values, as they are before upstream fills in defaults, do not offend."""
    from sglang.srt.server_args import ServerArgs

    fields = ServerArgs.__dataclass_fields__.items()
    args = argparse.Namespace(**{name: field.default for name, field in fields})
    args.device = device
    assert {option: rule.asked(args) for option, rule in rules().items() if rule.asked(args)} == {}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"dcp_size": 16}, r"--dcp-size 16 .*8 / 1 / 1 = 8, and 8 % 16 = 8\. Use --dcp-size 1, 2,"),
        ({"dcp_size": 2, "tp_size": 1}, r"--dcp-size 2 .* 1 % 2 = 1\. Use --dcp-size 1, or change"),
        (
            {"dcp_size": 8, "dp_size": 2, "enable_dp_attention": True},
            r"--dcp-size 8 .*8 / 2 / 1 = 4, and 4 % 8 = 4\. Use --dcp-size 1, 2, 4,",
        ),
        ({"dcp_size": 2, "dp_size": 2}, r"--dp-size 2 was asked for: .*--enable-dp-attention"),
        (
            {"dcp_size": 8, "nnodes": 2, "dist_init_addr": "127.0.0.1:20000"},
            r"--nnodes 2 was asked for: .*inside one node, and a node has 4 .*that divides 4",
        ),
    ],
)
def test_topology_is_refused(tiny_model, values, match):
    with pytest.raises(ValueError, match=match):
        make_args(tiny_model, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"dcp_size": 8},
        {"dcp_size": 4, "dp_size": 2, "enable_dp_attention": True},
        {"dcp_size": 4, "nnodes": 2, "dist_init_addr": "127.0.0.1:20000"},
        {"dcp_size": 2, "pp_size": 2, "disable_overlap_schedule": True},
        {"dcp_size": 2, "ep_size": 2},
    ],
)
def test_topology_that_fits_is_served(tiny_model, values):
    """The refusals above can pass: the neighbours of what they refuse build."""
    assert make_args(tiny_model, **values).dcp_size == values["dcp_size"]


def write_config(folder, **changes):
    """A checkpoint folder without weights: guards look at the configuration only."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**config_of(TinyModel()), **changes}
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "rope_scaling": None,
    "head_dim": 8,
}


SPARSE = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 4}
V32 = {"architectures": ["DeepseekV32ForCausalLM"], **SPARSE}
V3_SPARSE = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **SPARSE}


@pytest.mark.parametrize(
    ("machine", "changes"),
    [("cpu", LLAMA), ("hopper", LLAMA), ("hopper", V32), ("hopper", V3_SPARSE)],
    ids=["cpu-llama", "llama", "v32", "v3-sparse"],
)
def test_other_models_are_refused(tmp_path, monkeypatch, machine, changes):
    folder = write_config(tmp_path / "model", **changes)
    backend = "torch_mla" if machine == "cpu" else "triton"
    with pytest.raises(ValueError, match=r"--dcp-size 2 with .*Deepseek.*without --dcp-size"):
        make_args_on(machine, monkeypatch, folder, dcp_size=2, attention_backend=backend)


def test_non_mla_model_is_named(tmp_path):
    folder = write_config(tmp_path / "model", **LLAMA)
    with pytest.raises(ValueError, match=rf"{folder} was asked for: .*LlamaForCausalLM.* MLA"):
        make_args(folder, dcp_size=2, attention_backend="torch_native")


@pytest.mark.parametrize("where", ["quantization_config", "compression_config", "file"])
def test_quantized_checkpoint_is_refused(tmp_path, monkeypatch, where):
    method = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    changes = {} if where == "file" else {where: method}
    folder = write_config(tmp_path / "model", **changes)
    if where == "file":  # the form of the modelopt checkpoints, beside config.json
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
        text = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
        (folder / "hf_quant_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"--dcp-size 2 with .*quanti.* was asked for: .*bf16"):
        make_args_on("hopper", monkeypatch, folder, dcp_size=2)


def test_heads_must_divide(tmp_path):
    folder = write_tiny_model(
        tmp_path / "model", TinyModel(num_heads=12, hidden_size=96, num_layers=1)
    )
    with pytest.raises(ValueError, match=r"--tp 8 was asked for: 12 heads .* divides 12"):
        make_args(folder, dcp_size=2)


@pytest.mark.parametrize(
    ("machine", "values", "match"),
    [
        ("cpu", {"attention_backend": "torch_native"}, r"torch_native on cpu .*torch_mla"),
        ("cpu", {"attention_backend": "triton"}, r"triton on cpu .*torch_mla"),
        ("hopper", {"attention_backend": "fa3"}, r"fa3 on cuda .*flashmla, flashinfer, triton"),
        ("hopper", {"attention_backend": "cutlass_mla"}, r"cutlass_mla on cuda .*flashmla"),
        ("hopper", {"attention_backend": "torch_mla"}, r"torch_mla on cuda .*flashmla"),
        (
            "hopper",
            {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashmla"},
            r"fa3 \(prefill\) and flashmla \(decode\) on cuda .*Use --attention-backend flashmla",
        ),
        (
            "hopper",
            {"prefill_attention_backend": "flashinfer", "decode_attention_backend": "triton"},
            r"flashinfer \(prefill\) and triton \(decode\)",
        ),
        (
            "hopper",
            {"attention_backend": "triton", "cuda_graph_backend_decode": "breakable"},
            r"decode CUDA graph backend breakable .*--cuda-graph-backend-decode full",
        ),
    ],
)
def test_backends_are_refused(tiny_model, monkeypatch, machine, values, match):
    with pytest.raises(ValueError, match=r"--dcp-size 2 with .*" + match):
        make_args_on(machine, monkeypatch, tiny_model, dcp_size=2, **values)


@pytest.mark.parametrize("backend", ["flashmla", "flashinfer", "triton"])
@pytest.mark.parametrize("form", ["attention_backend", "both phases"])
def test_supported_backends_build(tiny_model, monkeypatch, backend, form):
    phases = ("prefill_attention_backend", "decode_attention_backend")
    names = ("attention_backend",) if form == "attention_backend" else phases
    values = dict.fromkeys(names, backend)
    args = make_args_on("hopper", monkeypatch, tiny_model, dcp_size=2, **values)
    assert args.get_attention_backends() == (backend, backend)
    assert args.attention_backend == backend  # phase two picks its patches by this field
    assert args.page_size == (128 if backend == "flashmla" else 2)


def test_no_rule_without_dcp(tiny_model, monkeypatch):
    """dcp_size 1 is upstream: options that DCP refuses are upstream's business."""
    args = make_args_on(
        "hopper", monkeypatch, tiny_model, enable_mixed_chunk=True, enable_symm_mem=True
    )
    assert args.enable_mixed_chunk


def test_replicated_projection_needs_a_group_and_a_tested_type(tiny_model):
    with pytest.raises(ValueError, match="q-proj with --dcp-size 1 was .*Use a --dcp-size of 2"):
        make_args(tiny_model, dcp_replicate_q_proj=True)
    message = "--dcp-replicate-q-proj with a model in float16 was .*float32 only.*--dtype bfloat16"
    with pytest.raises(ValueError, match=message):
        make_args(tiny_model, dcp_size=2, dcp_replicate_q_proj=True, dtype="float16")
    for dtype in ("bfloat16", "float32"):
        assert make_args(tiny_model, dcp_size=2, dcp_replicate_q_proj=True, dtype=dtype)
    assert make_args(tiny_model, dcp_size=2, dtype="float16")


def test_prefill_mode_and_calibration(tiny_model, tmp_path, monkeypatch):
    """Keywords bypass the CLI's choices; a bad calibration ends in the launcher."""
    with pytest.raises(ValueError, match=r"--dcp-prefill ring .*pass-kv, pass-q.*auto"):
        make_args(tiny_model, dcp_size=2, dcp_prefill="ring")
    assert make_args(tiny_model, dcp_size=2, dcp_prefill="pass-q").dcp_prefill == "pass-q"
    monkeypatch.setenv("SGLANG_DCP_PREFILL_CALIBRATION", str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"prefill calibration .*missing.json cannot be read"):
        make_args(tiny_model, dcp_size=2)
    make_args(tiny_model, dcp_size=1)  # nothing to calibrate
