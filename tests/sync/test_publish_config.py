from datetime import timedelta

import pytest

from monolith.errors import ConfigError
from monolith.runtime.config_loading import load_run_config
from monolith.sync.publish_config import GuardConfig, PublishConfig


def test_a_run_that_says_nothing_publishes_nothing() -> None:
    assert load_run_config().publish == PublishConfig()
    assert not PublishConfig().enabled


def test_a_file_says_where_to_publish_and_how_often(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[publish]\nto = "grpc://127.0.0.1:7900"\ninterval = "100ms"\nkeep_bytes = "64MiB"\n'
        '[publish.guard]\nauc_fall = 0.2\nresume = "when_recovered"\n'
    )
    publish = load_run_config(file=file, args=["--publish.dense-interval", "5s"]).publish
    assert publish == PublishConfig(
        to="grpc://127.0.0.1:7900",
        interval=timedelta(milliseconds=100),
        dense_interval=timedelta(seconds=5),
        keep_bytes=64 << 20,
        guard=GuardConfig(auc_fall=0.2, resume="when_recovered"),
    )
    assert publish.enabled


@pytest.mark.parametrize(
    "values, problem",
    [
        ({"publish.to": " "}, "must name a channel"),
        ({"publish.interval": 0}, "must be more than 0"),
        ({"publish.dense_interval": -1}, "must be more than 0"),
        ({"publish.keep_bytes": 10}, "must be at least 1048576"),
        ({"publish.finish_timeout": -1}, "must be at least 0"),
        ({"publish.guard.largest_value": 0}, "must be above 0"),
        ({"publish.guard.times_usual": 1}, "must be above 1"),
        ({"publish.guard.auc_fall": -0.1}, "must be above 0"),
        ({"publish.guard.calibration_rise": float("nan")}, "must be above 0"),
        ({"publish.guard.window": 0}, "must be at least 1"),
        ({"publish.guard.warm_up": 5}, "less than one window"),
        ({"publish.guard.resume": "soon"}, "by_hand"),
    ],
)
def test_what_cannot_be_is_refused(values, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_run_config(code=values)
