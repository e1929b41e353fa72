from dataclasses import dataclass, field
from pathlib import Path

import pytest

from monolith.config import ConfigNames, Dropped, Renamed, Unsupported, differences, load_config
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


def load(*, foreign=None, **sources):
    warnings: list[str] = []
    names = ConfigNames(aliases=ALIASES, foreign=foreign or {})
    return load_config(Whole, warn=warnings.append, names=names, **sources), warnings


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


# What cannot be had, what has moved, and what excludes each other


def problems(**sources) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(Whole, **sources)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


GONE = {"ranks": Unsupported("not built yet"), "ways": Unsupported("there is one way", default="one")}


@pytest.mark.parametrize("value", [True, "yes", 3, {"a": 1}, "two"])
def test_asking_for_what_cannot_be_had_is_an_error_with_the_reason(value):
    assert problems(code={"ranks": value}, names=ConfigNames(aliases=GONE)) == [
        "ranks (from code): not built yet"
    ]


@pytest.mark.parametrize("name, value", [("ranks", False), ("ranks", 0), ("ranks", ""), ("ways", "one")])
def test_asking_for_nothing_is_not(name, value):
    assert load_config(Whole, code={name: value}, names=ConfigNames(aliases=GONE)) == Whole()


def test_a_bare_flag_asks_and_its_negation_does_not():
    assert problems(args=["--ranks"], names=ConfigNames(aliases=GONE)) == [
        "ranks (from --ranks): not built yet"
    ]
    assert load_config(Whole, args=["--noranks"], names=ConfigNames(aliases=GONE)) == Whole()


MOVED = {
    "old.count": "part.count",
    "old.way": Unsupported("not built yet"),
    "table": "part.names",
    "first": "second",
}


def test_a_field_that_moved_is_an_error_that_names_its_place_in_every_source(tmp_path):
    said = "old.count is part.count (from {})"
    assert problems(code={"old.count": 1}, names=ConfigNames(moved=MOVED)) == [said.format("code")]
    assert problems(args=["--old.count", "1"], names=ConfigNames(moved=MOVED)) == [said.format("--old.count")]
    assert problems(args=["--old.count=1"], names=ConfigNames(moved=MOVED)) == [said.format("--old.count")]
    assert problems(environ={"MONOLITH_OLD__COUNT": "1"}, names=ConfigNames(moved=MOVED)) == [
        said.format("MONOLITH_OLD__COUNT")
    ]
    path = file(tmp_path, "[old]\ncount = 1\nway = 2\nnone = 3\n[table]\nkey = 4\n")
    assert problems(file=path, names=ConfigNames(moved=MOVED)) == [
        f"old.count is part.count (from {path})",
        f"old.way is gone (from {path}): not built yet",
        f"table.key is part.names (from {path})",
        f"unknown key old (from {path}); the nearest known key is second",
    ]


def test_a_former_path_that_is_an_old_name_is_one_if_it_is_alone(tmp_path):
    aliases = {"num": Renamed("part.count")}
    moved = {"num": "part.count", "old": "second"}
    assert (
        load_config(
            Whole, file=file(tmp_path, "num = 3\n"), names=ConfigNames(aliases=aliases, moved=moved)
        ).part.count
        == 3
    )
    path = file(tmp_path, "num = 3\nold = 4\n")
    assert problems(file=path, names=ConfigNames(aliases=aliases, moved=moved)) == [
        f"num is part.count (from {path})",
        f"old is second (from {path})",
    ]


def test_an_old_name_that_a_table_has_now_is_told_by_its_value():
    aliases = {"part": Renamed("text", beside_table=True)}
    config = load_config(
        Whole, code={"part": "x"}, environ={"MONOLITH_PART__COUNT": "3"}, names=ConfigNames(aliases=aliases)
    )
    assert (config.text, config.part.count) == ("x", 3)


def test_of_two_that_exclude_each_other_the_later_source_has_its_way(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Save:
        steps: int | None = 10
        secs: int | None = None

    exclusive = [("steps", "secs")]
    path = file(tmp_path, "secs = 3\n")
    assert load_config(Save, file=path, names=ConfigNames(exclusive=exclusive)) == Save(steps=None, secs=3)
    assert load_config(
        Save, file=path, args=["--steps", "5"], names=ConfigNames(exclusive=exclusive)
    ) == Save(steps=5)
    both = load_config(Save, code={"steps": 1, "secs": 2}, names=ConfigNames(exclusive=exclusive))
    assert both == Save(steps=1, secs=2)  # for the config itself to refuse
