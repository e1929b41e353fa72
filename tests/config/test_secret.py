import json
import logging
import pickle
from dataclasses import dataclass

import pytest

from monolith.config import MASK, Secret, config_from_mapping, load_config, to_dict, to_toml
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
    with pytest.raises(TypeError, match="not pickled"):
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
