"""`monolith export RUN --to DIR`, and servables that a run writes when it saves."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from serve.served_tasks import Predicted, Served, columns, exported, predictions, trained
from torch import nn

from monolith.cli import export
from monolith.cli.export import as_trained, run, train_options, with_flags
from monolith.cli.main import answer, parse_options
from monolith.cli.options.export import ExportOptions
from monolith.data import FileSource, Pipeline, Stream
from monolith.data.formats import CsvFormat
from monolith.errors import ConfigError, ExportError
from monolith.feature import Batch, FeatureSpec, IdFeature, Label
from monolith.model import DeepFM
from monolith.observe import Metrics
from monolith.runtime import Trainer
from monolith.runtime.config import ExportConfig
from monolith.runtime.export import (
    STATE_FILE,
    ExportListener,
    VersionMarks,
    exports_when_saving,
    how_to_export,
    task_exporter,
)
from monolith.runtime.publish_pause import NAME, PublishPause
from monolith.serve import Predictor
from monolith.serve.versions import LockedVersion, list_versions, withheld_versions
from monolith.sync.messages import run_identity
from monolith.train import KeepConfig, Mode, SaveConfig, TrainConfig

TASK = "serve.served_tasks:Served"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return trained(tmp_path_factory.mktemp("run"))


def options(*flags: str) -> ExportOptions:
    found: ExportOptions = parse_options("export", flags)
    return found


def test_a_run_is_exported_and_the_next_step_is_said(config, tmp_path, capsys):
    to = tmp_path / "to"
    status = run(options(config.model_dir, "--task", TASK, "--to", str(to), "--coding", "item=int8"))
    assert status == 0
    said = capsys.readouterr().err
    assert f"exported {to / '6'}: served, step 6, " in said
    assert "  item: int8, off by at most " in said
    assert said.endswith(f"next: monolith serve {to}\n")
    (wanted,) = predictions(config, Predicted(rows=3))
    with Predictor(str(to), show=False) as predictor:
        found = predictor.predict(columns(3, seed=9)).outputs["click"]
    assert torch.allclose(found, wanted["click"], atol=0.01)
    run(
        options(
            config.model_dir,
            "--task",
            TASK,
            "--to",
            str(to),
            "--checkpoint",
            "3",
            "--version",
            "rc",
            "--json",
        )
    )
    printed = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["version"], printed["folder"]) == (3, "rc", str(to / "rc"))
    assert printed["tables"]["item"]["largest_error"] == 0


def test_a_model_that_no_graph_can_hold_is_told_and_served_as_a_module(tmp_path, capsys, monkeypatch):
    code = """
from serve.served_tasks import Served
from monolith.model import DeepInterest
from serve.served_tasks import SPEC
class Looks(DeepInterest):
    def forward(self, batch, floats=None):
        return super().forward(batch, floats) + batch.ids["history"].row_lengths()
class Looking(Served):
    def model(self):
        return Looks(SPEC, dim=4, attention=(4,), hidden=(8,), threads=1)
"""
    (tmp_path / "looking.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from looking import Looking  # type: ignore[import-not-found]

    config = trained(tmp_path / "run", Looking())
    flags = [config.model_dir, "--task", "looking.py:Looking", "--to", "to", "--quiet"]
    assert answer(["export", *flags]) == 2
    assert "reads the IDs of feature 'history' outside of its" in capsys.readouterr().err
    assert answer(["export", *flags, "--as-module"]) == 0
    with pytest.raises(ConfigError, match="allow_module=True"):
        Predictor("to", show=False)
    (batch, wanted), *_ = Trainer(Looking(), config).predict()
    with Predictor("to", show=False, allow_module=True) as predictor:
        assert torch.equal(predictor.predict_batch(batch).outputs["click"], wanted["click"])
        assert predictor.warm_up() == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "needs the run to export"),
        (("nowhere",), "nothing in nowhere says which task"),
        (("--model-dir", "nowhere"), "nothing in nowhere says which task"),
        (("one", "--model-dir", "other"), "one and --model-dir both name the run"),
        (
            ("r", "--task", TASK, "--coding", "fp8"),
            "--coding: expected fp32, fp16, int8, int4, or TABLE=CODING",
        ),
        (("r", "--task", TASK, "--coding", "=fp16"), "--coding: expected"),
        (("r", "--task", TASK, "--missing-rows", "maybe"), "--missing-rows: expected refuse or default"),
        (("r", "--task", TASK, "--keep", "0"), "keep must be at least 1"),
        (("r", "--task", TASK), "no checkpoint in r"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(flags, said, capsys):
    assert answer(["export", *flags]) == 2
    assert said in capsys.readouterr().err


def test_flags_win_over_the_config():
    export = with_flags(
        ExportConfig(coding="fp16", codings={"a": "fp32"}, shards=3), options("r", "--coding", "b=int8")
    )
    assert (export.coding, export.codings, export.shards) == ("fp16", {"a": "fp32", "b": "int8"}, 3)
    export = with_flags(export, options("r", "--coding", "fp32", "--shards", "0"))
    assert (export.coding, export.codings, export.shards) == ("fp32", {}, 0)


def test_the_task_is_the_one_that_the_run_was_trained_with(tmp_path, monkeypatch, capsys):
    command = ["monolith", "train", TASK, "--model-dir", str(tmp_path / "run"), "--set", "batch_size=8"]
    monkeypatch.setattr(sys, "argv", command)
    trained(tmp_path / "run", steps=1)
    found = as_trained(options(str(tmp_path / "run"), "--set", "batch_size=9"))
    assert (found.task, found.set) == (TASK, ("batch_size=8", "batch_size=9"))
    assert "the task is as" in capsys.readouterr().err
    assert train_options(["pytest", "-q"]) is None
    assert train_options([]) is None
    assert export.FACTORY == "monolith.cli.export:served_module"


# When a run saves


def listening(config: TrainConfig, to: Path, metrics: Metrics | None = None, **how: object) -> ExportListener:
    """Train with a listener that exports; return it."""
    settings = ExportConfig(when_saving=True, dir=str(to), **how)  # type: ignore[arg-type]
    with exports_when_saving(Served(), config, settings, metrics=metrics) as listeners:
        Trainer(Served(), config, listeners=listeners).train()
        (listener,) = listeners
    assert isinstance(listener, ExportListener)
    return listener


def saving(folder: Path, **how: object) -> TrainConfig:
    settings = {"steps": 6, "summary_every_steps": None, "save": SaveConfig(steps=2), **how}
    return TrainConfig(model_dir=str(folder), **settings)  # type: ignore[arg-type]


def test_every_checkpoint_is_exported_when_it_is_saved(tmp_path):
    metrics = Metrics()
    config = saving(tmp_path / "run", keep=KeepConfig(max_to_keep=2, every=None))
    listener = listening(config, tmp_path / "to", metrics)
    assert list_versions(str(tmp_path / "to")) == ["4", "6"]  # those whose checkpoints are kept
    assert listener.newest is not None
    assert listener.newest.folder == str(tmp_path / "to" / "6")
    state = (tmp_path / "to" / STATE_FILE).read_text()
    assert state.count("entries {") == 2
    assert f'export_dir: "{tmp_path / "to" / "6"}"\n  global_step: 6' in state
    (wanted,) = predictions(config, Predicted(rows=3))
    with Predictor(str(tmp_path / "to"), show=False) as predictor:
        assert torch.equal(predictor.predict(columns(3, seed=9)).outputs["click"], wanted["click"])


def test_a_run_of_the_command_line_exports_when_its_config_says_so(tmp_path):
    (tmp_path / "run.toml").write_text(
        f"""
        [train]
        model_dir = "{tmp_path}/run"
        steps = 2
        [export]
        when_saving = true
        coding = "fp16"
        """
    )
    assert answer(["train", TASK, "--config", str(tmp_path / "run.toml"), "--quiet"]) == 0
    with Predictor(str(tmp_path / "run" / "exported_models"), show=False) as predictor:
        assert (predictor.step, predictor.servable.tables["item"].coding) == (2, "fp16")


def test_one_version_is_kept_and_what_a_server_holds(tmp_path):
    config = saving(tmp_path / "run", steps=2)
    listening(config, tmp_path / "to", keep=1, shards=2)
    with LockedVersion(str(tmp_path / "to" / "ps_1" / "2")):
        listening(config, tmp_path / "to", keep=1, shards=2)
        assert list_versions(str(tmp_path / "to" / "entry")) == ["2", "4"]
    listening(config, tmp_path / "to", keep=1, shards=2)
    for part in ("entry", "ps_0", "ps_1"):
        assert list_versions(str(tmp_path / "to" / part)) == ["6"]
        assert (tmp_path / "to" / part / STATE_FILE).read_text().count("entries {") == 1


def test_an_export_that_fails_is_reported_and_training_continues(tmp_path, caplog):
    metrics = Metrics()
    (tmp_path / "to" / "2").mkdir(parents=True)  # in the way
    config = saving(tmp_path / "run", steps=4)
    with caplog.at_level(logging.ERROR):
        listening(config, tmp_path / "to", metrics)
    assert "the checkpoint of step 2 is saved, and could not be exported" in caplog.text
    assert list_versions(str(tmp_path / "to")) == ["4"]
    assert (tmp_path / "run" / "model.ckpt-4.manifest").exists()


def test_versions_of_other_runs_are_left_alone(config, tmp_path):
    exported(config, tmp_path / "to", step=3)
    listening(saving(tmp_path / "run", steps=2), tmp_path / "to")
    assert list_versions(str(tmp_path / "to")) == ["2", "3"]


def test_a_run_that_keeps_nothing_is_told_so():
    with (
        pytest.raises(ConfigError, match="nothing is saved without a model_dir"),
        exports_when_saving(Served(), TrainConfig(), ExportConfig(when_saving=True)),
    ):
        pass


@dataclass(frozen=True)
class FromCsv(Served):
    """Learns from a file of which nobody knows the records before they are read."""

    path: str = ""

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        spec = FeatureSpec(features={"user": IdFeature(kind="string")}, labels={"click": Label()})
        source = FileSource(self.path, CsvFormat(types=spec.columns), batch_size=4)
        return Pipeline(source).to_batches(spec)

    def model(self) -> nn.Module:
        spec = FeatureSpec(features={"user": IdFeature(kind="string")}, labels={"click": Label()})
        return DeepFM(spec, dim=2, hidden=(4,), threads=1)


def test_warm_up_requests_are_drawn_from_a_csv(tmp_path):
    (tmp_path / "clicks.csv").write_text("user,click\n" + "".join(f"u{n},{n % 2}\n" for n in range(24)))
    task = FromCsv(path=str(tmp_path / "clicks.csv"))
    exported(trained(tmp_path / "run", task), tmp_path / "out", task=task)
    drawn = json.loads((tmp_path / "out" / "6" / "warmup.json").read_text())["requests"]
    assert drawn[0]["inputs"][0]["data"] == ["u0"]


def test_a_file_of_requests_takes_the_place_of_those_of_the_evaluation_data(tmp_path):
    (tmp_path / "clicks.csv").write_text("user,click\n" + "".join(f"u{n},{n % 2}\n" for n in range(24)))
    task = FromCsv(path=str(tmp_path / "clicks.csv"))
    config, file = trained(tmp_path / "run", task), tmp_path / "requests"
    request = {"inputs": [{"name": "user", "datatype": "BYTES", "shape": [2], "data": ["ann", "bob"]}]}

    def export(to: str) -> list[str]:
        said: list[str] = []
        how = how_to_export(ExportConfig(), config)
        with task_exporter(task, config, how, warm_up=str(file), say=said.append) as exporter:
            exporter.export(f"{config.model_dir}/model.ckpt-6", str(tmp_path / to))
        return said

    def requests(to: str) -> list[object]:
        return list(json.loads((tmp_path / to / "6" / "warmup.json").read_text())["requests"])

    assert export("drawn") == [
        f"there is no file {file} of warm-up requests; they are drawn from the evaluation data"
    ]
    assert len(requests("drawn")) == 2
    file.write_text(f"{json.dumps(request)}\n{json.dumps(request)}\n")
    assert export("lines") == []
    assert requests("lines") == [request, request]
    file.write_bytes((tmp_path / "drawn" / "6" / "warmup.json").read_bytes())
    export("copied")
    assert requests("copied") == requests("drawn")
    file.write_bytes(b"\x0a\x04\x00 a PredictionLog")
    with pytest.raises(ExportError, match="PredictionLog are not read"):
        export("binary")
    file.write_text(json.dumps({"inputs": [{**request["inputs"][0], "name": "item"}]}))
    with pytest.raises(ExportError, match=r"cannot answer request 1 of .*user"):
        export("others")


# While publishing is paused


def pause(run: Path, **how: object) -> None:
    run.mkdir(exist_ok=True)
    (run / NAME).write_text(json.dumps({"reason": "labels went wrong", "since": 1e12, **how}))


def withheld(root: Path) -> list[str]:
    return list(withheld_versions(str(root), list_versions(str(root))))


def test_a_checkpoint_of_the_first_bad_step_or_later_is_exported_withheld(tmp_path, caplog):
    pause(tmp_path / "run", first_bad_step=3)
    with caplog.at_level(logging.INFO):
        listening(saving(tmp_path / "run"), tmp_path / "to", shards=1)
    for part in ("entry", "ps_0"):
        assert withheld(tmp_path / "to" / part) == ["4", "6"]
        assert (tmp_path / "to" / part / STATE_FILE).read_text().count("entries {") == 1
    assert "6, withheld from servers while publishing is paused" in caplog.text


def test_a_checkpoint_that_was_saved_since_the_pause_is_withheld_whatever_its_step(tmp_path):
    pause(tmp_path / "run", since=1.0, first_bad_step=1000)
    listening(saving(tmp_path / "run", steps=2), tmp_path / "to")
    assert withheld(tmp_path / "to") == ["2"]


def test_the_last_good_version_stays_although_its_checkpoint_is_gone(tmp_path):
    run_identity(str(tmp_path / "run"), make=True)
    config = saving(tmp_path / "run", keep=KeepConfig(max_to_keep=1, every=None), steps=2)
    listening(config, tmp_path / "to")
    pause(tmp_path / "run", first_bad_step=3)
    listening(config, tmp_path / "to")
    listening(config, tmp_path / "to")
    assert list_versions(str(tmp_path / "to")) == ["2", "6"]
    with Predictor(str(tmp_path / "to"), show=False) as predictor:
        assert predictor.version == "2"


def test_a_pause_marks_the_versions_of_its_run_and_a_rollback_those_after_its_version(
    tmp_path,
):
    config = saving(tmp_path / "run")
    run_identity(config.model_dir, make=True)  # as a run that publishes does
    listening(config, tmp_path / "to")
    other = trained(tmp_path / "other")
    exported(other, tmp_path / "to", step=3)
    marks = VersionMarks.of(ExportConfig(dir=str(tmp_path / "to")), config)
    marks.withhold(PublishPause("labels went wrong", 0.0, first_bad_step=4))
    assert withheld(tmp_path / "to") == ["4", "6"]
    marks.withhold(PublishPause("rolled back", 0.0, version="4", first_bad_step=3))
    assert withheld(tmp_path / "to") == ["6"], "an operator who names a version has judged it"
    marks.withhold(PublishPause("rolled back", 0.0, version="2"))
    assert withheld(tmp_path / "to") == ["4", "6"]
    marks.release()
    assert withheld(tmp_path / "to") == []
    marks.withhold(PublishPause("of an older release", 0.0))
    assert withheld(tmp_path / "to") == ["2", "4", "6"], "all that was exported since"
