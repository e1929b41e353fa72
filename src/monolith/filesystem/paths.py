"""Paths as text: what is absolute, how to join and split. Touches no disk, but for `package_path`.

URLs always use `/`. `hdfs:/x` is a common spelling of `hdfs:///x` and counts as a URL.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path, PurePosixPath

from monolith.errors import FileMissingError, FilesystemError

AnyPath = str | os.PathLike[str]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_ONE_SLASH = re.compile(r"(hdfs|viewfs|file):/(?!/)")
_TEMPORARY = re.compile(r"-tmp-[0-9a-f]{12}$")


def is_url(path: AnyPath) -> bool:
    """Whether `path` names its filesystem: `s3://bucket/x`, `hdfs:/x`."""
    text = os.fspath(path)
    return bool(_URL.match(text) or _ONE_SLASH.match(text))


def is_remote(path: AnyPath) -> bool:
    """Whether `path` is on another filesystem than those of this machine."""
    return is_url(path) and not os.fspath(path).startswith("file:")


def is_absolute(path: AnyPath) -> bool:
    """Whether `path` means the same from every folder: a URL, or absolute by the system's rule."""
    return is_url(path) or os.path.isabs(path)  # noqa: PTH117  pathlib would fold `//`


def join(base: AnyPath, *parts: AnyPath) -> str:
    """Put `parts` below `base`; an absolute part starts over, as in `os.path.join`."""
    result = os.fspath(base)
    for part in [os.fspath(each) for each in parts]:
        if is_absolute(part) or not result:
            result = part
        elif part:
            result = result + part if result.endswith("/") else f"{result}/{part}"
    return result


def base_name(path: AnyPath) -> str:
    """The last component; empty for a root such as `/` or `s3://`."""
    return _split(os.fspath(path))[1]


def parent(path: AnyPath) -> str:
    """The folder of `path`; empty for a bare name, a root is its own."""
    return _split(os.fspath(path))[0]


def temporary(path: AnyPath) -> str:
    """Return a new name next to `path` for an unfinished file: `<path>-tmp-<random>`."""
    return f"{os.fspath(path).rstrip('/')}-tmp-{secrets.token_hex(6)}"


def is_temporary(path: AnyPath) -> bool:
    """Whether `path` is an unfinished write or copy, which may be deleted if no process is writing it."""
    return bool(_TEMPORARY.search(base_name(path)))


def is_below(path: AnyPath, folder: AnyPath) -> bool:
    """Whether what is written at `path` ends up inside `folder`, links and `..` followed.

    A URL that goes up by `..` is below nothing: filesystems differ on what that means.
    """
    inner, outer = os.fspath(path), os.fspath(folder)
    if is_url(inner) or is_url(outer):
        parts, above = (normal_url(text).rstrip("/").split("/") for text in (inner, outer))
        return ".." not in parts and len(parts) > len(above) and parts[: len(above)] == above
    real, base = os.path.realpath(inner), os.path.realpath(outer)
    return real != base and os.path.commonpath([real, base]) == base


def normal_url(path: str) -> str:
    """`hdfs:/x` as fsspec expects it, `hdfs:///x`; anything else unchanged."""
    return _ONE_SLASH.sub(r"\1:///", path, count=1)


def package_path(name: str) -> str:
    """Absolute path of a file or folder shipped inside this package.

    Args:
        name: Relative to the package, with `/`: "errors.py", "native/libmonolith.so".

    Raises:
        FileMissingError: The installed package has no such file.
        FilesystemError: `name` points out of the package.
    """
    inner = PurePosixPath(name)
    if inner.is_absolute() or ".." in inner.parts:
        raise FilesystemError(
            f"cannot find {name!r} in the package: give a path relative to monolith/ that stays inside it"
        )
    import monolith

    roots = [Path(root).absolute() for root in monolith.__path__]  # an editable install has two
    for root in roots:
        if (root / inner).exists():
            return str(root / inner)
    raise FileMissingError(
        f"the installed package has no {name!r}; looked in {', '.join(map(str, roots))}. If it is compiled, "
        "build and install the package again: pip install ."
    )


def _split(path: str) -> tuple[str, str]:
    url = _URL.match(path) or _ONE_SLASH.match(path)
    root = url.group() if url else ("/" if path.startswith("/") else "")
    rest = path[len(root) :].rstrip("/")
    folder, slash, name = rest.rpartition("/")
    if slash:
        return root + folder.rstrip("/"), name
    return root, rest
