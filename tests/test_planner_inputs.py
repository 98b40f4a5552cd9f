"""What the planner reads: models, weights, GPUs, constants, and requests that it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planner_requests import H200, ask

from sglang_dcp.planner import (
    GPUS,
    Constants,
    ExchangeTable,
    StepConstants,
    advice,
    load_constants,
    load_gpu,
    load_model,
    make_plan,
    preset_names,
    shape_from_config,
)
from sglang_dcp.planner.presets import PRESET_CONFIGS


@pytest.mark.parametrize(
    ("name", "published_parameters", "bytes_per_parameter"),
    [
        ("deepseek-v2-lite", 15.7e9, 2),
        ("deepseek-v2", 236e9, 2),
        ("deepseek-v3", 671e9, 1),
        ("kimi-k2", 1.03e12, 1),
        ("kimi-linear-48b", 49e9, 2),
    ],
)
def test_weights_against_published_parameter_counts(
    name, published_parameters, bytes_per_parameter
):
    weights = load_model(name).weights
    assert weights.total_bytes == pytest.approx(
        published_parameters * bytes_per_parameter, rel=0.02
    )
    assert weights.bytes_per_gpu(1) == weights.total_bytes
    assert weights.bytes_per_gpu(8) > weights.total_bytes / 8  # some weights are on every rank


def test_a_step_reads_more_experts_with_more_tokens():
    weights = load_model("deepseek-v3").weights
    reads = [weights.read_bytes_per_gpu(8, batch) for batch in (1, 8, 64, 4096)]
    assert reads == sorted(reads)
    one_token = weights.routed_bytes * 8 / 256 / 8
    rest = weights.replicated_bytes + weights.sharded_bytes / 8
    assert reads[0] == pytest.approx(one_token + rest)
    assert reads[-1] == pytest.approx(weights.routed_bytes / 8 + rest, rel=1e-6)


def test_quantized_experts_keep_bf16_attention_when_ignored():
    config = PRESET_CONFIGS["deepseek-v3"] | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
            "ignore": ["re:.*self_attn.*", "lm_head"],
        }
    }
    narrow = shape_from_config(config, "int4", "test").weights
    fp8 = load_model("deepseek-v3").weights
    assert narrow.routed_bytes == pytest.approx(fp8.routed_bytes * (0.5 + 2 / 32))
    assert narrow.replicated_bytes > fp8.replicated_bytes


@pytest.mark.parametrize("as_folder", [False, True])
def test_model_from_a_config_file_or_folder(tmp_path, as_folder):
    config = PRESET_CONFIGS["deepseek-v3"] | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_model(str(tmp_path if as_folder else tmp_path / "config.json"))
    assert shape.num_mla_layers == 7
    assert shape.latent_dim == 576


def test_hybrid_and_multimodal_configs():
    hybrid = load_model("kimi-linear-48b")
    assert (hybrid.num_mla_layers, hybrid.num_hidden_layers) == (7, 27)
    nested = shape_from_config({"text_config": PRESET_CONFIGS["kimi-k2"]}, "vl", "test")
    assert nested.num_attention_heads == 64
    assert nested.weights == load_model("kimi-k2").weights


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "hidden_size": 1}, "no kv_lora_rank"),
        ([], "no kv_lora_rank"),
        (PRESET_CONFIGS["deepseek-v3"] | {"index_topk": 2048}, "sparse attention"),
        ({"kv_lora_rank": 512, "hidden_size": 1}, "lacks num_attention_heads"),
    ],
)
def test_configs_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        shape_from_config(config, "m", "test")


def test_presets_all_plan():
    for name in preset_names():
        plan = make_plan(ask(name, context_tokens=64_000, batch=4))
        assert len(advice(plan)) >= 3
        assert plan.options[-1].dcp_size == 8


def test_gpu_rows_are_sane_and_sourced():
    for gpu in GPUS.values():
        assert gpu.source
        assert 70 * 2**30 < gpu.hbm_bytes < 300 * 10**9
        assert gpu.link_bytes_per_s < gpu.hbm_bytes_per_s < gpu.bf16_flops_per_s
    assert load_gpu("H200") is H200


def test_gpu_from_a_file(tmp_path):
    path = tmp_path / "x.json"
    data = {key: getattr(H200, key) for key in H200.__dataclass_fields__}
    path.write_text(json.dumps(data | {"name": "mine", "hbm_bytes": 5}))
    assert load_gpu(str(path)) == replace(H200, name="mine", hbm_bytes=5)
    for broken in (data | {"more": 1}, data | {"hbm_bytes": "5"}, data | {"hbm_bytes": 0}, [1]):
        path.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="--gpu"):
            load_gpu(str(path))


def test_constants_from_a_file_change_the_prediction(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(
        json.dumps(
            {
                "step": {"layer_overhead_us": 10.0},
                "exchange": {"nvlink": {"batches": [1, 64], "gather_us": [1, 2],
                                        "exchange_us": [3, 4], "source": "here"}},
            }
        )
    )  # fmt: skip
    got = load_constants(path)
    assert got.step == replace(StepConstants(), layer_overhead_us=10.0)
    assert got.exchange["nvlink"] == ExchangeTable((1, 64), (1, 2), (3, 4), source="here")
    assert got.exchange["a2a"] == Constants().exchange["a2a"]
    request = ask("deepseek-v3", context_tokens=1000, batch=1)
    faster = make_plan(replace(request, constants=got))
    assert faster.chosen.predicted_step_ms < make_plan(request).chosen.predicted_step_ms


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"steps": {}},
        {"step": {"layer_us": 1}},
        {"step": {"layer_overhead_us": "1"}},
        {"step": {"hbm_efficiency": 0}},
        {"exchange": {"nccl": {}}},
        {"exchange": {"nvlink": {"batches": [1, 2]}}},
        {"exchange": {"nvlink": {"batches": [64, 1, 2, 3]}}},
    ],
)
def test_broken_constants_are_refused(tmp_path, data):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="constants|exchange table"):
        load_constants(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 3}, r"--tp 3 does not divide --gpus 8: 8 % 3 = 2. Use --tp 1, 2, 4 or 8"),
        ({"num_gpus": 7, "tp_size": 7}, "does not divide the 96 query heads"),
        ({"dcp_size": 3}, r"8 % 3 = 2. Use --dcp-size 1, 2, 4 or 8"),
        ({"tp_size": 4, "dcp_size": 8}, r"--dcp-size 8 does not fit --tp 4"),
        ({"batch": 0}, "--batch 0"),
        ({"kv_dtype": "int3"}, "--kv-dtype int3"),
        ({"communicator": "mpi"}, "--dcp-comm-backend mpi"),
        ({"mem_fraction": 1.5}, "--mem-fraction 1.5"),
    ],
)
def test_requests_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_plan(ask(**changes))


def test_auto_communicator_follows_the_node():
    assert ask().chosen_communicator == "nvlink"
    assert ask(num_gpus=16, tp_size=16).chosen_communicator == "a2a"
    assert ask(communicator="ag_rs").chosen_communicator == "ag_rs"
