"""Where the dispatcher is, by MLP's variables."""

from __future__ import annotations

import pytest

from monolith.data.service import dispatcher_from_environment
from monolith.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"MLP_DISPATCHER_0_HOST": "h", "MLP_DISPATCHER_0_PORT": "5050"}, "h:5050"),
        ({"MLP_DISPATCHER_0_HOST": "h", "MLP_DISPATCHER_0_PRIMARY_HOST": "'p'"}, "p:2222"),
        ({"MLP_DISPATCHER_0_HOST": "::1", "MLP_DISPATCHER_0_PORT": '"70"'}, "[::1]:70"),
    ],
)
def test_the_environment_names_host_and_port(environment: dict[str, str], address: str) -> None:
    assert dispatcher_from_environment(environment) == address


def test_a_role_may_have_another_name() -> None:
    assert dispatcher_from_environment({"MLP_FEEDER_0_HOST": "h"}, role="feeder") == "h:2222"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "neither MLP_DISPATCHER_0_PRIMARY_HOST nor MLP_DISPATCHER_0_HOST"),
        ({"MLP_DISPATCHER_0_HOST": "h", "MLP_DISPATCHER_0_PORT": "http"}, "must be a port, got 'http'"),
        ({"MLP_DISPATCHER_0_HOST": "h", "MLP_DISPATCHER_0_PORT": "70000"}, "must be a port"),
    ],
)
def test_what_names_no_dispatcher_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dispatcher_from_environment(environment)
