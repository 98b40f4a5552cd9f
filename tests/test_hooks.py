"""The hook table against the installed SGLang, and the rules of applying it."""

import ast
import copy
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
from support import clean_env

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("plugin")


def all_patches():
    from sglang_dcp.hooks import table

    return [patch for patches in table.everything().values() for patch in patches]


# ---------------------------------------------------------------- the table as data


def test_no_field_is_blank():
    for patch in all_patches():
        for field in ("name", "target", "kind", "why", "remove_when", "test"):
            assert getattr(patch, field).strip(), (patch.name, field)
        assert bool(patch.hook) == (patch.kind != "append"), patch.name
        is_function = patch.kind in ("before", "after", "around")
        assert is_function or patch.params is None, patch.name
        if is_function and patch.name != "args-init":
            assert patch.params is not None, patch.name


def test_names_and_targets_are_unique():
    """The registry drops a second registration on a target: phases may never share one."""
    patches = all_patches()
    assert [n for n, times in Counter(p.name for p in patches).items() if times > 1] == []
    assert [t for t, times in Counter(p.target for p in patches).items() if times > 1] == []


def test_targets_fit_the_installed_sglang(plugin):
    from sglang_dcp.hooks import registry

    problems = {p.name: registry.mismatch(p) for p in all_patches() if registry.mismatch(p)}
    assert problems == {}


def defined_names(path):
    """Names that a source file defines at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def test_hooks_exist():
    """By source, since GPU backends import on GPUs only."""
    for patch in all_patches():
        module, _, attribute = patch.hook.partition(":")
        if module:
            assert attribute in defined_names(ROOT / f"{module.replace('.', '/')}.py"), patch.name


def test_hooks_take_what_their_targets_take(plugin):
    """A hook body that lost a parameter would fail in a serving process only."""
    from sglang_dcp.hooks import registry

    extra = {"before": (), "after": ("result",), "around": ("original",)}
    for patch in all_patches():
        if patch.kind in registry.REGISTRY_KINDS and patch.params is not None:
            arguments = (*extra[patch.kind], *patch.params)
            inspect.signature(patch.load_hook()).bind(*arguments)


def test_every_hook_module_is_in_the_table():
    modules = {path.stem for path in (ROOT / "sglang_dcp/hooks").glob("*.py")}
    used = {p.hook.split(":")[0].rpartition(".")[2] for p in all_patches() if ".hooks." in p.hook}
    tables = {"table", "table_cpu", "table_prefill", "table_replicate_q"}
    helpers = {"__init__", "guards", "registry", "seam", "startup_log", "workspace"}
    assert modules - used == helpers | tables


def test_named_tests_exist():
    missing = set()
    for patch in all_patches():
        path, _, name = patch.test.partition("::")
        if not (ROOT / path).is_file() or (name and name not in defined_names(ROOT / path)):
            missing.add(patch.test)
    assert missing == set()


# ---------------------------------------------------------------- applying patches, on a toy


UPSTREAM = """
table, names, number = {"a": 1}, ["a"], 5

def double(x, y=0):
    return 2 * x + y

def other():
    return "other"
"""
OURS = """
value = object()

def around_double(original, x, y=0):
    return 100 + original(x, y)

def after_other(result):
    return "hooked"
"""


@pytest.fixture
def toy(plugin, monkeypatch):
    """A module that stands for SGLang, one that stands for us, and clean registries."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dcp.hooks import registry

    registries = HookRegistry._hooks, HookRegistry._patched, registry._applied
    saved = copy.deepcopy(HookRegistry._hooks), set(HookRegistry._patched), dict(registry._applied)
    for name, source in (("toy_upstream", UPSTREAM), ("toy_hooks", OURS)):
        module = ModuleType(name)
        exec(source, vars(module))  # new functions: upstream replaces them wherever they are bound
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules["toy_upstream"]
    for now, before in zip(registries, saved, strict=True):
        now.clear()
        now.update(before)


def patch_of(name="double", kind="around", params=("x", "y"), **changes):
    from sglang_dcp.hooks.registry import Patch

    hook = {"double": "toy_hooks:around_double", "other": "toy_hooks:after_other"}
    values = {
        "name": f"toy-{name}-{kind}",
        "target": f"toy_upstream.{name}",
        "hook": hook.get(name, "toy_hooks:value"),
        "why": "why",
        "remove_when": "when",
        "test": "test",
    }
    return Patch(kind=kind, params=params, **{**values, **changes})


OTHER = {"name": "other", "kind": "after", "params": ()}


def test_apply_changes_the_target(toy):
    from sglang_dcp.hooks import registry

    patches = [
        patch_of(),
        patch_of(**OTHER),
        patch_of("table", "item", None, target="toy_upstream.table[a]"),
        patch_of("names", "append", None, target="toy_upstream.names[b]", hook=""),
        patch_of("number", "attr", None),
        patch_of("absent", "attr", None, missing_upstream=True),
    ]
    assert not any(registry.is_applied(p) for p in patches)
    registry.apply(patches)
    ours = sys.modules["toy_hooks"]
    assert toy.double(1) == 102
    assert toy.other() == "hooked"
    assert toy.table["a"] is toy.number is toy.absent is ours.value
    assert toy.names == ["a", "b"]
    assert all(registry.is_applied(p) for p in patches)
    registry.apply(patches)  # again: nothing is doubled
    assert toy.double(1) == 102
    assert toy.names == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"params": ("x",)}, "has parameters ('x', 'y'), expected ('x',)"),
        ({"params": ("y", "x")}, "has parameters ('x', 'y'), expected ('y', 'x')"),
        ({"target": "toy_upstream.gone"}, "does not exist"),
        ({"target": "toy_upstream.Gone.method"}, "cannot be resolved"),
        ({"target": "no_such_module.double"}, "cannot be resolved"),
        (
            {"kind": "item", "target": "toy_upstream.table[b]", "params": None},
            "has no key 'b'",
        ),
        (
            {"kind": "append", "target": "toy_upstream.table[b]", "params": None, "hook": ""},
            "is a dict, not a list",
        ),
        ({"kind": "attr", "target": "toy_upstream.gone", "params": None}, "does not exist"),
    ],
)
def test_apply_is_all_or_nothing(toy, changes, finding):
    """One patch that does not fit: nothing is changed, nothing is left registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dcp import compat
    from sglang_dcp.hooks import registry

    bad = replace(patch_of(), name="toy-bad", **changes)
    good = [patch_of(**OTHER), patch_of("number", "attr", None)]
    assert finding in registry.mismatch(bad)
    hooks = copy.deepcopy(HookRegistry._hooks)
    with pytest.raises(registry.PatchError) as failed:
        registry.apply([good[0], bad, good[1]])
    message = str(failed.value)
    assert f"{bad.target}: " in message
    assert finding in message
    assert f"SGLang {compat.installed_sglang()} (tested with 0.5.14)" in message
    assert "Nothing was served" in message
    assert "without --dcp-size" in message
    assert toy.other() == "other"
    assert toy.number == 5
    assert HookRegistry._hooks == hooks
    assert not any(name.startswith("toy-") for name in registry._applied)


def test_a_hook_that_cannot_be_loaded_changes_nothing(toy):
    from sglang_dcp.hooks import registry

    with pytest.raises(ImportError):
        registry.apply([patch_of("number", "attr", None), patch_of(hook="no_such_module:hook")])
    assert toy.number == 5


def test_a_failed_apply_fails_again(toy, monkeypatch):
    """Upstream logs a hook that it could not apply; a second try must not pass for success."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dcp.hooks import registry

    def fail(target, hooks):
        raise TypeError("cannot be wrapped")

    monkeypatch.setattr(HookRegistry, "_apply_target", staticmethod(fail))
    for _ in range(2):
        with pytest.raises(registry.PatchError, match=r"toy_upstream\.double: our around hook"):
            registry.apply([patch_of()])
        assert toy.double(1) == 2


def other_plugin(original, x, y=0):
    return 1000 + original(x, y)


def test_a_target_patched_by_others_is_an_error(toy):
    """Upstream would drop our hook on it and say nothing."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dcp.hooks import registry

    HookRegistry.register("toy_upstream.double", other_plugin, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert toy.double(1) == 1002
    with pytest.raises(registry.PatchError, match=r"toy_upstream\.double: another plugin has"):
        registry.apply([patch_of(), patch_of(**OTHER)])
    assert toy.double(1) == 1002
    assert toy.other() == "other"


def test_hooks_registered_before_are_chained(toy):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dcp.hooks import registry

    HookRegistry.register("toy_upstream.double", other_plugin, HookType.AROUND)
    registry.apply([patch_of()])
    assert toy.double(1) == 1102
    assert registry.is_applied(patch_of())


def test_verify_sees_a_silently_dropped_registration(toy):
    """Proof by identity: upstream's own list of patched targets says that all is well."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dcp.hooks import registry

    HookRegistry.register("toy_upstream.double", other_plugin, HookType.AROUND)
    HookRegistry.apply_hooks()
    patch = patch_of()
    registry.register([patch])
    HookRegistry.apply_hooks()
    assert patch.target in HookRegistry._patched
    assert toy.double(1) == 1002  # ours was dropped
    with pytest.raises(registry.PatchError, match="around hook toy_hooks:around_double is not in"):
        registry.verify([patch])


def test_verify_sees_a_patch_that_was_undone(toy):
    from sglang_dcp.hooks import registry

    patches = [patch_of(), patch_of("table", "item", None, target="toy_upstream.table[a]")]
    registry.apply(patches)
    toy.double = toy.double.__wrapped__
    toy.table["a"] = 1
    with pytest.raises(registry.PatchError) as failed:
        registry.apply(patches)
    assert all(f"{patch.target}: our" in str(failed.value) for patch in patches)


# ---------------------------------------------------------------- the two phases, for real

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


def run_python(code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean_env(), "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


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


# ---------------------------------------------------------------- versions and imports


@pytest.mark.parametrize("found", ["0.5.13", "0.5.15.post1", None])
def test_other_versions_are_left_alone(monkeypatch, caplog, found):
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_dcp import compat, plugin
    from sglang_dcp.hooks import registry

    monkeypatch.setattr(compat, "installed_sglang", lambda: found)
    monkeypatch.setattr(registry, "register", None)
    monkeypatch.setattr(HookRegistry, "register", None)
    plugin.register()
    message = caplog.records[-1].getMessage()
    assert caplog.records[-1].levelname == "ERROR"
    assert f"patch SGLang {found or '(not installed)'}" in message
    assert "tested with 0.5.14 only" in message
    assert "Install sglang==0.5.14, or serve without --dcp-size" in message


def test_version_is_pinned_once():
    from sglang_dcp import compat

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [d for d in project["dependencies"] if d.startswith("sglang")]
    assert pins == [f"sglang=={compat.SUPPORTED_SGLANG[-1]}"]
    assert compat.installed_sglang() in compat.SUPPORTED_SGLANG
    entry = project["entry-points"]["sglang.srt.plugins"]
    module, _, function = entry[compat.PLUGIN_NAME].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


CORE = (
    "layout",
    "kernels",
    "comm",
    "planner",
    "prefix_gather",
    "prefix_reader",
    "workspace",
    "state",
    "counters",
    "envs",
)
NO_SGLANG = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sglang":
            raise ImportError("the core imports " + name)

sys.meta_path.insert(0, Refuse())
for name in CORE:
    module = importlib.import_module("sglang_dcp." + name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        if found.name != "sglang_dcp.planner.plot":  # needs the extra `plot`
            importlib.import_module(found.name)
try:
    importlib.import_module("sglang_dcp.pool")
except ImportError:
    print("refused")
"""


def test_core_imports_no_sglang():
    out = run_python(f"CORE = {CORE!r}\n{NO_SGLANG}").stdout
    assert re.search("refused", out)  # the check can fail: the pool does import it
