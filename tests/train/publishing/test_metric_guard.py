"""When a model that gets worse holds publishing back."""

from __future__ import annotations

import torch
from torch import Tensor
from train.runs import FakeClock

from monolith.sync.publish_config import GuardConfig
from monolith.train.publishing.metric_guard import LOOK_EVERY, MetricGuard

CONFIG = GuardConfig(window=200, warm_up=600, auc_fall=0.1, calibration_rise=0.5)
LABELS = (torch.arange(100) % 4 == 0).float()
GOOD = LABELS * 0.2 + 0.2
"""Ranks all examples rightly, and says a quarter on the whole."""
TURNED = (1 - LABELS) * 0.2 + 0.1
"""Ranks them the wrong way round, and says a quarter on the whole."""


def guard(config: GuardConfig = CONFIG) -> tuple[MetricGuard, FakeClock]:
    clock = FakeClock()
    return MetricGuard(config, clock=clock), clock


def feed(watched: tuple[MetricGuard, FakeClock], said: Tensor, batches: int, labels: Tensor = LABELS) -> None:
    found, clock = watched
    for _ in range(batches):
        clock.now += LOOK_EVERY
        found.update({"click": said}, {"click": labels})


def test_a_model_that_is_as_good_as_ever_may_be_published() -> None:
    watched = guard()
    feed(watched, GOOD, 20)
    assert watched[0].reason is None


def test_a_fall_of_the_auc_of_the_latest_examples_holds_publishing() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 1)
    reason = watched[0].reason
    assert reason is not None
    assert reason.startswith("click/auc of the latest 200 examples fell to ")
    assert "from about 1.0000" in reason


def test_a_rise_of_the_calibration_error_holds_publishing() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, GOOD * 2.4, 2)
    assert "the error of click/calibration" in str(watched[0].reason)


def test_what_is_bad_does_not_become_usual() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 100)
    assert watched[0].reason is not None


def test_it_recovers_when_the_model_does() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 2)
    assert not watched[0].recovered(lambda _, ids: ids)
    feed(watched, GOOD, 3)
    assert watched[0].recovered(lambda _, ids: ids)


def test_whoever_accepts_things_as_they_are_begins_with_new_levels() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 5)
    watched[0].accept()
    assert watched[0].reason is None
    feed(watched, TURNED, 20)
    assert watched[0].reason is None


def test_a_model_that_has_only_begun_is_held_against_nothing() -> None:
    watched = guard()
    feed(watched, GOOD, 3)
    feed(watched, TURNED, 2)
    assert watched[0].reason is None


def test_bounds_that_are_none_hold_nothing() -> None:
    watched = guard(GuardConfig(window=200, warm_up=600, auc_fall=None, calibration_rise=None))
    assert not watched[0].looks
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 5)
    assert watched[0].reason is None


def test_labels_that_have_no_auc_hold_nothing() -> None:
    watched = guard()
    feed(watched, GOOD * 9, 20, labels=LABELS * 9)  # ratings
    feed(watched, TURNED * 9, 20, labels=LABELS * 9)
    assert watched[0].reason is None


def test_it_looks_no_oftener_than_its_clock_allows() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    found, clock = watched
    for _ in range(5):
        found.update({"click": TURNED}, {"click": LABELS})
    assert found.reason is None
    clock.now += LOOK_EVERY
    found.update({"click": TURNED}, {"click": LABELS})
    assert found.reason is not None
