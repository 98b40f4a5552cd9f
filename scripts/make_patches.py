"""Write patches/ from the hook table and the installed, unpatched SGLang wheel.

One patch a file of SGLang: it marks each function that the table hooks (`@dcp_seam("name")`) and,
in server_args.py, declares the arguments as real fields. A patch whose diff has not changed keeps
its date.
"""

import argparse
import ast
import datetime
import difflib
import inspect
import os
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # importing all of SGLang then asks for no GPU

from sglang_dcp import compat  # noqa: E402
from sglang_dcp.hooks import registry, seam  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

#: Entries of the table that need no mark in the source, with the reason.
NOT_MARKED = {
    "args-init": "@dataclass generates it, and it takes the declared fields",
    "args-eq": "@dataclass generates it, and it compares the declared fields",
    "args-repr": "@dataclass generates it, and it shows the declared fields",
}

IMPORT = "from sglang_dcp.hooks.seam import dcp_seam\n"
ARGUMENTS_IMPORT = "from sglang_dcp.hooks import server_args as dcp_args\n"
MARKER = """
# Built with the patches of sglang-dcp, whose plugin adds nothing that this source does.
SGLANG_DCP_PATCHED = True
"""
FIELDS = """
    # -------------------------------------------------------------------------
    # Decode context parallelism (sglang-dcp)
    # -------------------------------------------------------------------------
    dcp_size: dcp_args.DCP_SIZE.annotation = dcp_args.DCP_SIZE.default
    dcp_comm_backend: dcp_args.DCP_COMM_BACKEND.annotation = (
        dcp_args.DCP_COMM_BACKEND.default
    )
    dcp_replicate_q_proj: dcp_args.DCP_REPLICATE_Q_PROJ.annotation = (
        dcp_args.DCP_REPLICATE_Q_PROJ.default
    )
    dcp_workspace_mb: dcp_args.DCP_WORKSPACE_MB.annotation = (
        dcp_args.DCP_WORKSPACE_MB.default
    )
    dcp_prefill: dcp_args.DCP_PREFILL.annotation = dcp_args.DCP_PREFILL.default
    dcp_derived: dcp_args.DCP_DERIVED.annotation = dcp_args.DCP_DERIVED.default
"""

#: Text to insert before a line, as (line number from 1, text).
Insertions = list[tuple[int, str]]


def insert(source: str, insertions: Insertions) -> str:
    """`source` with the texts before their lines."""
    lines = source.splitlines(keepends=True)
    for line, text in sorted(insertions, reverse=True):
        lines.insert(line - 1, text)
    return "".join(lines)


def _line_after_imports(tree: ast.Module) -> int:
    """The line below the first block of top-level imports that brings in SGLang itself."""
    last = 0
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno or 0
        elif last and not isinstance(node, ast.Expr):
            break
    return last + 1


def _argument_insertions(tree: ast.Module) -> Insertions:
    """What server_args.py needs besides its marks: choice, marker, fields, first statement."""
    names = {
        node.targets[0].id: node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (args,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    (start,) = (n for n in args.body if getattr(n, "name", "") == "__post_init__")
    first = start.body[1]  # below the docstring
    return [
        (names["ATTENTION_BACKEND_CHOICES"].end_lineno, '    "torch_mla",  # sglang-dcp on CPU\n'),
        (names["logger"].end_lineno + 1, MARKER),
        (fields[-1].end_lineno + 1, FIELDS),
        (first.lineno, "        dcp_args.before_post_init(self)\n\n"),
    ]


def _mark_of(patch: registry.Patch) -> tuple[Path, int, str]:
    """File, line and text of the mark that stands for `patch`, right above the `def`."""
    function = inspect.unwrap(registry._resolve(patch.path))
    lines, start = inspect.getsourcelines(function)
    offset, header = next((i, t) for i, t in enumerate(lines) if t.lstrip().startswith("def "))
    indent = header[: len(header) - len(header.lstrip())]
    file = Path(inspect.getsourcefile(function) or "")
    return file, start + offset, f'{indent}@dcp_seam("{patch.name}")\n'


def edited_files() -> dict[Path, tuple[str, list[registry.Patch]]]:
    """Each file of the installed SGLang that changes: its new text and the entries behind it."""
    marks: dict[Path, Insertions] = defaultdict(list)
    entries: dict[Path, list[registry.Patch]] = defaultdict(list)
    for patch in seam.SEAMS.values():
        if patch.name not in NOT_MARKED:
            file, line, text = _mark_of(patch)
            marks[file].append((line, text))
            entries[file].append(patch)
    result = {}
    for file, insertions in marks.items():
        source = file.read_text()
        tree = ast.parse(source)
        imports = IMPORT
        if file.name == "server_args.py":
            imports = ARGUMENTS_IMPORT + IMPORT
            insertions = insertions + _argument_insertions(tree)
        insertions = [*insertions, (_line_after_imports(tree), imports)]
        result[file] = insert(source, insertions), entries[file]
    return result


def _description(path: str, entries: list[registry.Patch]) -> str:
    title = f"Description: decode context parallelism in {path}"
    if path.endswith("server_args.py"):
        title += "\n declares the DCP arguments as fields, torch_mla as a choice, and the marker"
    lines = [f"{p.name}: {p.kind} {p.path.rpartition('.')[2]}: {p.why}" for p in entries]
    return "\n".join([title, *(_wrapped(" " + line) for line in lines)])


def _wrapped(text: str) -> str:
    """A header line, continued on lines that begin with a space, as DEP-3 has it."""
    return textwrap.fill(text, 98, subsequent_indent="  ", break_on_hyphens=False)


def _header(path: str, entries: list[registry.Patch]) -> str:
    gone = "; ".join(sorted({patch.remove_when for patch in entries}))
    return (
        f"{_description(path, entries)}\n"
        "Origin: other, generated by scripts/make_patches.py of sglang-dcp\n"
        "Forwarded: not-needed (it calls sglang-dcp, which upstream does not depend on)\n"
        f"{_wrapped(f'Applied-Upstream: no; to be dropped when: {gone}')}\n"
        f"Last-Update: {datetime.date.today().isoformat()}\n"
        "---\n"
    )


def make() -> dict[str, str]:
    """All patches by file name, in the order of the table."""
    patches = {}
    for number, (file, (edited, entries)) in enumerate(edited_files().items(), start=1):
        root = next(parent for parent in file.parents if parent.name == "sglang").parent
        path = file.relative_to(root).as_posix()
        diff = difflib.unified_diff(
            file.read_text().splitlines(keepends=True),
            edited.splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
        name = f"{number:04d}-{file.stem.replace('_', '-')}.patch"
        patches[name] = _header(path, entries) + "".join(diff)
    return patches


def without_date(patch: str) -> list[str]:
    """The lines of a patch that a new run must reproduce."""
    return [line for line in patch.splitlines() if not line.startswith("Last-Update:")]


def write(folder: Path) -> None:
    """Write series and patches into `folder`; remove patches that are no longer made."""
    patches = make()
    for old in folder.glob("*.patch"):
        if old.name not in patches:
            old.unlink()
    for name, text in patches.items():
        file = folder / name
        if not file.exists() or without_date(file.read_text()) != without_date(text):
            file.write_text(text)
    (folder / "series").write_text("".join(f"{name}\n" for name in patches))


def main() -> int:
    """Write the patches; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "patches", help="folder to write to")
    args = parser.parse_args()
    problem = compat.version_error()
    if problem is None and compat.is_patched_tree():
        problem = (
            "patches were to be made from a tree that has them: a diff needs the released files. "
            "Run this with the wheel of the supported SGLang installed."
        )
    if problem:
        sys.exit(f"error: {problem}")
    args.output.mkdir(parents=True, exist_ok=True)
    write(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
