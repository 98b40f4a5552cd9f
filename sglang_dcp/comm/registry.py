"""Names of the communicators, and the choice that `auto` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang_dcp.comm.base import Communicator, GroupInfo

AUTO = "auto"
COMM_BACKENDS: dict[str, type[Communicator]] = {}


def register_comm_backend(
    name: str,
) -> Callable[[type[Communicator]], type[Communicator]]:
    """Class decorator: make a communicator selectable by name and by `auto`.

    Raises:
        ValueError: the name is taken.
    """

    def register(cls: type[Communicator]) -> type[Communicator]:
        if name == AUTO or name in COMM_BACKENDS:
            raise ValueError(
                f"communicator {name!r} ({cls.__name__}) cannot be registered: taken names are"
                f" {comm_backend_names()}. Choose another name."
            )
        cls.name = name
        COMM_BACKENDS[name] = cls
        return cls

    return register


def comm_backend_names() -> list[str]:
    """Choices of --dcp-comm-backend: "auto", then the registered names in order."""
    return [AUTO, *sorted(COMM_BACKENDS)]


def resolve_auto(requested: str, group_info: GroupInfo) -> tuple[str, str]:
    """Resolve a requested name to a backend that can serve the group.

    Args:
        requested: "auto" or a registered name.
        group_info: facts that are equal on all ranks, so that all ranks choose alike.

    Returns:
        (name, reason): the backend, and one line on why it and no better one was taken.

    Raises:
        ValueError: the name is unknown, or that backend cannot serve this group.
    """
    if requested == AUTO:
        return _best(group_info)
    if requested not in COMM_BACKENDS:
        raise ValueError(
            f"--dcp-comm-backend {requested} is unknown: registered are {sorted(COMM_BACKENDS)}."
            f" Use one of {comm_backend_names()}."
        )
    available, reason = COMM_BACKENDS[requested].is_available(group_info)
    if not available:
        raise ValueError(
            f"--dcp-comm-backend {requested} cannot serve this DCP group of {group_info.size}"
            f" ranks: {reason}. Use --dcp-comm-backend {_best(group_info)[0]} or {AUTO}."
        )
    return requested, "as requested"


def hangs_on_peer_access(requested: str, group_info: GroupInfo) -> bool:
    """Whether `resolve_auto` would answer differently with and without peer access.

    Finding out about it maps memory, so this says whether that is worth it; group_info's own
    peer_access is not looked at.
    """
    able, unable = (replace(group_info, peer_access=value) for value in (True, False))
    if requested == AUTO:
        return _best(able)[0] != _best(unable)[0]
    cls = COMM_BACKENDS.get(requested)
    return cls is not None and cls.is_available(able)[0] != cls.is_available(unable)[0]


def _best(group_info: GroupInfo) -> tuple[str, str]:
    """Available backend of the highest priority, and what was passed over for which reason."""
    passed_over: list[str] = []
    for name, cls in sorted(COMM_BACKENDS.items(), key=lambda item: -item[1].priority):
        available, reason = cls.is_available(group_info)
        if available:
            return name, "; ".join([reason, *passed_over])
        passed_over.append(f"not {name}: {reason}")
    raise AssertionError(f"no communicator serves {group_info}: {passed_over}")
