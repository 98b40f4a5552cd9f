"""The mark that patches/ puts on SGLang's functions, for a tree that is built instead of patched.

`@dcp_seam("groups")` above a function makes it call the hook of the table's entry `groups`, as the
plugin would have wired it. Entries of phase 1 are always awake; the others sleep until this
process activates them, so that a patched tree without --dcp-size runs SGLang's own code.
"""

import functools
from collections.abc import Callable
from typing import Any

from sglang_dcp.hooks import registry, table

_ALWAYS = (*table.ARGUMENTS, *table.LAUNCH, *table.SCHEDULER)
#: What a source patch can mark, by name.
SEAMS = {
    patch.name: patch
    for patch in (*_ALWAYS, *table.DCP, *table.OBSERVE, *table.METRICS, *table.REPLICATE_Q)
    if patch.kind in registry.REGISTRY_KINDS
}


def dcp_seam(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: let the hook of table entry `name` act before, after or around the function.

    Raises:
        KeyError: the table has no such entry: source patches and installed sglang_dcp differ.
    """
    patch = SEAMS[name]
    always = patch in _ALWAYS
    load_hook = functools.cache(patch.load_hook)  # late: hooks import the modules they are in

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not always and not registry.is_registered(patch):
                return function(*args, **kwargs)
            return _call(patch.kind, load_hook(), function, args, kwargs)

        setattr(call, registry.SEAM_MARK, name)
        return call

    return mark


def _call(
    kind: str,
    hook: Callable[..., Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call both as SGLang's HookRegistry does for a hook of this kind."""
    if kind == "around":
        return hook(function, *args, **kwargs)
    if kind == "before":
        changed = hook(*args, **kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        return function(*args, **kwargs)
    result = function(*args, **kwargs)
    changed = hook(result, *args, **kwargs)
    return result if changed is None else changed
