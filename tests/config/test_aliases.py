from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monolith.config import Dropped, Renamed, differences, load_config
from monolith.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Part:
    count: int = 0
    on: bool = True
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part = field(default_factory=Part)
    first: int = 0
    second: int = 0
    text: str | None = None


ALIASES = {
    "num_things": Renamed("part.count"),
    "is_off": Renamed("part.on", lambda value: "false" if value in ("true", True) else "true"),
    "thousands": Renamed("first", lambda value: int(value) * 1000),  # type: ignore[call-overload]
    "list_of": Renamed("part.names"),
    "tpu": Dropped("there is none"),
}


def load(**sources):
    warnings: list[str] = []
    return load_config(Whole, aliases=ALIASES, warn=warnings.append, **sources), warnings


def file(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


def test_old_names_are_read_in_every_source(tmp_path):
    for sources in (
        {"file": file(tmp_path, "num_things = 3")},
        {"environ": {"MONOLITH_NUM_THINGS": "3"}},
        {"args": ["--num_things", "3"]},
        {"args": ["--num-things=3"]},
        {"code": {"num_things": 3}},
    ):
        config, warnings = load(**sources)
        assert config.part.count == 3, sources
        assert warnings == []


def test_sources_keep_their_order_whatever_the_names(tmp_path):
    path = file(tmp_path, "num_things = 1")
    environ, args = {"MONOLITH_PART__COUNT": "2"}, ["--num_things", "3"]
    assert load(file=path)[0].part.count == 1
    assert load(file=path, environ=environ)[0].part.count == 2
    assert load(file=path, environ=environ, args=args)[0].part.count == 3
    assert load(file=path, environ=environ, args=args, code={"part.count": 4})[0].part.count == 4


@pytest.mark.parametrize("flag", ["--is_off", "--is-off", "--is_off=true"])
def test_a_switch_may_be_given_bare(flag):
    assert load(args=[flag])[0].part.on is False


@pytest.mark.parametrize("flag", ["--nois_off", "--no-is-off", "--no_is_off"])
def test_a_switch_may_be_turned_off(flag):
    assert load(args=[flag])[0].part.on is True


def test_values_are_converted_where_the_unit_changed():
    assert load(code={"thousands": 2})[0].first == 2000
    assert load(environ={"MONOLITH_THOUSANDS": "2"})[0].first == 2000


def test_negative_numbers_and_several_words_are_values_of_the_flag_before():
    config, _ = load(args=["--num_things", "-5", "--list_of", "a", "b", "--second", "1"])
    assert (config.part.count, config.part.names, config.second) == (-5, ("a", "b"), 1)


def test_a_name_that_means_nothing_is_accepted_with_a_warning(tmp_path):
    config, warnings = load(file=file(tmp_path, 'tpu = "x"\nsecond = 4'), args=["--tpu", "y"])
    assert config.second == 4
    assert warnings == [
        f"tpu (from {tmp_path / 'c.toml'}) is ignored: there is none",
        "tpu (from --tpu) is ignored: there is none",
    ]


def test_one_source_must_not_give_a_field_by_both_its_names(tmp_path):
    path = file(tmp_path, "num_things = 1\n[part]\ncount = 2")
    with pytest.raises(ConfigError, match=r"part\.count .* given twice, also by the old name num_things"):
        load(file=path)
    with pytest.raises(ConfigError, match="given twice"):
        load(args=["--num_things", "1", "--part.count", "1"])


def test_a_mistyped_name_is_told_the_nearest_of_both_kinds():
    with pytest.raises(ConfigError, match="nearest known one is --num-things"):
        load(args=["--num_thing", "1"])
    with pytest.raises(ConfigError, match=r"unknown key num_thing \(from code\); .* part.count"):
        load(code={"num_thing": 1})
    with pytest.raises(ConfigError, match=r"did you mean part.count\?"):
        load(code={"part.num_things": 1})


def test_variables_of_others_set_fields_and_ours_win():
    foreign = {"THEIR_TEXT": "text"}
    assert load(environ={"THEIR_TEXT": "a"}, foreign=foreign)[0].text == "a"
    both = {"THEIR_TEXT": "a", "MONOLITH_TEXT": "b"}
    assert load(environ=both, foreign=foreign)[0].text == "b"
    assert load(environ={"THEIR_TEXT": ""}, foreign=foreign)[0].text is None


def test_other_defaults_are_below_all_sources(tmp_path):
    defaults = {"second": 9, "part.count": 9}
    config, _ = load(defaults=defaults, file=file(tmp_path, "num_things = 1"))
    assert (config.second, config.part.count) == (9, 1)


def test_differences_are_what_was_chosen():
    chosen = Whole(part=Part(count=2), text="t")
    assert differences(chosen, Whole()) == {"part.count": 2, "text": "t"}
    assert differences(Whole(), Whole()) == {}
