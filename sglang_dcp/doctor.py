"""`sglang-dcp doctor`: does the hook table fit this installation, and what can this machine use?"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_dcp import compat

_DESCRIPTION = (
    "Check every patch of the hook table against the installed SGLang, and list versions, devices, "
    "attention backends and communicators. Exits 1 if anything does not fit."
)
#: Distributions whose versions decide what runs; the names are those of pip.
PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers")
#: For every attention backend: device, module that it needs, CUDA capability (major).
BACKENDS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "flashmla": ("cuda", "sgl_kernel.flash_mla", (9,)),
    "flashinfer": ("cuda", "flashinfer", (8, 9, 10)),
    "triton": ("cuda", "triton", (8, 9, 10)),
    "torch_mla": ("cpu", "torch", ()),
}


def add_doctor_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `doctor` command; the parsed namespace carries `run=run_doctor`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="does this installation fit, and what can it use", description=_DESCRIPTION
    )
    parser.set_defaults(run=run_doctor)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def run_doctor(args: argparse.Namespace) -> int:
    """Print the diagnosis; returns 1 if a version or a patch does not fit, else 0."""
    found = diagnose()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if found["ok"] else 1


def diagnose() -> dict[str, Any]:
    """Everything that doctor knows, as plain values; `ok` is false if a patch cannot work.

    A missing GPU or communicator is a fact, not a mismatch.
    """
    problem = compat.version_error()
    patches = [] if compat.installed_sglang() is None else patch_statuses()
    return {
        "ok": problem is None and all(patch["ok"] for patch in patches),
        "version_problem": problem,
        "versions": versions(),
        "patches": patches,
        "devices": devices(),
        "peer_access": peer_access(),
        "attention_backends": attention_backends(),
        "communicators": communicators(),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop what SGLang prints and warns while it is imported: stdout may carry JSON."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def patch_statuses() -> list[dict[str, Any]]:
    """Every patch of the hook table with its status against the installed SGLang."""
    from sglang_dcp.hooks import registry, table

    rows = []
    with _quiet():
        for occasion, patches in table.everything().items():
            for patch in patches:
                status = registry.status(patch)
                rows.append(
                    {
                        "occasion": occasion,
                        "name": patch.name,
                        "target": patch.target,
                        "kind": patch.kind,
                        "status": status,
                        "ok": status in ("ok", "applied"),
                    }
                )
    return rows


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of PACKAGES; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("sglang-dcp", *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def devices() -> list[dict[str, Any]]:
    """GPUs of this machine: name, compute capability, bytes of memory."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def peer_access() -> bool | None:
    """Whether every GPU can map every other one's memory; None with fewer than two."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return None
    return all(
        torch.cuda.can_device_access_peer(a, b)
        for a in range(count)
        for b in range(count)
        if a != b
    )


def attention_backends() -> dict[str, str]:
    """ "ok", or why this machine cannot use it, for every attention backend of DCP."""
    with _quiet():
        return {name: _backend_status(*needs) for name, needs in BACKENDS.items()}


def _backend_status(device: str, module: str, majors: tuple[int, ...]) -> str:
    import torch

    if device == "cuda":
        if not torch.cuda.is_available():
            return "needs a GPU"
        major, minor = torch.cuda.get_device_capability()
        if major not in majors:
            return f"needs compute capability {', '.join(map(str, majors))}.x, not {major}.{minor}"
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}".splitlines()[0]
    return "ok"


def communicators() -> dict[str, str]:
    """ "ok", or why not, for every communicator, in one group of all GPUs (or of CPU ranks).

    And what `auto` would pick there, unless the trial that a starting server makes fails.
    """
    import torch

    from sglang_dcp.comm import COMM_BACKENDS, GroupInfo, resolve_auto
    from sglang_dcp.comm.symmetric import peer_problem

    gpus = range(torch.cuda.device_count())
    problems = filter(None, (peer_problem(gpu, gpus) for gpu in gpus))
    problem = next(problems, "" if len(gpus) > 1 else "needs two GPUs")
    group = GroupInfo(
        size=max(len(gpus), 2),
        device_type="cuda" if gpus else "cpu",
        peer_access=not problem,
        peer_reason=problem,
    )
    found = {"auto": f"picks {resolve_auto('auto', group)[0]}"}
    for name, cls in sorted(COMM_BACKENDS.items()):
        available, reason = cls.is_available(group)
        found[name] = "ok" if available else reason
    return found


def _print(found: dict[str, Any]) -> None:
    print("versions")
    for name, value in found["versions"].items():
        print(f"  {name:<18} {value or 'not installed'}")
    print("\nhook table")
    for patch in found["patches"]:
        mark = "ok  " if patch["ok"] else "FAIL"
        reason = "" if patch["status"] == "ok" else f": {patch['status']}"
        print(f"  {mark} {patch['occasion']:<11} {_short(patch['target'])}{reason}")
    print("\ndevices")
    for index, device in enumerate(found["devices"]):
        major, minor = device["capability"]
        gib = device["memory_bytes"] / 2**30
        print(f"  cuda:{index} {device['name']}, capability {major}.{minor}, {gib:.0f} GiB")
    if not found["devices"]:
        print("  no GPU; CPU ranks only (--device cpu)")
    if found["peer_access"] is not None:
        print(f"  peer access among all: {'yes' if found['peer_access'] else 'no'}")
    for title, key in (
        ("attention backends", "attention_backends"),
        ("communicators", "communicators"),
    ):
        print(f"\n{title}")
        for name, status in found[key].items():
            print(f"  {name:<18} {status}")
    _print_verdict(found)


#: Where targets begin, so that lines fit a terminal of 80 columns.
TARGET_COLUMN = 19


def _short(target: str) -> str:
    """A target without the package that all of them share."""
    short = target.removeprefix("sglang.srt.")
    while len(short) > 80 - TARGET_COLUMN and "." in short:
        short = short.split(".", 1)[1]
    return short


def _print_verdict(found: dict[str, Any]) -> None:
    bad = [patch for patch in found["patches"] if not patch["ok"]]
    print()
    if found["version_problem"]:
        print(f"FAIL {found['version_problem']}")
    if bad:
        print(f"FAIL {len(bad)} of {len(found['patches'])} patches do not fit.")
    if found["ok"]:
        print(f"ok: all {len(found['patches'])} patches fit SGLang {found['versions']['sglang']}.")
