"""Features in the file of a run: read strictly, and handed to the task as one spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.errors import ConfigError
from monolith.feature import BucketFeature, FeatureSpec, FloatFeature, IdFeature, Label
from monolith.runtime.config import RunConfig
from monolith.runtime.config_loading import load_run_config
from monolith.table import Adagrad

FILE = """
[features.user_id]
kind = "string"
dim = 16
optimizer = { type = "Adagrad", learning_rate = 0.1 }
expire_after = "9d"

[features.tags]
kind = "string"
separator = "|"
combiner = "mean"

[features.price]
scale = "log"

[features.age]
boundaries = [18, 30]

[labels.like]
column = "rating"
at_least = 4

[examples]
event_time = "time"
group = "user_id"
"""


def read(folder: Path, text: str) -> RunConfig:
    (folder / "run.toml").write_text(text)
    return load_run_config(file=folder / "run.toml")


def test_a_file_says_what_a_python_user_would_write(tmp_path: Path) -> None:
    run = read(tmp_path, FILE)
    spec = run.feature_spec
    assert spec is not None
    assert isinstance(spec.features["user_id"], IdFeature)
    assert spec.features["user_id"].optimizer == Adagrad(learning_rate=0.1)
    assert spec.features["price"] == FloatFeature(scale="log")
    assert spec.features["age"] == BucketFeature(boundaries=(18.0, 30.0))
    assert spec.labels == {"like": Label(column="rating", at_least=4.0)}
    assert (spec.event_time, spec.group) == ("time", "user_id")
    assert run.inputs == {"features": spec}
    assert FeatureSpec.from_json(spec.to_json()) == spec


def test_without_features_there_is_no_spec() -> None:
    assert RunConfig().feature_spec is None
    assert RunConfig().inputs == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "dim = 16",
            "dimm = 16",
            "unknown key features.user_id.dimm.*the nearest known key is features.user_id.dim",
        ),
        ('"mean"', '"median"', "features.tags.combiner.*expected one of 'sum', 'mean', 'max'"),
        ('group = "user_id"', 'group = "user"', "group: 'user' is no feature of ids; did you mean 'user_id'"),
        ("[18, 30]", "[30, 18]", "boundaries must be finite and rise"),
    ],
)
def test_a_problem_is_reported_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, FILE.replace(old, new))


def test_labels_need_features(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"these go with features; name some, as in \[features.user_id\]"):
        read(tmp_path, "[labels.click]\n")
