"""Check, apply and prove the patches of the hook table.

Functions and methods go through SGLang's HookRegistry; list and dict entries, missing module
attributes and dataclass fields, which the registry cannot reach, are set here and nowhere else.
The registry only logs a hook that it could not apply, and silently drops a second registration
on a target that it has patched before; so a patch counts as applied only when our hook is found
in the object that SGLang will call. A tree that was built with patches/ does part of this in its
source; such a patch counts as applied and is only switched on.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dcp import compat

#: What rows of the tables share: packages, and when a patch can go.
SRT = "sglang.srt."
COMMON = SRT + "models.deepseek_common."
HOOKS = "sglang_dcp.hooks."
NATIVE = "SGLang's own DCP covers this release's MLA backends on Hopper"
CPU_GONE = "SGLang serves MLA models on CPU without AMX"


class PatchError(RuntimeError):
    """A patch does not fit the installed SGLang or did not take effect; nothing may serve."""


@dataclass(frozen=True)
class Patch:
    """One change to SGLang, as data.

    Attributes:
        name: short unique name.
        target: dotted path of what is changed; for `item` a dict with its key in brackets, for
            `append` a list with the value in brackets.
        kind: before, after, around (through HookRegistry), attr, item, append, field.
        params: parameter names that the target must have; None where it is not a function.
        hook: "module:attribute" of ours; empty for `append`, whose value is in the target.
        why: what would go wrong without it.
        remove_when: the condition under which the patch can be dropped.
        test: the test that fails without it.
        missing_upstream: `attr` only: the attribute does not exist where the patch is needed.
    """

    name: str
    target: str
    kind: str
    params: tuple[str, ...] | None
    hook: str
    why: str
    remove_when: str
    test: str
    missing_upstream: bool = False

    @property
    def path(self) -> str:
        """Dotted path without the bracketed key."""
        return self.target.split("[")[0]

    @property
    def key(self) -> str:
        """The bracketed key of an `item` or `append` target."""
        return self.target.split("[")[1].rstrip("]")

    def load_hook(self) -> Any:
        """Import our side of the patch."""
        module, _, attribute = self.hook.partition(":")
        return getattr(importlib.import_module(module), attribute)


REGISTRY_KINDS = ("before", "after", "around")
#: Attribute of a function that a source patch has marked: the name of its entry in the table.
SEAM_MARK = "__dcp_seam__"
#: What @dataclass writes from the declared fields; real fields make patches of these needless.
_GENERATED = ("__init__", "__eq__", "__repr__")
_MISSING = object()
_applied: dict[str, Patch] = {}


def _owner_and_name(path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    return pkgutil.resolve_name(owner), name


def _resolve(path: str) -> Any:
    """The raw object at `path`: class- and staticmethods unwrapped to their function."""
    owner, name = _owner_and_name(path)
    value = inspect.getattr_static(owner, name, _MISSING)
    return value.__func__ if isinstance(value, classmethod | staticmethod) else value


def _wrapper_chain(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _contains_hook(function: Any, hook: Callable[..., Any]) -> bool:
    return any(
        cell.cell_contents is hook
        for link in _wrapper_chain(function)
        for cell in getattr(link, "__closure__", None) or ()
    )


def mismatch(patch: Patch) -> str | None:
    """None if the installed SGLang is what `patch` expects, else what was found instead."""
    try:
        found = _resolve(patch.path)
    except (ImportError, AttributeError) as error:
        return f"cannot be resolved: {error}"
    if patch.kind in ("attr", "field") and patch.missing_upstream:
        return None
    if found is _MISSING:
        return "does not exist"
    if patch.kind == "item" and patch.key not in found and not patch.missing_upstream:
        return f"has no key {patch.key!r}"
    if patch.kind == "append" and not isinstance(found, list):
        return f"is a {type(found).__name__}, not a list"
    if patch.params is not None:
        *_, original = _wrapper_chain(found)
        params = tuple(inspect.signature(original).parameters)
        if params != patch.params:
            return f"has parameters {params}, expected {patch.params}"
    return None


def in_source(patch: Patch) -> bool:
    """True if SGLang's own source does what `patch` would: a tree built with patches/."""
    if patch.kind not in (*REGISTRY_KINDS, "field"):
        return False
    owner, name = _owner_and_name(patch.path)
    if patch.kind == "field":
        *_, generated = _wrapper_chain(owner.__init__)
        return name in inspect.signature(generated).parameters
    if name in _GENERATED and dataclasses.is_dataclass(owner):
        return compat.is_patched_tree()
    links = _wrapper_chain(_resolve(patch.path))
    return any(getattr(link, SEAM_MARK, None) == patch.name for link in links)


def is_registered(patch: Patch) -> bool:
    """True once this process has registered `patch`, which switches its mark in the source on."""
    return patch.name in _applied


def is_applied(patch: Patch) -> bool:
    """True if the object that SGLang uses now is, or contains, our hook."""
    if in_source(patch):
        return True
    found = _resolve(patch.path)
    if patch.kind in REGISTRY_KINDS:
        return _contains_hook(found, patch.load_hook())
    if patch.kind == "append":
        return patch.key in found
    if patch.kind == "item":
        return found[patch.key] is patch.load_hook()
    if patch.kind == "field":
        owner, name = _owner_and_name(patch.path)
        return name in owner.__dataclass_fields__
    return found is patch.load_hook()


def _fail(problems: Sequence[str]) -> None:
    raise PatchError(
        f"sglang-dcp cannot patch SGLang {compat.installed_sglang()} (tested with "
        f"{', '.join(compat.SUPPORTED_SGLANG)}):\n  "
        + "\n  ".join(problems)
        + "\nNothing was served. Install the tested version, remove the plugin that changes these "
        "targets, or serve without --dcp-size."
    )


def check(patches: Sequence[Patch]) -> None:
    """Raise PatchError unless every target is as expected and free of other plugins' patches."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = []
    for patch in patches:
        problem = mismatch(patch)
        if problem:
            problems.append(f"{patch.target}: {problem}")
        elif in_source(patch):
            continue  # hooks of other plugins lie around ours
        elif patch.kind in REGISTRY_KINDS and patch.target in HookRegistry._patched:
            # The registry would drop our hook and say nothing.
            problems.append(f"{patch.target}: another plugin has patched it before us")
    if problems:
        _fail(problems)


def register(patches: Sequence[Patch]) -> None:
    """Set what the registry cannot reach and register the rest; the caller applies and verifies.

    A hook that another plugin registers on the same target before it is applied is chained by the
    registry.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: list[Any] = [patch.load_hook() if patch.hook else None for patch in patches]
    for patch, hook in zip(patches, hooks, strict=True):
        _applied[patch.name] = patch
        if in_source(patch):
            continue
        if patch.kind in REGISTRY_KINDS:
            HookRegistry.register(patch.target, hook, HookType(patch.kind))
        elif patch.kind == "append":
            values = _resolve(patch.path)
            if patch.key not in values:
                values.append(patch.key)
        elif patch.kind == "item":
            _resolve(patch.path)[patch.key] = hook
        elif patch.kind == "field":
            hook.add_to(_owner_and_name(patch.path)[0])
        else:
            owner, name = _owner_and_name(patch.path)
            setattr(owner, name, hook)


def verify(patches: Sequence[Patch]) -> None:
    """Raise PatchError unless every patch has taken effect, proven by object identity."""
    problems = [
        f"{patch.target}: our {patch.kind} hook {patch.hook} is not in effect"
        for patch in patches
        if not is_applied(patch)
    ]
    if problems:
        _fail(problems)


def apply(patches: Sequence[Patch]) -> None:
    """Check, register, apply and verify: all of the patches or a PatchError."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    new = [patch for patch in patches if patch.name not in _applied]
    check(new)
    register(new)
    HookRegistry.apply_hooks()
    verify(patches)


def status(patch: Patch) -> str:
    """One word and reason for `doctor`: "ok", "applied" or what does not fit."""
    problem = mismatch(patch)
    if problem:
        return problem
    active = in_source(patch) or (is_registered(patch) and is_applied(patch))
    return "applied" if active else "ok"
