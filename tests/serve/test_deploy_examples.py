"""The manifest of a model server is true about the command it starts."""

from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from serve.server.linear import one_model
from serve.server.serving import ask_http, serving

from monolith.cli.main import parse_options, shared_parser, split_command
from monolith.cli.serve import serve_config

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"


@pytest.fixture(scope="module")
def documents():
    text = (DEPLOY / "kubernetes" / "model-server.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


@pytest.fixture
def container(documents):
    (found,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def options_of(container):
    _, rest = shared_parser().parse_known_args([*container["command"][1:], *container["args"]])
    return parse_options(*split_command(rest))


def test_the_command_is_one_that_monolith_understands(container):
    assert container["command"][0] == "monolith"
    options = options_of(container)
    serve_config(options)
    assert options.folders == ("my_model=/servables/my_model",)
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/servables", str(options.security.token_file.parent)} == mounts


def test_ports_are_those_that_the_server_listens_on(documents, container):
    options = options_of(container)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": int(options.http_port), "grpc": int(options.grpc_port)}
    service = documents["Service"]["spec"]
    assert {one["name"]: one["port"] for one in service["ports"]} == ports
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    notes = documents["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(ports["http"])
    assert notes["prometheus.io/path"] == "/metrics"


def test_probes_are_answered_without_a_token(container):
    from monolith.cluster.security import Guard
    from monolith.config import Secret

    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {one["port"] for one in probes} == {"http"}
    with serving(one_model(), server={"guard": Guard(token=Secret("x"))}) as server:
        for path in {one["path"] for one in probes}:
            assert ask_http(server.http_port, "GET", path)[0] == 200


def test_a_pod_has_time_to_answer_what_is_in_flight(documents, container):
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (sleep,) = container["lifecycle"]["preStop"]["exec"]["command"][1:]
    drain = serve_config(options_of(container)).drain
    assert timedelta(seconds=pod["terminationGracePeriodSeconds"]) > drain + timedelta(seconds=int(sleep))
