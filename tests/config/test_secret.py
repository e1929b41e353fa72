import json
import logging
import pickle
from dataclasses import dataclass

import pytest

from monolith.config import (
    MASK,
    Secret,
    config_from_mapping,
    is_secret_name,
    load_config,
    looks_secret,
    masked,
    masked_words,
    to_dict,
    to_toml,
)
from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Login:
    token: Secret | None = None
    user: str = "me"


def test_whatever_prints_a_secret_prints_a_mask(caplog):
    secret = Secret("hunter2")
    with caplog.at_level(logging.INFO):
        logging.getLogger("x").info("%s %r %s", secret, secret, Login(token=secret))
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>40}", repr([secret]), caplog.text]
    assert not any("hunter2" in text for text in shown)
    assert all(MASK in text for text in shown)
    assert secret.reveal() == "hunter2"


def test_a_secret_is_no_text_so_joining_and_json_do_not_show_it():
    secret: object = Secret("hunter2")
    with pytest.raises(TypeError):
        "".join([secret])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        json.dumps(secret)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)


def test_secrets_compare_by_their_text_and_empty_ones_are_false():
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1
    assert not Secret("")


def test_a_secret_is_read_from_every_source(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('token = "from file"')
    assert load_config(Login, file=file).token == Secret("from file")
    assert load_config(Login, environ={"MONOLITH_TOKEN": "e"}).token == Secret("e")
    assert load_config(Login, args=["--token", "f"]).token == Secret("f")
    assert load_config(Login, code={"token": Secret("c")}).token == Secret("c")


def test_a_written_config_has_a_mask_which_is_refused_when_read_back():
    written = to_dict(Login(token=Secret("hunter2")))
    assert written == {"token": MASK, "user": "me"}
    assert "hunter2" not in to_toml(Login(token=Secret("hunter2")))
    with pytest.raises(ConfigError, match="in place of a secret"):
        config_from_mapping(Login, written)


@pytest.mark.parametrize("value", [12345, ["hunter2"], {"a": "hunter2"}])
def test_a_problem_with_a_secret_does_not_show_it(value):
    with pytest.raises(ConfigError, match="secret text") as caught:
        config_from_mapping(Login, {"token": value})
    assert "12345" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["token", "--security.token", "zookeeper_auth", "DB_PASSWORD", "api-key", "x.aws_access_key"]
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["token_file", "--security.token-file", "tokenizer.path", "keep", "model_dir", ""]
)
def test_other_names_and_places_of_secrets_are_not(name: str) -> None:
    assert not is_secret_name(name)


def test_a_command_line_is_shown_without_its_secrets() -> None:
    words = ["train", "t:T", "--security.token", "s3", "--set", "password=s3", "--steps", "3"]
    assert masked_words(
        [*words, "--zk_auth=u:s3", "--kafka.brokers", "a,b", "--source", "s3://me:s3@host/x"]
    ) == [
        *("train", "t:T", "--security.token", MASK, "--set", f"password={MASK}", "--steps", "3"),
        *(f"--zk_auth={MASK}", "--kafka.brokers", "a,b", "--source", f"s3://me:{MASK}@host/x"),
    ]


def test_plain_values_are_shown_without_their_secrets() -> None:
    values = {"a": {"token": "s3", "token_file": "f", "keys": [1]}, "passwords": ["x", "y"], "n": None}
    assert masked(values) == {
        "a": {"token": MASK, "token_file": "f", "keys": [1]},
        "passwords": [MASK, MASK],
        "n": None,
    }


def test_what_may_be_a_token_is_told_from_words_paths_and_numbers() -> None:
    assert looks_secret("0123456789abcdef0123456789abcdef")
    for text in ("/etc/monolith/token1234567", "worker", "model.ckpt-1234567890", "1234567890123456789"):
        assert not looks_secret(text)


@dataclass(frozen=True, kw_only=True)
class Outer:
    login: Login = Login()
    count: int = 0


TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    "data",
    [
        {"login": TOKEN},
        {"login": "hunter2"},
        {"login": {"token": ["hunter2"]}},
        {"login": {"user": ["hunter2"]}},
        {"login": {"token": {"hunter2": 1}}},
        {"login": {"tokens": "hunter2"}},
        {"count": TOKEN},
        {"token": "hunter2"},
    ],
    ids=repr,
)
def test_a_misplaced_secret_is_not_echoed(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(Outer, data)
    assert TOKEN not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("args", [["--login", "hunter2"], ["--count", TOKEN], [TOKEN]])
def test_a_misplaced_secret_of_a_flag_is_not_echoed(args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, args=args)
    assert TOKEN not in str(caught.value)
    assert "hunter2" not in str(caught.value)
