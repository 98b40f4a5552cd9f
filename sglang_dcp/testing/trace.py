"""Read chrome traces of a served decode step: which kernels, in which order, how long, per layer.

A decode step under CUDA graphs is one replay: its kernels carry one correlation id. In every layer
the attention kernel runs once; around it lie four GEMMs:

    q_b_proj, w_kc, ..., attention, ..., w_vc, o_proj

The core of a layer is everything between q_b_proj and o_proj, the w_kc and w_vc products included.
"""

import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Categories of what runs on the GPU; copies and fills are graph nodes like kernels.
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_ATTENTION = re.compile(
    r"flash_fwd|flashattn|fmha|BatchMLA|_fwd_grouped_kernel|_fwd_kernel_stage1|attention",
    re.IGNORECASE,
)
#: Helpers of an attention kernel, which its name pattern finds too.
_HELPER = re.compile(r"combine|reduce|merge|metadata|stage2|nccl|set_mla|kv_buffer", re.IGNORECASE)
_GEMM = re.compile(r"gemm|gemv|nvjet|xmma|cublas", re.IGNORECASE)
_NO_GEMM = re.compile(r"split_?k_?reduce", re.IGNORECASE)
_NCCL = re.compile(r"nccl", re.IGNORECASE)
ROLES = ("q_b_proj", "w_kc", "attention", "w_vc", "o_proj")


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the GPU.

    Attributes:
        name: as the trace has it.
        start_us, duration_us: on the trace's clock.
        stream: CUDA stream.
        correlation: id of the launch; all kernels of one graph replay share it.
    """

    name: str
    start_us: float
    duration_us: float
    stream: int
    correlation: int

    @property
    def end_us(self) -> float:
        """When it ended, on the trace's clock."""
        return self.start_us + self.duration_us

    @property
    def short_name(self) -> str:
        """The name without return type, template arguments and parameters."""
        plain, shorter = "", self.name.replace("(anonymous namespace)::", "")
        while shorter != plain:
            plain, shorter = shorter, re.sub(r"<[^<>]*>", "", shorter)
        words = plain.split("(")[0].split()
        inner = re.search(r"FlashAttnFwd\w*", self.name) or re.search(
            r"(?<=cutlass::Kernel2<)\w+", self.name
        )
        return inner.group() if inner else words[-1] if words else self.name

    @property
    def is_attention(self) -> bool:
        """Whether the name is one of a kernel that attends, not of its helpers."""
        name = self.short_name
        return _ATTENTION.search(name) is not None and not _HELPER.search(name)

    @property
    def is_gemm(self) -> bool:
        """Whether it is a matrix product; the second half of a split one is not."""
        found = _GEMM.search(self.name) is not None and not _NO_GEMM.search(self.name)
        return found and not _ATTENTION.search(self.short_name)


def read_kernels(path: Path) -> list[Kernel]:
    """All GPU work of a chrome trace (.json or .json.gz) in the order of its start."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as f:
        events = json.load(f)["traceEvents"]
    kernels = [
        Kernel(
            event["name"],
            float(event["ts"]),
            float(event["dur"]),
            int(event["args"].get("stream", event["tid"])),
            int(event["args"].get("correlation", -1)),
        )
        for event in events
        if event.get("cat") in _GPU_WORK and event.get("ph") == "X"
    ]
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def decode_steps(kernels: Sequence[Kernel], num_layers: int) -> list[list[Kernel]]:
    """The graph replays among `kernels`, whole ones of the most common size only.

    Raises:
        ValueError: there are none.
    """
    launches: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        launches[kernel.correlation].append(kernel)
    launches.pop(-1, None)
    replays = [launch for launch in launches.values() if len(launch) > num_layers]
    if not replays:
        raise ValueError(
            f"the trace has {len(kernels)} kernels but no launch of more than {num_layers} of them:"
            f" a decode step of {num_layers} layers must be one graph replay. Trace a server with "
            "decode CUDA graphs, while it decodes."
        )
    size = Counter(len(replay) for replay in replays).most_common(1)[0][0]
    return [replay for replay in replays if len(replay) == size]


def attention_name(step: Sequence[Kernel], num_layers: int) -> str:
    """Name of the kernel that attends: once a layer, and the longest of those that may be it.

    Raises:
        ValueError: there is none; the message lists what runs once a layer.
    """
    runs: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in step:
        runs[kernel.name].append(kernel)
    once = {name: run for name, run in runs.items() if len(run) == num_layers}
    found = [name for name, run in once.items() if run[0].is_attention]
    if not found:
        raise ValueError(
            f"no attention kernel runs exactly once in each of {num_layers} layers; the kernels "
            f"that do are {sorted(run[0].short_name for run in once.values())}. Give the right "
            "number of layers, or extend the attention names of this module."
        )
    return max(found, key=lambda name: sum(kernel.duration_us for kernel in once[name]))


def _roles(step: Sequence[Kernel], attention: int) -> dict[str, int]:
    """Index in `step` of each of ROLES in the layer whose attention is at that index."""
    before = [i for i in range(attention) if step[i].is_gemm]
    after = [i for i in range(attention + 1, len(step)) if step[i].is_gemm]
    if len(before) < 2 or len(after) < 2:
        raise ValueError(
            f"{len(before)} GEMMs before and {len(after)} after an attention kernel of the step: "
            "q_b_proj, w_kc, w_vc and o_proj need two each. Extend the GEMM names of this module."
        )
    return dict(zip(ROLES, (*before[-2:], attention, *after[:2]), strict=True))


def summarize(kernels: Sequence[Kernel], num_layers: int) -> dict[str, Any]:
    """What a decode step does, from all GPU work of a trace.

    Returns:
        num_steps: whole replays found; kernels_per_step of each.
        kernels_per_layer, core_kernels: {median, min, max} over layers; the core lies between
            q_b_proj and o_proj (see the module).
        step_us: from first start to last end of a replay; step_period_us from start to start, None
            with one replay; layer_us from attention to attention; core_us from the end of q_b_proj
            to the start of o_proj: medians.
        busy_us: sum of durations of a step, mean.
        core_nccl, step_nccl: names of NCCL kernels with their number in a step.
        kernels: per name per_step, mean_us, share of busy_us; largest share first.
        layer: the middle layer of the middle step in order, from behind the o_proj before to its
            own: name, start_us from the first, us, stream, role (of ROLES, or "").
    """
    steps = decode_steps(kernels, num_layers)
    name = attention_name(steps[0], num_layers)
    layers = [_layers(step, name) for step in steps]
    between = [roles["o_proj"] - roles["q_b_proj"] - 1 for roles in layers[0]]
    per_layer = [b["attention"] - a["attention"] for a, b in _pairs(layers[0])]
    starts = [step[0].start_us for step in steps]
    middle = len(steps) // 2
    return {
        "num_steps": len(steps),
        "num_layers": num_layers,
        "kernels_per_step": len(steps[0]),
        "kernels_per_layer": _spread(per_layer),
        "core_kernels": _spread(between),
        "step_us": statistics.median(_span_us(step) for step in steps),
        "step_period_us": _median([b - a for a, b in _pairs(starts)]),
        "layer_us": _median(
            [
                step[b["attention"]].start_us - step[a["attention"]].start_us
                for step, found in zip(steps, layers, strict=True)
                for a, b in _pairs(found)
            ]
        ),
        "core_us": _median(
            [
                step[roles["o_proj"]].start_us - step[roles["q_b_proj"]].end_us
                for step, found in zip(steps, layers, strict=True)
                for roles in found
            ]
        ),
        "busy_us": statistics.mean(sum(k.duration_us for k in step) for step in steps),
        "core_nccl": _nccl(_cores(steps[0], layers[0])),
        "step_nccl": _nccl(steps[0]),
        "attention": name,
        "kernels": _by_name(steps),
        "layer": _layer_rows(steps[middle], layers[middle], num_layers // 2),
    }


def _layers(step: Sequence[Kernel], attention: str) -> list[dict[str, int]]:
    return [_roles(step, i) for i, kernel in enumerate(step) if kernel.name == attention]


def _cores(step: Sequence[Kernel], layers: Sequence[dict[str, int]]) -> list[Kernel]:
    return [k for roles in layers for k in step[roles["q_b_proj"] + 1 : roles["o_proj"]]]


def _layer_rows(
    step: Sequence[Kernel], layers: Sequence[dict[str, int]], layer: int
) -> list[dict[str, Any]]:
    first = layers[layer - 1]["o_proj"] + 1 if layer else 0
    names = {index: role for role, index in layers[layer].items()}
    return [
        {
            "name": step[i].name,
            "short_name": step[i].short_name,
            "start_us": round(step[i].start_us - step[first].start_us, 3),
            "us": step[i].duration_us,
            "stream": step[i].stream,
            "role": names.get(i, ""),
        }
        for i in range(first, layers[layer]["o_proj"] + 1)
    ]


def _by_name(steps: Sequence[Sequence[Kernel]]) -> list[dict[str, Any]]:
    durations: dict[str, list[float]] = defaultdict(list)
    for kernel in (kernel for step in steps for kernel in step):
        durations[kernel.name].append(kernel.duration_us)
    total_us = sum(map(sum, durations.values()))
    rows = [
        {
            "name": name,
            "per_step": len(values) / len(steps),
            "mean_us": statistics.mean(values),
            "share": sum(values) / total_us,
        }
        for name, values in durations.items()
    ]
    return sorted(rows, key=lambda row: -row["share"])


def _nccl(kernels: Sequence[Kernel]) -> dict[str, int]:
    return dict(Counter(kernel.name for kernel in kernels if _NCCL.search(kernel.name)))


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values, values[1:], strict=False))


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _span_us(step: Sequence[Kernel]) -> float:
    return max(kernel.end_us for kernel in step) - step[0].start_us
