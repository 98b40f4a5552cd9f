"""The hook table as data, against the installed SGLang and our own sources."""

import ast
import inspect
from collections import Counter

import pytest
from support import ROOT

pytestmark = pytest.mark.usefixtures("plugin")


def all_patches():
    from sglang_dcp.hooks import table

    return [patch for patches in table.everything().values() for patch in patches]


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
