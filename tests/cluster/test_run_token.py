"""The token of a run that was not given one."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monolith.cluster.run_token import (
    RUN_TOKEN,
    TOKEN_FILE,
    rank_security,
    read_token,
    run_security,
    shared_security,
    user_security,
    user_token_file,
    write_token,
)
from monolith.cluster.security import SecurityConfig
from monolith.config import Secret
from monolith.errors import ConfigError

OPEN = SecurityConfig()
SET = SecurityConfig(token=Secret("mine"))


def test_the_token_of_a_launcher_counts_where_nothing_was_set() -> None:
    assert run_security(OPEN, {}) == OPEN
    assert run_security(OPEN, {RUN_TOKEN: "t"}).token == Secret("t")
    assert run_security(SET, {RUN_TOKEN: "t"}) == SET
    of_file = SecurityConfig(token_file=Path("x"))
    assert run_security(of_file, {RUN_TOKEN: "t"}) == of_file
    tls = SecurityConfig(cert=Path("a"), key=Path("b"), ca=Path("c"))
    assert run_security(tls, {RUN_TOKEN: "t"}) == tls


def test_ranks_have_a_token_also_with_certificates(tmp_path: Path) -> None:
    tls = SecurityConfig(cert=Path("a"), key=Path("b"), ca=Path("c"))
    assert rank_security(SET, {RUN_TOKEN: "t"}, str(tmp_path)) == SET
    assert rank_security(tls, {RUN_TOKEN: "t"}, "s3://bucket/m").token == Secret("t")
    found = rank_security(tls, {}, str(tmp_path))
    assert found.token == read_token(tmp_path / TOKEN_FILE)
    assert found.cert == tls.cert


@pytest.mark.parametrize("model_dir", ["", "s3://bucket/m"])
def test_ranks_without_any_token_are_told_which_flag_to_give(model_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"--security\.token-file"):
        rank_security(OPEN, {}, model_dir)


def test_processes_that_share_a_model_dir_share_a_token_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: shared_security(OPEN, str(folder)), range(32)))
    assert len({one.token.reveal() for one in found if one.token is not None}) == 1
    assert [path.name for path in folder.iterdir()] == [TOKEN_FILE]
    assert stat.S_IMODE((folder / TOKEN_FILE).stat().st_mode) == 0o600
    assert shared_security(OPEN, str(tmp_path / "other")).token != found[0].token


def test_data_services_that_belong_to_no_run_share_a_token_per_user(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state")}
    path = user_token_file(environ)
    found = [user_security(OPEN, environ) for _ in range(2)]
    assert found[0].token == found[1].token == read_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert user_security(SET, environ) == SET
    assert user_token_file({"HOME": "/h"}) == Path("/h/.local/state/monolith/data_service_token")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="cannot trust the token"):
        user_security(OPEN, environ)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create the token file .*--token-file .*--insecure"):
        user_security(OPEN, {"XDG_STATE_HOME": str(tmp_path / "file")})


def test_what_was_set_and_a_remote_model_dir_leave_no_token(tmp_path: Path) -> None:
    assert shared_security(SET, str(tmp_path)) == SET
    assert shared_security(OPEN, "") == OPEN
    assert shared_security(OPEN, "hdfs://one/run") == OPEN
    assert list(tmp_path.iterdir()) == []


def test_a_token_that_another_user_left_or_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / TOKEN_FILE
    path.write_text("planted")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"cannot trust the token .*run_token: .*mode 0600"):
        shared_security(OPEN, str(tmp_path))
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="cannot read the token"):
        shared_security(OPEN, str(tmp_path))
    path.unlink()
    write_token(path, Secret(""))
    with pytest.raises(ConfigError, match="not be empty"):
        read_token(path)
    if os.geteuid() == 0:
        write_token(path, Secret("planted"))
        os.chown(path, 65534, 65534)
        with pytest.raises(ConfigError, match="must belong to the user of this process"):
            read_token(path)
