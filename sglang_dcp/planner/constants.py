"""Measured times as data: what the exchange and a decode layer cost beside moving their bytes.

Every constant carries its source and can be replaced: write what another machine measured into a
JSON file (``{"step": {...}, "exchange": {"nvlink": {...}}}``) and pass it to ``--constants``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

_TWO_H200 = "two H200, NVLink NV18, 96 heads x 512, bf16, CUDA-graph replay; scripts/results/"
_NVLINK_RUN = _TWO_H200 + "bench_exchange_c2.json"
_NCCL_RUN = _TWO_H200 + "bench_exchange_c2_flags.json"


@dataclass(frozen=True)
class ExchangeTable:
    """Time per layer of stage 4 and of stages 6 + 7, by batch, for one communicator.

    Attributes:
        batches: tokens per step of each column, increasing, at least two.
        gather_us, exchange_us: times of the columns.
        dcp_size, num_heads, link_bytes_per_s: what they were measured with.
        is_estimate: not measured as such; ``source`` says how it was put together.
        source: hardware and method.
    """

    batches: tuple[int, ...]
    gather_us: tuple[float, ...]
    exchange_us: tuple[float, ...]
    dcp_size: int = 2
    num_heads: int = 96
    link_bytes_per_s: float = 450e9
    is_estimate: bool = False
    source: str = _NVLINK_RUN

    def __post_init__(self) -> None:
        lengths = {len(self.batches), len(self.gather_us), len(self.exchange_us)}
        if len(lengths) != 1 or len(self.batches) < 2 or list(self.batches) != sorted(self.batches):
            raise ValueError(
                f"exchange table with batches {list(self.batches)}, {len(self.gather_us)} gather "
                f"and {len(self.exchange_us)} exchange times: it needs at least two increasing "
                "batches and one time of each kind per batch. Give the lists the same length."
            )


EXCHANGE_TABLES: dict[str, ExchangeTable] = {
    "nvlink": ExchangeTable(
        batches=(1, 16, 64, 128),
        gather_us=(6.1, 7.8, 17.1, 25.6),
        exchange_us=(4.2, 8.3, 20.4, 31.1),
        source=_NVLINK_RUN + "; one kernel each",
    ),
    "a2a": ExchangeTable(
        batches=(1, 16, 64, 128),
        gather_us=(8.9, 18.2, 35.8, 53.0),
        exchange_us=(12.5, 20.6, 34.4, 56.7),
        source=_NCCL_RUN + "; pack + NCCL all-gather, and pack + NCCL all-to-all + merge",
    ),
    "ag_rs": ExchangeTable(
        batches=(1, 16, 64, 128),
        gather_us=(10.6, 19.7, 35.5, 53.2),
        exchange_us=(17.8, 38.9, 63.8, 103.1),
        source=_NCCL_RUN + "; NCCL all-gather of the LSE, weighing, NCCL reduce-scatter in float32",
    ),
}


@dataclass(frozen=True)
class StepConstants:
    """What a decode layer costs beyond peak rates.

    Attributes:
        attention_launch_us: fixed cost of one MLA attention call (split, combine, launch).
        hbm_efficiency, flops_efficiency: share of the peak that a long attention call reaches.
        head_tile: heads are padded to a multiple of this by the kernel.
        layer_overhead_us: per layer on the GPU, everything but attention and reading weights:
            norms, small kernels, all-reduces.
        host_step_us: what the host takes for a step under CUDA graphs (schedule, launch, sample);
            it runs beside the GPU, and no step is shorter.
        startup_bytes: memory the server never sees: driver, CUDA context, NCCL buffers.
        source: hardware and method.
    """

    attention_launch_us: float = 30.0
    hbm_efficiency: float = 0.958
    flops_efficiency: float = 0.753
    head_tile: int = 64
    layer_overhead_us: float = 58.0
    host_step_us: float = 2290.0
    startup_bytes: int = int(2.6 * 2**30)
    source: str = (
        "H200, FlashMLA of sgl-kernel 0.4.4: 48 heads 8 x 131072 288 us, 96 heads 8 x 65536 215 us "
        "and 8 x 131072 411 us. SGLang 0.5.14 TP 2, 12 layers, hidden 6144: overhead from a trace "
        "(182 us a layer, 81 of them attention, 42 weights), host from 2 x 16384 and 4 x 32768 "
        "with and without DCP, startup bytes from the KV capacity (6.26M tokens at 0.6)"
    )


@dataclass(frozen=True)
class Constants:
    """All measured constants a plan uses."""

    step: StepConstants = field(default_factory=StepConstants)
    exchange: dict[str, ExchangeTable] = field(default_factory=lambda: dict(EXCHANGE_TABLES))


def load_constants(path: str | Path) -> Constants:
    """Defaults with the values of a JSON file put over them; keys are the fields' names.

    Raises:
        ValueError: no such file, not JSON, an unknown key or communicator, or a broken table.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"--constants {path} cannot be read ({error}): it must be a JSON file with the keys "
            "step and exchange. Give its path, or leave the option out."
        ) from error
    _check_keys(path, "the file", data, {"step", "exchange"})
    exchange = dict(EXCHANGE_TABLES)
    _check_keys(path, "exchange", data.get("exchange", {}), set(exchange))
    for name, overrides in data.get("exchange", {}).items():
        exchange[name] = _override(path, f"exchange.{name}", exchange[name], overrides)
    return Constants(
        step=_override(path, "step", StepConstants(), data.get("step", {})), exchange=exchange
    )


def _override(path: str | Path, where: str, defaults: Any, overrides: Any) -> Any:
    _check_keys(path, where, overrides, {entry.name for entry in fields(defaults)})
    for key, value in overrides.items():
        _check_value(path, f"{where}.{key}", getattr(defaults, key), value)
    return replace(
        defaults,
        **{key: tuple(val) if isinstance(val, list) else val for key, val in overrides.items()},
    )


def _check_value(path: str | Path, where: str, default: Any, value: Any) -> None:
    values = value if isinstance(default, tuple) and isinstance(value, list) else [value]
    if isinstance(default, str | bool):
        is_right = isinstance(value, type(default))
    else:
        is_right = all(isinstance(entry, int | float) and entry > 0 for entry in values)
    if not is_right:
        raise ValueError(
            f"--constants {path}: {where} is {value!r}: it replaces {default!r}, so it must be of "
            "that kind, numbers above 0. Correct it."
        )


def _check_keys(path: str | Path, where: str, data: Any, known: set[str]) -> None:
    unknown = sorted(set(data) - known) if isinstance(data, dict) else [type(data).__name__]
    if unknown:
        raise ValueError(
            f"--constants {path}: {where} holds {', '.join(unknown)}: known are "
            f"{', '.join(sorted(known))}. Remove or rename what is unknown."
        )
