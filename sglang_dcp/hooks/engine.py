"""Hooks on sglang.srt.entrypoints.engine: a scheduler that is not striped must not serve.

A scheduler process in which the plugin never loaded (another SGLANG_PLUGINS, another environment)
cannot raise by itself: it would serve without DCP on widened pages. So the ready message carries
dcp_size, and both ends of the pipe refuse one that does not.
"""

import functools
from collections.abc import Callable
from typing import Any


def _refuse_unstriped(info: dict[str, Any], dcp_size: int) -> None:
    if info.get("dcp_size") != dcp_size:
        raise RuntimeError(
            f"--dcp-size {dcp_size} was asked for, but a scheduler came up with dcp_size "
            f"{info.get('dcp_size')}: the sglang_dcp plugin is not active in its process. Let "
            "SGLANG_PLUGINS, if it is set, name sglang_dcp, and start launcher and schedulers in "
            "one environment."
        )


class _CheckedWriter:
    """A scheduler's end of the ready pipe that refuses to announce an unstriped scheduler."""

    def __init__(self, writer: Any, dcp_size: int) -> None:
        self._writer = writer
        self._dcp_size = dcp_size

    def send(self, info: dict[str, Any]) -> None:
        _refuse_unstriped(info, self._dcp_size)
        self._writer.send(info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def run_checked_scheduler(
    run_scheduler_process: Callable[..., None], server_args: Any, *args: Any
) -> None:
    """Target of a scheduler process: upstream's, with a checked ready pipe (its last argument).

    It also covers schedulers that the data-parallel controller starts, whose ready messages never
    reach the launcher.
    """
    *others, writer = args
    run_scheduler_process(server_args, *others, _CheckedWriter(writer, server_args.dcp_size))


def around_launch_scheduler_processes(
    original: Callable[..., Any],
    cls: type,
    server_args: Any,
    port_args: Any,
    run_scheduler_process_func: Callable[..., None],
) -> Any:
    """AROUND Engine._launch_scheduler_processes, through which every launch path goes."""
    if server_args.dcp_size == 1:
        return original(cls, server_args, port_args, run_scheduler_process_func)
    checked = functools.partial(run_checked_scheduler, run_scheduler_process_func)
    result, processes = original(cls, server_args, port_args, checked)
    wait_for_ready = result.wait_for_ready

    def wait_and_check() -> None:
        wait_for_ready()
        if server_args.dp_size == 1:  # else the controller's own message, which has no such field
            for info in result.scheduler_infos:
                _refuse_unstriped(info, server_args.dcp_size)

    result.wait_for_ready = wait_and_check
    return result, processes
