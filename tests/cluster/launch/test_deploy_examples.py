"""The manifests under examples/deploy: well-formed, and true about the commands and configs they name."""

import json
import re
import shlex
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from monolith.cli.commands import COMMANDS
from monolith.cli.main import parse_options, split_command
from monolith.cli.train import run_of
from monolith.cluster.launch.ray import RayPlacement
from monolith.runtime.config_loading import load_run_config, read_run, refused
from monolith.runtime.context import Launch
from monolith.runtime.discovery import assign_role
from monolith.runtime.launch import GRACE, check_launch
from monolith.runtime.parameter_server import LINGER

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"
MANIFEST = DEPLOY / "kubernetes" / "parameter-servers.yaml"
PRIMUS = DEPLOY / "yarn" / "primus.json"
RAY_JOB = DEPLOY / "ray" / "rayjob.yaml"


def documents(manifest: Path = MANIFEST) -> list[str]:
    return re.split(r"^---$", manifest.read_text(), flags=re.MULTILINE)


@pytest.fixture
def run_toml(tmp_path) -> Path:
    """The config inside of the config map."""
    inside = documents()[0].partition("run.toml: |\n")[2]
    file = tmp_path / "run.toml"
    file.write_text(textwrap.dedent(inside))
    return file


@pytest.mark.parametrize(
    ("manifest", "versions"),
    [
        (MANIFEST, {"ConfigMap": "v1", "StatefulSet": "apps/v1", "Job": "batch/v1"}),
        (RAY_JOB, {"RayJob": "ray.io/v1"}),
    ],
)
def test_each_document_has_what_kubernetes_asks_for(manifest, versions):
    kinds = {}
    for document in documents(manifest):
        assert "\t" not in document
        for needed in ("apiVersion", "kind", "metadata"):
            assert len(re.findall(rf"^{needed}:", document, re.MULTILINE)) == 1
        kind = re.search(r"^kind: (\w+)$", document, re.MULTILINE)
        version = re.search(r"^apiVersion: (\S+)$", document, re.MULTILINE)
        name = re.search(r"^  name: ([a-z0-9-]+)$", document, re.MULTILINE)
        assert kind
        assert version
        assert name
        kinds[kind[1]] = version[1]
    assert kinds == versions


def test_the_manifests_are_yaml():
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert [each["kind"] for each in found] == ["ConfigMap", "StatefulSet", "Job"]
    job = yaml.safe_load(RAY_JOB.read_text())["spec"]
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (machines,) = cluster["workerGroupSpecs"]
    (container,) = machines["template"]["spec"]["containers"]
    room = machines["replicas"] * int(container["resources"]["limits"]["cpu"])
    words = job["entrypoint"].split()
    members = [int(words[words.index(flag) + 1]) for flag in ("--num-ps", "--num-workers")]
    assert sum(members) * RayPlacement().cpus <= room


def test_each_pod_that_trains_has_time_to_save_once_it_is_told_to_stop():
    _, servers, workers = yaml.safe_load_all(MANIFEST.read_text())
    ray = yaml.safe_load(RAY_JOB.read_text())["spec"]["rayClusterSpec"]
    pods = [one["spec"]["template"] for one in (servers, workers)]
    pods += [ray["headGroupSpec"]["template"], *(one["template"] for one in ray["workerGroupSpecs"])]
    ps, *others = [timedelta(seconds=pod["spec"]["terminationGracePeriodSeconds"]) for pod in pods]
    assert ps > LINGER + timedelta(seconds=30)
    assert set(others) == {GRACE}  # as `--launch local` gives its processes


def test_the_job_of_ray_is_the_one_of_the_readme():
    (entrypoint,) = re.findall(r"^  entrypoint: (.*)$", RAY_JOB.read_text(), re.MULTILINE)
    assert entrypoint.startswith("monolith train tasks:MyTask --launch ray ")
    assert f"ray job submit --working-dir . -- {entrypoint}\n" in (DEPLOY / "README.md").read_text()


@pytest.mark.parametrize("manifest", [MANIFEST, RAY_JOB], ids=["kubernetes", "ray"])
def test_brackets_in_a_manifest_close_where_they_open(manifest):
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        bare = re.sub(r'"[^"]*"', "", line)
        for opening, closing in ("[]", "{}"):
            assert bare.count(opening) == bare.count(closing), f"line {number}: {line}"


def test_the_config_in_the_manifest_is_one_for_each_process(run_toml):
    for role, count in (("ps", 2), ("worker", 2)):
        for index in range(count):
            environ = {"MONOLITH_CLUSTER__ROLE": role, "MONOLITH_CLUSTER__INDEX": str(index)}
            config = load_run_config(file=run_toml, environ=environ)
            assert (config.cluster.role, config.cluster.index) == (role, index)
    replicas = re.findall(r"^  (?:replicas|completions): (\d+)$", MANIFEST.read_text(), re.MULTILINE)
    assert replicas == [str(config.cluster.num_ps), str(config.cluster.num_workers)]


def test_the_manifest_mounts_what_the_config_and_the_commands_name(run_toml):
    config = load_run_config(file=run_toml)
    assert str(config.security.token_file) == "/etc/monolith/token"
    text = MANIFEST.read_text()
    assert text.count("mountPath: /etc/monolith,") == 2
    assert text.count("mountPath: /etc/run}") == text.count("--config, /etc/run/run.toml]") == 2


def test_the_job_of_primus_trains_with_a_config_for_each_role():
    job = json.loads(PRIMUS.read_text())
    counts = {role["roleName"]: role["num"] for role in job["role"]}
    assert counts == {"chief": 1, "ps": 2, "worker": 1}
    cluster = {name: [f"{name}{index}:80" for index in range(num)] for name, num in counts.items()}
    assert "run.toml" in job["files"]
    for role in job["role"]:
        words = role["command"].split()
        assert words[:2] == ["monolith", "train"]
        assert words[3:5] == ["--config", "run.toml"]
        tf_config = {"cluster": cluster, "task": {"type": role["roleName"], "index": 0}}
        config = load_run_config(
            file=PRIMUS.parent / "run.toml", environ={"TF_CONFIG": json.dumps(tf_config)}, args=words[5:]
        )
        placed = assign_role(config, {})
        assert (placed.cluster.num_ps, placed.cluster.num_workers) == (2, 2)
        assert placed.cluster.role == ("ps" if role["roleName"] == "ps" else "worker")


# Every command line, by the parser that will read it


def command_lines() -> dict[str, list[str]]:
    """What stands behind `monolith` in the files, by where it was found."""
    found = {}
    for file in sorted(path for path in DEPLOY.rglob("*") if path.is_file()):
        text = file.read_text()
        lists = [
            ", ".join(re.findall(r"[^,\s\[\]]+", words)) for words in re.findall(r"command: \[(.*)\]", text)
        ]
        lines = re.findall(
            r"(?:entrypoint: |\"command\": \"|-- |^    )(monolith [^\"\n]*)", text, re.MULTILINE
        )
        inline = re.findall(r"`(monolith [^`]*)`", text)
        for number, line in enumerate([each.replace(", ", " ") for each in lists] + lines + inline):
            found[f"{file.relative_to(DEPLOY)}, {number}"] = shlex.split(line)[1:]
    return found


LINES = command_lines()


def test_there_are_command_lines_to_check_in_every_file():
    assert {where.partition(",")[0] for where in LINES} == {
        *("README.md", "kubernetes/model-server.yaml", "kubernetes/parameter-servers.yaml"),
        *("ray/rayjob.yaml", "yarn/primus.json"),
    }
    assert len(LINES) == 14


@pytest.mark.parametrize("where", LINES)
def test_each_command_line_is_one_that_can_be_given(where):
    words = LINES[where]
    if words == ["train"]:
        assert words[0] in COMMANDS
        return
    name, flags = split_command(words)
    options = parse_options(name, flags, words)
    if name == "train" and options.launch is not None:
        check_launch(
            run_of(options, {}, {"discovery.kind": "ray"}),
            Launch(kind=options.launch, flags=options.run_flags),
        )


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_nothing_in_a_config_asks_for_what_cannot_be_done(run_toml, role):
    tf_config = {"cluster": {"chief": ["a:1"], "ps": ["b:1", "c:1"], "worker": ["d:1"]}}
    primus = json.dumps({**tf_config, "task": {"type": role, "index": 0}})
    kubernetes = {"MONOLITH_CLUSTER__ROLE": role}
    for file, environ in ((run_toml, kubernetes), (PRIMUS.parent / "run.toml", {"TF_CONFIG": primus})):
        run = read_run(file, environ)
        assert list(refused(run)) == []
        assert run.cluster.role == role
        assert run.failover.max_retries == 6
        assert run.train.save.secs == 600
