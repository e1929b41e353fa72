"""Tasks by name: what is found, what is refused, and how settings reach them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train.tasks import Clicks

from monolith.data import DataConfig, KafkaConfig
from monolith.errors import ConfigError, UnknownTaskError
from monolith.train import Task, load_task

KAFKA = KafkaConfig(servers=("h:1",), topics=("t",), group="g")

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from train.tasks import Clicks


@dataclass(frozen=True)
class Tower:
    width: int = 8
    dropout: float = 0.0


@dataclass(frozen=True)
class Sized(Clicks):
    tower: Tower = field(default_factory=Tower)
    optimizer: Literal["adam", "sgd"] = "adam"
    window: timedelta | None = None
    layers: tuple[int, ...] = (8,)


class Plain(Clicks):
    def __init__(self, path: str, rate: float = 0.1, untyped=3) -> None:
        super().__init__()
        object.__setattr__(self, "given", (path, rate, untyped))


def make(dim: int = 4, *, twice: bool = False) -> Clicks:
    return Clicks(dim=2 * dim if twice else dim)


def wrong():
    return 7


ready = Clicks(dim=16)
number = 3


class Other:
    inside = Clicks(dim=5)
"""


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("task_", "shop")):
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "clicks.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "tasks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


# Finding


def test_a_class_is_made_into_a_task() -> None:
    assert load_task("train.tasks:Clicks") == Clicks()


@pytest.mark.parametrize("name", ["shop.tasks:ready", "shop.tasks.ready"])
@pytest.mark.usefixtures("package")
def test_a_name_in_a_module_may_follow_a_colon_or_a_dot(name: str) -> None:
    assert load_task(name) == Clicks(dim=16)


def test_a_name_in_a_file_is_found(file: str) -> None:
    assert load_task(f"{file}:ready") == Clicks(dim=16)
    assert load_task(f"{file}:make") == Clicks(dim=4)
    assert load_task(f"{file}:Other.inside") == Clicks(dim=5)


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "shop_beside.py").write_text("DIM = 9")
    (tmp_path / "main.py").write_text(
        "import shop_beside\nfrom train.tasks import Clicks\ntask = Clicks(dim=shop_beside.DIM)"
    )
    assert load_task(f"{tmp_path}/main.py:task") == Clicks(dim=9)


def test_a_module_of_the_current_folder_is_found(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(file).rename(Path(file).with_name("shop_here.py"))
    monkeypatch.chdir(Path(file).parent)
    assert load_task("shop_here:ready") == Clicks(dim=16)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Clicks", r"^Invalid model name Clicks"),
        ("tasks/clicks.py", "name the task in the file"),
        ("clicks.toml", "clicks.toml is a config file and no task: pass it as --config clicks.toml"),
        (":Clicks", r"write package\.module:Name"),
        ("train.tasks:", r"write package\.module:Name"),
        ("train.tasks:SPEC", "is a BatchSpec"),
        ("train.tasks:DriftConfig", "not a Task; derive it"),
        ("monolith.train:Task", "does not define dataset, model"),
    ],
)
def test_what_names_no_task_is_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_task(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("shopp.tasks:Clicks", "no module 'shopp'"),
        ("train.nothing.Clicks", "no module 'train.nothing'"),
        ("/nowhere/x.py:Clicks", "no file /nowhere/x.py"),
        ("train.tasks:Click", "did you mean 'Clicks'"),
        ("train.tasks:Impressions", "its tasks are: Clicks"),
        ("json:Clicks", "there is no Task in it"),
    ],
)
def test_what_is_not_there_is_a_lookup_error(name: str, says: str) -> None:
    with pytest.raises(UnknownTaskError, match=says) as error:
        load_task(name)
    assert isinstance(error.value, LookupError)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import nothing_of_the_kind",
            r"x\.py:1: ModuleNotFoundError: No module named 'nothing_of_the_kind'",
        ),
        ("a = 1\nb = a / 0", r"x\.py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n  pass", r"x\.py:1: SyntaxError"),
        ("import sys\nsys.exit(3)", r"x\.py:2: SystemExit: 3"),
        (
            "from monolith import FloatFeature\nFloatFeature(mean=14.5)",
            r"x\.py:2: ConfigError: .*mean",
        ),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_an_error_inside_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str, form: str
) -> None:
    (tmp_path / "shop_x.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{tmp_path}/shop_x.py:Clicks" if form == "file" else "shop_x:Clicks"
    with pytest.raises(UnknownTaskError, match=says) as error:
        load_task(name)
    assert error.value.__cause__ is not None


def test_a_function_that_returns_something_else_is_refused(file: str) -> None:
    with pytest.raises(ConfigError, match="returned a int instead of a Task"):
        load_task(f"{file}:wrong")


# Settings


def test_settings_are_typed_by_annotation(file: str) -> None:
    texts = ["dim=8", "dropout=0.5", "optimizer=sgd", "window=10m", "layers=4,2", "tower.width=3"]
    task: Any = load_task(f"{file}:Sized", texts=texts)
    assert (task.dim, task.dropout, task.optimizer, task.layers) == (8, 0.5, "sgd", (4, 2))
    assert task.window.total_seconds() == 600
    assert (task.tower.width, task.tower.dropout) == (3, 0.0)


def test_texts_win_over_the_file_and_later_ones_over_earlier_ones(file: str) -> None:
    settings = {"dim": 2, "tower": {"width": 1, "dropout": 0.2}, "layers": [1]}
    task: Any = load_task(f"{file}:Sized", settings, texts=["dim=3", "tower.width=5", "dim=4"])
    assert (task.dim, task.tower.width, task.tower.dropout, task.layers) == (4, 5, 0.2, (1,))


def test_a_constructor_and_a_function_take_settings_too(file: str) -> None:
    plain: Any = load_task(f"{file}:Plain", texts=["path=a=b", "rate=1", "untyped=5"])
    assert plain.given == ("a=b", 1.0, 5)
    assert load_task(f"{file}:make", {"dim": 3}, texts=["twice=yes"]) == Clicks(dim=6)


def test_a_task_that_is_a_dataclass_is_changed(file: str) -> None:
    assert load_task(f"{file}:ready", texts=["batches=2"]) == Clicks(dim=16, batches=2)


def test_one_that_is_none_takes_no_settings(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "from monolith.train import Task\nclass T(Task):\n  def dataset(self, mode): ...\n"
        "  def model(self): ...\ntask = T()"
    )
    assert isinstance(load_task(f"{tmp_path}/x.py:task"), Task)
    with pytest.raises(ConfigError, match="takes no settings, got dim"):
        load_task(f"{tmp_path}/x.py:task", texts=["dim=1"])
    with pytest.raises(ConfigError, match="it takes no keys"):
        load_task(f"{tmp_path}/x.py:T", texts=["dim=1"])


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["batchs=3"], r"unknown key batchs \(from 'batchs=3'\); the nearest known key is batches"),
        (["tower.wdth=3"], "the nearest known key is tower.width"),
        (["dim=big"], "dim .*expected int, got 'big'"),
        (["optimizer=adagrad"], "one of 'adam', 'sgd'"),
        (["dim"], "written key=value, got 'dim'"),
        (["=3"], "written key=value"),
    ],
)
def test_what_is_no_setting_is_refused(file: str, texts: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_task(f"{file}:Sized", texts=texts)


def test_all_problems_are_reported_at_once_with_their_places(file: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_task(f"{file}:Sized", {"dim": "x"}, texts=["bached=1"], source="[task] of run.toml")
    assert "dim (from [task] of run.toml)" in str(error.value)
    assert "unknown key bached" in str(error.value)


def test_a_setting_that_must_be_given_says_how(file: str) -> None:
    with pytest.raises(ConfigError, match=r"path is required.*--set path="):
        load_task(f"{file}:Plain")


# What a run hands over


HANDED = """
from dataclasses import dataclass

from train.tasks import Clicks

from monolith.data import DataConfig


@dataclass(frozen=True)
class One(Clicks):
    files: DataConfig = DataConfig(path="own", pattern="*.csv")


@dataclass(frozen=True)
class Two(One):
    more: DataConfig | None = None


@dataclass(frozen=True)
class Named(Two):
    data: DataConfig | None = None


def made(where: DataConfig, dim: int = 4) -> Clicks:
    return One(files=where, dim=dim)


ready = One()
"""


@pytest.fixture
def handed(tmp_path: Path) -> str:
    path = tmp_path / "handed.py"
    path.write_text(HANDED)
    return str(path)


@pytest.mark.parametrize("name", ["One", "made", "ready"])
def test_a_config_of_the_run_goes_to_the_setting_of_its_type(handed: str, name: str) -> None:
    data = DataConfig(path="runs")
    task: Any = load_task(f"{handed}:{name}", inputs={"data": data})
    assert task.files == data


def test_settings_win_over_single_fields_of_what_is_handed_over(handed: str) -> None:
    data = DataConfig(path="runs", pattern="*.parquet")
    settings = {"files": {"path": "mine"}, "dim": 2}
    task: Any = load_task(f"{handed}:One", settings, inputs={"data": data})
    assert (task.files, task.dim) == (DataConfig(path="mine", pattern="*.parquet"), 2)


def test_of_two_settings_of_a_type_the_one_with_the_name_of_the_group_takes_it(handed: str) -> None:
    data = DataConfig(path="runs")
    task: Any = load_task(f"{handed}:Named", inputs={"data": data})
    assert (task.data, task.more) == (data, None)
    with pytest.raises(ConfigError, match="files and more are both of type DataConfig; call the one"):
        load_task(f"{handed}:Two", inputs={"data": data})


def test_what_no_setting_takes_is_an_error_that_says_what_to_declare(handed: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_task(f"{handed}:One", inputs={"kafka": KAFKA})
    assert "the run has a group kafka, but the task has no setting of type KafkaConfig" in str(error.value)
    assert "declare one, such as `kafka: KafkaConfig | None = None`" in str(error.value)
