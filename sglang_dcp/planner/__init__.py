"""Capacity and communication planner of DCP: pure arithmetic, imports neither torch nor SGLang."""

from sglang_dcp.planner.advice import advice
from sglang_dcp.planner.constants import Constants, ExchangeTable, StepConstants, load_constants
from sglang_dcp.planner.gpus import GPUS, GpuSpec, load_gpu
from sglang_dcp.planner.models import ModelShape, load_model, preset_names, shape_from_config
from sglang_dcp.planner.plan import DcpOption, Plan, make_plan
from sglang_dcp.planner.report import plan_json, startup_block
from sglang_dcp.planner.request import PlanRequest

__all__ = [
    "GPUS",
    "Constants",
    "DcpOption",
    "ExchangeTable",
    "GpuSpec",
    "ModelShape",
    "Plan",
    "PlanRequest",
    "StepConstants",
    "advice",
    "load_constants",
    "load_gpu",
    "load_model",
    "make_plan",
    "plan_json",
    "preset_names",
    "shape_from_config",
    "startup_block",
]
