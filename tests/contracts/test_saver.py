"""What the saver does, wherever it saves and however it writes its paths."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from contracts.savers import SAVERS, Run, names, put, write_checkpoint

from monolith import filesystem
from monolith.checkpoint.folder.saver import Saver, checkpoint_exists
from monolith.checkpoint.folder.state_files import (
    CheckpointState,
    read_checkpoint_state,
    update_monolith_checkpoint,
)
from monolith.checkpoint.folder.state_files import MonolithCheckpointState as Exempt
from monolith.errors import ConfigError, FileMissingError


@pytest.fixture(params=SAVERS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return Run(SAVERS[request.param], tmp_path)


def state(run: Run) -> CheckpointState:
    found = read_checkpoint_state(run.folder, run.case.latest_filename)
    assert found is not None
    return found


def exempt(run: Run, *entries: str) -> None:
    """Edit the file as a user would: these and no others."""
    lines = "".join(f'exempt_model_checkpoint_paths: "{entry}"\n' for entry in entries)
    put(filesystem.join(run.folder, "monolith_checkpoint"), lines)


# One save


def test_a_save_returns_its_prefix_and_is_listed_last(run: Run) -> None:
    saver = run.saver()
    for step in (7, 8):
        prefix = run.save(saver, step)
        assert prefix == saver.names.prefix(step)
        assert checkpoint_exists(prefix)
        assert state(run).model_checkpoint_path == prefix
        assert state(run).all_model_checkpoint_paths[-1] == prefix
    assert state(run).all_model_checkpoint_timestamps == (1000.0, 1000.0)
    assert saver.last_checkpoints == list(state(run).all_model_checkpoint_paths)


def test_nothing_is_left_behind_but_checkpoints_and_state_files(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    run.save(saver, 1, 2, 3)
    base = filesystem.base_name(saver.names.prefix(3))
    ends = ("assets", "dense-00000-of-00002", "dense-00001-of-00002", "manifest")
    noted = ["monolith_checkpoint"] if run.case.speaks_for_folder else []
    expected = [run.case.latest_filename, *noted, *(f"{base}.{end}" for end in ends)]
    assert names(run.folder) == sorted(expected)


def test_the_state_file_is_written_when_the_data_is_complete(run: Run) -> None:
    def write(prefix: str) -> None:
        assert not filesystem.exists(f"{run.folder}/{run.case.latest_filename}")
        write_checkpoint(prefix)

    run.saver().save(1, write)


def test_a_save_without_a_manifest_is_no_checkpoint(run: Run) -> None:
    saver = run.saver()
    run.save(saver, 1)
    with pytest.raises(FileMissingError, match="manifest"):
        saver.save(2, lambda _: None)
    assert run.listed(saver) == [1]
    assert run.saver().names.step_of(state(run).model_checkpoint_path) == 1


def test_steps_count_from_0(run: Run) -> None:
    saver = run.saver()
    assert checkpoint_exists(run.save(saver, 0))
    with pytest.raises(ConfigError, match="-1"):
        saver.save(-1, write_checkpoint)


# How many are kept


def test_a_path_saved_again_becomes_the_newest_and_is_never_there_twice(run: Run) -> None:
    saver = run.saver(max_to_keep=2)
    run.save(saver, 1, 2, 3)
    assert (run.listed(saver), run.on_disk(saver)) == ([2, 3], {2, 3})
    run.save(saver, 2)
    assert (run.listed(saver), run.on_disk(saver)) == ([3, 2], {2, 3})
    run.save(saver, 1)
    assert (run.listed(saver), run.on_disk(saver)) == ([2, 1], {1, 2})
    assert state(run).all_model_checkpoint_paths == tuple(saver.last_checkpoints)


def test_a_saver_given_the_list_of_another_continues_like_it(run: Run) -> None:
    first = run.saver(max_to_keep=2)
    run.save(first, 1, 2, 3)
    second = run.saver(max_to_keep=2)
    second.set_last_checkpoints_with_time([(path, 1000.0) for path in first.last_checkpoints])
    run.save(second, 2)
    assert (run.listed(second), run.on_disk(second)) == ([3, 2], {2, 3})
    run.save(second, 1)
    assert (run.listed(second), run.on_disk(second)) == ([2, 1], {1, 2})


def test_a_saver_given_no_list_knows_only_what_it_wrote_itself(run: Run) -> None:
    run.save(run.saver(max_to_keep=2), 1, 2, 3)
    third = run.saver(max_to_keep=2)
    run.save(third, 2)
    assert (run.listed(third), run.on_disk(third)) == ([2], {2, 3})
    run.save(third, 1)
    assert (run.listed(third), run.on_disk(third)) == ([2, 1], {1, 2, 3})


def test_the_list_must_be_a_list(run: Run) -> None:
    with pytest.raises(ConfigError, match="tuple"):
        run.saver().set_last_checkpoints_with_time(())  # type: ignore[arg-type]


@pytest.mark.parametrize("max_to_keep", [0, None])
def test_without_a_bound_nothing_is_tracked_and_nothing_deleted(run: Run, max_to_keep: int | None) -> None:
    saver = run.saver(max_to_keep=max_to_keep)
    run.save(saver, 1, 2, 3)
    assert run.on_disk(saver) == {1, 2, 3}
    assert saver.last_checkpoints == []
    assert state(run).all_model_checkpoint_paths == (saver.names.prefix(3),)


def test_a_smaller_bound_holds_at_the_next_save(run: Run) -> None:
    run.save(run.saver(max_to_keep=5), 1, 2, 3, 4, 5)
    saver = run.saver(max_to_keep=2)
    saver.recover()
    run.save(saver, 6)
    assert (run.listed(saver), run.on_disk(saver)) == ([5, 6], {5, 6})


def test_the_bound_must_make_sense(run: Run) -> None:
    with pytest.raises(ConfigError, match="max_to_keep"):
        run.saver(max_to_keep=-1)
    with pytest.raises(ConfigError, match="keep_every"):
        run.saver(keep_every=timedelta(0))


# Exempt


def test_exempt_checkpoints_stay_and_do_not_count(run: Run) -> None:
    saver = run.saver(max_to_keep=3)
    exempt(run, *(filesystem.base_name(saver.names.prefix(step)) for step in (10, 20)))
    run.save(saver, 10, 20, 30, 40, 50)
    assert run.listed(saver) == [10, 20, 30, 40, 50]
    run.save(saver, 60)
    assert run.listed(saver) == [10, 20, 40, 50, 60]
    assert run.on_disk(saver) == {10, 20, 40, 50, 60}


def test_an_exempt_checkpoint_given_to_the_saver_stays(run: Run) -> None:
    name = filesystem.base_name(run.saver().names.prefix(2))
    saver = run.saver(max_to_keep=2, exempt=[name])
    run.save(saver, 1, 2, 3)
    assert run.on_disk(saver) == {1, 2, 3}
    run.save(saver, 4)
    assert run.on_disk(saver) == {2, 3, 4}


def test_the_list_may_be_edited_while_the_run_continues(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    run.save(saver, 1)
    exempt(run, filesystem.base_name(saver.names.prefix(1)))
    run.save(saver, 2, 3)
    assert run.on_disk(saver) == {1, 3}


def test_an_entry_added_while_a_checkpoint_is_written_counts_and_is_kept(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    run.save(saver, 1)
    name = filesystem.base_name(saver.names.prefix(1))

    def write(prefix: str) -> None:
        write_checkpoint(prefix)
        exempt(run, name)

    run.written.append(2)
    saver.save(2, write)
    assert run.on_disk(saver) == {1, 2}
    assert update_monolith_checkpoint(run.folder).exempt_model_checkpoint_paths == (name,)


def test_an_emptied_list_means_nothing_is_exempt(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    exempt(run, *(filesystem.base_name(saver.names.prefix(step)) for step in (1, 2, 3)))
    run.save(saver, 1, 2, 3)
    exempt(run)
    run.save(saver, 4)
    assert (run.listed(saver), run.on_disk(saver)) == ([4], {4})


def test_the_list_of_the_file_adds_to_that_of_the_saver(run: Run) -> None:
    base = [filesystem.base_name(run.saver().names.prefix(step)) for step in range(3)]
    saver = run.saver(max_to_keep=1, exempt=[base[1]])
    exempt(run, base[2])
    run.save(saver, 1, 2, 3, 4)
    assert run.on_disk(saver) == {1, 2, 4}


def test_an_absolute_entry_means_that_path_only(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    elsewhere = filesystem.join("/elsewhere", filesystem.base_name(saver.names.prefix(1)))
    exempt(run, elsewhere, saver.names.prefix(2), "s3://no-such-filesystem-here/model.ckpt-3")
    run.save(saver, 1, 2, 3, 4)
    assert run.on_disk(saver) == {2, 4}


def test_while_the_list_cannot_be_read_nothing_is_deleted(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    saver = run.saver(max_to_keep=1)
    path = put(f"{run.folder}/monolith_checkpoint", "exempt_model_checkpoint_paths: oops")
    run.save(saver, 1, 2, 3)
    assert run.on_disk(saver) == {1, 2, 3}
    assert filesystem.read_bytes(path) == b"exempt_model_checkpoint_paths: oops", "left as it is"
    copies = [name for name in names(run.folder) if ".bad-" in name]
    assert len(copies) == run.case.speaks_for_folder
    assert all(
        filesystem.read_bytes(f"{run.folder}/{copy}") == filesystem.read_bytes(path) for copy in copies
    )
    assert "none is deleted" in caplog.text
    exempt(run, filesystem.base_name(saver.names.prefix(2)))
    run.save(saver, 4)
    assert run.on_disk(saver) == {2, 4}


# One in every so many hours


def test_one_checkpoint_per_period_is_kept_for_good(run: Run) -> None:
    run.clock.now = 0.0
    saver = run.saver(max_to_keep=2, keep_every=timedelta(seconds=0.7))
    run.clock.now = 1.0
    run.save(saver, 1, 2)
    assert run.on_disk(saver) == {1, 2}
    run.save(saver, 3)
    assert (run.on_disk(saver), run.listed(saver)) == ({1, 2, 3}, [2, 3])
    run.save(saver, 4)
    assert (run.on_disk(saver), run.listed(saver)) == ({1, 3, 4}, [3, 4])
    assert state(run).last_preserved_timestamp == pytest.approx(0.7)


def test_an_idle_time_does_not_keep_every_checkpoint_after_it(run: Run) -> None:
    saver = run.saver(max_to_keep=1, keep_every=timedelta(seconds=10))
    run.clock.now += 1000
    run.save(saver, 1, 2, 3, 4)
    assert run.on_disk(saver) == {1, 4}


@pytest.mark.parametrize("restart_every", [1, 2, 3, 20])
def test_restarts_do_not_change_what_is_kept_for_good(run: Run, restart_every: int) -> None:
    period = timedelta(seconds=10)

    saver = run.saver(max_to_keep=2, keep_every=period)
    for step in range(20):
        if step % restart_every == 0:
            saver = run.saver(max_to_keep=2, keep_every=period)
            saver.recover()
        run.clock.now += 3.7
        run.save(saver, step)
    assert sorted(run.on_disk(saver)) == [2, 5, 8, 10, 13, 16, 18, 19]


# Restarts


def test_a_saver_recovers_the_list_of_the_one_before(run: Run) -> None:
    run.save(run.saver(max_to_keep=2), 1, 2)
    saver = run.saver(max_to_keep=2)
    saver.recover()
    run.save(saver, 3)
    assert (run.listed(saver), run.on_disk(saver)) == ([2, 3], {2, 3})


def test_missing_checkpoints_are_skipped(run: Run) -> None:
    first = run.saver()
    run.save(first, 1, 2, 3)
    filesystem.remove(first.names.prefix(1) + ".manifest")
    saver = run.saver()
    saver.recover(first.last_checkpoints)
    assert run.listed(saver) == [2, 3]
    run.save(saver, 4)
    assert [saver.names.step_of(path) for path in state(run).all_model_checkpoint_paths] == [2, 3, 4]


def test_recovering_where_nothing_is_makes_nothing(run: Run) -> None:
    saver = run.saver()
    saver.recover()
    assert saver.last_checkpoints == []
    assert not filesystem.exists(run.folder)


# What belongs to a checkpoint


def test_a_deleted_checkpoint_takes_everything_of_its_step_along(run: Run) -> None:
    saver = run.saver(max_to_keep=1)

    def more(step: int) -> list[str]:
        base = filesystem.base_name(saver.names.prefix(step))
        return [
            f"{base}_item_pool_0_1_2",
            f"{base}.dense-tmp-0123456789ab",
            f"ckpt.info-{step}",
            f"input_worker_0.ckpt-{step}",
            f"input_worker_11.ckpt-{step}",
        ]

    others = [
        *more(10),  # of a step whose name begins alike
        "checkpoint_input_worker_0",
        "ckpt.info-11",
        "dense_only/model.ckpt-1.manifest",
        "restore_ckpt",
    ]
    for name in more(1) + others:
        put(f"{run.folder}/{name}")
    run.save(saver, 1)
    run.save(saver, 2)
    left = names(run.folder)
    base = filesystem.base_name(saver.names.prefix(1))
    gone = more(1) if run.case.speaks_for_folder else more(1)[:2]
    assert not [name for name in left if name.startswith(f"{base}.") or name in gone]
    assert set(more(1)) - set(gone) <= set(left), "what is not its own belongs to the saver of the folder"
    for name in others:
        assert filesystem.exists(f"{run.folder}/{name}"), name


def test_files_that_are_gone_already_are_only_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    saver = run.saver(max_to_keep=1)
    prefix = run.save(saver, 1)
    for path in filesystem.list_files(run.folder):
        if path.startswith(f"{prefix}."):
            filesystem.remove(path)
    filesystem.remove_tree(f"{prefix}.assets")
    run.save(saver, 2)
    assert "gone already" in caplog.text
    assert (run.listed(saver), run.on_disk(saver)) == ([2], {2})


# Checkpoints that need others


def incremental(run: Run, saver: Saver, step: int, *needs: int, **options: Any) -> None:
    run.save(saver, step, depends_on=[saver.names.prefix(need) for need in needs], **options)


def test_what_a_listed_checkpoint_needs_stays_until_nothing_needs_it(run: Run) -> None:
    saver = run.saver(max_to_keep=2)
    run.save(saver, 1)
    incremental(run, saver, 2, 1)
    incremental(run, saver, 3, 2)
    run.save(saver, 4)
    assert (run.listed(saver), run.on_disk(saver)) == ([3, 4], {1, 2, 3, 4})
    run.save(saver, 5)
    assert (run.listed(saver), run.on_disk(saver)) == ([4, 5], {4, 5})


@pytest.mark.parametrize("recovers", [True, False])
def test_what_is_needed_is_known_after_a_restart(run: Run, recovers: bool) -> None:
    saver = run.saver(max_to_keep=1)
    run.save(saver, 1)
    incremental(run, saver, 2, 1)
    saver = run.saver(max_to_keep=1)
    if recovers:
        saver.recover()
    incremental(run, saver, 3, 2)
    assert (run.listed(saver), run.on_disk(saver)) == ([3], {1, 2, 3})
    saver = run.saver(max_to_keep=1)
    saver.recover()
    run.save(saver, 4)
    # A saver that was told nothing of 2 leaves it alone, and what it needs.
    assert run.on_disk(saver) == ({4} if recovers else {1, 2, 4})


def test_what_an_exempt_checkpoint_needs_stays(run: Run) -> None:
    saver = run.saver(max_to_keep=1)
    exempt(run, filesystem.base_name(saver.names.prefix(2)))
    run.save(saver, 1)
    incremental(run, saver, 2, 1)
    run.save(saver, 3, 4)
    assert run.on_disk(saver) == {1, 2, 4}
    exempt(run)
    run.save(saver, 5)
    assert run.on_disk(saver) == {5}


def test_what_a_checkpoint_kept_for_good_needs_stays_for_good(run: Run) -> None:
    saver = run.saver(max_to_keep=1, keep_every=timedelta(seconds=10))
    run.save(saver, 1)
    run.clock.now += 11
    incremental(run, saver, 2, 1)
    run.save(saver, 3)
    for step in (4, 5):
        saver = run.saver(max_to_keep=1, keep_every=timedelta(seconds=10))
        saver.recover()
        run.save(saver, step)
    assert (run.listed(saver), run.on_disk(saver)) == ([5], {1, 2, 5})


def test_a_checkpoint_kept_for_good_that_someone_deleted_needs_nothing(run: Run) -> None:
    saver = run.saver(max_to_keep=1, keep_every=timedelta(seconds=10))
    run.save(saver, 1)
    run.clock.now += 11
    incremental(run, saver, 2, 1)
    run.save(saver, 3)
    filesystem.remove(saver.names.prefix(2) + ".manifest")
    saver = run.saver(max_to_keep=1, keep_every=timedelta(seconds=10))
    saver.recover()
    assert run.on_disk(saver) == {3}


def test_nothing_can_be_built_upon_a_checkpoint_that_is_gone_or_upon_itself(run: Run) -> None:
    saver = run.saver()
    with pytest.raises(FileMissingError, match="it needs"):
        incremental(run, saver, 2, 1)
    with pytest.raises(ConfigError, match="itself"):
        incremental(run, saver, 2, 2)
    assert not filesystem.exists(f"{run.folder}/{run.case.latest_filename}")


def test_a_checkpoint_of_another_folder_is_never_deleted(run: Run) -> None:
    other = f"{run.folder}/../other" if not run.case.remote else f"{run.folder}-other"
    foreign = f"{other}/model.ckpt-1"
    write_checkpoint(foreign)
    saver = run.saver(max_to_keep=1)
    saver.set_last_checkpoints_with_time([(foreign, 0.0)])
    run.save(saver, 2, 3)
    assert checkpoint_exists(foreign)
    assert run.listed(saver) == [3]


# monolith_checkpoint


def test_a_save_notes_its_time_and_the_kind_of_table(run: Run) -> None:
    saver = run.saver()
    put(f"{run.folder}/monolith_checkpoint", 'exempt_model_checkpoint_paths: "a"\n')
    run.clock.now = 1234.9
    run.save(saver, 1)
    if not run.case.speaks_for_folder:
        assert update_monolith_checkpoint(run.folder) == Exempt(("a",))
        return
    expected = b'exempt_model_checkpoint_paths: "a"\nlast_checkpoint_save_timestamp: 1234\n'
    found = filesystem.read_bytes(f"{run.folder}/monolith_checkpoint")
    assert found == expected + b"builtin_hash_table_type: MULTI_CUCKOO_HASH_MAP\n"
    assert update_monolith_checkpoint(run.folder) == Exempt(("a",), 1234, 2)  # type: ignore[arg-type]
