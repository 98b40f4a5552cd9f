"""The two phases of patching, in a process set up as a scheduler is."""

import json

import pytest
from support import run_python

pytestmark = pytest.mark.usefixtures("plugin")

PHASES = """
import json, sys
import sglang.srt.managers.scheduler  # as in a spawned scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed import parallel_state
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from sglang_dcp import state
from sglang_dcp.hooks import registry, scheduler, table

phases = {name: patches for name, patches in table.everything().items() if name != "backends"}
seen = {}

def applied():
    return {name: [registry.is_applied(p) if not registry.mismatch(p) and
                   (not p.missing_upstream or p.name in registry._applied) else False
                   for p in patches] for name, patches in phases.items()}

def step(name, device, dcp_size):
    args = ServerArgs(model_path="dummy", device=device, dcp_size=dcp_size, page_size=dcp_size)
    args.attention_backend = "torch_mla"
    scheduler.before_configure_scheduler_process(args, 0, 0)
    seen[name] = {"applied": applied(), "targets": sorted(HookRegistry._patched)}

step("loaded", "cuda", 1)
step("cpu", "cpu", 1)
step("dcp", "cpu", 2)
step("again", "cpu", 2)

calls = []
class Part:
    def __init__(self, name):
        self.destroy = lambda: calls.append(name)
parts = Part("comm"), Part("group")
state.set_state(state.DcpState(2, 0, (0, 1), coordinator=parts[1], comm=parts[0]))
parallel_state.destroy_model_parallel()
seen["destroy"] = {"calls": calls, "initialized": state.is_initialized()}
parallel_state.destroy_model_parallel()
seen["destroy"]["again"] = len(calls)
print("RESULT" + json.dumps(seen))
"""


@pytest.fixture(scope="module")
def phases():
    """What a scheduler process has patched after each way of activating."""
    out = run_python(PHASES, SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="sglang_dcp").stdout
    return json.loads(out.partition("RESULT")[2])


def test_plugin_unused_patches_arguments_only(phases):
    from sglang_dcp.hooks import table

    seen = phases["loaded"]
    wanted = [*table.ARGUMENTS, *table.SCHEDULER]
    launch = [p.target for p in table.LAUNCH]  # only where the launcher's module is loaded
    targets = {p.target for p in wanted if p.kind in ("before", "after", "around")}
    assert targets <= set(seen["targets"]) <= targets | set(launch)
    assert all(seen["applied"]["arguments"])
    assert all(seen["applied"]["scheduler"])
    for phase in ("dcp", "cpu", "observe"):
        assert not any(seen["applied"][phase]), phase


def test_cpu_without_dcp_patches_the_cpu_table_only(phases):
    applied = phases["cpu"]["applied"]
    assert all(applied["cpu"])
    assert not any(applied["dcp"])
    assert not any(applied["observe"])


def test_dcp_applies_every_patch_once(phases):
    applied = phases["dcp"]["applied"]
    assert all(applied["cpu"])
    assert all(applied["dcp"])
    assert not any(applied["observe"])
    assert phases["again"] == phases["dcp"]


def test_destroy_clears_state(phases):
    """Upstream's destroy_model_parallel takes ours down first, once."""
    assert phases["destroy"] == {"calls": ["comm", "group"], "initialized": False, "again": 2}
