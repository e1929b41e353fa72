"""A loss that diverges is found, and acted upon."""

from __future__ import annotations

import math

import pytest
import torch
from train.runs import FakeRun, batch, train

from monolith.errors import ConfigError, DivergedError
from monolith.observe import Metrics
from monolith.train.hook import Hook, StepResult
from monolith.train.hooks import AlertConfig, AlertHook


def nan_from(step: int):
    return lambda now: math.nan if now >= step else 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run_at_the_next_look(bad):
    run = FakeRun()
    with pytest.raises(DivergedError, match="training diverged by step 10: the loss of the last 5 steps is"):
        train(
            [AlertHook(AlertConfig(action="stop", every_steps=5))],
            50,
            run=run,
            losses=lambda step: bad if step == 7 else 1.0,
        )
    assert run.step == 10


def test_an_exploding_loss_is_found_against_its_running_mean():
    config = AlertConfig(action="stop", every_steps=2, explosion=10, warmup_checks=3)
    run = FakeRun()
    with pytest.raises(DivergedError, match="the last 2 steps is 101, against 1 before"):
        train([AlertHook(config)], 50, run=run, losses=lambda step: 101.0 if step > 20 else 1.0)
    assert run.step == 22


def test_a_negative_loss_explodes_as_well():
    config = AlertConfig(action="stop", every_steps=1, explosion=10, warmup_checks=3)
    with pytest.raises(DivergedError):
        train([AlertHook(config)], 50, losses=lambda step: -101.0 if step > 20 else -1.0)


def test_the_first_losses_may_be_anything():
    config = AlertConfig(action="stop", every_steps=1, explosion=2, warmup_checks=5)
    assert train([AlertHook(config)], 5, losses=lambda step: float(10**step)).step == 5


def test_a_loss_may_rise_slowly():
    config = AlertConfig(action="stop", every_steps=1, explosion=2, warmup_checks=1)
    assert train([AlertHook(config)], 200, losses=lambda step: 1.02**step).step == 200


def test_explosions_are_not_looked_for_where_that_is_off():
    config = AlertConfig(action="stop", every_steps=1, explosion=None, warmup_checks=1)
    assert train([AlertHook(config)], 20, losses=lambda step: 1e6 if step > 10 else 1.0).step == 20


def test_a_warning_is_logged_and_counted_and_training_continues(caplog):
    metrics = Metrics(prefix="")
    run = train([AlertHook(AlertConfig(every_steps=5), metrics=metrics)], 20, losses=nan_from(11))
    assert run.step == 20
    assert "training diverged by step 15" in caplog.text
    assert "training_diverged_total 2.0" in metrics.render().decode()


def test_an_explosion_does_not_raise_the_mean_it_is_measured_by(caplog):
    config = AlertConfig(every_steps=1, explosion=10, warmup_checks=1)
    train([AlertHook(config)], 20, losses=lambda step: 100.0 if step > 10 else 1.0)
    assert caplog.text.count("training diverged") == 10


def test_a_rollback_restores_and_training_continues():
    run = FakeRun()
    restored = []

    def restore() -> None:
        restored.append(run.step)
        run.step = 3

    hook = AlertHook(AlertConfig(action="rollback", every_steps=1), rollback=restore)
    train([hook], 10, run=run, losses=lambda step: math.nan if step == 5 and not restored else 1.0)
    assert restored == [5]
    assert run.step == 8


def test_rollbacks_are_limited():
    restored = []
    config = AlertConfig(action="rollback", every_steps=1, max_rollbacks=2)
    with pytest.raises(DivergedError, match="again after 2 rollbacks"):
        train([AlertHook(config, rollback=lambda: restored.append(1))], 10, losses=nan_from(1))
    assert len(restored) == 2


def test_a_rollback_needs_something_to_restore_with():
    with pytest.raises(ConfigError, match="rollback"):
        AlertHook(AlertConfig(action="rollback"))


def test_the_end_is_looked_at_before_it_is_saved():
    saved = []

    class Save(Hook):
        def end(self, run: object) -> None:  # noqa: ARG002
            saved.append(True)

    with pytest.raises(DivergedError):
        train([AlertHook(AlertConfig(action="stop")), Save()], 3, losses=nan_from(2))
    assert saved == []


def test_other_steps_are_looked_at_when_a_save_is_due():
    run = FakeRun()
    hook = AlertHook(AlertConfig(action="stop"), also_when=lambda step: step % 4 == 0)
    with pytest.raises(DivergedError):
        train([hook], 50, run=run, losses=nan_from(5))
    assert run.step == 8


def test_the_loss_is_read_only_when_it_is_looked_at():
    reads = []

    class Watched(torch.Tensor):
        def __float__(self) -> float:
            reads.append(run.step)
            return super().__float__()

    run = FakeRun()
    hook = AlertHook(AlertConfig(every_steps=4))
    for step in range(1, 13):
        run.step = step
        hook.after_step(run, StepResult(step, batch(), torch.tensor(1.0).as_subclass(Watched)))
    assert reads == [4, 8, 12]


@pytest.mark.parametrize(
    "options",
    [
        {"action": "pray"},
        {"every_steps": 0},
        {"explosion": 1},
        {"warmup_checks": 0},
        {"decay": 1},
        {"max_rollbacks": -1},
    ],
)
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AlertConfig(**options)
