import pytest

from monolith.cli import commands, main
from monolith.cli.commands import Command
from monolith.cli.options.config import (
    ConfigCheckOptions,
    ConfigExplainOptions,
    ConfigInitOptions,
    ConfigShowOptions,
)

MODULE = "monolith.cli.config_commands"
CONFIG_COMMANDS = {
    "config init": Command(ConfigInitOptions, MODULE, "init"),
    "config explain": Command(ConfigExplainOptions, MODULE, "explain", positional=True),
    "config check": Command(ConfigCheckOptions, MODULE, "check", positional=True),
    "config show": Command(ConfigShowOptions, MODULE, "show", positional=True),
}


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setattr(main, "COMMANDS", {**commands.COMMANDS, **CONFIG_COMMANDS})

    def call(*words: str) -> tuple[int, str, str]:
        status = main.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.mark.parametrize("kind", ["local", "ps", "serve"])
def test_a_written_config_passes_its_check(run, tmp_path, kind):
    file = tmp_path / "run.toml"
    status, out, _ = run("config", "init", "--kind", kind, "--to", str(file))
    assert (status, str(file) in out) == (0, True)
    assert run("config", "check", str(file)) == (0, f"{file}: no problems\n", "")


def test_a_config_of_what_is_not_built_yet_does_not_pass(run, tmp_path):
    file = tmp_path / "run.toml"
    assert run("config", "init", "--kind", "sync", "--to", str(file))[0] == 0
    status, out, _ = run("config", "check", str(file))
    assert status == 1
    assert "training.synchronous: all ranks stepping together is not built yet" in out


def test_a_check_reads_files_with_the_fields_of_a_training_too(run, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model_dir = "m"\nsteps = 3\n')
    assert run("config", "check", str(file))[0] == 0
    file.write_text('model_dir = "m"\nsteps = -3\n')
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
    file.write_text('tpu = "x"\nnum_workers = 0\n[checkpoint]\nkeep = "ten"\n[trianing]\ngpu = true\n')
    status, out, _ = run("config", "check", str(file))
    assert status == 1
    assert "warning: tpu" in out
    assert "3 problems" in out
    for found in ("cluster.num_workers", "checkpoint.keep", "unknown key trianing"):
        assert found in out


def test_a_file_that_cannot_be_read_fails_its_check(run, tmp_path):
    assert run("config", "check", str(tmp_path / "none.toml"))[0] == 1
    file = tmp_path / "run.toml"
    file.write_text("[[")
    assert run("config", "check", str(file))[0] == 1


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


def test_groups_and_all_fields_are_listed(run):
    _, out, _ = run("config", "explain", "embedding")
    assert [line.split()[0] for line in out.splitlines()][:2] == [
        "embedding.filter.kind",
        "embedding.filter.capacity",
    ]
    assert len(run("config", "explain", "all")[1].splitlines()) > 120


@pytest.mark.parametrize(
    "name, near", [("nmu_ps", "num_ps"), ("cluster.nums_ps", "cluster.num_ps"), ("keeep", "checkpoint.keep")]
)
def test_a_mistyped_field_is_told_the_nearest(run, name, near):
    status, _, err = run("config", "explain", name)
    assert status == 2
    assert near in err


def test_show_spells_out_defaults_and_decisions_and_masks_secrets(run, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text('enable_realtime_training = true\n[security]\ntoken = "hunter2"\n')
    status, out, _ = run("config", "show", str(file))
    assert status == 0
    assert "max_retries = 6" in out
    assert 'token = "********"' in out
    assert "hunter2" not in out
    monkeypatch.setenv("MONOLITH_CHECKPOINT__KEEP", "77")
    assert "keep = 10" in run("config", "show", str(file))[1]
    assert "keep = 77" in run("config", "show", str(file), "--environment")[1]
