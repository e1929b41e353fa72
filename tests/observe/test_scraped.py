"""What `/metrics` shows is read back as it was counted."""

from __future__ import annotations

import math

import pytest

from monolith.errors import RequestError
from monolith.observe import Metrics
from monolith.observe.metrics import Scraped


def test_what_a_process_counts_is_read_back() -> None:
    metrics = Metrics()
    metrics.gauge("train_step", "").set(7)
    quality = metrics.gauge("train_metric", "", ["metric"])
    quality.set(0.75, metric='a "quoted"\nhead/auc')
    quality.set(math.nan, metric="like/auc")
    requests = metrics.counter("serve_requests", "", ["model", "code"])
    requests.inc(3, model="ads", code="ok")
    requests.inc(2, model="ads", code="invalid")
    scraped = Scraped(metrics.render())
    assert scraped.value("train_step") == 7
    assert scraped.value("serve_requests_total") == 5
    assert scraped.value("serve_requests_total", code="ok") == 3
    assert scraped.value("train_loss") is None
    assert scraped.by("train_metric", "metric") == {'a "quoted"\nhead/auc': 0.75}
    assert "train_step" in scraped
    assert "train_loss" not in scraped


def test_a_custom_prefix_is_found_by_what_every_process_has() -> None:
    metrics = Metrics("acme.ads")
    metrics.gauge("run_info", "", ["role"]).set(1, role="worker")
    metrics.gauge("train_step", "").set(7)
    assert Scraped(metrics.render()).value("train_step") is None
    assert Scraped(metrics.render(), None, known=("run_info",)).value("train_step") == 7
    assert Scraped(metrics.render(), None, known=("other",)).value("train_step") is None


def test_histograms_of_one_label_are_added_up() -> None:
    metrics = Metrics()
    took = metrics.histogram("took", "", ["stage", "process"], buckets=(0.1, 1.0))
    for process, seconds in (("0", 0.05), ("0", 0.5), ("1", 0.5), ("1", 5.0)):
        took.observe(seconds, stage="read", process=process)
    assert Scraped(metrics.render()).histograms("took", "stage") == {
        "read": {0.1: 1.0, 1.0: 3.0, math.inf: 4.0}
    }


@pytest.mark.parametrize("text", [b"{not metrics", b"\xff\xfe", b"name value\n"])
def test_something_else_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError, match="does not read as metrics"):
        Scraped(text)


def test_too_much_is_refused() -> None:
    text = b"".join(b"m_%d 1\n" % number for number in range(11))
    assert len(Scraped(text, most=11)) == 11
    with pytest.raises(RequestError, match="more than 10 numbers"):
        Scraped(text, most=10)
