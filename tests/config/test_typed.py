import enum
import json
import tomllib
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith.config import ConfigNames, config_from_mapping, load_config, to_dict, to_toml
from monolith.errors import ConfigError


class Mode(enum.Enum):
    TRAIN = "t"
    EVAL = "e"


ShardCount = NewType("ShardCount", int)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One table."""

    dim: int
    """Floats per embedding."""
    name: str = "item"
    capacity_bytes: int = 0
    expire_after: timedelta | None = timedelta(weeks=9)

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ConfigError(f"dim must be at least 1, got {self.dim}")


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    rate: float = 0.1
    accumulator: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ftrl:
    rate: float = 0.2
    beta: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    table: TableConfig
    steps: int = 10
    learning_rate: float = 0.5
    """Step size."""
    use_gpu: bool = False
    mode: Mode = Mode.TRAIN
    combiner: Literal["sum", "mean", 3] = "sum"
    model_dir: Path = Path("runs")
    hosts: tuple[str, ...] = ()
    window: tuple[int, float] = (1, 2.0)
    sizes: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    side: TableConfig | None = None
    tables: dict[str, TableConfig] = field(default_factory=dict)
    stages: tuple[TableConfig, ...] = ()
    optimizer: Adagrad | Ftrl = Ftrl()
    limit: int | str | None = None
    shards: Annotated[ShardCount, "how many"] = ShardCount(1)
    anything: Any = None
    derived: int = field(default=0, init=False)


MINIMAL = {"table": {"dim": 4}}


def problems_of(call) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        call()
    return str(raised.value).split("\n  - ")[1:]


def from_flags(*args: str, cls: type = RunConfig, **more) -> Any:
    return load_config(cls, args=args, **more)


# Values


def test_defaults_fill_what_is_not_given():
    assert config_from_mapping(RunConfig, MINIMAL) == RunConfig(table=TableConfig(dim=4))


@pytest.mark.parametrize(
    ("key", "plain", "typed"),
    [
        ("learning_rate", 1, 1.0),
        ("learning_rate", 0.25, 0.25),
        ("use_gpu", True, True),
        ("mode", "EVAL", Mode.EVAL),
        ("mode", "eval", Mode.EVAL),
        ("mode", "e", Mode.EVAL),
        ("combiner", "mean", "mean"),
        ("combiner", 3, 3),
        ("model_dir", "/data", Path("/data")),
        ("hosts", ["a", "b"], ("a", "b")),
        ("window", [3, 4], (3, 4.0)),
        ("sizes", [1, 2], [1, 2]),
        ("weights", {"a": 1}, {"a": 1.0}),
        ("side", {"dim": 2}, TableConfig(dim=2)),
        ("side", None, None),
        ("tables", {"user": {"dim": 2}}, {"user": TableConfig(dim=2)}),
        ("stages", [{"dim": 2}], (TableConfig(dim=2),)),
        ("limit", 5, 5),
        ("limit", "all", "all"),
        ("limit", "none", None),
        ("shards", 8, 8),
        ("anything", {"x": [1, {"y": 2}]}, {"x": [1, {"y": 2}]}),
    ],
)
def test_each_kind_of_field_reads_its_plain_form(key, plain, typed):
    config = config_from_mapping(RunConfig, {**MINIMAL, key: plain})
    assert getattr(config, key) == typed
    assert type(getattr(config, key)) is type(typed)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (600, timedelta(minutes=10)),
        (0.5, timedelta(milliseconds=500)),
        ("10m", timedelta(minutes=10)),
        ("9w", timedelta(weeks=9)),
        ("none", None),
        (None, None),
    ],
)
def test_a_number_is_seconds_and_text_a_duration(value, expected):
    config = config_from_mapping(TableConfig, {"dim": 1, "expire_after": value})
    assert config.expire_after == expected


def test_a_field_named_bytes_reads_sizes_and_others_do_not():
    assert config_from_mapping(TableConfig, {"dim": 1, "capacity_bytes": "64GiB"}).capacity_bytes == 64 << 30
    assert config_from_mapping(TableConfig, {"dim": 1, "capacity_bytes": 7}).capacity_bytes == 7
    assert problems_of(lambda: config_from_mapping(TableConfig, {"dim": "64GiB"})) == [
        "dim (from mapping): expected int, got str '64GiB'"
    ]


def test_a_table_of_one_of_several_classes_is_told_by_its_keys_or_its_type():
    def read(optimizer):
        return config_from_mapping(RunConfig, {**MINIMAL, "optimizer": optimizer}).optimizer

    assert read({"accumulator": 1.0}) == Adagrad(accumulator=1.0)
    assert read({"type": "Adagrad"}) == Adagrad()
    assert read({"rate": 0.7}) == Ftrl(rate=0.7)  # the default is one
    assert problems_of(lambda: read({"type": "Adam"})) == [
        "optimizer.type (from mapping): expected one of Adagrad, Ftrl, got str 'Adam'"
    ]
    [problem] = problems_of(lambda: read({"gamma": 1}))
    assert "fits none of Adagrad, Ftrl; say which with type" in problem


def test_a_nested_default_keeps_what_is_not_set():
    @dataclass(frozen=True)
    class Holder:
        table: TableConfig = TableConfig(dim=8, name="user")

    assert config_from_mapping(Holder, {"table": {"capacity_bytes": 1}}).table == TableConfig(
        dim=8, name="user", capacity_bytes=1
    )


# Problems


def test_an_unknown_key_names_the_nearest_known_one_its_path_and_its_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[table]\ndim = 4\ncapacity_byte = 1\n")
    assert problems_of(lambda: load_config(RunConfig, file=file)) == [
        f"unknown key table.capacity_byte (from {file}); the nearest known key is table.capacity_bytes"
    ]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("steps", "7", "expected int, got str '7'"),
        ("steps", 7.0, "expected int, got float 7.0"),
        ("steps", True, "expected int, got bool True"),
        ("steps", None, "expected int, got NoneType None"),
        ("steps", {}, "expected int, got a table"),
        ("learning_rate", True, "expected float, got bool True"),
        ("use_gpu", 1, "expected bool, got int 1"),
        ("mode", "test", "expected one of TRAIN, EVAL, got str 'test'"),
        ("combiner", "max", "expected one of 'sum', 'mean', 3, got str 'max'"),
        ("model_dir", 3, "expected path, got int 3"),
        ("hosts", "a", "expected list of str, got str 'a'"),
        ("window", [1], "expected list of 2 (int, float), got 1 values"),
        ("weights", [1], "expected table from str to float, got list [1]"),
        ("table", 4, "expected table of TableConfig, got int 4"),
        ("limit", 1.5, "expected int or str or None, got float 1.5"),
    ],
)
def test_a_value_of_the_wrong_type_says_where_what_was_expected_and_what_was_found(key, value, problem):
    assert problems_of(lambda: config_from_mapping(RunConfig, {**MINIMAL, key: value}, "x.toml")) == [
        f"{key} (from x.toml): {problem}"
    ]


def test_problems_inside_lists_and_tables_have_their_full_path():
    data = {
        "table": {"dim": 1},
        "sizes": [1, "x"],
        "stages": [{"dim": 1}, {"dim": "y"}],
        "tables": {"user": {"dims": 1, "dim": 1}},
        "weights": {"a": "z"},
    }
    assert [p.split(":")[0] for p in problems_of(lambda: config_from_mapping(RunConfig, data))] == [
        "sizes[1] (from mapping)",
        "weights.a (from mapping)",
        "unknown key tables.user.dims (from mapping); the nearest known key is tables.user.dim",
        "stages[1].dim (from mapping)",
    ]


def test_a_missing_value_says_how_to_set_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("")
    [problem] = problems_of(lambda: load_config(RunConfig, file=file, environ={}, args=[]))
    assert problem == (
        f"table.dim is required: expected int; set table.dim in {file} or MONOLITH_TABLE__DIM or --table.dim"
    )


def test_what_a_config_itself_refuses_is_reported_with_its_path():
    data = {"table": {"dim": 0}, "side": {"dim": -1}, "steps": "x"}
    with pytest.raises(ConfigError) as raised:
        config_from_mapping(RunConfig, data)
    assert str(raised.value) == (
        "cannot read RunConfig: 3 problems"
        "\n  - table (from mapping): dim must be at least 1, got 0"
        "\n  - steps (from mapping): expected int, got str 'x'"
        "\n  - side (from mapping): dim must be at least 1, got -1"
    )
    assert isinstance(raised.value.__cause__, ConfigError)


def test_problems_of_all_sources_come_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('stepz = 1\nmode = "rest"\n')
    problems = problems_of(
        lambda: load_config(
            RunConfig,
            file=file,
            environ={"MONOLITH_USE_GPU": "maybe", "MONOLITH_STEP": "1", "PATH": "/bin"},
            args=["--table.dim", "four", "--table.dimm", "4"],
            code={"hosts": 7},
        )
    )
    assert problems == [
        "unknown environment variable MONOLITH_STEP; the nearest known one is MONOLITH_STEPS",
        "unknown flag --table.dimm; the nearest known one is --table.dim",
        f"unknown key stepz (from {file}); the nearest known key is steps",
        "table.dim (from --table.dim): expected int, got 'four'",
        "use_gpu (from MONOLITH_USE_GPU): expected bool, got 'maybe'",
        f"mode (from {file}): expected one of TRAIN, EVAL, got str 'rest'",
        "hosts (from code): expected list of str, got int 7",
    ]


# Order


def test_code_wins_over_flags_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "run.json"
    sources = {}
    seen = []
    file.write_text(json.dumps({"table": {"dim": 1}}))
    for name, source in {
        "file": {"file": file},
        "environ": {"environ": {"MONOLITH_TABLE__DIM": "2"}},
        "args": {"args": ["--table.dim", "3"]},
        "code": {"code": {"table.dim": 4}},
    }.items():
        sources |= source
        seen.append((name, load_config(RunConfig, **sources).table.dim))
    assert seen == [("file", 1), ("environ", 2), ("args", 3), ("code", 4)]


def test_sources_meet_key_by_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[table]\ndim = 1\nname = "a"\n[weights]\nx = 1.0\ny = 2.0\n')
    config = load_config(
        RunConfig,
        file=file,
        environ={"MONOLITH_TABLE__NAME": "b", "MONOLITH_WEIGHTS__X": "5"},
        args=["--table.capacity-bytes", "1KiB"],
    )
    assert config.table == TableConfig(dim=1, name="b", capacity_bytes=1024)
    assert config.weights == {"x": 5.0, "y": 2.0}


def test_code_may_hand_over_typed_values_and_whole_configs():
    side = TableConfig(dim=9)
    config = load_config(
        RunConfig,
        code={"table": TableConfig(dim=2), "side": side, "mode": Mode.EVAL, "model_dir": Path("x")},
    )
    assert config.side is side
    assert (config.table.dim, config.mode, config.model_dir) == (2, Mode.EVAL, Path("x"))


# Environment


def test_variables_nest_with_two_underscores():
    environ = {
        "MONOLITH_TABLE__DIM": "4",
        "MONOLITH_TABLE__EXPIRE_AFTER": "none",
        "MONOLITH_SIDE__DIM": "5",
        "MONOLITH_TABLES__USER__DIM": "6",
        "MONOLITH_USE_GPU": "Yes",
        "MONOLITH_LEARNING_RATE": "1e-3",
        "MONOLITH_HOSTS": "a, b",
        "MONOLITH_SIZES": "[1, 2]",
        "MONOLITH_WEIGHTS": "a=1,b=2",
        "MONOLITH_OPTIMIZER__TYPE": "Adagrad",
        "MONOLITH_OPTIMIZER__RATE": "3",
        "MONOLITH_COMBINER": "3",
        "MONOLITH_LIMIT": "12",
    }
    config = load_config(RunConfig, environ=environ)
    assert config.table == TableConfig(dim=4, expire_after=None)
    assert config.side == TableConfig(dim=5)
    assert config.tables == {"user": TableConfig(dim=6)}
    assert (config.use_gpu, config.learning_rate, config.hosts) == (True, 0.001, ("a", "b"))
    assert (config.sizes, config.weights) == ([1, 2], {"a": 1.0, "b": 2.0})
    assert config.optimizer == Adagrad(rate=3.0)
    assert (config.combiner, config.limit) == (3, 12)


def test_a_variable_may_hold_a_whole_table_and_another_refine_it():
    environ = {"MONOLITH_TABLE": '{"dim": 4, "name": "a"}', "MONOLITH_TABLE__NAME": "b"}
    assert load_config(RunConfig, environ=environ).table == TableConfig(dim=4, name="b")


def test_malformed_json_in_a_variable_is_a_problem_with_its_name():
    [problem] = problems_of(lambda: load_config(RunConfig, environ={"MONOLITH_TABLE": "{dim"}))
    assert problem.startswith("table (from MONOLITH_TABLE): malformed JSON")


def test_variables_that_are_not_config_can_be_named():
    environ = {"MONOLITH_VECTORS": "x", "MONOLITH_TABLE__DIM": "1", "MONOLITHIC": "y"}
    assert (
        load_config(RunConfig, environ=environ, names=ConfigNames(ignore=["MONOLITH_VECTORS"])).table.dim == 1
    )
    assert len(problems_of(lambda: load_config(RunConfig, environ=environ))) == 1


def test_another_prefix_reads_other_variables():
    environ = {"SERVE_TABLE__DIM": "1", "MONOLITH_STEPS": "x"}
    assert load_config(RunConfig, environ=environ, names=ConfigNames(prefix="SERVE")).table.dim == 1


# Flags


def test_flags_are_dotted_and_take_either_dash():
    config = from_flags("--table.dim=4", "--table.capacity_bytes", "2MB", "--learning-rate", "-0.5")
    assert config.table == TableConfig(dim=4, capacity_bytes=2_000_000)
    assert config.learning_rate == -0.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--use-gpu"], True),
        (["--use-gpu", "false"], False),
        (["--no-use-gpu"], False),
        (["--use_gpu=on"], True),
    ],
)
def test_a_switch_needs_no_value(words, expected):
    assert from_flags(*words, code=MINIMAL).use_gpu is expected


def test_lists_take_several_words_and_dicts_pairs():
    config = from_flags("--hosts", "a", "b", "--sizes", "1,2", "--weights", "x=1", "y=2", code=MINIMAL)
    assert (config.hosts, config.sizes, config.weights) == (("a", "b"), [1, 2], {"x": 1.0, "y": 2.0})


def test_an_optional_table_is_made_by_its_flags():
    assert from_flags("--side.dim", "3", code=MINIMAL).side == TableConfig(dim=3)
    assert from_flags(code=MINIMAL).side is None


def test_tables_without_fixed_names_are_given_as_json():
    config = from_flags(
        "--tables", '{"user": {"dim": 3}}', "--optimizer", '{"type": "Adagrad"}', code=MINIMAL
    )
    assert config.tables == {"user": TableConfig(dim=3)}
    assert config.optimizer == Adagrad()


def test_none_takes_back_what_a_lower_source_set():
    config = from_flags("--table.expire-after", "none", "--table.dim", "1")
    assert config.table.expire_after is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--steps"], "steps (from --steps): takes one value, int, got none"),
        (["--steps", "1", "2"], "steps (from --steps): takes one value, int, got 2"),
        (["--no-use-gpu", "x"], "use_gpu (from --no-use-gpu): takes one value, bool, got 2"),
        (["stray"], "unexpected argument 'stray'; values follow a flag, as in --name value"),
        (["--weights", "x"], "weights (from --weights): expected key=value, got 'x'"),
    ],
)
def test_a_flag_used_wrongly_says_how(words, problem):
    assert problems_of(lambda: from_flags(*words, code=MINIMAL)) == [problem]


def test_help_shows_every_flag_with_its_text_and_default(capsys):
    with pytest.raises(SystemExit) as exited:
        from_flags("--help")
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for expected in [
        "--table.dim INT",
        "Floats per embedding. (required)",
        "Step size. (default: 0.5)",
        "{train,eval}",
        "(default: 9w)",
        "--no-use-gpu Turns it off.",
    ]:
        assert expected in shown


# Files


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.toml", "x = = 1", r"a\.toml: .*line 1"),
        ("a.json", "{", r"a\.json: .*line 1"),
        ("a.json", "[1]", "expected an object, got list"),
        ("a.json", '{"steps": 1, "steps": 2}', "'steps' is given twice"),
        ("a.yaml", "x: 1", r"ends in \.toml or \.json"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_config(RunConfig, file=tmp_path / name)


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(RunConfig, file=tmp_path / "no.toml")


def test_what_is_not_a_dataclass_cannot_be_read():
    with pytest.raises(ConfigError, match="not a dataclass"):
        load_config(int)


def test_annotations_that_do_not_exist_at_run_time_are_named():
    @dataclass(frozen=True)
    class Odd:
        x: "Nowhere"  # noqa: F821

    with pytest.raises(ConfigError, match="'Nowhere' is not defined"):
        config_from_mapping(Odd, {})


# Printing


FULL = RunConfig(
    table=TableConfig(dim=4, expire_after=None, capacity_bytes=1 << 36),
    learning_rate=float("inf"),
    use_gpu=True,
    mode=Mode.EVAL,
    combiner=3,
    model_dir=Path("/data/a b"),
    hosts=("a", 'quo"te\n\x7f', "ünï 🎉"),
    sizes=[1, -2],
    weights={"a.b": 0.1, "c d": 1e30, "": 2.0},
    side=TableConfig(dim=1, expire_after=timedelta(seconds=90)),
    tables={"user": TableConfig(dim=2)},
    stages=(TableConfig(dim=1), TableConfig(dim=2)),
    optimizer=Adagrad(accumulator=0.5),
    limit="some",
    anything={"deep": [1, {"x": "y"}], "empty": {}},
)


@pytest.mark.parametrize(
    "config", [RunConfig(table=TableConfig(dim=1)), FULL, replace(FULL, limit=None, optimizer=Ftrl())]
)
def test_every_config_survives_printing(config, tmp_path):
    plain = to_dict(config)
    assert config_from_mapping(RunConfig, plain) == config
    assert config_from_mapping(RunConfig, json.loads(json.dumps(plain))) == config
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load_config(RunConfig, file=tmp_path / "run.toml") == config


def test_printing_is_plain_and_spells_out_defaults():
    assert to_toml(TableConfig(dim=4)).splitlines() == [
        "dim = 4",
        'name = "item"',
        "capacity_bytes = 0",
        'expire_after = "9w"',
    ]
    assert to_toml(replace(FULL, optimizer=Ftrl())).count("[optimizer]\ntype = ") == 1


def test_text_that_would_read_back_as_none_is_refused():
    with pytest.raises(ConfigError, match=r"RunConfig\.limit.*told from None"):
        to_dict(RunConfig(table=TableConfig(dim=1), limit="none"))


def test_a_value_without_a_plain_form_is_refused():
    with pytest.raises(ConfigError, match=r"RunConfig\.anything: object has no plain form"):
        to_toml(RunConfig(table=TableConfig(dim=1), anything=object()))


@dataclass(frozen=True, kw_only=True)
class Journey:
    from_: str = "here"
    """Where it begins."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    journey: Journey = field(default_factory=Journey)
    from_: int = 1


def test_a_field_that_stands_for_a_word_of_python_has_that_word_as_its_key(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    plan = Plan(journey=Journey(from_="there"), from_=2)
    path.write_text(to_toml(plan))
    assert tomllib.loads(path.read_text()) == {"from": 2, "journey": {"from": "there"}}
    assert load_config(Plan, file=path) == plan
    assert load_config(Plan, args=["--from", "2", "--journey.from", "there"]) == plan
    assert load_config(Plan, environ={"MONOLITH_FROM": "2", "MONOLITH_JOURNEY__FROM": "there"}) == plan
    with pytest.raises(ConfigError, match=r"unknown key from_ .*nearest known key is from$"):
        config_from_mapping(Plan, {"from_": 2})
    with pytest.raises(SystemExit):
        load_config(Plan, args=["--help"])
    assert "--journey.from STR" in capsys.readouterr().out


PLAIN = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), PLAIN, max_size=4))
def test_any_plain_data_survives_toml(data):
    from monolith.config.text import write_toml

    assert tomllib.loads(write_toml(data)) == data
