"""What a user asks the planner, checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_dcp.planner.constants import Constants
from sglang_dcp.planner.gpus import GpuSpec
from sglang_dcp.planner.ledgers import COMMUNICATORS, KV_DTYPE_BYTES
from sglang_dcp.planner.models import ModelShape
from sglang_dcp.planner.walls import default_mem_fraction, kv_budget_bytes


@dataclass(frozen=True)
class PlanRequest:
    """One question to the planner; `check_request` says whether it makes sense.

    Attributes:
        model, gpu: shapes and rates.
        num_gpus: GPUs of the node; ``num_gpus / tp_size`` replicas when TP is smaller.
        tp_size: attention-TP size of one replica.
        dcp_size: None lets the planner choose.
        context_tokens, batch: cached tokens per sequence, and sequences per replica.
        kv_dtype: a key of `KV_DTYPE_BYTES`.
        communicator: "auto" or one of `COMMUNICATORS`.
        weight_bytes: all weights of one copy; None uses the model's estimate.
        other_bytes: further memory per GPU (draft model, LoRA, linear-attention state, ...).
        mem_fraction: ``--mem-fraction-static``; None uses SGLang's default.
        constants: measured times.
    """

    model: ModelShape
    gpu: GpuSpec
    num_gpus: int
    tp_size: int
    context_tokens: int
    batch: int
    dcp_size: int | None = None
    kv_dtype: str = "bf16"
    communicator: str = "auto"
    weight_bytes: int | None = None
    other_bytes: int = 0
    mem_fraction: float | None = None
    constants: Constants = field(default_factory=Constants)

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one cached element."""
        return KV_DTYPE_BYTES[self.kv_dtype]

    @property
    def weight_bytes_per_gpu(self) -> int | None:
        """Weights on each rank; None when neither given nor estimated."""
        if self.weight_bytes is not None:
            return self.weight_bytes // self.tp_size
        if self.model.weights is None:
            return None
        return self.model.weights.bytes_per_gpu(self.tp_size)

    @property
    def mem_fraction_static(self) -> float:
        """The fraction asked for, or SGLang's default for this GPU and TP size."""
        if self.mem_fraction is not None:
            return self.mem_fraction
        return default_mem_fraction(self.gpu, self.tp_size)

    @property
    def kv_budget_bytes_per_gpu(self) -> int:
        """HBM left for the KV cache; an upper bound when the weights are unknown.

        Negative when the weights alone do not fit.
        """
        return kv_budget_bytes(
            self.gpu,
            self.mem_fraction_static,
            self.weight_bytes_per_gpu or 0,
            self.other_bytes,
            self.constants.step.startup_bytes,
        )

    @property
    def chosen_communicator(self) -> str:
        """ "auto" resolved: nvlink inside one node with peer access, a2a across nodes."""
        if self.communicator != "auto":
            return self.communicator
        return "nvlink" if self.tp_size <= self.gpu.gpus_per_node else "a2a"

    @property
    def dcp_sizes(self) -> list[int]:
        """Powers of two that divide the TP size: what DCP can be set to."""
        return [c for c in _POWERS_OF_TWO if c <= self.tp_size and self.tp_size % c == 0]


_POWERS_OF_TWO = tuple(2**n for n in range(10))


def check_request(request: PlanRequest) -> None:
    """Raise what `sglang_dcp` itself would refuse at start-up, and requests that mean nothing.

    Raises:
        ValueError: sizes that do not divide each other, an unknown dtype or communicator, or a
            memory fraction outside (0, 1).
    """
    _check_sizes(request)
    if request.kv_dtype not in KV_DTYPE_BYTES:
        raise ValueError(
            f"--kv-dtype {request.kv_dtype} is unknown: the planner knows "
            f"{', '.join(KV_DTYPE_BYTES)}. Name one of them."
        )
    if request.communicator not in ("auto", *COMMUNICATORS):
        raise ValueError(
            f"--dcp-comm-backend {request.communicator} is unknown: there are auto, "
            f"{', '.join(COMMUNICATORS)}. Name one of them."
        )
    if not 0 < request.mem_fraction_static < 1:
        raise ValueError(
            f"--mem-fraction {request.mem_fraction_static} is no share of the GPU memory: it must "
            "lie between 0 and 1. Leave it out for SGLang's default, or give for example 0.85."
        )


def _check_sizes(request: PlanRequest) -> None:
    heads, tp_size = request.model.num_attention_heads, request.tp_size
    for option, size in (
        ("--gpus", request.num_gpus),
        ("--tp", tp_size),
        ("--context", request.context_tokens),
        ("--batch", request.batch),
    ):
        if size < 1:
            raise ValueError(f"{option} {size} is too small: at least 1 is needed. Raise it.")
    if request.num_gpus % tp_size:
        raise ValueError(
            f"--tp {tp_size} does not divide --gpus {request.num_gpus}: {request.num_gpus} % "
            f"{tp_size} = {request.num_gpus % tp_size}. Use --tp "
            f"{_listed(_divisors(request.num_gpus))}, or change --gpus."
        )
    if heads % tp_size:
        raise ValueError(
            f"--tp {tp_size} does not divide the {heads} query heads of {request.model.name}: "
            f"{heads} % {tp_size} = {heads % tp_size}. Use --tp "
            f"{_listed([n for n in _divisors(request.num_gpus) if heads % n == 0])}."
        )
    if request.dcp_size is not None and request.dcp_size not in request.dcp_sizes:
        raise ValueError(
            f"--dcp-size {request.dcp_size} does not fit --tp {tp_size}: it must be a power of two "
            f"that divides the TP size, and {tp_size} % {request.dcp_size} = "
            f"{tp_size % request.dcp_size if request.dcp_size else 'undefined'}. "
            f"Use --dcp-size {_listed(request.dcp_sizes)}, or change --tp."
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(sizes: list[int]) -> str:
    if len(sizes) == 1:
        return str(sizes[0])
    return ", ".join(map(str, sizes[:-1])) + f" or {sizes[-1]}"
