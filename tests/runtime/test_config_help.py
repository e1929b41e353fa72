import tomllib

import pytest

from monolith.config import describe_fields
from monolith.errors import ConfigError
from monolith.runtime.config import RunConfig
from monolith.runtime.config_help import KINDS, template
from monolith.runtime.config_loading import check_run, load_run_config


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_a_config_of_its_kind_that_can_be_trained(tmp_path, kind):
    file = tmp_path / "run.toml"
    file.write_text(template(kind))
    config = load_run_config(file=file)
    assert {"local": config.job.local, "ps": config.cluster.num_ps == 2}[kind]
    check_run(config)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_template_suggests_may_be_taken_up(tmp_path, kind):
    file = tmp_path / "run.toml"
    taken = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line
        for line in template(kind).splitlines()
    )
    file.write_text(taken)
    load_run_config(file=file)
    assert leaves(tomllib.loads(taken)) == len(KINDS[kind])


def leaves(table: object) -> int:
    return sum(map(leaves, table.values())) if isinstance(table, dict) else 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_explains_each_of_its_fields(kind):
    known = {info.path: info for info in describe_fields(RunConfig)}
    text = " ".join(template(kind).replace("\n# ", " ").split())
    for path in KINDS[kind]:
        assert " ".join(known[path].doc.split()) in text


def test_there_are_templates_for_two_kinds():
    assert list(KINDS) == ["local", "ps"]
    with pytest.raises(ConfigError, match="there are local, ps"):
        template("cloud")


def test_the_help_of_the_mode_that_keeps_going_says_what_it_costs():
    (recovery,) = (info for info in describe_fields(RunConfig) if info.path == "failover.recovery")
    said = " ".join(recovery.doc.split())
    assert "updates since then are lost" in said
    assert "records since then are trained twice" in said
