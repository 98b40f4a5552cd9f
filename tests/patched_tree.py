"""Run by test_patches.py on a tree with the patches: `python patched_tree.py MODEL`.

Checks, in a process of its own, that the source does what the plugin would, and does it once.
"""

import dataclasses
import pickle
import sys

import pytest
import sglang.srt.entrypoints.engine  # noqa: F401 (the launcher has it when plugins load)
import sglang.srt.managers.scheduler as scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_dcp.hooks import registry, seam, table
from sglang_dcp.launch_server import require_plugin

PHASE_ONE = table.ARGUMENTS + table.LAUNCH + table.SCHEDULER


def check_before_activation() -> None:
    """The plugin, if SGLang loads it, finds everything done and no hook of phase 2 awake."""
    require_plugin()  # SGLANG_PLUGINS may exclude the plugin: the source is enough
    load_plugins()
    for patch in PHASE_ONE + table.DCP + table.OBSERVE + table.METRICS + table.REPLICATE_Q:
        assert registry.status(patch) == "applied", patch
        assert patch.target not in HookRegistry._hooks, patch
    awake = [patch.name for patch in table.DCP + table.METRICS if registry.is_registered(patch)]
    assert not awake, awake


def check_arguments(argv: list[str]) -> ServerArgs:
    """The fields travel, follow `replace` in both directions, and wrong values are refused."""
    args = prepare_server_args([*argv, "--decode-context-parallel-size", "2"])
    assert (args.dcp_size, args.page_size, args.attention_backend) == (2, 2, "torch_mla")
    assert dataclasses.replace(args) == args == pickle.loads(pickle.dumps(args))
    one = dataclasses.replace(args, dcp_size=1)
    assert (one.dcp_size, one.page_size, one.dcp_derived) == (1, 1, None)
    assert dataclasses.replace(one, dcp_size=2).page_size == 2
    assert dataclasses.asdict(args)["dcp_size"] == 2
    assert "dcp_size=2" in repr(args)
    assert one != args
    with pytest.raises(ValueError, match="power of two"):
        prepare_server_args([*argv, "--dcp-size", "3"])
    return args


def check_activation(args: ServerArgs) -> None:
    """A scheduler's first step activates phase 2 once, and no function is wrapped twice."""
    activations = []
    apply = registry.apply

    def record(patches: list[registry.Patch]) -> None:
        activations.append(patches)
        apply(patches)

    registry.apply = record
    scheduler.configure_scheduler_process(args, 0, 0, 0, 0, 0, 0, None)
    assert activations == [table.phase_two(args)], activations
    registry.verify(activations[0])
    assert all(registry.is_registered(patch) for patch in table.DCP)
    for name, patch in seam.SEAMS.items():
        if name not in ("args-init", "args-eq", "args-repr"):  # generated: not wrapped at all
            mark, _ = registry._wrapper_chain(registry._resolve(patch.path))
            assert mark.__dcp_seam__ == name
    hooked = {patch.target for patch in PHASE_ONE + table.DCP + table.CPU} & set(
        HookRegistry._hooks
    )
    # No source patch stands for what only ranks without a GPU need
    cpu = {patch.target for patch in table.CPU if patch.kind in registry.REGISTRY_KINDS}
    assert hooked == cpu, hooked


if __name__ == "__main__":
    model = ["--model-path", sys.argv[1], "--device", "cpu", "--dtype", "float32", "--tp", "2"]
    check_before_activation()
    check_activation(check_arguments(model))
