"""A canary gets more traffic while it answers like the base, and none as soon as it does not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from serve.server.linear import LinearCatalog, LinearModel
from serve.server.serving import ask_http, rows_json, serving

from monolith.errors import ConfigError
from monolith.observe import Metrics
from monolith.serve.config import CanaryConfig, Route
from monolith.serve.server.canary import Canary, CanaryState

BASE, NEW = ("ads", "1"), ("ads", "2")


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Split:
    """A canary, and the split that it sets."""

    def __init__(self, **config: Any) -> None:
        self.time, self.metrics = Time(), Metrics()
        given = {"steps": (0.1, 0.5), "hold": timedelta(seconds=60), "least_requests": 100, **config}
        route = Route.parse("name=ads/1,ads/2")
        self.canary = Canary(route, CanaryConfig(**given), self.metrics, self.time)
        self.targets = self.canary.targets
        self._random = np.random.default_rng(3)

    def tick(self) -> None:
        self.targets = self.canary.tick(self.targets) or self.targets

    def answer(
        self, target: tuple[str, str], mean: float = 0.2, seconds: float = 0.01, count: int = 200
    ) -> None:
        for _ in range(count):
            scores = self._random.normal(mean, 0.1, 8).astype(np.float32)
            self.canary.answered(target, seconds * self._random.uniform(0.9, 1.1), {"click": scores})


def test_a_candidate_like_the_base_is_promoted_step_by_step() -> None:
    split = Split()
    assert split.targets == "ads/1:90,ads/2:10"
    for after in ("ads/1:50,ads/2:50", "ads/2:100"):
        split.answer(BASE)
        split.answer(NEW)
        split.time.now += 59
        before = split.targets
        split.tick()
        assert split.targets == before  # not long enough
        split.time.now += 1
        split.tick()
        assert split.targets == after
    assert split.canary.state is CanaryState.PROMOTED
    split.tick()
    assert split.targets == "ads/2:100"
    assert 'serve_canary_weight{name="name"} 1.0' in split.metrics.render().decode()


def test_a_step_is_not_judged_by_few_requests() -> None:
    split = Split()
    split.answer(BASE, count=200)
    split.answer(NEW, mean=0.9, count=99)
    split.time.now += 600
    split.tick()
    assert split.targets == "ads/1:90,ads/2:10"


@pytest.mark.parametrize(
    ("new", "why"),
    [({"mean": 0.25}, "mean of 'click'"), ({"seconds": 0.02}, "95 %"), ({"mean": np.nan}, "nan")],
)
def test_a_candidate_that_predicts_otherwise_or_is_slower_is_rolled_back_at_once(
    new: dict[str, float], why: str
) -> None:
    split = Split()
    split.answer(BASE)
    split.answer(NEW, **new)
    split.tick()  # at once: the step need not be over
    assert split.targets == "ads/1:100"
    assert split.canary.state is CanaryState.ROLLED_BACK
    assert why in split.canary.reason


def test_a_shift_that_may_be_chance_is_none() -> None:
    split = Split(least_requests=2, max_shift=0.0)
    split.answer(BASE, count=3)
    split.answer(NEW, count=3, mean=0.205)
    split.time.now += 60
    split.tick()
    assert split.targets == "ads/1:50,ads/2:50"


@pytest.mark.parametrize("answered", [0, 200])
def test_a_candidate_that_fails_is_rolled_back(answered: int) -> None:
    split = Split()
    split.answer(BASE)
    split.answer(NEW, count=answered)
    for _ in range(100):
        split.canary.failed(NEW)
    split.tick()
    assert split.targets == "ads/1:100"
    assert "failed" in split.canary.reason


def test_the_split_of_an_operator_ends_the_canary() -> None:
    split = Split()
    split.targets = "ads/1:100"
    split.tick()
    split.answer(BASE)
    split.answer(NEW)
    split.time.now += 600
    split.tick()
    assert split.targets == "ads/1:100"
    assert split.canary.state is CanaryState.STOPPED


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": ()},
        {"steps": (0.5, 0.1)},
        {"steps": (1.0,)},
        {"routes": ("ads=ads/1",)},
        {"routes": ("ads=ads/1,ads/1",)},
        {"routes": ("ads=ads/1:90,ads/2:10",)},
        {"max_latency": 0.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CanaryConfig(**wrong)


@pytest.mark.parametrize(("bias", "left"), [(0.0, ("2",)), (50.0, ("1", "2"))])
def test_a_server_promotes_a_good_version_and_rolls_a_bad_one_back(
    bias: float, left: tuple[str, ...]
) -> None:
    catalog = LinearCatalog({"f": {"1": LinearModel, "2": lambda: LinearModel(version="2", bias=bias)}})
    config = CanaryConfig(
        routes=("ads=f/1,f/2",), steps=(0.5,), hold=timedelta(0), least_requests=10, max_latency=1000
    )
    with serving(catalog, canary=config, poll=timedelta(hours=1)) as server:
        for number in range(60):
            body = rows_json("ann", parameters={"split_key": f"user {number}"})
            assert ask_http(server.http_port, "POST", "/v2/models/ads/infer", body)[0] == 200
        changed = server.inference.guide_canaries()
        assert changed == {"ads": "f/2:100" if bias == 0 else "f/1:100"}
        assert server.inference.traffic.described() == changed
        assert server.inference.repository.versions("f") == left  # the newest stays, by the policy
