"""`monolith serve`: real processes, a real servable."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from serve.served_tasks import columns, exported, trained
from services import warm
from sync.delta_channels import Copy, SmallPublisher
from sync.delta_channels import until as go_on_until

from monolith.checkpoint import BestCheckpoint, write_best
from monolith.cli.main import main, parse_options
from monolith.cli.options.serve import ServeOptions
from monolith.cli.serve import chosen_folder, chosen_text, command_of, peers_of, serve_config, trainer_of
from monolith.cluster import open_discovery_url
from monolith.errors import ConfigError, UnavailableError
from monolith.serve import Client, ClientOptions, Predictor
from monolith.serve.exporter import ExportHow
from monolith.serve.versions import list_versions
from monolith.sync.channel_url import open_writer

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
PATIENCE = 120


@pytest.fixture(scope="module")
def servables(tmp_path_factory) -> Path:
    """A folder with a version of a small model, and the training it is of beside it."""
    folder = tmp_path_factory.mktemp("served")
    config = trained(folder / "run")
    exported(config, folder / "out", step=3)
    exported(config, folder / "later", step=6)
    exported(config, folder / "kept", step=6)
    return folder


@pytest.fixture
def evaluated(tmp_path) -> Path:
    """A run that was exported twice, and whose earlier checkpoint is the best."""
    config = trained(tmp_path / "run")
    for step in (3, 6):
        exported(config, tmp_path / "run" / "exported_models", step=step)
    best = BestCheckpoint(name="model.ckpt-3", step=3, metric="click/auc", value=0.75)
    write_best(str(tmp_path / "run"), best)
    return tmp_path / "run"


def chosen(*words: str) -> tuple[list[str], str]:
    """Return the versions that a server begins with, and why, in words."""
    options = parse_options("serve", list(words))
    config = serve_config(options)
    one = chosen_folder(options.folders[0], options, config)
    versions = one.policy.wanted(list_versions(one.folder))
    return versions, chosen_text(one, options, versions[-1], follows=bool(config.follow.url)).strip(" ()")


def test_the_best_version_is_served_where_the_run_was_evaluated(evaluated):
    best = "the best by click/auc, 0.7500; --checkpoint latest serves the newest"
    for folder in (evaluated, evaluated / "exported_models"):
        assert chosen(str(folder)) == (["3"], best)
        assert chosen(str(folder), "--checkpoint", "best") == (["3"], "--checkpoint best")
        assert chosen(str(folder), "--checkpoint", "latest") == (["6"], "--checkpoint latest")
        assert chosen(str(folder), "--checkpoint", "model.ckpt-6") == (["6"], "--checkpoint model.ckpt-6")
        assert chosen(str(folder), "--version-policy", "all")[0] == ["3", "6"]
    trainer = chosen(str(evaluated), "--follow", "grpc://127.0.0.1:1")
    assert trainer == (["6"], "the newest, which the trainer continues")
    assert chosen(str(evaluated / "exported_models" / "6"))[0] == ["6"]


def test_another_best_is_served_as_soon_as_the_run_names_it(evaluated):
    options = parse_options("serve", [str(evaluated)])
    one = chosen_folder(str(evaluated), options, serve_config(options))
    assert one.policy.wanted(["3", "6"]) == ["3"]
    better = BestCheckpoint(name="model.ckpt-6", step=6, metric="click/auc", value=0.76)
    write_best(str(evaluated), better)
    assert one.policy.wanted(["3", "6"]) == ["6"]


def test_without_an_evaluation_or_an_export_of_the_best_the_newest_is_served(evaluated):
    best = BestCheckpoint(name="model.ckpt-5", step=5, metric="click/auc", value=0.75)
    write_best(str(evaluated), best)
    versions, why = chosen(str(evaluated))
    assert versions == ["6"]
    assert why == f"the newest; the best, model.ckpt-5, is not exported: monolith export {evaluated}"
    with pytest.raises(ConfigError, match="is of the best checkpoint of its run"):
        chosen(str(evaluated), "--checkpoint", "best")
    (evaluated / "best_checkpoint").unlink()
    assert chosen(str(evaluated)) == (["6"], "the newest")


def test_a_checkpoint_that_is_not_exported_is_refused_with_those_that_are(evaluated, capsys):
    for words, says in (
        (["--checkpoint", "77"], "no version in .* is of checkpoint 77; there are 3, 6"),
        (["--checkpoint", "best", "--version-policy", "all"], "give one of them"),
    ):
        assert main(["serve", str(evaluated), *words]) == 2
        assert re.search(says, capsys.readouterr().err)
    shutil.rmtree(evaluated / "exported_models")
    assert main(["serve", str(evaluated)]) == 2
    assert f"monolith export {evaluated}" in capsys.readouterr().err


class Server:
    """`monolith serve` in a process, and what it has said so far."""

    def __init__(self, *words: str, until: str = "ask it") -> None:
        self.process = warm.Popen(["-m", "monolith", "serve", *words], stdout=warm.PIPE)
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(until):
                break
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()

    def said(self, begin: str) -> str:
        (found,) = [line for line in self.lines if line.startswith(begin)]
        return found.removeprefix(begin).strip()

    @property
    def url(self) -> str:
        return self.said("http").split()[0]

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_folder_is_served_asked_and_switched_and_sigterm_ends_it_well(servables, tmp_path, capsys):
    root = tmp_path / "out"
    root.mkdir()
    (servables / "out" / "3").rename(root / "3")
    server = Server(str(root), "--http-port", "0", "--grpc-port", "0", "--poll", "0.05")
    try:
        assert "version 3" in server.said("model")
        assert server.said("model").endswith("(the newest)")
        words = shlex.split(server.said("ask it"))
        assert words[:2] == ["monolith", "query"]
        assert main([*words[1:], "--json"]) == 0  # the very line that it told us to type
        first = json.loads(capsys.readouterr().out)
        assert (first["version"], first["step"]) == ("3", 3)
        assert 0 < first["outputs"]["click"][0] < 1
        about = json.loads(server.get(f"/v2/models/{first['model']}")[1])
        shapes = {one["name"]: one["shape"] for one in about["inputs"]}
        assert (shapes["item"], shapes["history"]) == ([-1], [-1, -1])  # one value, and a list
        with Client(server.said("grpc")) as client:
            told = {one.name: list(one.shape) for one in client.inputs(first["model"])}
        assert told == shapes
        row = json.loads(words[words.index("--row") + 1])
        for wrong, says in (({"item": [1, 2]}, "reads one value"), ({}, None)):
            status = main(["query", server.url, "--row", json.dumps(row | wrong), "--json"])
            found = capsys.readouterr()
            assert (status == 0) == (says is None)
            assert says is None or says in found.err
        assert main(["query", server.said("grpc"), *words[3:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["outputs"] == first["outputs"]
        (servables / "later" / "6").rename(root / "6")
        until(lambda: b'"6"' in server.get(f"/v2/models/{first['model']}")[1])
        assert main([*words[1:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["version"] == "6"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    finally:
        server.close()


def test_memory_for_rows_may_be_limited_and_what_was_read_is_counted(servables, capsys):
    root = str(servables / "kept")
    with Predictor(root, show=False) as whole:
        memory = sum(one.core.index_bytes for one in whole.rows.files.members.values()) + 100
    server = Server(root, "--http-port", "0", "--poll", "0.05", "--memory", str(memory))
    try:
        words = shlex.split(server.said("ask it"))
        assert main([*words[1:], "--json"]) == 0
        assert 0 < json.loads(capsys.readouterr().out)["outputs"]["click"][0] < 1
        assert f"{memory:,} bytes" in server.said("memory")
        line = rb'^monolith_serve_rows_found_total{model="[^"]+",tier="memory"} [1-9]'
        until(lambda: re.search(line, server.get("/metrics")[1], re.MULTILINE))
    finally:
        server.close()


def test_a_version_that_is_not_compiled_is_not_served_as_such(servables):
    server = Server(
        str(servables / "kept"), "--http-port", "0", "--grpc-port", "None", "--compiled", until="model"
    )
    try:
        assert "none that can be loaded" in server.said("model")
        index = urllib.request.Request(f"{server.url}/v2/repository/index", b"{}")
        (line,) = json.load(urllib.request.urlopen(index, timeout=PATIENCE))
        assert "no compiled package; export it with --compile" in line["reason"]
        assert server.get("/v2/health/ready")[0] == 503
    finally:
        server.close()


def test_certificates_and_a_token_are_asked_for_over_every_port(servables, certificates, tmp_path, capsys):
    (tmp_path / "token").write_text("s3cret")
    ours = [*certificate_flags(certificates, "ca"), "--token-file", str(tmp_path / "token")]
    server = Server(str(servables / "kept"), "--http-port", "0", "--grpc-port", "0", *ours)
    try:
        words = shlex.split(server.said("ask it"))
        assert words[2].startswith("https://127.0.0.1:")
        assert words[3:5] == ours[-2:]
        for url in (words[2], server.said("grpc")):
            ask = ["query", url, *words[5:]]
            assert main([*ask, *ours]) == 0
            assert main([*ask, *ours, "--tls-server-name", "localhost"]) == 0
            assert main([*ask, *ours, "--tls-server-name", "somebody"]) != 0
            assert main([*ask, *certificate_flags(certificates, "ca")]) != 0
            assert "token" in capsys.readouterr().err
            assert main([*ask, *certificate_flags(certificates, "other"), *ours[-2:]]) != 0
    finally:
        server.close()


def certificate_flags(certificates: Path, authority: str) -> list[str]:
    node = certificates / f"{authority}-node"
    return ["--tls-cert", f"{node}.crt", "--tls-key", f"{node}.key", "--tls-ca", f"{certificates}/ca.crt"]


def test_an_entry_answers_with_the_rows_of_serving_servers(tmp_path, capsys):
    config = trained(tmp_path / "run", steps=3)
    exported(config, tmp_path / "sharded", step=3, how=ExportHow(shards=2))
    exported(config, tmp_path / "whole", step=3)
    registry = f"files://{tmp_path}/registry"
    folder = str(tmp_path / "sharded")
    shared = ("--discovery", registry)
    with ExitStack() as open_things:
        for shard in ("0", "1"):
            words = [folder, "--role", "ps", "--shard", shard, "--metrics-port", "0", *shared]
            rows = Server(*words, until="rows")
            open_things.callback(rows.close)
        entry = Server(folder, "--role", "entry", *shared, "--http-port", "0", "--grpc-port", "None")
        open_things.callback(entry.close)
        words = shlex.split(entry.said("ask it"))
        assert main([*words[1:], "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        with Predictor(str(tmp_path / "whole"), show=False) as predictor:
            row = json.loads(words[-1])
            wanted = predictor.predict({name: [value] for name, value in row.items()})
        assert said["outputs"]["click"] == pytest.approx(wanted.outputs["click"].tolist())
        assert "missing_shards" not in said
        with urllib.request.urlopen(rows.said("metrics"), timeout=PATIENCE) as answer:
            counted = answer.read().decode()
        (lookups,) = re.findall(r'serve_lookups_total\{shard="[^"]+:ps_1"\} (\S+)', counted)
        assert float(lookups) >= 1


def test_what_cannot_be_served_is_said(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "nowhere")]) == 2
    assert "nothing to serve in" in capsys.readouterr().err
    for words, says in (
        (["--version-policy", "newest"], "version policy"),
        (["--metrics-port", "0"], "--metrics-port is for --role ps"),
        (["--role", "ps"], "say with --discovery"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--port", "0", "--grpc-port", "0"], "so --grpc-port has no meaning with it"),
        (["--processes", "2", "--port", "0", "--http-port", "None"], "so --http-port has no meaning with it"),
        (["--processes", "2", "--split", "x"], "cannot read the route"),
        (["--processes", "2", "--host", "0.0.0.0"], "neither certificates nor a token"),
    ):
        assert main(["serve", str(tmp_path), *words]) == 2
        assert says in capsys.readouterr().err


def test_a_batch_is_computed_by_one_thread_of_torch_unless_told_otherwise(tmp_path):
    before = torch.get_num_threads()
    try:
        for words, threads in (([], 1), (["--predict-threads", "2"], 2)):
            torch.set_num_threads(3)
            assert main(["serve", str(tmp_path / "nowhere"), *words]) == 2  # after threads were set
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_flags_make_the_config():
    words = ["a", "b=c", "--port", "0", "--max-delay-ms", "2.5", "--max-rows", "7", "--timeout", "0.5"]
    config = serve_config(parse_options("serve", [*words, "--memory", "2GiB"]))
    assert config.port == 0
    assert config.memory_bytes == 2 << 30
    assert config.batching.max_delay.total_seconds() == 0.0025
    assert config.limits.rows == 7
    assert config.limits.timeout.total_seconds() == 0.5


def test_each_of_several_processes_is_started_with_the_same_flags(tmp_path):
    words = ["a", "--split", "x=a/1,a/2", "y=a", "--allow-module", "--grpc-port", "None", "--threads", "3"]
    words += ["--compiled"]
    options = parse_options("serve", [*words, "--processes", "2", "--token-file", "t"])
    command = command_of(options, 1, tmp_path)
    assert command[1:4] == ("-m", "monolith", "serve")
    again = parse_options("serve", list(command[4:]))
    assert isinstance(again, ServeOptions)
    assert (again.folders, again.split) == (("a",), ("x=a/1,a/2", "y=a"))
    assert (again.allow_module, again.compiled) == (True, True)
    assert (again.grpc_port, again.threads, again.processes) == ("None", 3, 1)
    assert again.security.token_file == Path("t")
    assert peers_of(again.peers) == (1, 2, tmp_path)
    with pytest.raises(ConfigError, match="--peers is set by --processes"):
        peers_of("x")


def test_a_killed_process_fails_only_what_was_in_flight_and_is_restarted(servables):
    root = str(servables / "kept")
    given = {name: values for name, values in columns(8, seed=3).items() if name not in ("click", "time")}
    rows = [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]
    with Predictor(root, show=False) as predictor:
        wanted = predictor.predict(given).outputs["click"].tolist()
        name = predictor.name
    server = Server(root, "--processes", "2", "--http-port", "0", "--grpc-port", "None", until="serving")
    try:
        stop = threading.Event()
        outcomes: list[str] = []

        def ask(row: int) -> None:
            while not stop.is_set():
                try:
                    with Client(server.url, options=ClientOptions(retries=0)) as client:
                        found = client.predict(name, [rows[row]]).outputs["click"]
                    outcomes.append("right" if found == pytest.approx([wanted[row]]) else "wrong")
                except (UnavailableError, OSError):
                    outcomes.append("failed")

        threads = [threading.Thread(target=ask, args=(row,), daemon=True) for row in (0, 5)]
        for thread in threads:
            thread.start()
        until(lambda: len(outcomes) > 4)
        killed, _ = serving_processes(root)
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(serving_processes(root) - {killed}) == 2)
        until(lambda: server.get("/metrics")[1].count(b"monolith_serve_in_flight{process=") == 2)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert outcomes.count("right") > 10
        assert "wrong" not in outcomes
        # Those in flight, and who connected before the system had closed its sockets; others by hundreds.
        assert outcomes.count("failed") <= 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    finally:
        server.close()


def serving_processes(root: str) -> set[int]:
    """Return the processes that serve a folder together, without those that watch over them."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        isolated = any(word.startswith(b"-I") for word in words)
        if b"--peers" in words and root.encode() in words and not isolated:
            found.add(int(entry.parent.name))
    return found


def test_the_publishers_to_follow_are_checked_before_anything_is_served(tmp_path):
    def trainer(url, **more):
        options = ServeOptions(folders=("d",), follow=url, **more)
        return trainer_of(options, serve_config(options))

    with trainer(None) as nobody:
        assert nobody is None
    with trainer(str(tmp_path)) as found:
        reader = found()
        assert list(reader.logs()) == []
        reader.close()
    with pytest.raises(ConfigError, match="--discovery"), trainer("discovery"):
        pass
    with pytest.raises(ConfigError), trainer("kafka://broker:9092"):
        pass
    config = serve_config(ServeOptions(folders=("d",), follow="grpc://h:1", stale_after="3"))
    assert (config.follow.url, config.follow.stale_after.total_seconds()) == ("grpc://h:1", 3)
    words = command_of(ServeOptions(folders=("d",), follow="grpc://h:1", processes=2), 0, tmp_path)
    assert words[words.index("--follow") + 1] == "grpc://h:1"


def test_a_trainer_is_found_by_the_discovery_that_serving_uses(tmp_path):
    registry = f"files://{tmp_path}/job"
    options = ServeOptions(folders=("d",), follow="discovery", discovery=registry)
    with open_discovery_url(registry, {}) as discovery, trainer_of(options, serve_config(options)) as found:
        writer = open_writer("discovery", discovery=discovery)
        publisher, copy = SmallPublisher(writer), Copy()
        publisher.publish([1, 2])
        reader = found()
        go_on_until(lambda: copy.equals(publisher), lambda: copy.follow(reader, 0))
        reader.close()
        writer.close()


def test_the_group_serve_of_a_config_file_holds_unless_a_flag_is_given(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[serve]\nhttp_port = 9000\npoll = "5s"\nsplits = ["ads=ads/1:9,ads/2:1"]\n'
        '[serve.limits]\nrequest_bytes = "32MiB"\nrows = 100\n[serve.follow]\nurl = "grpc://h:1"\n'
    )
    words = ["d", "--config", str(file), "--max-rows", "7", "--timeout", "500ms", "--max-json-bytes", "1MiB"]
    config = serve_config(parse_options("serve", [*words, "--grpc-port", "None"]))
    assert (config.http_port, config.grpc_port, config.poll.total_seconds()) == (9000, None, 5.0)
    limits = config.limits
    assert (limits.request_bytes, limits.json_bytes, limits.rows) == (32 << 20, 1 << 20, 7)
    assert (limits.timeout.total_seconds(), config.follow.url) == (0.5, "grpc://h:1")
    assert [one.name for one in config.split_routes] == ["ads"]


def test_memory_that_is_no_size_is_refused():
    with pytest.raises(ConfigError, match="serve: --memory: 'lots' is not a size"):
        serve_config(parse_options("serve", ["a", "--memory", "lots"]))


def test_a_port_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="--http-port must be a whole number or None, got 'x'"):
        serve_config(ServeOptions(folders=("d",), http_port="x"))
