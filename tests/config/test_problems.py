from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from monolith.config import Checked, ConfigProblemsError, Problem, config_from_mapping, load_config
from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Window(Checked):
    low: int = 0
    high: int = 10

    def problems(self) -> Iterator[Problem]:
        if self.low < 0:
            yield Problem(("low",), "must not be negative")
        if self.low > self.high:
            yield Problem(("low", "high"), f"{self.low} is above {self.high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Checked):
    window: Window = field(default_factory=Window)
    steps: int = 1
    name: str = "x"

    def problems(self) -> Iterator[Problem]:
        if self.steps > self.window.high:
            yield Problem(("steps", "window.high"), "too many")


def lines(error: ConfigError) -> list[str]:
    return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]


def problems_of(data: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(Run, data, "f")
    return lines(caught.value)


def test_a_config_names_all_its_problems_when_it_is_built():
    with pytest.raises(ConfigProblemsError) as caught:
        Window(low=-1, high=-2)
    assert caught.value.problems == (
        Problem(("low",), "must not be negative"),
        Problem(("low", "high"), "-1 is above -2"),
    )
    assert lines(caught.value) == ["low: must not be negative", "low and high: -1 is above -2"]


def test_problems_of_a_part_and_of_the_whole_come_together():
    assert problems_of({"window": {"low": -1, "high": 3}, "steps": 5}) == [
        "window.low (from f): must not be negative",
        "steps and window.high (from f): too many",
    ]


def test_problems_of_types_do_not_hide_problems_of_values():
    assert problems_of({"name": 7, "nmae": "y", "window": {"high": 3}, "steps": 5}) == [
        "unknown key nmae (from f); the nearest known key is name",
        "name (from f): expected str, got int 7",
        "steps and window.high (from f): too many",
    ]


def test_a_field_that_has_a_problem_is_not_blamed_again():
    # With `high` taken out, `steps` is compared with nothing: what is wrong with `high` may be all.
    assert problems_of({"window": {"high": "x"}, "steps": 50}) == [
        "window.high (from f): expected int, got str 'x'"
    ]


def test_only_fields_that_were_set_are_blamed_with_their_sources(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("steps = 7")
    with pytest.raises(ConfigError) as caught:
        load_config(Run, file=file, args=["--window.high", "5"])
    assert lines(caught.value) == [f"steps and window.high (from {file} and --window.high): too many"]
    with pytest.raises(ConfigError) as caught:
        load_config(Run, args=["--steps", "70"])
    assert lines(caught.value) == ["steps (from --steps): too many"]
