"""A task in a file: the same as the class that a person would write."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime.config_files import write_clicks, write_project

from monolith.checkpoint.folder.manifest import read_manifest
from monolith.checkpoint.offline.reading import find_id
from monolith.cli.main import main
from monolith.data import Pipeline
from monolith.data.config import DataConfig, DataSplit
from monolith.errors import ConfigError
from monolith.feature import FeatureSpec, FloatFeature, IdFeature, Label, SequenceFeature
from monolith.model import DeepFM
from monolith.model.by_name import ModelConfig
from monolith.runtime import Trainer
from monolith.runtime.config import CONFIG_TASK
from monolith.runtime.config_loading import read_run
from monolith.runtime.config_task import ConfigTask
from monolith.runtime.task_data import data_of
from monolith.train import Mode, TrainConfig, load_task

SPEC = FeatureSpec(
    features={"user": IdFeature(kind="string"), "price": FloatFeature()},
    labels={"click": Label()},
    group="user",
)


def task_of(folder: Path, **settings: object) -> ConfigTask:
    write_clicks(folder / "clicks.csv", 300)
    data = DataConfig(path=str(folder / "clicks.csv"), split=DataSplit(evaluate=0.2))
    network = ModelConfig(type="deepfm", settings={"dim": 4, "hidden": (8,)})
    return ConfigTask(**{"features": SPEC, "network": network, "data": data, "batch_size": 50, **settings})  # type: ignore[arg-type]


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_file_trains_evaluates_and_predicts_without_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_project(tmp_path, records=2000))
    assert main(["train", "--config", config, "--epochs", "3", "--quiet", "--json"]) == 0
    report = said(capsys)
    assert report["step"] == 48  # about 1600 records are trained on, three times
    assert main(["evaluate", "--config", config, "--quiet", "--json"]) == 0
    found = said(capsys)
    assert 300 < found["examples"] < 500  # type: ignore[operator]
    metrics = found["metrics"]
    assert set(metrics) == {"click/auc", "click/log_loss", "click/calibration", "click/gauc", "loss"}  # type: ignore[call-overload]
    assert metrics["click/auc"] > 0.75  # type: ignore[index]
    to = str(tmp_path / "predictions.csv")
    words = ["predict", "--config", config, "--columns", "user,price", "--to", to, "--quiet", "--json"]
    assert main(words) == 0
    assert said(capsys)["examples"] == found["examples"]
    header, first, *_ = Path(to).read_text().splitlines()
    assert header == "prediction.click,label.click,user,price"
    assert len(first.split(",")[2]) == 4  # a text as it was, zeros included
    assert main(["checkpoint", "inspect", config, "--json"]) == 0
    assert said(capsys)["step"] == 48
    assert main(["checkpoint", "list", config, "--json"]) == 0
    assert said(capsys)["run"] == str(tmp_path / "run")


def test_quiet_commands_print_their_result_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_project(tmp_path, more="evaluate = { every_steps = 5 }\n"))
    to = ["--to", str(tmp_path / "found.csv")]
    for words, result in (
        (["train", "--config", config, "--steps", "10"], "deepfm\n  ended "),
        (["evaluate", "--config", config], "deepfm: "),
        (["predict", "--config", config, *to], ""),
        (["export", str(tmp_path / "run"), "--config", config], ""),
        (["evaluate", "insight", str(tmp_path / "run"), "--config", config], None),
    ):
        assert main([*words, "--quiet"]) == 0
        out, err = capsys.readouterr()
        assert err == "", words
        assert result is None or (out.startswith(result) and bool(out) == bool(result)), out
    assert main(["train", "--config", config, "--steps", "1", "--quiet", "--log-level", "info"]) == 0
    assert "INFO" in capsys.readouterr().err  # who asks for more gets it


def test_a_run_warns_once_of_each_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_project(tmp_path, more="epochs = 3\nevaluate = { every_steps = 4 }\n")
    config.write_text(
        config.read_text()
        .replace("[labels.click]", '[features.color]\nkind = "string"\n\n[labels.click]')
        .replace('group = "user"', 'group = "user"\noptional = ["color"]')
    )
    header, *lines = (tmp_path / "clicks.csv").read_text().splitlines()
    for number in range(0, len(lines), 20):  # no label, or no price
        user, item, tags, price, when, click = lines[number].split(",")
        if number % 40:
            price = ""
        else:
            click = ""
        lines[number] = ",".join([user, item, tags, price, when, click])
    (tmp_path / "clicks.csv").write_text("\n".join([header, *lines]) + "\n")
    assert main(["train", "--config", str(config), "--quiet", "--json"]) == 0
    err = [line.partition(" WARNING ")[2] for line in capsys.readouterr().err.splitlines()]
    *once, counted = err
    assert sum("has no column 'color'" in line for line in once) == 1
    assert sum("label 'click' is empty" in line for line in once) == 2  # the first one, and a count
    assert sum("have no number in these features: price" in line for line in once) == 1
    assert len(once) == 4
    assert "warnings of one cause are shown once; there were" in counted


def test_what_is_to_be_predicted_needs_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_project(tmp_path))
    assert main(["train", "--config", config, "--steps", "2", "--quiet", "--json"]) == 0
    write_clicks(tmp_path / "new.csv", 70, label=False)
    text = Path(config).read_text()
    Path(config).write_text(text.replace("[data]", f'[data]\npredict = "{tmp_path}/new.csv"'))
    capsys.readouterr()
    assert main(["predict", "--config", config, "--to", str(tmp_path / "p.csv"), "--quiet", "--json"]) == 0
    assert said(capsys)["examples"] == 70


def test_a_checkpoint_is_measured_on_what_nothing_was_chosen_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_project(tmp_path))
    text = Path(config).read_text()
    Path(config).write_text(text.replace("[data]", f'[data]\npredict = "{tmp_path}/new.csv"'))
    write_clicks(tmp_path / "new.csv", 70)
    assert main(["train", "--config", config, "--steps", "2", "--quiet", "--json"]) == 0
    capsys.readouterr()
    words = ["evaluate", "--config", config, "--part", "predict", "--quiet", "--json"]
    assert main(words) == 0
    assert said(capsys)["examples"] == 70
    write_clicks(tmp_path / "new.csv", 70, label=False)
    assert main(words) == 2
    assert "label" in capsys.readouterr().err
    assert main([*words, "--follow"]) == 2
    assert "leave --part out" in capsys.readouterr().err


def test_the_file_is_what_a_python_user_would_write(tmp_path: Path) -> None:
    run = read_run(write_project(tmp_path), {})
    assert run.job.task == CONFIG_TASK
    task = load_task(CONFIG_TASK, run.task, inputs=run.inputs)
    assert isinstance(task, ConfigTask)
    assert task == ConfigTask(
        features=run.feature_spec,  # type: ignore[arg-type]
        network=ModelConfig.from_dict(run.model),
        data=run.data,  # type: ignore[arg-type]
        batch_size=100,
    )


def test_a_task_of_ones_own_may_take_the_model_of_the_file(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from monolith.runtime.config_task import ConfigTask\n"
        "class Own(ConfigTask):\n"
        "    def metrics(self, mode): return ('auc',)\n"
    )
    run = read_run(write_project(tmp_path), {}, code={"job.task": f"{own}:Own"})
    task = load_task(run.job.task or "", run.task, inputs=run.inputs)
    assert task.metrics(Mode.TRAIN) == ("auc",)


def test_the_model_is_the_named_one_with_its_first_weights_of_the_runs_seed(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    torch.manual_seed(1)
    first, again = task.model(), task.model()
    assert isinstance(first, DeepFM)
    assert first.spec == SPEC
    torch.manual_seed(2)
    other = task.model()
    weights = [torch.cat([one.flatten() for one in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_examples_are_grouped_as_the_features_say(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    batch = next(iter(task.dataset(Mode.TRAIN)))
    groups = task.groups(batch)
    assert groups is not None
    assert groups.tolist() == batch.ids["user"].flat_values.tolist()
    assert "gauc" in task.metrics(Mode.TRAIN)["click"]  # type: ignore[call-overload]


def test_training_and_evaluation_share_no_record(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    counts = {mode: sum(len(batch) for batch in task.dataset(mode)) for mode in Mode}
    assert counts[Mode.TRAIN] + counts[Mode.EVALUATE] == 300
    assert counts[Mode.PREDICT] == counts[Mode.EVALUATE]
    sizes = [len(batch) for batch in task.dataset(Mode.TRAIN)]
    assert set(sizes[:-1]) == {50}


def test_a_data_service_reads_the_files_with_the_types_of_the_features(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    found = data_of(task)
    (read,) = Pipeline(found.open_split(str(tmp_path / "clicks.csv"))).rebatch(300)
    assert set(read.columns) == {"user", "price", "click"}
    assert all(len(text) == 4 for (text,) in read.strings("user"))  # 0007, and not 7


SEVERAL = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "item": IdFeature(),
        "seen": SequenceFeature(column="item", length=2, shares="item", combiner="mean"),
        "price": FloatFeature(),
    },
    labels={"click": Label(), "early": Label(column="time", at_least=1_700_000_100)},
)
HISTORY = replace(
    SEVERAL,
    features={**SEVERAL.features, "seen": SequenceFeature(column="item", length=2, shares="item")},
    labels={"click": Label()},
)


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        (replace(SEVERAL, labels={"click": Label()}), {"type": "dcnv2", "hidden": [8]}),
        (replace(SEVERAL, labels={"click": Label()}), {"type": "dlrm", "bottom": [4], "top": [8]}),
        (replace(SEVERAL, labels={"click": Label()}), {"type": "ffm", "pairs": [["user", "item", 4]]}),
        (SEVERAL, {"type": "mmoe", "num_experts": 2, "experts": [8]}),
        (HISTORY, {"type": "din", "attention": [4], "hidden": [8]}),
    ],
    ids=lambda given: given["type"] if isinstance(given, dict) else "",
)
def test_every_ready_model_trains_and_evaluates(
    tmp_path: Path, spec: FeatureSpec, model: dict[str, object]
) -> None:
    task = task_of(tmp_path, features=spec, network=ModelConfig.from_dict(model))
    trainer = Trainer(task, TrainConfig(model_dir=str(tmp_path / "run"), summary_every_steps=None))
    assert trainer.train().step == 5
    found = trainer.evaluate()
    assert {f"{head}/auc" for head in spec.labels} < found.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dim = 4", "dimm = 4", "unknown key model.dimm .*the nearest known key is model.dim"),
        ("hidden = [8]", 'hidden = "wide"', "model.hidden.*expected list of int"),
        ('type = "deepfm"', 'type = "deepfn"', "there is no ready model 'deepfn'; did you mean 'deepfm'"),
        ('type = "deepfm"', "", "model.type is required: one of deepfm, dcnv2"),
        ('"deepfm"', '"two-tower"', "did you mean 'two_tower'"),
        ('"deepfm"', '"two_tower"', "model.item is required"),
        (
            "batch_size",
            "batchsize",
            "task.batchsize .*unknown key; the.*nearest.*batch_size",
        ),
        ('type = "Adagrad"', 'type = "Adagard"', "model.optimizer.type.*expected one of Adagrad"),
    ],
)
def test_a_problem_is_reported_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    config = write_project(tmp_path, records=10)
    config.write_text(config.read_text().replace(old, new, 1))
    assert main(["train", "--config", str(config)]) == 2
    assert re.search(message, capsys.readouterr().err, flags=re.DOTALL)


def test_a_model_alone_is_no_task(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\ntype = "deepfm"\n')
    with pytest.raises(ConfigError, match=r"(?s)reads features; name some.*reads files; say which"):
        read_run(tmp_path / "run.toml", {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"batch_size": 0}, "batch_size must be at least 1"), ({"dense_rate": 0.0}, "dense_rate must be more")],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of(tmp_path, **settings)


def tables_of(prefix: object) -> dict[str, int]:
    """Return the tables of a checkpoint with their rows."""
    tables = read_manifest(str(prefix)).manifest.parts["tables"]["tables"]
    return {name: entry["rows"] for name, entry in tables.items()}


def test_equal_slots_may_live_in_one_table_with_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = "--train.tables.merge-equal-slots=true"
    apart, together = (write_fids(tmp_path / name) for name in ("apart", "together"))
    for config, flags in ((apart, []), (together, [merged])):
        assert main(["train", "--config", config, "--max-steps", "4", "--quiet", *flags]) == 0
    capsys.readouterr()
    reports = []
    # Each goes on with the other's setting: a checkpoint restores either way.
    for config, flags in ((apart, [merged]), (together, [])):
        assert main(["train", "--config", config, "--quiet", "--json", *flags]) == 0
        reports.append(said(capsys))
        assert main(["evaluate", "--config", config, "--quiet", "--json"]) == 0
        reports.append(said(capsys))
    first, first_evaluated, second, second_evaluated = reports
    assert first["loss"] == second["loss"]
    assert first_evaluated["metrics"] == second_evaluated["metrics"]
    rows, rows_apart = tables_of(first["checkpoint"]), tables_of(second["checkpoint"])
    assert sorted(rows_apart) == ["item", "price_level", "tags", "user", "user_tag"]
    (one,) = rows  # all five have the same dims and optimizers
    assert rows[one] == sum(rows_apart.values())


def write_fids(folder: Path) -> str:
    folder.mkdir()
    config = write_project(folder)
    text = config.read_text().replace("[examples]", "[examples]\nfids = true")
    config.write_text(text.replace("[train]", "[train]\ndeterministic = true"))
    return str(config)


def test_a_run_may_store_embeddings_as_bfloat16_and_a_checkpoint_restores_with_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def values(checkpoint: str) -> list[float]:
        rows = [find_id(checkpoint, "item", item) for item in range(50)]
        return [
            value for row in rows if row.status == "found" for one in row.segments for value in one.values
        ]

    def exact(checkpoint: str) -> bool:
        held = torch.tensor(values(checkpoint))
        return torch.equal(held, held.bfloat16().float())

    config = str(write_project(tmp_path))
    words = ["--quiet", "--json", "--log-level", "info"]
    for steps, dtype in ((2, "bfloat16"), (4, "bfloat16"), (6, "float32"), (8, "bfloat16")):
        caplog.clear()
        chosen = ["--max-steps", str(steps), "--train.tables.embedding_dtype", dtype]
        assert main(["train", "--config", config, *words, *chosen]) == 0
        checkpoint = str(said(capsys)["checkpoint"])
        assert values(checkpoint)
        assert exact(checkpoint) == (dtype == "bfloat16")
        assert ("rounded to the nearest" in caplog.text) == (steps == 8)  # the one before was float32


def test_a_feature_says_what_its_rows_begin_with_and_how_many_to_make_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = write_project(tmp_path)
    text = config.read_text()
    text = text.replace(
        "[features.item]\n",
        '[features.item]\ninitializer = { type = "Constant", value = 2.0 }\n'
        'bias_initializer = { type = "Ones" }\nlearning_rate = 0.0\nbias_learning_rate = 0.0\n'
        "initial_rows = 1000\n",
    )
    config.write_text(text)
    words = ["--quiet", "--json", "--max-steps", "3", "--log-level", "info"]
    assert main(["train", "--config", str(config), *words]) == 0
    checkpoint = str(said(capsys)["checkpoint"])
    rows = [find_id(checkpoint, "item", item) for item in range(50)]
    met = [[segment.values for segment in row.segments] for row in rows if row.status == "found"]
    assert met
    assert met == [[[1.0], [2.0] * 4]] * len(met)
    taken = dict(re.findall(r"step 1: table (\w+): \d+ rows, (\d+) bytes", caplog.text))
    assert int(taken["item"]) > 1000 * 5 * 4 > int(taken["user"])  # room for the rows there will be


def test_merging_that_merges_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = str(write_project(tmp_path))  # ids are no fids
    flag = "--train.tables.merge-equal-slots=true"
    assert main(["train", "--config", config, "--max-steps", "1", "--quiet", flag]) == 0
    assert "train.tables.merge_equal_slots merges none of the 5 tables" in caplog.text
