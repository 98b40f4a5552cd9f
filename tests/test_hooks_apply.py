"""The rules of applying patches, on a toy that stands for SGLang."""

import copy
import sys
from dataclasses import replace
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("plugin")

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
