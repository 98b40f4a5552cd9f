"""Which SGLang is patched, and which of our modules import it."""

import importlib
import re

import pytest
import tomllib
from support import ROOT, run_python

pytestmark = pytest.mark.usefixtures("plugin")


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
