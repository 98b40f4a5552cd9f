"""For the tests of the planner: one request, those that differ from it, and what it names."""

from __future__ import annotations

from sglang_dcp.planner import GPUS, PlanRequest, load_model

K3 = load_model("kimi-k3")
H200 = GPUS["h200"]


def ask(model: str = "kimi-k3", **changes) -> PlanRequest:
    fields = {
        "model": load_model(model), "gpu": H200, "num_gpus": 8, "tp_size": 8,
        "context_tokens": 10**6, "batch": 64,
    }  # fmt: skip
    return PlanRequest(**(fields | changes))
