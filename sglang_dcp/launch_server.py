"""`python -m sglang_dcp.launch_server`: SGLang's server with the DCP plugin required.

Takes every argument of `python -m sglang.launch_server`, and `--dry-run`, which prints the
parallel groups and exits.
"""

import os
import sys
from typing import Any

from sglang_dcp import compat, envs
from sglang_dcp.layout import dcp_groups


def require_plugin() -> None:
    """Exit with a message unless SGLang is the supported release and will have our hooks.

    Either it loads the plugin, or it was built with patches/.
    """
    problem = compat.version_error()
    excluded = problem is None and envs.plugin_excluded(compat.PLUGIN_NAME)
    if excluded and not compat.is_patched_tree():
        problem = (
            f"sglang_dcp.launch_server was started with SGLANG_PLUGINS="
            f"{os.environ[envs.SGLANG_PLUGINS]!r}, which excludes the plugin "
            f"{compat.PLUGIN_NAME!r}: SGLang would serve without DCP. Add {compat.PLUGIN_NAME} to "
            "SGLANG_PLUGINS or unset it, or start sglang.launch_server to serve without DCP."
        )
    if problem:
        sys.exit(f"error: {problem}")


def describe_groups(server_args: Any) -> str:
    """The TP x CP layout as text: one line a DCP group."""
    attn_dp = server_args.dp_size if server_args.enable_dp_attention else 1
    attn_tp = server_args.tp_size // attn_dp
    world = server_args.tp_size * server_args.pp_size
    lines = [
        f"TP {server_args.tp_size} x PP {server_args.pp_size}, attention TP {attn_tp}, "
        f"DCP {server_args.dcp_size}, {server_args.nnodes} node(s)"
    ]
    for index, ranks in enumerate(dcp_groups(world, attn_tp, server_args.dcp_size)):
        lines.append(
            f"  DCP group {index}: ranks {', '.join(map(str, ranks))} "
            f"(owner of virtual slot v: rank {ranks[0]} + v mod {len(ranks)})"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Parse, then serve until stopped. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    require_plugin()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    dry_run = "--dry-run" in argv
    try:
        server_args = prepare_server_args([arg for arg in argv if arg != "--dry-run"])
    except ValueError as error:
        sys.exit(f"error: {error}")
    if dry_run:
        print(describe_groups(server_args))
        return 0
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
