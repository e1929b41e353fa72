from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from monolith.errors import ConfigError
from monolith.table import (
    Adagrad,
    Adam,
    BatchSoftmax,
    Constant,
    ConstantRate,
    DelayCompensated,
    Expiry,
    FixedR8,
    MovingAverage,
    PolynomialDecay,
    Segment,
    Sgd,
    TableConfig,
)

TABLE = TableConfig(name="item", segments=(Segment(dim=2),))


def test_widths_add_up_over_segments() -> None:
    config = replace(TABLE, segments=(Segment(dim=2, optimizer=Adam()), Segment(dim=1, optimizer=Adagrad())))
    assert (config.dim, config.state_dim) == (3, 6 + 1)
    assert replace(config, serving=True).state_dim == 0


def test_a_segment_is_plain_by_default() -> None:
    assert str(Segment(dim=2)) == (
        "segment(dim=2, optimizer=sgd(learning_rate=0.01, warmup_steps=0), initializer=zeros(), "
        "compressor=fp32(), learning_rate=ConstantRate(rate=0.01))"
    )


def test_a_rate_is_the_segments_or_else_the_optimizers_with_its_warm_up() -> None:
    warm = Sgd(learning_rate=0.5, warmup_steps=10)
    config = replace(
        TABLE,
        segments=[
            Segment(dim=1, optimizer=warm),
            Segment(dim=1, optimizer=warm, learning_rate=0.25),
            Segment(dim=1, optimizer=warm, learning_rate=0.0),
            Segment(dim=1, optimizer=warm, learning_rate=lambda step: step * 2.0),
            Segment(dim=1, optimizer=MovingAverage()),
        ],
    )
    assert config.learning_rates(5) == [0.25, 0.25, 0.0, 10.0, 0.0]
    assert config.learning_rates(20) == [0.5, 0.25, 0.0, 40.0, 0.0]


def test_sequences_are_kept_as_tuples() -> None:
    config = TableConfig(name="t", segments=[Segment(dim=1)], extra_restore_names=["old"])  # type: ignore[arg-type]
    assert config.segments == (Segment(dim=1),)
    assert config.extra_restore_names == ("old",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name"),
        ({"segments": ()}, "at least one segment"),
        ({"initial_rows": -1}, "initial_rows"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"when_full": "explode"}, "when_full"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"skip_zero": True}, "skip_zero"),
        ({"extra_restore_names": ("",)}, "extra_restore_names"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TABLE, **change)


def test_a_segment_checks_itself() -> None:
    with pytest.raises(ConfigError, match="dim"):
        Segment(dim=0)
    with pytest.raises(ConfigError, match="batch_softmax"):
        Segment(dim=2, optimizer=BatchSoftmax())
    with pytest.raises(ConfigError, match="batch_softmax"):
        Segment(dim=2, optimizer=DelayCompensated(BatchSoftmax(), 0.1))
    with pytest.raises(ConfigError, match="learning rate"):
        Segment(dim=2, learning_rate=-1.0)


def test_signatures_leave_out_names_only() -> None:
    assert replace(TABLE, name="other", extra_restore_names=("old",)).signature() == TABLE.signature()
    changes: list[dict[str, Any]] = [
        {"segments": (Segment(dim=3),)},
        {"segments": (Segment(dim=1), Segment(dim=1))},
        {"segments": (Segment(dim=2, initializer=Constant(1.0)),)},
        {"segments": (Segment(dim=2, compressor=FixedR8()),)},
        {"segments": (Segment(dim=2, learning_rate=0.5),)},
        {"segments": (Segment(dim=2, optimizer=Adagrad()),)},
        {"expiry": Expiry.days(1)},
        {"expiry": Expiry.days(per_slot={1: 1})},
        {"capacity_bytes": 5},
        {"when_full": "expire_oldest"},
        {"initial_rows": 5},
        {"seed": 5},
        {"serving": True},
    ]
    assert (
        len({replace(TABLE, **change).signature() for change in changes} | {TABLE.signature()})
        == len(changes) + 1
    )


def test_equal_schedules_give_equal_signatures() -> None:
    one, other = (
        replace(
            TABLE,
            segments=(
                Segment(dim=1, learning_rate=PolynomialDecay(initial_learning_rate=1.0, decay_steps=3)),
                Segment(dim=1, learning_rate=rate),
            ),
        )
        for rate in (0.5, ConstantRate(0.5))
    )
    assert one.signature() == other.signature()
