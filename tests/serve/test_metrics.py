"""What a server says of its requests: a line for a share of those answered, and some of those refused."""

import logging
import random
from types import SimpleNamespace

import pytest

from monolith.observe.metrics import Metrics
from monolith.serve.metrics import REFUSALS_PER_SECOND, AccessLog, ReadMetrics
from monolith.table.frozen_table import RowReads

ANSWERED = {"model": "ads", "version": "7", "transport": "grpc", "id": "a1", "rows": 3, "seconds": 0.0042}
REFUSED = {"model": "ads", "transport": "http", "id": "", "code": "invalid", "why": "no column 'user'"}


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, "monolith.access")
    return caplog


def test_a_line_has_what_one_would_search_for(heard):
    AccessLog(1.0, random.Random(0), lambda: 0.0).answered(**ANSWERED)
    (line,) = heard.records
    assert line.getMessage() == "answered 3 rows with ads version 7 in 4.20 ms"
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


def test_the_log_says_once_a_minute_how_many_rows_were_in_memory(caplog):
    caplog.set_level(logging.INFO, "monolith.serve.metrics")
    now, counts = [100.0], ReadMetrics(metrics := Metrics(), clock=lambda: now[0])
    rows, other = SimpleNamespace(reads=RowReads(10, 4, 6, 24_576)), SimpleNamespace(reads=None)

    def after(seconds, reads):
        now[0] += seconds
        rows.reads = reads
        counts.count("ads", rows)
        counts.count("mapped", other)

    after(0, rows.reads)
    after(30, RowReads(600, 504, 296, 1_212_416))
    assert caplog.messages == []
    after(30, RowReads(1000, 900, 600, 2_457_600))
    assert caplog.messages == [
        "model ads: 90% of 1,000 rows were found in memory in the last 60 s; "
        "10 reads/s of 40 KiB/s from the disk"
    ]
    after(60, rows.reads)
    assert len(caplog.messages) == 1  # no row was looked up
    rows = SimpleNamespace(reads=None)  # of the next version, whose counts begin again
    after(60, RowReads(8, 8))
    assert caplog.messages[1:] == [
        "model ads: 100% of 8 rows were found in memory in the last 60 s; 0 reads/s of 0 B/s from the disk"
    ]
    assert b'serve_rows_found_total{model="ads",tier="memory"} 908.0' in metrics.render()
