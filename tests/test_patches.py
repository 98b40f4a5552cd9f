"""patches/: they fit the released wheel, say what the table says, and serve the same tokens."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import clean_env

from sglang_dcp import compat
from sglang_dcp.hooks import registry, seam, table
from sglang_dcp.hooks.registry import Patch
from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import Server
from sglang_dcp.testing.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
PATCHES = ROOT / "patches"
SERIES = (PATCHES / "series").read_text().split()
TEXTS = {name: (PATCHES / name).read_text() for name in SERIES}
TOUCHED = [path for text in TEXTS.values() for path in re.findall(r"^--- a/(\S+)$", text, re.M)]
# Found, not imported: these tests run no SGLang in their own process.
WHEEL = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]).parent


def _make_patches() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_patches", ROOT / "scripts/make_patches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _apply(target: Path, *args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": path or os.environ["PATH"]}
    command = ["/bin/bash", str(ROOT / "scripts/apply_patches.sh"), str(target), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def _bytes(tree: Path) -> dict[str, bytes]:
    return {str(f.relative_to(tree)): f.read_bytes() for f in tree.rglob("*") if f.is_file()}


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A folder with the released files that the patches touch, and the release's number."""
    for path in (*TOUCHED, "sglang/_version.py"):
        copy = tmp_path / "released" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(WHEEL / path, copy)
    return tmp_path / "released"


@pytest.fixture(params=["patch", "git"])
def tool_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A PATH on which only one of the tools that can apply a diff is found."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "cat", "sed", "grep", "dirname", request.param):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def test_apply_and_reverse_are_idempotent(released: Path, tool_path: str) -> None:
    before = _bytes(released)
    linked = released.parent / "linked"
    shutil.copytree(released, linked, copy_function=os.link)
    first = _apply(linked, path=tool_path)
    assert first.returncode == 0, first.stderr
    patched = _bytes(linked)
    assert sorted(p for p in patched if patched[p] != before[p]) == sorted(TOUCHED)
    for path in TOUCHED:
        compile(patched[path], path, "exec")
    assert _bytes(released) == before, "a hard-linked original was written through"
    again = _apply(linked, path=tool_path)
    assert (again.returncode, _bytes(linked)) == (0, patched)
    assert "already applied" in again.stdout
    for said in ("absent from", "already absent"):
        back = _apply(linked, "--reverse", path=tool_path)
        assert (back.returncode, _bytes(linked)) == (0, before), back.stderr
        assert said in back.stdout


def test_an_interrupted_application_is_completed(released: Path) -> None:
    subprocess.run(
        ["git", "apply", str(PATCHES / SERIES[1])],
        cwd=released,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(released.parent)},
        check=True,
    )
    done = _apply(released)
    assert done.returncode == 0, done.stderr
    assert f"{len(SERIES) - 1} of {len(SERIES)}" in done.stdout


def test_all_or_nothing(released: Path, tool_path: str) -> None:
    target = released / TOUCHED[-1]  # the last one: the others would have been written by then
    target.write_text(re.sub(r"(def \w+)", r"\1_other", target.read_text()))
    before = _bytes(released)
    result = _apply(released, path=tool_path)
    assert result.returncode == 1
    assert _bytes(released) == before
    assert SERIES[-1] in result.stderr
    assert SERIES[0] not in result.stderr
    assert "pip install" in result.stderr


def test_another_release_is_refused(released: Path) -> None:
    version = released / "sglang/_version.py"
    version.write_text(version.read_text().replace("0.5.14", "0.5.15"))
    before = _bytes(released)
    result = _apply(released)
    assert result.returncode == 1
    assert _bytes(released) == before
    assert "made for sglang 0.5.14, and this is 0.5.15. Use" in result.stderr
    version.write_text(version.read_text().replace("0.5.15", "0.5.14+fork"))
    assert _apply(released).returncode == 0


@pytest.mark.parametrize("args", [[], ["--what"], ["--reverse"]])
def test_wrong_targets_and_options(tmp_path: Path, args: list[str]) -> None:
    result = _apply(tmp_path, *args)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")


def test_script_and_package_support_one_release() -> None:
    script = (ROOT / "scripts/apply_patches.sh").read_text()
    assert re.findall(r"^release=(\S+)$", script, re.M) == list(compat.SUPPORTED_SGLANG)


def test_local_versions_of_a_release_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, supported in (("0.5.14", 1), ("0.5.14+fork", 1), ("0.5.15", 0), (None, 0)):
        monkeypatch.setattr(compat, "installed_sglang", lambda found=found: found)
        assert (compat.version_error() is None) == bool(supported), found


@pytest.mark.parametrize("name", SERIES)
def test_header_is_complete(name: str) -> None:
    header, separator, diff = TEXTS[name].partition("\n---\n")
    assert separator
    assert diff.startswith("--- a/sglang/")
    fields = dict(re.findall(r"^([A-Z][\w-]+): (\S.*)$", header, re.M))
    wanted = {"Description", "Origin", "Forwarded", "Applied-Upstream", "Last-Update"}
    assert set(fields) == wanted
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", fields["Last-Update"])
    continued = [line for line in header.splitlines() if not re.match(r"[A-Z][\w-]+: ", line)]
    assert all(line.startswith(" ") for line in continued)


def test_series_names_every_patch_once() -> None:
    assert sorted(SERIES) == sorted(path.name for path in PATCHES.glob("*.patch"))
    assert len(TOUCHED) == len(set(TOUCHED)) == len(SERIES)


def test_every_hook_has_its_counterpart() -> None:
    not_marked = _make_patches().NOT_MARKED
    added = "\n".join(re.findall(r"^\+(?!\+\+ )(.*)$", "\n".join(TEXTS.values()), re.M))
    marks = re.findall(r'@dcp_seam\("([\w-]+)"\)', added)
    phase_one = table.ARGUMENTS + table.SCHEDULER + table.LAUNCH
    in_patches = phase_one + table.DCP + table.OBSERVE + table.METRICS + table.REPLICATE_Q
    entries = {patch.name: patch for patch in in_patches}
    functions = {n for n, patch in entries.items() if patch.kind in registry.REGISTRY_KINDS}
    assert sorted(marks) == sorted(functions - set(not_marked))
    assert set(not_marked) <= functions
    assert all(not_marked.values())
    for patch in entries.values():
        if patch.kind == "field":
            assert re.search(rf"^    {patch.path.rpartition('.')[2]}: ", added, re.M), patch.name
        else:
            assert patch.name in functions, f"{patch.name}: patches/ has no form for {patch.kind}"


def test_patches_are_what_the_table_says(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts/make_patches.py")]
    subprocess.run([*command, "--output", str(tmp_path)], env=_env(), check=True, timeout=300)
    without_date = _make_patches().without_date
    assert (tmp_path / "series").read_text().split() == SERIES
    for name in SERIES:
        assert without_date((tmp_path / name).read_text()) == without_date(TEXTS[name])


def _before_hook(x: int, by: int = 1) -> tuple[tuple[int], dict[str, int]]:
    return (x + 10,), {"by": by}


def _after_hook(result: int, x: int, by: int = 1) -> int:
    return result + 1000 * x


def _around_hook(original: Callable[..., int], x: int, by: int = 1) -> int:
    return -original(x, by=by + 1)


def _silent_hook(*args: Any, **kwargs: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("before", _before_hook),
        ("after", _after_hook),
        ("around", _around_hook),
        ("before", _silent_hook),
        ("after", _silent_hook),
        ("around", _silent_hook),
    ],
)
def test_seam_calls_as_the_plugin_registry_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, hook: Callable[..., Any]
) -> None:
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    def scaled(x: int, by: int = 1) -> int:
        return x * by

    patch = Patch("s", "a.b", kind, None, f"{__name__}:{hook.__name__}", "", "", "")
    monkeypatch.setitem(seam.SEAMS, "s", patch)
    marked, wrapped = seam.dcp_seam("s")(scaled), _wrap_fn(scaled, hook, HookType(kind))
    assert marked(7, by=3) == 21, "a seam sleeps until its entry is registered"
    monkeypatch.setitem(registry._applied, "s", patch)
    assert marked(7, by=3) == wrapped(7, by=3)
    assert hook is _silent_hook or marked(7, by=3) != 21


def test_unknown_seam_is_an_error() -> None:
    with pytest.raises(KeyError):
        seam.dcp_seam("no such entry")


def _env(tree: Path | None = None, **more: str | None) -> dict[str, str]:
    """A clean environment in which this checkout and, if given, a patched tree come first."""
    env = clean_env() | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (ROOT, tree) if p)
    return env | {name: value for name, value in more.items() if value is not None}


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def patched_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole wheel with the patches; hard links save its 100 MB, patched files are new."""
    tree = tmp_path_factory.mktemp("patched")
    shutil.copytree(WHEEL / "sglang", tree / "sglang", copy_function=_link_or_copy)
    result = _apply(tree)
    assert result.returncode == 0, result.stderr
    return tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("plugins", [None, "none"])
def test_patched_tree_needs_no_plugin_and_tolerates_it(
    patched_tree: Path, model: Path, plugins: str | None
) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/patched_tree.py"), str(model)]
    env = _env(patched_tree, SGLANG_PLUGINS=plugins)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


def test_wheel_without_plugin_is_refused() -> None:
    command = [sys.executable, "-m", "sglang_dcp.launch_server", "--dry-run"]
    env = _env(SGLANG_PLUGINS="none")
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "excludes the plugin" in result.stderr


PROMPTS = [
    [1] + [(7 * i + 13 * j) % 500 + 3 for j in range(length - 1)]
    for i, length in enumerate([1, 2, 3, 31, 100, 201])
]


def _serve(
    model: Path, log: Path, counters: Path | None, *args: str, **server: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Two rounds: fresh prompts, then the same with a cached prefix.

    Returns token ids and logprobs of each, and each rank's counters if there is a folder for them.
    """
    fixed = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--tp", "2"]
    fixed += ["--max-total-tokens", "4096", "--context-length", "1024"]
    fixed += ["--chunked-prefill-size", "32", "--max-running-requests", "8"]
    with Server([*fixed, *args], log, **server) as running:
        answers = [a for _ in range(2) for a in running.generate(PROMPTS, 12)]
        ranks = rank_counters(running, counters, 2) if counters else []
    assert answers[-1]["meta_info"]["cached_tokens"] > 150
    return [(a["output_ids"], a["meta_info"]["output_token_logprobs"]) for a in answers], ranks


@pytest.fixture(scope="module")
def baseline(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    log = tmp_path_factory.mktemp("baseline") / "log"
    env = {"TRITON_INTERPRET": None, "PYTHONPATH": str(ROOT), "SGLANG_PLUGINS": None}
    return _serve(model, log, None, env=env)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "module", "prefill", "read"),
    [
        ("none", "sglang.launch_server", "pass-q", "attend_prefix"),
        (None, "sglang_dcp.launch_server", "pass-kv", "kv_gather"),
    ],
    ids=["without-plugin", "with-plugin"],
)
def test_patched_tree_serves_the_same_tokens(
    patched_tree: Path,
    model: Path,
    baseline: list[Any],
    tmp_path: Path,
    plugins: str | None,
    module: str,
    prefill: str,
    read: str,
) -> None:
    log, counters = tmp_path / "log", tmp_path / "counters"
    env = {"TRITON_INTERPRET": None, "SGLANG_PLUGINS": plugins}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{patched_tree}"}
    env |= {"SGLANG_DCP_COUNTERS_DIR": str(counters)}
    dcp = ("--dcp-size", "2", "--dcp-prefill", prefill)
    got, ranks = _serve(model, log, counters, *dcp, module=module, env=env)
    assert [ids for ids, _ in got] == [ids for ids, _ in baseline]
    differences = [
        abs(a[0] - b[0])
        for (_, ours), (_, theirs) in zip(got, baseline, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert max(differences) < 1e-4
    for rank, info in enumerate(ranks):
        assert (info["pool"], info["dcp_size"], info["dcp_rank"]) == (
            "DcpMLATokenToKVPool",
            2,
            rank,
        )
        assert min(info["counts"][name] for name in ("kv_write", read)) > 0
