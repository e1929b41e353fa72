"""Checks that the packages open, make and lock files and folders only through `monolith.filesystem`.

Another user of the machine may plant a link, a pipe or a folder where a process is about to write; the
package has functions that this cannot harm (`monolith/filesystem/private.py` says which one is for what).
Refused outside of it, unless `ALLOWED` says why:

- opening a file to write: `open` with such a mode, `os.open` with other flags than those of reading,
  `write_text` and `write_bytes`, `sqlite3.connect`, `shutil.copy` and its kin;
- making a folder: `mkdir`, `makedirs`, `exist_ok=True`;
- everything of `tempfile` that makes something.

Prints `path:line: message` for each finding and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = ("monolith", "monolith_compat")
"""Not `monolith_bench`: its commands write to temporary folders and to the folder that the user names."""
OWNER = "monolith/filesystem"
ALLOWED: Mapping[str, str] = {
    "monolith/cli/main.py": "/dev/null takes the place of a closed stdout",
    "monolith/testing/disk.py": "the disk of a simulation, which is in memory",
}
"""Module -> the reason why the rule is not for it."""

WRITING = re.compile(r"[rwaxbtU+]*[wax+][rwaxbtU+]*")
READING_FLAGS = frozenset({"O_RDONLY", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_DIRECT"})
MAKERS = {
    "tempfile": {
        "TemporaryDirectory", "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile",
        "mkdtemp", "mkstemp", "mktemp"
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "sqlite3": {"connect"},
    "os": {"mkdir", "makedirs", "mkfifo", "mknod"},
}  # fmt: skip
METHODS = frozenset({"write_text", "write_bytes", "mkdir"})


def check(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Yield line and message of each finding in a module."""
    if name in ALLOWED or name.startswith(OWNER):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in MAKERS:
            found = sorted(MAKERS[node.module] & {alias.name for alias in node.names})
            if found:
                yield node.lineno, f"`from {node.module} import {found[0]}`: use monolith.filesystem"
        elif isinstance(node, ast.Call) and (why := refused(node)):
            yield node.lineno, f"`{ast.unparse(node.func)}` {why}"


def refused(call: ast.Call) -> str:
    """Return why a call is refused; empty if it is not."""
    function = call.func
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    if owner == "filesystem":
        return ""
    if name in MAKERS.get(owner, ()) or (owner and name in METHODS):
        return "writes where others may: use monolith.filesystem"
    if any(one.arg == "exist_ok" and ast.unparse(one.value) == "True" for one in call.keywords):
        return "takes a folder that another user may have made: use monolith.filesystem"
    if owner == "os" and name == "open":
        flags = {node.attr for node in ast.walk(call.args[1]) if isinstance(node, ast.Attribute)}
        return "" if flags and flags <= READING_FLAGS else "may follow a planted link: use open_regular"
    if name == "open" and any(is_writing(one) for one in modes(call)):
        return "follows a planted link: use atomic_write or open_regular"
    return ""


def modes(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of `open` that may be its mode: `open(path, mode)`, `path.open(mode)`."""
    return [*call.args[:2], *(one.value for one in call.keywords if one.arg == "mode")]


def is_writing(mode: ast.expr) -> bool:
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and WRITING.fullmatch(mode.value) is not None
    )


def main(folders: list[str]) -> int:
    """Check whole packages; return the exit status."""
    findings = 0
    for folder in map(Path, folders or [str(SOURCE / package) for package in PACKAGES]):
        for path in sorted(folder.rglob("*.py")):
            for line, message in check(path, path.relative_to(folder.parent).as_posix()):
                sys.stdout.write(f"{path}:{line}: {message}\n")
                findings += 1
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
