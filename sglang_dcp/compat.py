"""The supported SGLang release, stated once, and the check against the installed one."""

from importlib.metadata import PackageNotFoundError, version

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
    """True if the installed SGLang was built with patches/, so that it needs no plugin."""
    from sglang.srt import server_args

    return getattr(server_args, "SGLANG_DCP_PATCHED", False)
