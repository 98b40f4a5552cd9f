"""The supported SGLang release, stated once, and the check against the installed one."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

#: Releases whose inside the hook table describes. pyproject.toml pins the same (tested).
SUPPORTED_SGLANG = ("0.5.14",)
PLUGIN_NAME = "sglang_dcp"


def installed_sglang() -> str | None:
    """Version of the installed sglang distribution, or None."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def version_error() -> str | None:
    """None if the installed SGLang is supported, else a message in three parts."""
    found = installed_sglang()
    # A fork that was built from a supported release carries a local version: 0.5.14+fork.
    if found is not None and found.split("+")[0] in SUPPORTED_SGLANG:
        return None
    return (
        f"sglang-dcp was asked to patch SGLang {found or '(not installed)'}: its hooks are written "
        f"for and tested with {', '.join(SUPPORTED_SGLANG)} only. Install "
        f"sglang=={SUPPORTED_SGLANG[-1]}, or serve without --dcp-size (newer releases have a "
        "native --dcp-size of their own: uninstall sglang-dcp to use it)."
    )


def is_patched_tree() -> bool:
    """True if the installed SGLang was built with patches/, so that it needs no plugin.

    Read from the source: importing SGLang to refuse it would take seconds and print its warnings.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return False
    source = Path(spec.submodule_search_locations[0], "srt", "server_args.py")
    return "\nSGLANG_DCP_PATCHED = True\n" in source.read_text()
