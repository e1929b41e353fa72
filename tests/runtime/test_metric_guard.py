"""When a model that gets worse holds publishing back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from train.runs import FakeClock

from monolith.runtime.metric_guard import LOOK_EVERY, MetricGuard
from monolith.sync.publish_config import GuardConfig

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


def test_accepting_the_current_levels_makes_them_the_new_reference() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 5)
    watched[0].accept()
    assert watched[0].reason is None
    feed(watched, TURNED, 20)
    assert watched[0].reason is None


def test_a_model_that_has_only_begun_is_compared_with_nothing() -> None:
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


def fed(watched: tuple[MetricGuard, FakeClock], said: Tensor, steps: range) -> None:
    found, clock = watched
    for step in steps:
        clock.now += LOOK_EVERY
        found.update({"click": said}, {"click": LABELS}, step=step)


def test_the_first_bad_step_is_that_of_the_last_window_that_was_well() -> None:
    watched = guard()
    fed(watched, GOOD, range(1, 21))
    assert watched[0].bad is None
    fed(watched, TURNED, range(21, 23))
    bad = watched[0].bad
    assert bad is not None
    assert bad.step == 19, "a window has two batches, and that of step 20 was well"
    fed(watched, TURNED, range(23, 60))
    assert watched[0].bad is not None
    assert watched[0].bad.step == 19


def test_an_accepted_level_is_not_bad_any_more() -> None:
    watched = guard()
    fed(watched, GOOD, range(1, 21))
    fed(watched, TURNED, range(21, 30))
    watched[0].accept()
    fed(watched, GOOD, range(30, 50))
    fed(watched, TURNED, range(50, 60))
    assert watched[0].bad is not None
    assert 30 <= watched[0].bad.step <= 50


def test_a_run_that_went_back_has_no_bad_step_after_its_own() -> None:
    watched = guard()
    fed(watched, GOOD, range(101, 121))
    fed(watched, TURNED, range(51, 55))
    assert watched[0].bad is not None
    assert watched[0].bad.step <= 51


def restarted(
    watched: tuple[MetricGuard, FakeClock], config: GuardConfig = CONFIG
) -> tuple[MetricGuard, FakeClock]:
    """Return the guard of the next start of a run, which restored the checkpoint of this one."""
    found = guard(config)
    found[0].restore(watched[0].state())
    return found


def test_a_restarted_run_is_guarded_at_once_by_the_levels_of_its_checkpoint() -> None:
    watched = guard()
    fed(watched, GOOD, range(1, 21))
    again = restarted(watched)
    assert again[0].reason is None
    fed(again, TURNED, range(21, 23))
    assert "click/auc of the latest 200 examples fell" in str(again[0].reason)
    assert again[0].bad is not None
    assert again[0].bad.step <= 21


def test_a_restart_is_no_recovery() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 5)
    again = restarted(watched)
    assert not again[0].recovered(lambda _, ids: ids)
    feed(again, TURNED, 5)
    assert again[0].reason is not None
    feed(again, GOOD, 3)
    assert again[0].recovered(lambda _, ids: ids)


def test_a_bound_that_was_taken_away_before_a_restart_holds_nothing() -> None:
    watched = guard()
    feed(watched, GOOD, 10)
    feed(watched, TURNED, 5)
    assert restarted(watched, replace(CONFIG, auc_fall=None))[0].reason is None


def test_a_run_that_was_restarted_while_it_warmed_up_goes_on_warming_up() -> None:
    watched = guard()
    feed(watched, GOOD, 3)
    again = restarted(watched)
    feed(again, TURNED, 2)
    assert again[0].reason is None
