"""Argument sets of SGLang for the tests; the `plugin` fixture must have loaded the plugin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

#: A seed of our own: upstream draws one, and two argument sets would never be equal.
SEED = 7


def make_args(model: Path, **values: Any) -> Any:
    """ServerArgs on 8 CPU ranks, unless `values` says otherwise."""
    from sglang.srt.server_args import ServerArgs

    values = {"tp_size": 8, "random_seed": SEED, "device": "cpu", **values}
    return ServerArgs(model_path=str(model), **values)


def make_args_on(machine: str, patch: pytest.MonkeyPatch, model: Path, **values: Any) -> Any:
    """Arguments as a machine would make them: "cpu", "hopper", or "cuda" with older GPUs."""
    from sglang.srt import server_args

    from sglang_dcp.hooks import server_args as ours

    if machine == "cpu":
        return make_args(model, **values)
    hopper = machine == "hopper"
    patch.setattr(server_args, "is_cpu", lambda: False)
    patch.setattr(server_args, "is_hopper_with_cuda_12_3", lambda: hopper)
    patch.setattr(server_args, "is_sm100_supported", lambda: False)
    patch.setattr(server_args, "get_device_memory_capacity", lambda device: 141 * 1024)
    patch.setattr("torch.cuda.get_device_capability", lambda *args: (9, 0) if hopper else (8, 0))
    patch.setattr(ours, "is_sm90_supported", lambda: hopper)
    return make_args(model, **{"device": "cuda", **values})


def fields_of(args: Any) -> dict[str, Any]:
    """The fields of `args` to compare, for readable differences.

    Upstream computes mem_fraction_static from the graphs when it is not given and keeps it on
    `replace`, with or without DCP, so it is left out.
    """
    names = [field.name for field in dataclasses.fields(args)]
    return {name: getattr(args, name) for name in names if name != "mem_fraction_static"}
