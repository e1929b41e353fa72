"""A server follows a trainer in one process: rows, dense weights, freshness, newer exports, going back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.fake_trainer import PATIENCE, FakeTrainer, until
from serve.served_tasks import columns, exported, trained
from serve.server.serving import ask_http

from monolith.errors import ConfigError, RequestError
from monolith.serve import Predictor
from monolith.serve.config import ServeFollowConfig
from monolith.serve.manifest import read_servable, write_servable
from monolith.serve.server import InferenceServer, ServeConfig, VersionPolicy
from monolith.serve.server.catalog import ServableCatalog, served_folder
from monolith.store import TableIds
from monolith.sync.channel import MemoryChannel
from monolith.sync.messages import LearnedUpTo, LogPosition

UNKNOWN = -1


@pytest.fixture(scope="module")
def servables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 3 and 6 of a small model."""
    folder = tmp_path_factory.mktemp("served")
    config = trained(folder / "run")
    exported(config, folder / "out", step=3)
    exported(config, folder / "out", step=6)
    return folder / "out"


@pytest.fixture
def root(servables: Path, tmp_path: Path) -> Path:
    """A folder that has version 3; `release` brings 6."""
    shutil.copytree(servables / "3", tmp_path / "models" / "3")
    return tmp_path / "models"


def release(servables: Path, root: Path) -> None:
    shutil.copytree(servables / "6", root / ".6")
    (root / ".6").rename(root / "6")


@contextmanager
def following(root: Path, channel: MemoryChannel, **config: Any) -> Iterator[InferenceServer]:
    policy = VersionPolicy.parse(config.pop("policy", "latest"))
    settings = {"http_port": 0, "grpc_port": None, "poll": timedelta(seconds=0.02), "threads": 4, **config}
    with InferenceServer(
        ServeConfig(**settings),
        [served_folder(str(root), policy)],
        ServableCatalog({"threads": 1}),
        follow=channel.reader,
    ) as server:
        yield server


def caught_up(server: InferenceServer, place: LogPosition) -> bool:
    standing = server.followers["served"].standing
    reached = standing[0].position if 0 in standing else None
    return reached is not None and reached.epoch == place.epoch and reached.sequence >= place.sequence


def lookup(server: InferenceServer, ids: torch.Tensor) -> torch.Tensor:
    """Return what a served model reads for ids of table `item`."""
    with server.inference.repository.lease("served") as held:
        rows = held.model.rows  # type: ignore[attr-defined]
        sizes = torch.tensor([len(ids) if name == "item" else 0 for name in rows.tables])
        return rows.lookup(TableIds(ids, sizes)).rows.reshape(len(ids), -1)


def ask(server: InferenceServer) -> dict[str, Any]:
    raw = columns(3, seed=9)
    inputs = [
        {"name": "user_id", "datatype": "BYTES", "shape": [3], "data": raw["user_id"]},
        {"name": "item", "datatype": "INT64", "shape": [3], "data": raw["item"]},
        {"name": "history", "datatype": "INT64", "shape": [3, 1], "data": [1, 2, 3]},
        {"name": "price", "datatype": "FP32", "shape": [3], "data": raw["price"]},
        {
            "name": "where",
            "datatype": "FP32",
            "shape": [3, 2],
            "data": [one for pair in raw["where"] for one in pair],
        },
    ]
    assert server.http_url is not None
    port = int(server.http_url.rpartition(":")[2])
    status, said, _ = ask_http(port, "POST", "/v2/models/served/infer", {"inputs": inputs})
    assert status == 200, said
    return said  # type: ignore[no-any-return]


def test_rows_and_dense_weights_that_a_trainer_publishes_are_served(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        before = ask(server)
        assert before["parameters"]["step"] == 3
        assert before["parameters"].keys() >= {"step", "staleness"}
        ids, values = trainer.change()
        gone, stay = ids[:2], ids[2:]
        trainer.tables["item"].remove(gone)
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        assert torch.equal(lookup(server, stay), values[2:])
        assert not lookup(server, gone).any()
        rows_only = ask(server)
        assert rows_only["outputs"] != before["outputs"]
        trainer.dense = {name: one + 0.1 for name, one in trainer.dense.items()}
        trainer.publisher.publish_now()
        until(lambda: ask(server)["outputs"] != rows_only["outputs"])
    trainer.publisher.close()


def test_every_answer_says_how_new_it_is_and_metrics_say_where_time_went(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher.publish_now()
    with following(root, channel) as server:
        until(lambda: caught_up(server, trainer.publisher.position))
        trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        said = ask(server)["parameters"]
        assert (said["step"], said["watermark"], said["event_at"]) == (70, 1_700_000_000, 100.0)
        assert said["staleness"] >= 0
        assert said["published_at"] <= said["received_at"] <= said["applied_at"]
        server.followers["served"].look()
        text = server.inference.render_metrics().decode()
    trainer.publisher.close()
    for stage in ("read", "train", "publish", "wire", "apply", "total"):
        assert f'serve_event_to_served_seconds_count{{model="served",stage="{stage}"}}' in text
    assert 'monolith_serve_follow_sequence{model="served",shard="0"}' in text
    assert 'monolith_serve_followed_rows_total{by="delta",model="served"}' in text
    assert "monolith_serve_follow_resyncs_total" in text
    assert 'monolith_serve_staleness_seconds{model="served"}' in text


def test_a_snapshot_of_rows_that_are_as_exported_is_not_kept_twice(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher.publish_now()
    with following(root, channel) as server:
        until(lambda: caught_up(server, trainer.publisher.position))
        assert server.followers["served"].target.rows.rows == 0
    trainer.publisher.close()


def test_a_server_resumes_from_the_position_that_its_export_names(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher.publish_now()
    place = trainer.publisher.position
    write_servable(
        str(root / "3"), replace(trainer.servable, log_places={"0": (place.epoch, place.sequence)})
    )
    ids, values = trainer.change()
    trainer.publisher.publish_now()
    with following(root, channel) as server:
        until(lambda: caught_up(server, trainer.publisher.position))
        assert torch.equal(lookup(server, ids), values)
        assert server.followers["served"].standing[0].snapshots == 0
    trainer.publisher.close()


def test_a_newer_export_takes_over_while_what_is_newer_stays(root: Path, servables: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel, follow=ServeFollowConfig(compact_after=timedelta(0))) as server:
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        release(servables, root)
        until(lambda: server.inference.repository.versions("served") == ("6",))
        assert torch.equal(lookup(server, ids), values)
        assert ask(server)["parameters"]["step"] == 70
        follower = server.followers["served"]
        follower.look()
        assert torch.equal(lookup(server, ids), values)
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        assert torch.equal(lookup(server, ids), values)
    trainer.publisher.close()


def test_an_export_that_is_newer_than_what_was_followed_counts(root: Path, servables: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.learned = LearnedUpTo(step=4)
    with following(root, channel) as server:
        ids, old = trainer.change(by=100.0)
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        channel.broken = True
        release(servables, root)
        until(lambda: server.inference.repository.versions("served") == ("6",))
        assert not torch.equal(lookup(server, ids), old)
        follower = server.followers["served"]
        ids, values = trainer.change()
        channel.broken = False
        trainer.publisher.publish_now()
        until(lambda: follower.look() or caught_up(server, trainer.publisher.position))
        until(lambda: torch.equal(lookup(server, ids), values))
    trainer.publisher.close()


def test_servers_go_back_to_an_exported_version_and_follow_again(root: Path, servables: Path) -> None:
    release(servables, root)
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "6", channel)
    with Predictor(str(root / "3"), show=False) as third:
        names = torch.tensor([1, 2, 3])
        sizes = torch.tensor([3 if name == "item" else 0 for name in third.rows.tables])
        exported_rows = third.rows.lookup(TableIds(names, sizes)).rows.reshape(3, -1)
    with following(root, channel) as server:
        trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        trainer.publisher.rollback("3")
        until(lambda: server.inference.repository.versions("served") == ("3",))
        said = ask(server)
        assert (said["model_version"], said["parameters"]["step"]) == ("3", 3)
        assert torch.equal(lookup(server, names), exported_rows)
        ids, values = trainer.change()
        trainer.publisher.publish_now()  # held
        assert torch.equal(lookup(server, names), exported_rows)
        trainer.publisher.resume()
        until(lambda: server.inference.repository.versions("served") == ("6",))
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        assert torch.equal(lookup(server, ids), values)
        until(
            lambda: ask(server)["parameters"].get("step") == 70
        )  # known with a delta begun after the snapshot
    trainer.publisher.close()


def test_no_answer_claims_what_its_rows_are_not_while_servers_go_back_and_follow_again(
    root: Path, servables: Path
) -> None:
    release(servables, root)
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "6", channel)
    heard: list[tuple[tuple[str, int], Any]] = []
    with following(root, channel) as server:
        target = server.followers["served"].target
        go_to, forget = target._go_to, target._forget

        def hear() -> tuple[tuple[str, int], Any]:
            said = ask(server)
            step = said["parameters"].get("step", UNKNOWN)
            heard.append(((said["model_version"], step), said["outputs"]))
            return heard[-1]

        def between(step: Any) -> Any:
            def do(*version: Any) -> None:
                hear()
                step(*version)
                hear()

            return do

        exported = hear()
        trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        followed = hear()
        target._go_to, target._forget = between(go_to), between(forget)  # type: ignore[method-assign]
        trainer.publisher.rollback("3")
        until(lambda: target.rolled_back_to == "3")
        until(lambda: server.inference.repository.versions("served") == ("3",))
        until(lambda: len(heard) >= 6)
        back = hear()
        trainer.publisher.resume()
        until(lambda: len(heard) >= 11)
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        hear()
    trainer.publisher.close()
    true = dict([exported, followed, back])
    assert list(true) == [("6", 6), ("6", 70), ("3", 3)]
    claims = [(claim, outputs) for claim, outputs in heard if claim[1] != UNKNOWN]
    assert [claim for claim, outputs in claims if true[claim] != outputs] == []
    assert len(claims) > 8, "an answer knows what its rows are, but for the moment after a resume"


def test_going_back_to_the_version_that_follows_drops_what_deltas_brought(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        first = ask(server)["outputs"]
        trainer.change()
        trainer.publisher.publish_now()
        until(lambda: ask(server)["outputs"] != first)
        trainer.publisher.rollback("3")
        until(lambda: ask(server)["outputs"] == first)
    trainer.publisher.close()


def test_a_version_that_is_not_there_changes_nothing_and_is_named(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        trainer.publisher.rollback("77")
        follower = server.followers["served"]
        until(lambda: follower.target.problem)
        assert "has no version '77'" in follower.target.problem
        assert "there are 3" in caplog.text
        assert torch.equal(lookup(server, ids), values)
        assert server.inference.is_ready
    trainer.publisher.close()


def test_a_silent_trainer_is_warned_about_once_and_answers_continue(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel, follow=ServeFollowConfig(stale_after=timedelta(hours=2))) as server:
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        follower = server.followers["served"]
        ahead = 3600.0
        follower._clock = lambda: time.time() + ahead
        follower._timer = lambda: time.monotonic() + ahead
        follower.look()
        assert "no newer rows arrive" not in caplog.text
        ahead = 7300.0
        follower.look()
        follower.look()
        assert caplog.text.count("no newer rows arrive") == 1
        with server.inference.repository.lease("served") as held:
            held.model._clock = follower._clock  # type: ignore[attr-defined]
        assert ask(server)["parameters"]["staleness"] >= 7200
        assert server.inference.is_ready
    trainer.publisher.close()


def test_a_publisher_whose_clock_is_ahead_is_named_in_answers_metrics_and_once_in_the_log(
    root: Path, caplog: Any
) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher._clock = lambda: time.time() + 86_400
    with following(root, channel) as server, caplog.at_level("WARNING"):
        for _ in range(2):
            trainer.change()
            trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        said = ask(server)["parameters"]
        for _ in range(2):
            server.followers["served"].look()
    assert said["clock_differs_by"] == pytest.approx(86_400, abs=60)
    assert said["staleness"] < PATIENCE
    assert caplog.text.count("clock differs") == 1
    trainer.publisher.close()


def test_a_server_that_is_catching_up_is_not_reported_as_silent(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher._clock = lambda: time.time() - 3600.0
    with following(root, channel) as server:
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        follower = server.followers["served"]
        follower._listens_since -= 60.0
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        follower.look()
        assert "catching up, the deltas that arrive are old" in caplog.text
        assert "no newer rows arrive" not in caplog.text
    trainer.publisher.close()


def test_an_old_export_is_nothing_to_warn_about_before_the_first_contact_with_the_trainer(
    root: Path, caplog: Any
) -> None:
    made = read_servable(str(root / "3"))
    write_servable(str(root / "3"), replace(made, created=made.created - 3600.0))
    with following(root, MemoryChannel()) as server:
        follower, now = server.followers["served"], time.time()
        follower._listens_since = now
        follower._clock = follower._timer = lambda: now + 9.0
        follower.look()
        assert follower.staleness() > 3600
        assert "no newer rows arrive" not in caplog.text
        follower._clock = follower._timer = lambda: now + 11.0
        follower.look()
        assert "no newer rows arrive (nothing is published)" in caplog.text


def test_after_a_resume_the_paused_rows_have_time_to_arrive(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    trainer.publisher.publish_now()
    with following(root, channel) as server:
        follower, now = server.followers["served"], time.time()
        until(lambda: caught_up(server, trainer.publisher.position))
        trainer.publisher.pause("by hand")
        until(lambda: follower.target.state.paused)
        follower._clock = follower._timer = lambda: now + 3600.0
        follower.look()
        trainer.publisher.resume()
        until(lambda: not follower.target.state.paused)
        follower._clock = follower._timer = lambda: now + 3609.0
        follower.look()
        assert "no newer rows arrive" not in caplog.text
        follower._clock = follower._timer = lambda: now + 3611.0
        follower.look()
        assert "no newer rows arrive" in caplog.text
    trainer.publisher.close()


def test_while_a_share_of_training_is_nowhere_answers_are_as_old_as_the_export(
    root: Path, caplog: Any
) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel, share=(0, 2))
    with following(root, channel) as server:
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        follower = server.followers["served"]
        until(lambda: "no publisher found for" in caplog.text)
        assert ask(server)["parameters"]["step"] == 3
        follower._clock = lambda: time.time() + 3600.0
        follower._timer = lambda: time.monotonic() + 3600.0
        follower.look()
        assert "no newer rows arrive (no publisher found for" in caplog.text
    trainer.publisher.close()


def test_dense_weights_that_do_not_fit_are_not_taken_and_counted(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        before = ask(server)["outputs"]
        trainer.dense = {name: one for number, (name, one) in enumerate(trainer.dense.items()) if number}
        trainer.publisher.publish_now()
        until(lambda: "refused dense weights" in caplog.text)
        assert ask(server)["outputs"] == before
        assert "monolith_serve_follow_dense_refused_total" in server.inference.render_metrics().decode()
    trainer.publisher.close()


def test_a_trainer_of_another_run_is_refused_with_one_line(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel, run="/models/another#0123456789abcdef")
    with following(root, channel) as server:
        ids, values = trainer.change()
        before = lookup(server, ids)
        trainer.publisher.publish_now()
        until(lambda: "not followed: version 3" in caplog.text)
        follower = server.followers["served"]
        follower.look()
        assert "allow it with --follow-any-run" in follower.notice
        assert follower.standing == {}
        assert torch.equal(lookup(server, ids), before)
        assert not torch.equal(before, values)
        assert caplog.text.count("not followed") == 1
        assert (
            'monolith_serve_follows_other_run{model="served"} 1' in server.inference.render_metrics().decode()
        )
    trainer.publisher.close()


def test_a_run_that_takes_the_place_of_the_one_that_is_followed_is_refused(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        trainer.publisher.close()
        other = FakeTrainer(root / "3", channel, run="/models/another")
        other.change()
        other.publisher.publish_now()
        until(lambda: "allow it with --follow-any-run" in caplog.text)
        assert torch.equal(lookup(server, ids), values)
        other.publisher.close()
        again = FakeTrainer(root / "3", channel)  # the run of the export is started again, with a new epoch
        ids, values = again.change()
        again.publisher.publish_now()
        until(lambda: caught_up(server, again.publisher.position))
        assert torch.equal(lookup(server, ids), values)
        again.publisher.close()


def test_a_trainer_of_another_run_is_followed_if_that_is_allowed_and_said_to_be(
    root: Path, caplog: Any
) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel, run="/models/another")
    with following(root, channel, follow=ServeFollowConfig(any_run=True)) as server:
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        follower = server.followers["served"]
        follower.look()
        follower.look()
        said = f"exported from the run {trainer.servable.run!r}"
        assert caplog.text.count(said) == 1, "once"
        assert "belongs to the run '/models/another'" in caplog.text
        assert torch.equal(lookup(server, ids), values), "its snapshot is taken all the same"
        assert (
            'monolith_serve_follows_other_run{model="served"} 1' in server.inference.render_metrics().decode()
        )
        with server.inference.repository.lease("served") as held:
            assert said in held.model.about["following"]
    trainer.publisher.close()


def test_a_trainer_of_the_run_of_the_export_is_nothing_to_speak_of(root: Path, caplog: Any) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        server.followers["served"].look()
        assert server.followers["served"].notice == ""
        assert (
            'monolith_serve_follows_other_run{model="served"} 0' in server.inference.render_metrics().decode()
        )
    assert "another" not in caplog.text
    trainer.publisher.close()


def test_what_differs_is_found_and_repaired(root: Path) -> None:
    channel = MemoryChannel()
    trainer = FakeTrainer(root / "3", channel)
    with following(root, channel) as server:
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        ids, values = trainer.change()
        trainer.publisher.publish_now()
        until(lambda: caught_up(server, trainer.publisher.position))
        rows = server.followers["served"].target.rows
        rows.apply({}, {"item": ids[:1]})  # a mistake of somebody
        assert not lookup(server, ids[:1]).any()

        def mended() -> bool:
            trainer.publisher.publish_now()
            trainer.change("tags", 0.0)
            return torch.equal(lookup(server, ids), values)

        until(mended)
        until(lambda: server.followers["served"].standing[0].repaired > 0)
    trainer.publisher.close()


def test_only_one_version_of_a_model_can_follow(root: Path) -> None:
    with pytest.raises(ConfigError, match="has one version"), following(root, MemoryChannel(), policy="all"):
        pass
    split = "ads=served/3:1"
    with pytest.raises(ConfigError, match="by version"), following(root, MemoryChannel(), splits=(split,)):
        pass


def test_a_server_that_follows_refuses_a_split_by_version_while_it_runs(root: Path) -> None:
    with following(root, MemoryChannel()) as server:
        with pytest.raises(RequestError, match="follows a trainer"):
            server.inference.set_split("ads", "served/6")
        server.inference.set_split("ads", "served")  # by model there is one version, the trainer's newest
        assert server.inference.traffic.described() == {"ads": "served:1"}


def test_an_answer_of_a_model_that_follows_no_trainer_has_the_age_of_its_export(root: Path) -> None:
    with Predictor(str(root), show=False, clock=lambda: made.created + 12.5) as predictor:
        made = predictor.servable
        said = predictor.freshness()
        assert (said["step"], said.get("watermark"), said["staleness"]) == (3, made.watermark, 12.5)
