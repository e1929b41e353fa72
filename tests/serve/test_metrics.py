"""What a server says of its requests: a line for a share of those answered, and some of those refused."""

import logging
import random

import pytest

from monolith.serve.metrics import REFUSALS_PER_SECOND, AccessLog

ANSWERED = {"model": "ads", "version": "7", "transport": "grpc", "id": "a1", "rows": 3, "seconds": 0.0042}
REFUSED = {"model": "ads", "transport": "http", "id": "", "code": "invalid", "why": "no column 'user'"}


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, "monolith.access")
    return caplog


def test_a_line_has_what_one_would_search_for(heard):
    AccessLog(1.0, random.Random(0), lambda: 0.0).answered(**ANSWERED)
    (line,) = heard.records
    assert line.getMessage() == "answered 3 rows by ads version 7 in 4.20 ms"
    fields = ("model", "model_version", "transport", "request_id", "rows", "milliseconds", "code")
    assert [getattr(line, name) for name in fields] == ["ads", "7", "grpc", "a1", 3, 4.2, "ok"]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.1, 50, 150), (1.0, 1000, 1000)])
def test_of_those_answered_a_share_is_logged(heard, share, least, most):
    log = AccessLog(share, random.Random(0), lambda: 0.0)
    for _ in range(1000):
        log.answered(**ANSWERED)
    assert least <= len(heard.records) <= most


def test_of_those_refused_some_a_second_are_logged_and_no_flood(heard):
    now = [100.0]
    log = AccessLog(0.0, random.Random(0), lambda: now[0])
    for _ in range(3 * REFUSALS_PER_SECOND):
        log.refused(**REFUSED)
    assert len(heard.records) == REFUSALS_PER_SECOND
    now[0] = 101.0
    log.refused(**REFUSED)
    assert len(heard.records) == REFUSALS_PER_SECOND + 1
    assert "no column 'user'" in heard.records[-1].getMessage()
    assert heard.records[-1].code == "invalid"
