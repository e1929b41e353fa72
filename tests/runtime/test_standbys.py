"""Every share has a second copy in another server, which serves it when the first is lost."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.fleets import PATIENT, Tallied, has_cold_rows, read_model, run_config
from runtime.losing import LosingFleet, settings, wait_for
from runtime.test_failover import At
from torch import Tensor

from monolith.errors import ConfigError
from monolith.runtime import join_fleet
from monolith.runtime.cluster_config import FailoverConfig
from monolith.runtime.parameter_server import _ShardInRun
from monolith.runtime.standbys import CopyPlan, StandbyCopy, describe_standbys
from monolith.sync.publisher import Publisher
from monolith.table import Rows, iterate
from monolith.train import KeepConfig, SaveConfig, TrainConfig
from monolith.train.config import TablesConfig
from monolith.train.hook import DATA_ENDED

TASK = Tallied(batches=14)
PER_STEP = 2 + 1
"""Pushes to each server: rows of two stores, and weights."""
SELDOM = CopyPlan(interval=3600.0)
"""Copies have what they had when `settle` was called."""


def standing_by(config: TrainConfig, standbys: int = 2, **how: Any) -> LosingFleet:
    fleet = LosingFleet(config, loses_servers=True, **{"task": TASK, "copies": SELDOM, **how})
    for index in range(standbys):
        fleet.start_server(fleet.num_ps + index)
    return fleet


def served(fleet: LosingFleet, place: int) -> _ShardInRun:
    """What is held by whoever serves a place."""
    assert fleet.standbys is not None
    address = fleet.standbys._used()[place].address
    (index,) = (index for index in fleet.servers if fleet.address(index) == address)
    held = fleet.shares[index]._held
    assert held is not None
    return held


def copy_of(fleet: LosingFleet, place: int) -> StandbyCopy[_ShardInRun]:
    assert fleet.standbys is not None
    address = fleet.standbys.of(place)[0]
    (index,) = (index for index in fleet.servers if fleet.address(index) == address)
    copy = fleet.shares[index]._standby
    assert copy is not None
    return copy


def publisher(held: _ShardInRun) -> Publisher:
    assert held.copied is not None
    return held.copied.publisher


def settle(fleet: LosingFleet, places: tuple[int, ...] = (0, 1)) -> None:
    """Wait until each of the shares has a copy, and the copies have all that was learned up to now."""
    wait_for_copies(fleet, places)
    for place in places:
        source = publisher(served(fleet, place))
        assert source.flush()
        wait_for(partial(has_reached, copy_of(fleet, place), source), "a copy")


def wait_for_copies(fleet: LosingFleet, places: tuple[int, ...] = (0, 1)) -> None:
    """Wait until each share has a whole copy; one is whole with the first delta after its snapshot."""
    assert fleet.standbys is not None
    keeper = fleet.standbys

    def are_whole() -> bool:
        for place in places:
            if (copied := served(fleet, place).copied) is not None:
                copied.publisher.flush()
        return keeper.whole.issuperset(places)

    wait_for(are_whole, "all shares to have a whole copy")


def has_reached(copy: StandbyCopy[_ShardInRun], source: Publisher) -> bool:
    return copy.followed is not None and copy.followed.position == source.position


def rows_of(held: _ShardInRun) -> dict[str, Rows]:
    """All rows by table, in the order of their ids."""
    found = {}
    for name, table in held.model.tables.items():
        rows = Rows.concat(list(iterate(table)))
        order = rows.ids.argsort()
        found[name] = Rows(*(column[order] for column in columns(rows)))
    return found


def columns(rows: Rows) -> list[Tensor]:
    return [rows.ids, rows.event_times, rows.values, rows.state]


def same(some: dict[str, Rows], others: dict[str, Rows]) -> bool:
    return some.keys() == others.keys() and all(
        torch.equal(one, other)
        for name in some
        for one, other in zip(columns(some[name]), columns(others[name]), strict=True)
    )


@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_server_is_served_from_its_copy_and_loses_what_came_after_it(
    tmp_path: Path, lost: int, tables: TablesConfig
) -> None:
    copied: list[tuple[dict[str, Rows], bytes]] = []
    kept: list[tuple[_ShardInRun, dict[str, Rows]]] = []
    weights: list[bytes] = []

    save = SaveConfig(steps=3, retry_secs=0.01)
    with standing_by(settings(tmp_path, save=save, tables=tables)) as fleet:

        def copy() -> None:
            settle(fleet)
            for held in (served(fleet, lost), copy_of(fleet, lost).held):
                assert has_cold_rows(held.model) == (tables.storage == "tiered")
            copied.append((rows_of(served(fleet, lost)), served(fleet, lost).dense.dump()))

        def lose() -> None:
            held = copy_of(fleet, lost).held
            kept.append((held, rows_of(held)))
            load = held.dense.load

            def loaded(data: bytes) -> None:
                load(data)
                weights.append(held.dense.dump())

            held.dense.load = loaded  # type: ignore[method-assign]
            fleet.lose_server(lost)

        report = fleet.train(hooks=[At(5, copy), At(9, lose)]).report()
        ((held, rows),) = kept
        assert same(rows, copied[0][0]), "with optimizer state and event times, to the bit"
        assert weights == [copied[0][1]], "with what their optimizer keeps"
        assert served(fleet, lost) is held
        standby = fleet.address(next(index for index, share in fleet.shares.items() if share._held is held))
    assert report.step >= TASK.batches
    assert report.stop_reason == DATA_ENDED
    (found,) = report.lost.servers
    assert (found.server, found.restored_from, found.standby) == (lost, None, standby)
    assert found.updates == 4 * PER_STEP, "steps 6 to 9, though the checkpoint of step 9 has them"
    assert f"taken over by its standby at {standby}" in found.describe()
    tally = read_model(TASK, tmp_path).tally
    assert set(tally.values()) == {1.0}
    gone = set(range(TASK.records)) - tally.keys()
    assert gone == {record for record in range(5 * 8, 9 * 8) if record % 2 == lost}


def test_a_lost_standby_is_replaced(tmp_path: Path) -> None:
    with standing_by(settings(tmp_path)) as fleet:

        def lose() -> None:
            settle(fleet)
            (index,) = (i for i, share in fleet.shares.items() if share._standby is copy_of(fleet, 1))
            fleet.replace_server(index)
            assert fleet.standbys is not None
            keeper = fleet.standbys
            wait_for(lambda: keeper.of(1) == (fleet.address(index),), "another standby")
            settle(fleet)
            assert same(rows_of(copy_of(fleet, 1).held), rows_of(served(fleet, 1)))
            fleet.lose_server(1)

        report = fleet.train(hooks=[At(9, lose)]).report()
    (found,) = report.lost.servers
    assert (found.updates, found.restored_from) == (0, None)
    assert len(read_model(TASK, tmp_path).tally) == TASK.records


def test_where_both_are_lost_the_share_is_restored_from_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with standing_by(settings(tmp_path)) as fleet:

        def lose() -> None:
            settle(fleet)
            assert fleet.standbys is not None
            fleet.standbys.close()  # who would notice that the standby is lost
            with fleet.standbys._turn:
                pass
            (index,) = (i for i, share in fleet.shares.items() if share._standby is copy_of(fleet, 1))
            fleet.lose_server(index)
            fleet.replace_server(1)

        report = fleet.train(hooks=[At(9, lose)]).report()
    (found,) = report.lost.servers
    assert (found.restored_from, found.standby) == (str(tmp_path / "model.ckpt-6"), None)
    assert found.updates == 3 * PER_STEP
    (said,) = [
        record.getMessage() for record in caplog.records if "shard 1 returns to" in record.getMessage()
    ]
    assert said.startswith(
        f"shard 1 returns to step 6, of checkpoint {tmp_path}/model.ckpt-6, because no standby took over: "
        "its standby at "
    )
    assert "could not take over" in said


def test_a_copy_that_is_not_whole_yet_does_not_take_over(tmp_path: Path) -> None:
    with standing_by(settings(tmp_path)) as fleet:

        def lose() -> None:
            settle(fleet)
            copy_of(fleet, 1)._target.dense = None
            fleet.replace_server(1)

        report = fleet.train(hooks=[At(9, lose)]).report()
    assert [one.restored_from for one in report.lost.servers] == [str(tmp_path / "model.ckpt-6")]


def test_a_copy_is_whole_once_rows_and_pushes_are_of_one_moment(tmp_path: Path) -> None:
    """Rows of a snapshot are read while pushes change them: it alone does not say which pushes it has."""
    seen: list[bool] = []

    with standing_by(settings(tmp_path)) as fleet:

        def look() -> None:
            def has_snapshot() -> bool:
                return bool(copies_of(fleet, 0)) and copies_of(fleet, 0)[0].followed is not None

            wait_for(has_snapshot, "a snapshot")
            seen.append(copies_of(fleet, 0)[0].whole)
            settle(fleet)
            seen.append(copies_of(fleet, 0)[0].whole)

        fleet.train(hooks=[At(5, look)]).report()
    assert seen == [False, True]


def test_a_push_that_comes_while_a_delta_is_read_is_in_the_next_one(tmp_path: Path) -> None:
    """Were it in the rows of the first, and not among its pushes, the worker's retry would apply it again."""
    named: list[bool] = []

    with standing_by(settings(tmp_path)) as fleet, ThreadPoolExecutor(1) as pool:

        def push_meanwhile() -> None:
            settle(fleet)
            copied = served(fleet, 0).copied
            assert copied is not None
            applied, source, rest = copied._server._state.applied, copied.publisher, copied._rest
            late = threading.Event()

            def read_slowly() -> Any:
                pool.submit(applied.once, "late", 1, late.set, lambda: None)
                assert not late.wait(0.1), "the push waits for the end of the delta"
                return rest()

            source._ask_dense = read_slowly
            first = source.publish_now()
            source._ask_dense = rest
            assert late.wait(PATIENT)
            for delta in (first, source.publish_now()):
                assert delta is not None
                assert delta.dense is not None
                about = json.loads(bytes(delta.dense["about"].tolist()))
                named.append("late" in about["pushes"])

        fleet.train(hooks=[At(5, push_meanwhile)]).report()
    assert named == [False, True]


def test_a_server_that_comes_back_becomes_the_standby_of_its_successor(tmp_path: Path) -> None:
    with standing_by(settings(tmp_path)) as fleet:

        def lose() -> None:
            settle(fleet)
            fleet.replace_server(1)

        def lose_again() -> None:
            settle(fleet)
            (index,) = (i for i, share in fleet.shares.items() if share._held is served(fleet, 1))
            assert index >= fleet.num_ps
            assert copy_of(fleet, 1) is fleet.shares[1]._standby
            fleet.lose_server(index)

        report = fleet.train(hooks=[At(5, lose), At(9, lose_again)]).report()
        assert [one.standby for one in report.lost.servers][1] == fleet.address(1)
    assert [one.updates for one in report.lost.servers] == [0, 0]
    tally = read_model(TASK, tmp_path).tally
    assert tally == dict.fromkeys(range(TASK.records), 1.0)


def test_increments_after_a_take_over_have_all_of_the_share(tmp_path: Path) -> None:
    config = settings(tmp_path, save=SaveConfig(steps=3, retry_secs=0.01), keep=KeepConfig(full_every=10))
    task = Tallied(batches=14)
    with standing_by(config, task=task) as fleet:

        def lose() -> None:
            settle(fleet)
            cut: Any = copy_of(fleet, 1).held.tables.snapshot(0)
            assert all(one.cleared for one in cut._snapshots.values()), (
                "what was saved before and is gone, stays gone"
            )
            cut.close(saved=False)
            fleet.lose_server(1)

        report = fleet.train(hooks=[At(7, lose)]).report()
    assert report.lost.servers[0].updates == 0
    assert read_model(task, tmp_path).tally == dict.fromkeys(range(task.records), 1.0)


def test_what_all_workers_taught_a_server_after_the_copy_is_counted(tmp_path: Path) -> None:
    task = Tallied(batches=20)
    with standing_by(settings(tmp_path), task=task, num_workers=2) as fleet:

        def lose() -> None:
            settle(fleet)
            fleet.lose_server(1)  # in the middle of what the other worker does

        chief = fleet.train(0, [At(6, lose)])
        other = fleet.train(1)
        reports = [chief.report(), other.report()]
    assert all(report.finished for report in reports)
    (found,) = reports[0].lost.servers
    tally = read_model(task, tmp_path).tally
    missing = set(range(task.records)) - tally.keys()
    assert not {record for record in missing if record % 2 == 0}
    assert set(tally.values()) == {1.0}, "a push that was never answered is applied once"
    assert found.uncounted == ()
    assert len(missing) <= found.updates * 4, "what is missing was said to be lost"


def test_what_a_worker_taught_a_server_that_has_left_since_is_counted(tmp_path: Path) -> None:
    task = Tallied(batches=8)
    here, copied = threading.Event(), threading.Event()
    with standing_by(settings(tmp_path), task=task, num_workers=2) as fleet:
        meeting = fleet.shares[0]._meeting

        def lose() -> None:
            assert here.wait(PATIENT)
            settle(fleet)
            copied.set()
            wait_for(lambda: meeting._run is not None and 1 in meeting._run.left, "worker 1 to leave")
            fleet.lose_server(1)

        def wait() -> None:
            here.set()
            assert copied.wait(PATIENT)

        chief = fleet.train(0, [At(2, lose)])
        other = fleet.train(1, [At(3, wait)])
        reports = [chief.report(), other.report()]
    (found,) = reports[0].lost.servers
    missing = set(range(task.records)) - read_model(task, tmp_path).tally.keys()
    assert missing, "what worker 1 did last"
    assert found.updates * 4 == PER_STEP * len(missing), "each push of rows brings four of a batch of eight"
    assert found.uncounted == ()


# Two standbys


def copies_of(fleet: LosingFleet, place: int) -> list[StandbyCopy[_ShardInRun]]:
    found = [share._standby for share in fleet.shares.values() if share._standby is not None]
    return [copy for copy in found if copy.follows.index == place]


def settle_all(fleet: LosingFleet, copies: int) -> None:
    """Wait until share 1 has so many copies of what its server holds, with all that was learned up to now."""

    def follow_it() -> bool:
        if (copied := served(fleet, 1).copied) is not None:
            copied.publisher.flush()  # a copy is whole with the first delta after its snapshot
        now = fleet.standbys._used()[1].incarnation if fleet.standbys is not None else None
        found = [copy for copy in copies_of(fleet, 1) if copy.follows.incarnation == now and copy.whole]
        return len(found) == copies and served(fleet, 1).copied is not None

    wait_for(follow_it, "copies of share 1")
    source = publisher(served(fleet, 1))
    assert source.flush()
    for copy in copies_of(fleet, 1):
        wait_for(partial(has_reached, copy, source), "a copy")


def lose_server_of(fleet: LosingFleet, place: int) -> None:
    (index,) = (i for i, share in fleet.shares.items() if share._held is served(fleet, place))
    fleet.lose_server(index)


@pytest.mark.parametrize("followed", [False, True])
def test_with_two_standbys_a_second_loss_before_there_is_a_new_copy_costs_no_checkpoint(
    tmp_path: Path, followed: bool
) -> None:
    """The standby that is left serves: from its copy of the first server, or from what it followed since."""
    with standing_by(settings(tmp_path), standbys=4, standbys_wanted=2) as fleet:

        def lose() -> None:
            settle_all(fleet, copies=2)
            assert fleet.standbys is not None
            if not followed:
                fleet.standbys.close()
                with fleet.standbys._turn:
                    pass
            lose_server_of(fleet, 1)

        def lose_again() -> None:
            if followed:
                settle_all(fleet, copies=1)
            lose_server_of(fleet, 1)

        report = fleet.train(hooks=[At(5, lose), At(8, lose_again)]).report()
    first, second = report.lost.servers
    assert (first.restored_from, second.restored_from) == (None, None)
    assert None not in (first.standby, second.standby)
    assert first.standby != second.standby
    assert (first.updates, second.updates) == (0, 0 if followed else 3 * PER_STEP)
    tally = read_model(TASK, tmp_path).tally
    assert set(tally.values()) == {1.0}
    gone = set(range(TASK.records)) - tally.keys()
    assert gone == ({record for record in range(5 * 8, 8 * 8) if record % 2} if not followed else set())


def test_a_shard_that_lacks_a_standby_is_named_with_how_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    with standing_by(settings(tmp_path)) as fleet:

        def lose() -> None:
            settle(fleet)
            assert fleet.standbys is not None
            assert describe_standbys(fleet.standbys.standing()) == ""
            lose_server_of(fleet, 1)

        def look() -> None:
            keeper = fleet.standbys
            assert keeper is not None
            wait_for(lambda: keeper.standing()[1].lacking_seconds > 0, "the chief to notice")
            (share,) = [one for one in keeper.standing() if one.present < one.wanted]
            assert (share.shard, share.present, share.wanted) == (1, 0, 1)
            said.append(describe_standbys(keeper.standing()))
            keeper.look()
            said.append(fleet.metrics.render().decode())
            lose_server_of(fleet, 1)
            fleet.start_server(1)  # empty; another process in its place

        report = fleet.train(hooks=[At(5, lose), At(8, look)]).report()
    in_words, metrics = said
    assert re.fullmatch(
        r"shards that lack a standby: 1 \(0 of 1 for \d+ s\); if a server without one is lost now, its shard "
        "returns to the last checkpoint",
        in_words,
    )
    assert re.search(r'shard_standbys\{shard="0"\} 1', metrics)
    assert re.search(r'shard_standbys\{shard="1"\} 0', metrics)
    assert re.search(r'shard_standbys_wanted\{shard="1"\} 1', metrics)
    assert re.search(r'shard_standby_missing_seconds\{shard="0"\} 0', metrics)
    assert float(re.search(r'shard_standby_missing_seconds\{shard="1"\} (\S+)', metrics)[1]) > 0
    assert [one.restored_from for one in report.lost.servers] == [None, str(tmp_path / "model.ckpt-6")]
    returned = [one.getMessage() for one in caplog.records if "shard 1 returns to step 6" in one.getMessage()]
    assert len(returned) == 1
    assert "it had no standby" in returned[0] or "could not take over" in returned[0]


@pytest.mark.parametrize(("standbys", "keep_going"), [(1, False), (3, True)])
def test_standbys_are_refused_where_nothing_may_be_lost(standbys: int, keep_going: bool) -> None:
    failover = FailoverConfig(recovery="keep_going" if keep_going else "exact")

    def join() -> None:
        config = run_config(num_ps=1, standbys=standbys, failover=failover)
        join_fleet(None, config)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="standby"):
        join()
