import re

import pytest
from runtime.config_files import write_project

from monolith.cli import main
from monolith.cluster.run_token import TOKEN_FILE, read_token
from monolith.cluster.security import derive_token
from monolith.config.fields import leaf_paths
from monolith.runtime import task_data
from monolith.runtime.config import RunConfig


@pytest.fixture
def run(capsys):
    def call(*words: str) -> tuple[int, str, str]:
        status = main.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize("kind", ["local", "ps"])
def test_a_written_config_passes_its_check(run, tmp_path, kind):
    file = tmp_path / "run.toml"
    status, out, _ = run("config", "init", "--kind", kind, "--to", str(file))
    assert (status, str(file) in out) == (0, True)
    assert run("config", "check", str(file), "--no-data") == (0, f"{file}: no problems\n", "")
    status, out, _ = run("config", "check", str(file))  # the task that it names is still to be written
    assert (status, "there is no module 'tasks' to find a task in" in out) == (1, True)


@pytest.mark.parametrize("kind", ["sync", "serve"])
def test_a_kind_of_run_that_cannot_be_had_is_not_offered(run, kind):
    status, _, err = run("config", "init", "--kind", kind)
    assert status == 2
    assert "one of local, ps" in err


def test_a_check_tells_where_the_fields_of_a_flat_file_are(run, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model_dir = "m"\nsteps = 3\n')
    status, out, _ = run("config", "check", str(file))
    assert status == 1
    assert "model_dir is train.model_dir" in out
    assert "steps is train.steps" in out
    file.write_text('[train]\nmodel_dir = "m"\nsteps = -3\n')
    status, out, _ = run("config", "check", str(file))
    assert (status, "steps must be above 0" in out) == (1, True)


def test_without_a_file_the_config_is_printed(run):
    status, out, _ = run("config", "init", "--kind", "ps")
    assert status == 0
    assert "[cluster]" in out


def test_an_existing_file_is_left_alone(run, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("mine")
    status, _, err = run("config", "init", "--kind", "ps", "--to", str(file))
    assert (status, file.read_text()) == (2, "mine")
    assert "it exists" in err
    assert run("config", "init", "--kind", "ps", "--to", str(tmp_path / "run.yaml"))[0] == 2


def test_a_check_names_all_problems_and_exits_with_1(run, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('tpu = "x"\nnum_workers = 0\n[train.keep]\nmax_to_keep = "ten"\n[trian]\nseed = 1\n')
    status, out, _ = run("config", "check", str(file))
    assert status == 1
    assert "warning: tpu" in out
    assert "3 problems" in out
    for found in ("cluster.num_workers", "train.keep.max_to_keep", "unknown key trian"):
        assert found in out


def test_misspelt_keys_of_all_sections_are_named_at_once(run, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "trian = 3\n[train]\nseedd = 1\n[train.save]\nstepss = 3\n[data]\npth = 'x'\n"
        "[candidates]\npathh = 'x'\n"
        "[features.user]\ntype = 'IdFeature'\ndimm = 3\n[labels.click]\natleast = 1\n"
        "[model]\ntype = 'deepfm'\nhiden = [3]\n[task]\nbatchsize = 3\n"
    )
    status, out, _ = run("config", "check", str(file))
    assert status == 1
    for key in ("trian", "train.seedd", "train.save.stepss", "data.pth", "candidates.pathh"):
        assert f"unknown key {key} (from {file})" in out
    for key in ("features.user.dimm", "labels.click.atleast", "model.hiden"):
        assert f"unknown key {key} (from the config)" in out
    assert f"task.batchsize (from {file}): unknown key; the nearest known key is task.batch_size" in out


def test_a_check_takes_the_flags_of_train(run, tmp_path, monkeypatch):
    file = write_project(tmp_path)
    assert run("config", "check", str(file))[0] == 0
    flags = ("--steps", "-3", "--filter_type=x", "--train.save.stepss", "2")
    status, out, _ = run("config", "check", str(file), *flags)
    assert status == 1
    for found in ("steps must be above 0", "(from --filter_type)", "unknown flag --train.save.stepss"):
        assert found in out
    check = ("config", "check", str(file))
    assert "no file matches" in run(*check, "--data.path", "none.csv")[1]
    assert "unknown key batchsize (from 'batchsize=3')" in run(*check, "--set", "batchsize=3")[1]
    monkeypatch.setenv("MONOLITH_TRAIN__STEPS", "-3")
    assert run(*check)[0] == 0
    assert "from MONOLITH_TRAIN__STEPS" in run(*check, "--environment")[1]


def test_a_file_that_cannot_be_read_fails_its_check(run, tmp_path):
    assert run("config", "check", str(tmp_path / "none.toml"))[0] == 1
    file = tmp_path / "run.toml"
    file.write_text("[[")
    assert run("config", "check", str(file))[0] == 1


BROKEN = {
    "a missing file": ("clicks.csv", "none.csv", "no file matches"),
    "a missing column": ("[features.item]", "[features.itme]", "the records have no column 'itme'"),
    "a label that the data does not have": (
        "[labels.click]",
        "[labels.clik]",
        "say examples.optional = ['clik'] in the config",
    ),
    "text as event time": (
        'event_time = "time"',
        'event_time = "tags"',
        "which is no time",
    ),
    "din without a sequence": ('"deepfm"', '"din"', "DeepInterest: needs a sequence"),
    "dlrm without numbers": (
        '[features.price]\nscale = "standard"\n\n',
        "",
        "DLRM: needs float features",
    ),
    "a label that is not 0 or 1": (
        "[labels.click]",
        '[labels.item]\ncolumn = "item"',
        "and a class is 0 or 1",
    ),
    "candidates that are not there": (
        "[examples]",
        '[candidates]\npath = "no_items.csv"\n\n[examples]',
        "no file matches",
    ),
    "evaluation data that is not there": (
        "split = { evaluate = 0.2 }",
        'evaluate = "no_evaluation.csv"',
        "no file matches 'no_evaluation.csv'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_check_refuses_of_the_data_and_the_model_what_a_training_refuses_with_the_same_words(
    run, tmp_path, what
):
    old, new, said = BROKEN[what]
    file = write_project(tmp_path, more="evaluate = { every_steps = 1 }\n")
    text = file.read_text()
    assert old in text
    text = text.replace(old, new)
    if what == "dlrm without numbers":
        text = text.replace('"deepfm"', '"dlrm"').replace("hidden = [8]\n", "")
    if what.startswith("candidates"):
        text = text.replace('"deepfm"\ndim = 4', '"two_tower"\nitem = ["item"]\nuser = ["user"]\ndim = 4')
    file.write_text(text)
    status, out, _ = run("config", "check", str(file))
    assert (status, said in out) == (1, True), out
    assert run("config", "check", str(file), "--no-data")[0] == 0
    status, _, err = run("train", "--config", str(file), "--quiet")
    assert (status, f"monolith: {out}" in err) == (2, True), err
    assert "learning" not in err  # it is refused before a pass over all the data
    assert not (tmp_path / "run").exists()


def test_a_resumed_training_is_not_checked_again(run, tmp_path, monkeypatch):
    file = write_project(tmp_path)
    checked = []
    found = task_data.task_problems
    monkeypatch.setattr(task_data, "task_problems", lambda *task: checked.append(1) or found(*task))
    for _ in range(2):  # files that the first used up may be gone
        assert run("train", "--config", str(file), "--steps", "2", "--quiet")[0] == 0
        assert checked == [1]


def test_a_check_opens_the_files_of_a_task_in_python(run, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from monolith.data import DataConfig\n"
        "from monolith.train import Task\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Task):\n"
        "    data: DataConfig\n"
        "    rate: float = 0.5\n"
        '    """How fast it learns. By default not very."""\n'
        "    def dataset(self, mode):\n"
        "        return self.data.source(batch_size=2)\n"
        "    def model(self): ...\n"
        "    def loss(self, outputs, batch): ...\n"
    )
    file = tmp_path / "run.toml"
    file.write_text(f'[job]\ntask = "{tmp_path}/mine.py:Mine"\n[data]\npath = "{tmp_path}/none.csv"\n')
    status, out, _ = run("config", "check", str(file))
    assert (status, "no file matches" in out) == (1, True)
    (tmp_path / "none.csv").write_text("a\n1\n")
    assert run("config", "check", str(file))[0] == 0
    file.write_text(file.read_text() + "[task]\nspeed = 1\n")
    assert "speed" in run("config", "check", str(file))[1]

    # The same task, explained
    task = ("--task", f"{tmp_path}/mine.py:Mine")
    listed = run("config", "explain", "task", *task)[1]
    assert "task.rate                                How fast it learns. (default: 0.5)" in listed
    assert "task.data.path" in listed
    explained = run("config", "explain", "task.rate", *task)[1]
    assert "How fast it learns. By default not very." in explained
    assert "default:  0.5" in explained


def test_the_keys_of_a_task_by_config_are_explained(run):
    assert "default:  512" in run("config", "explain", "task.batch_size")[1]
    listed = run("config", "explain", "task")[1]
    for key in ("task.batch_size", "task.dense_rate", "task.scores"):
        assert key in listed
    status, _, err = run("config", "explain", "task.batch_siz")
    assert (status, "task.batch_size" in err) == (2, True)


def test_lists_show_defaults_and_whole_sentences(run):
    line = run("config", "explain", "train.keep")[1].splitlines()[0]
    assert line.endswith("besides exempt ones; 0 keeps all. (default: 10)")
    for group in ("all", "model", "features", "labels", "task"):
        lines = run("config", "explain", group)[1].splitlines()
        listed = [line for line in lines if re.match(r" *[a-z_]+\.[\w.]+ {2,}", line)]
        assert listed
        for line in listed:
            assert re.search(r"[.)`\"] \((default: .*|required)\)$", line), line


@pytest.mark.parametrize("name", ["cluster.num_ps", "num_ps", "--cluster.num-ps"])
def test_a_field_is_explained_by_either_name(run, name):
    status, out, _ = run("config", "explain", *(["--", name] if name.startswith("-") else [name]))
    assert status == 0
    for said in (
        "Parameter servers",
        "default:  0",
        "--cluster.num-ps",
        "MONOLITH_CLUSTER__NUM_PS",
        "num_ps",
    ):
        assert said in out


def test_a_name_without_a_meaning_is_explained_too(run):
    assert run("config", "explain", "use_estimator")[1].startswith("use_estimator is accepted and ignored: ")
    assert run("config", "explain", "base_name")[1].startswith("base_name is refused: nothing is sent to")


def test_a_former_path_is_explained_by_the_one_of_today(run):
    assert run("config", "explain", "checkpoint.keep")[1] == "checkpoint.keep is train.keep.max_to_keep.\n"
    assert (
        run("config", "explain", "training.synchronous")[1]
        == "training.synchronous is cluster.mode, async or sync.\n"
    )
    assert run("config", "explain", "training.realtime")[1] == "training.realtime is publish.to.\n"
    assert "is gone: nothing is sent to servers" in run("config", "explain", "job.business_id")[1]


def test_every_field_is_explained_those_of_a_training_too(run):
    status, out, _ = run("config", "explain", "train.save.steps")
    assert status == 0
    for said in (
        "Steps between saves",
        "default:  1000",
        "--train.save.steps",
        "MONOLITH_TRAIN__SAVE__STEPS",
    ):
        assert said in out
    assert "default:  (required)" in run("config", "explain", "kafka.topics")[1]
    listed = run("config", "explain", "all")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(leaf_paths(RunConfig))
    assert all(len(line.split()) > 1 for line in listed)


def test_keys_of_a_model_are_explained_for_each_type_that_has_them(run):
    status, out, _ = run("config", "explain", "model.dim")
    first, second, third, *_, last = out.split("\n\n")
    assert (status, first) == (
        0,
        "model.dim\n  Width of each feature's vector, in addition to its bias.\n  of type:  deepfm\n"
        "  type:     int\n  default:  16",
    )
    assert "of type:  dcnv2, mmoe, din, two_tower\n" in second
    assert "of type:  dlrm\n" in third
    assert "of type:  sasrec, hstu, gru4rec\n" in last
    _, out, _ = run("config", "explain", "model.item")
    assert "The features of the item tower" in out
    assert "default:  (required)" in out
    listed = run("config", "explain", "model.two_tower")[1].splitlines()
    assert listed[0] == "two_tower:"
    assert [line.split()[0] for line in listed[1:3]] == ["model.item", "model.user"]
    assert all(len(line.split()) > 1 for line in listed[1:])


def test_keys_of_features_labels_and_candidates_are_explained(run):
    for name, said in (
        ("features.user.kind", "of type:  IdFeature, SequenceFeature"),
        ("features.NAME.boundaries", "of type:  BucketFeature"),
        ("labels.click.at_least", "of type:  Label"),
        ("candidates.path", "default:  (required)"),
        ("candidates.ks", "--candidates.ks"),
        ("features", "features.NAME.scale"),
        ("features.user", "features.user.scale"),
        ("model", "model.cross_layers"),
    ):
        status, out, _ = run("config", "explain", name)
        assert (status, said in out) == (0, True), out
    assert "candidates.barred" in run("config", "explain", "candidates")[1]


@pytest.mark.parametrize(
    "name, near", [("model.dimm", "model.dim"), ("features.user.kin", "features.user.kind")]
)
def test_a_mistyped_key_is_told_the_nearest(run, name, near):
    status, _, err = run("config", "explain", name)
    assert (status, near in err) == (2, True), err


def test_groups_and_all_fields_are_listed(run):
    _, out, _ = run("config", "explain", "train.keep")
    assert [line.split()[0] for line in out.splitlines()][:2] == [
        "train.keep.max_to_keep",
        "train.keep.every",
    ]
    assert len(run("config", "explain", "all")[1].splitlines()) > 120


@pytest.mark.parametrize(
    "name, near",
    [
        ("nmu_ps", "num_ps"),
        ("cluster.nums_ps", "cluster.num_ps"),
        ("alert.explosio", "train.alert.explosion"),
    ],
)
def test_a_mistyped_field_is_told_the_nearest(run, name, near):
    status, _, err = run("config", "explain", name)
    assert status == 2
    assert near in err


def test_show_spells_out_defaults_and_decisions_and_masks_secrets(run, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text(
        "tide_save_secs = 60\ntide_start_hour = 1\ntide_start_minute = 0\ntide_end_hour = 2\n"
        'tide_end_minute = 0\n[security]\ntoken = "hunter2"\n'
    )
    status, out, _ = run("config", "show", str(file))
    assert status == 0
    assert "max_retries = 6" in out
    assert "[train.save.hours]" in out  # with an interval outside of the window, the run goes on there
    assert 'token = "********"' in out
    assert "hunter2" not in out
    monkeypatch.setenv("MONOLITH_TRAIN__KEEP__MAX_TO_KEEP", "77")
    assert "max_to_keep = 10" in run("config", "show", str(file))[1]
    assert "max_to_keep = 77" in run("config", "show", str(file), "--environment")[1]


def test_a_token_for_a_role_is_derived_from_that_of_the_run_or_of_a_file(run, tmp_path):
    token = read_token(tmp_path / TOKEN_FILE, make=True)
    follow, predict = (derive_token(token, role).reveal() + "\n" for role in ("follow", "predict"))
    assert run("config", "token", "--role", "follow", "--model-dir", str(tmp_path)) == (0, follow, "")
    by_file = ("--token-file", str(tmp_path / TOKEN_FILE))
    assert run("config", "token", "--role", "predict", *by_file) == (0, predict, "")
    assert follow != predict
    status, _, said = run("config", "token", "--role", "follow")
    assert status == 2
    assert "give --model-dir or --token-file" in said
