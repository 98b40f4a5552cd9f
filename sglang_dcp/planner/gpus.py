"""GPUs as data. Add a row here, or pass a JSON file with the same fields to ``--gpu``."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

_MIB = 2**20


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model; rates are peaks.

    Attributes:
        name: as written on the command line.
        hbm_bytes: device memory as the driver reports it (``nvidia-smi`` memory.total).
        hbm_bytes_per_s: memory bandwidth.
        bf16_flops_per_s: dense bf16 tensor-core rate, without sparsity.
        link_bytes_per_s: NVLink bandwidth in ONE direction.
        gpus_per_node: GPUs that reach each other over that link.
        source: where the numbers can be checked; they are the vendors' peaks, not measurements.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    link_bytes_per_s: float
    gpus_per_node: int
    source: str

    @property
    def ridge_flops_per_byte(self) -> float:
        """Arithmetic intensity at which memory and tensor cores are equally busy."""
        return self.bf16_flops_per_s / self.hbm_bytes_per_s


# Only H200's memory was read from a device; the others are what such cards commonly report.
_SMI = "memory: nvidia-smi memory.total; rates: "
_GPUS = (
    GpuSpec("a100", 81920 * _MIB, 2.039e12, 312e12, 300e9, 8,
            _SMI + "nvidia.com/en-us/data-center/a100 (80 GB SXM)"),
    GpuSpec("h100", 81559 * _MIB, 3.35e12, 989e12, 450e9, 8,
            _SMI + "nvidia.com/en-us/data-center/h100 (SXM; 1979 TFLOP/s sparse, halved)"),
    GpuSpec("h800", 81559 * _MIB, 3.35e12, 989e12, 200e9, 8,
            _SMI + "as H100 SXM with NVLink cut to 400 GB/s both ways (DeepSeek-V3 report, 3.1)"),
    GpuSpec("h200", 143771 * _MIB, 4.8e12, 989e12, 450e9, 8,
            _SMI + "nvidia.com/en-us/data-center/h200 (SXM; 1979 TFLOP/s sparse, halved)"),
    GpuSpec("h20", 97871 * _MIB, 4.0e12, 148e12, 450e9, 8,
            _SMI + "vendor lists, no public NVIDIA page (96 GB HBM3, 148 TFLOP/s dense)"),
    GpuSpec("b200", 183359 * _MIB, 8.0e12, 2.25e15, 900e9, 8,
            _SMI + "nvidia.com/en-us/data-center/hgx (HGX B200; 36 PFLOP/s sparse per 8, halved)"),
)  # fmt: skip
GPUS: dict[str, GpuSpec] = {gpu.name: gpu for gpu in _GPUS}


def find_gpu(device_name: str) -> GpuSpec | None:
    """The GPU that a driver calls `device_name`, such as "NVIDIA H200"; None if unknown."""
    words = device_name.lower().replace("-", " ").split()
    return next((spec for name, spec in GPUS.items() if name in words), None)


def load_gpu(name_or_path: str) -> GpuSpec:
    """Look a GPU up by name (any case), or read it from a JSON file with `GpuSpec`'s fields.

    Raises:
        ValueError: the name is not in the table and no such file exists, or the file's fields
            are not those of `GpuSpec`.
    """
    if name_or_path.lower() in GPUS:
        return GPUS[name_or_path.lower()]
    path = Path(name_or_path)
    if path.suffix == ".json" and path.is_file():
        return _gpu_from_json(path)
    raise ValueError(
        f"--gpu {name_or_path} is unknown: the table holds {', '.join(GPUS)}. Name one of them, "
        f"or give a JSON file (--gpu my.json) with {', '.join(_field_names())}."
    )


def _gpu_from_json(path: Path) -> GpuSpec:
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--gpu {path} is not JSON ({error}): the file must hold one object. "
            f"Give it the fields {', '.join(_field_names())}."
        ) from error
    if not isinstance(data, dict) or set(data) != set(_field_names()):
        got = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"--gpu {path} holds {got}: the fields must be exactly {', '.join(_field_names())}. "
            "Add what is missing, in bytes, bytes/s (one direction) and dense bf16 FLOP/s."
        )
    rates = {key: value for key, value in data.items() if key not in ("name", "source")}
    wrong = [key for key, val in rates.items() if not isinstance(val, int | float) or val <= 0]
    if wrong:
        raise ValueError(
            f"--gpu {path} has {', '.join(f'{key} = {data[key]!r}' for key in wrong)}: sizes and "
            "rates must be positive numbers, in bytes, bytes/s and FLOP/s. Correct them."
        )
    return GpuSpec(**data)


def _field_names() -> list[str]:
    return [field.name for field in fields(GpuSpec)]
