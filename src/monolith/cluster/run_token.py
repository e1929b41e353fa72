"""The token of a run that was not given one: every run has a secret, so that a stranger is told nothing.

A launcher makes a token for all its processes and hands it on as a variable, which only their user can
read. Processes that were started one by one share a folder, the model_dir: the first of them leaves a token
there, in a file that only their user can read. The processes of a data service that is not part of a run know
no common folder; they share one token per user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from monolith import concurrency, filesystem
from monolith.cluster.security import SecurityConfig
from monolith.config import Secret
from monolith.errors import ConfigError

RUN_TOKEN = "MONOLITH_RUN_TOKEN"
"""The variable by which a launcher passes on a run's token. Not a setting: operators set security instead."""
TOKEN_FILE = "run_token"
"""In the model_dir of a run whose processes were started one by one."""
USER_TOKEN_FILE = "data_service_token"
"""In the state folder of a user who starts data services that belong to no run."""


def run_security(security: SecurityConfig, environ: Mapping[str, str]) -> SecurityConfig:
    """Return `security` if it is set, else the token of the launcher that started this process."""
    if is_guarded(security) or not environ.get(RUN_TOKEN):
        return security
    return replace(security, token=Secret(environ[RUN_TOKEN]))


def rank_security(security: SecurityConfig, environ: Mapping[str, str], model_dir: str) -> SecurityConfig:
    """Return what is set, with a token in any case: ranks sign with it the keys that they share.

    Raises:
        ConfigError: There is none, and no folder of this user in which ranks could share one.
    """
    if security.token is not None or security.token_file is not None:
        return security
    if environ.get(RUN_TOKEN):
        return replace(security, token=Secret(environ[RUN_TOKEN]))
    if not model_dir or filesystem.is_remote(model_dir):
        raise ConfigError(
            "ranks sign the keys that they share with a token, and share one by themselves only in a local "
            f"model_dir, not {model_dir or 'without one'!r}. Give all of them the same security.token_file, "
            "as the flag --security.token-file."
        )
    return replace(security, token=read_token(Path(model_dir) / TOKEN_FILE, make=True))


def shared_security(security: SecurityConfig, model_dir: str) -> SecurityConfig:
    """Return `security` if it is set, else the token that the processes of a run share in their model_dir.

    A remote model_dir has no token: this process cannot tell which users may read it.

    Raises:
        ConfigError: Other users can read the token, or another user wrote it.
    """
    if is_guarded(security) or not model_dir or filesystem.is_remote(model_dir):
        return security
    return replace(security, token=read_token(Path(model_dir) / TOKEN_FILE, make=True))


def user_token_file(environ: Mapping[str, str]) -> Path:
    """Return where a user's stand-alone data services keep their token."""
    home = environ.get("HOME") or str(Path.home())
    return Path(environ.get("XDG_STATE_HOME") or Path(home, ".local", "state"), "monolith", USER_TOKEN_FILE)


def user_security(security: SecurityConfig, environ: Mapping[str, str]) -> SecurityConfig:
    """Return the given security, or else the token that this user's stand-alone data services share.

    The first process creates the token file with mode 0600; later ones of the same user read it.

    Raises:
        ConfigError: The file cannot be created or read, or other users can read it.
    """
    if is_guarded(security):
        return security
    path = user_token_file(environ)
    try:
        return replace(security, token=read_token(path, make=True))
    except OSError as cause:
        raise ConfigError(
            f"data service: cannot create the token file {path}: {cause.strerror}. Give the dispatcher, data "
            "workers and trainers a token by --token-file (security.token_file of a run), or start the "
            "dispatcher and the data workers with --insecure."
        ) from cause


def is_guarded(security: SecurityConfig) -> bool:
    """Whether callers must show something."""
    return security.token is not None or security.token_file is not None or security.uses_tls


def write_token(path: Path, token: Secret) -> None:
    """Write a token for this user alone; an existing file is replaced."""
    unfinished = Path(filesystem.temporary(path))
    try:
        file = filesystem.open_regular(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, own=True)
        with os.fdopen(file, "w") as opened:
            opened.write(token.reveal())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_token(path: Path, *, make: bool = False) -> Secret:
    """Read a token that this user left.

    Args:
        make: Leave one where there is none. Of several processes that do at once, one is the first.

    Raises:
        ConfigError: It is not of this user, or others can read it.
    """
    if make and not path.exists():
        filesystem.make_dirs(path.parent)
        own = Path(filesystem.temporary(path))
        write_token(own, Secret(concurrency.token_hex(32)))
        with suppress(FileExistsError):
            os.link(own, path)
        own.unlink()
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            about = os.fstat(file.fileno())
            text = file.read(1024).strip()
    except OSError as cause:
        raise ConfigError(f"cannot read the token {path}: {cause.strerror}") from cause
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077 or not text:
        raise ConfigError(
            f"cannot trust the token {path}: it must belong to the user of this process, have mode 0600 and "
            "not be empty. Remove it, or give all processes one with security.token_file."
        )
    return Secret(text)
