from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from monolith import filesystem
from monolith.checkpoint.folder.state_files import (
    LAST_SLOT,
    CheckpointState,
    CkptInfo,
    Journal,
    LatestState,
    MonolithCheckpointState,
    SaveNames,
    TableKind,
    check_latest_filename,
    choose_table_kind,
    load_monolith_checkpoint,
    read_checkpoint_state,
    read_ckpt_info,
    read_journal,
    read_monolith_checkpoint,
    update_monolith_checkpoint,
    write_checkpoint_state,
    write_ckpt_info,
    write_journal,
)
from monolith.errors import ConfigError, CorruptFileError, FileMissingError, FilesystemError
from monolith.filesystem.backends import LocalBackend
from monolith.wire import checkpoint_state_pb2, monolith_checkpoint_pb2


class Sleeps:
    """Counts pauses, and may do something in one of them."""

    def __init__(self, **then) -> None:
        self.count = 0
        self._then = then

    def __call__(self, seconds: float) -> None:
        assert seconds > 0
        self.count += 1
        self._then.get(f"at_{self.count}", lambda: None)()


def put(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


STATE = 'model_checkpoint_path: "model.ckpt-61"\nall_model_checkpoint_paths: "model.ckpt-30"\n'
STATE += 'all_model_checkpoint_paths: "model.ckpt-61"\n'


# checkpoint


def test_a_state_is_written_as_protobuf_writes_it(tmp_path):
    folder = str(tmp_path)
    paths = (f"{folder}/model.ckpt-30", f'{folder}/mod"el-é', "/other/model.ckpt-2")
    state = CheckpointState(paths[1], paths, (1.0, 1700000000.123456, 3e-7), 1699999999.5)
    write_checkpoint_state(folder, state)
    message = checkpoint_state_pb2.CheckpointState(
        model_checkpoint_path='mod"el-é',
        all_model_checkpoint_paths=["model.ckpt-30", 'mod"el-é', "/other/model.ckpt-2"],
        all_model_checkpoint_timestamps=[1.0, 1700000000.123456, 3e-7],
        last_preserved_timestamp=1699999999.5,
    )
    assert (tmp_path / "checkpoint").read_text() == text_format.MessageToString(message)
    assert read_checkpoint_state(folder) == state


def test_a_state_of_the_system_we_follow_is_read(tmp_path):
    put(tmp_path / "checkpoint", STATE)
    state = read_checkpoint_state(str(tmp_path))
    assert state == CheckpointState(
        f"{tmp_path}/model.ckpt-61", (f"{tmp_path}/model.ckpt-30", f"{tmp_path}/model.ckpt-61")
    )


def test_relative_paths_belong_to_the_folder_they_are_read_from_and_hdfs_is_absolute(tmp_path):
    text = 'model_checkpoint_path: "hdfs:/x/model.ckpt-1"\n'
    text += "".join(
        f'all_model_checkpoint_paths: "{p}"\n' for p in ("a", "/b", "hdfs:/x/model.ckpt-1", "../c")
    )
    put(tmp_path / "checkpoint", text)
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    assert state.model_checkpoint_path == "hdfs:/x/model.ckpt-1"
    assert state.all_model_checkpoint_paths == (
        f"{tmp_path}/a",
        "/b",
        "hdfs:/x/model.ckpt-1",
        f"{tmp_path}/../c",
    )


def test_a_folder_can_be_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write_checkpoint_state(str(old), CheckpointState(f"{old}/m-1", (f"{old}/m-1",)))
    old.rename(new)
    assert read_checkpoint_state(str(new)) == CheckpointState(f"{new}/m-1", (f"{new}/m-1",))


def test_absolute_paths_are_kept_if_asked_for(tmp_path):
    state = CheckpointState(f"{tmp_path}/m-1", (f"{tmp_path}/m-1",))
    write_checkpoint_state(str(tmp_path), state, relative_paths=False)
    assert f'"{tmp_path}/m-1"' in (tmp_path / "checkpoint").read_text()
    assert read_checkpoint_state(str(tmp_path)) == state


@pytest.mark.parametrize("relative_paths", [True, False])
def test_in_a_relative_folder_paths_are_never_written_twice(tmp_path, monkeypatch, relative_paths):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    state = CheckpointState("runs/m-1", ("other/m-0", "runs/m-1"))
    write_checkpoint_state("runs", state, relative_paths=relative_paths)
    found = read_checkpoint_state("runs")
    assert found == replace(state, all_model_checkpoint_paths=(f"{tmp_path}/other/m-0", "runs/m-1"))


def test_no_file_is_no_checkpoint(tmp_path):
    sleeps = Sleeps()
    assert read_checkpoint_state(str(tmp_path), sleep=sleeps) is None
    assert read_checkpoint_state(f"{tmp_path}/nowhere", sleep=sleeps) is None
    assert sleeps.count == 0


@pytest.mark.parametrize(
    "text", ["", "model_checkpoint_path", 'all_model_checkpoint_paths: "a"\n', "unknown: 1", b"\xff\xfe"]
)
def test_a_file_that_makes_no_sense_is_read_five_times_more(tmp_path, text):
    path, sleeps = put(tmp_path / "checkpoint", text), Sleeps()
    with pytest.raises(CorruptFileError, match="read ckpt error!") as raised:
        read_checkpoint_state(str(tmp_path), sleep=sleeps)
    assert sleeps.count == 5
    assert raised.value.path == str(path)


@pytest.mark.parametrize("pause", [1, 5])
def test_it_may_make_sense_at_any_of_them(tmp_path, pause):
    path = put(tmp_path / "checkpoint", STATE[:30])
    sleeps = Sleeps(**{f"at_{pause}": lambda: put(path, STATE)})
    assert read_checkpoint_state(str(tmp_path), sleep=sleeps) is not None
    assert sleeps.count == pause


def test_an_error_says_where(tmp_path):
    put(tmp_path / "checkpoint", 'model_checkpoint_path: "a"\nfoo: 1\n')
    with pytest.raises(CorruptFileError) as raised:
        read_checkpoint_state(str(tmp_path), sleep=Sleeps())
    assert raised.value.offset == len('model_checkpoint_path: "a"\n')


def test_a_file_that_cannot_be_read_is_not_a_missing_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalBackend, "open_read", refuse)
    with pytest.raises(FilesystemError, match="Permission denied"):
        read_checkpoint_state(str(tmp_path), sleep=Sleeps())


def test_the_latest_is_always_in_the_list(tmp_path):
    put(tmp_path / "checkpoint", 'model_checkpoint_path: "/b"\nall_model_checkpoint_paths: "/a"\n')
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    assert state.all_model_checkpoint_paths == ("/a", "/b")
    with pytest.raises(ConfigError, match="must be one of those listed"):
        CheckpointState("/b", ("/a",))


def test_timestamps_that_do_not_fit_are_ignored(tmp_path, caplog):
    put(tmp_path / "checkpoint", STATE + "all_model_checkpoint_timestamps: 1.0\n")
    state = read_checkpoint_state(str(tmp_path))
    assert state is not None
    assert state.all_model_checkpoint_timestamps == ()
    assert "1 timestamps for 2 checkpoints" in caplog.text
    with pytest.raises(ConfigError, match="one timestamp per checkpoint"):
        replace(state, all_model_checkpoint_timestamps=(1.0,))


def test_the_beginning_of_time_is_a_time(tmp_path):
    state = CheckpointState(f"{tmp_path}/a", (f"{tmp_path}/a",), (0.0,), 0.0)
    write_checkpoint_state(str(tmp_path), state)
    assert read_checkpoint_state(str(tmp_path)) == state


def test_a_failed_write_leaves_the_old_state(tmp_path, monkeypatch):
    old = CheckpointState(f"{tmp_path}/a", (f"{tmp_path}/a",))
    write_checkpoint_state(str(tmp_path), old)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalBackend, "rename", refuse)
    with pytest.raises(FilesystemError, match="disk is full"):
        write_checkpoint_state(str(tmp_path), replace(old, last_preserved_timestamp=1.0))
    assert read_checkpoint_state(str(tmp_path)) == old


@pytest.mark.parametrize("name", ["a/b", "/a", "../a", "a/", ""])
def test_the_name_of_the_state_file_is_a_plain_name(tmp_path, name):
    with pytest.raises(ConfigError, match="'latest_filename' must not contain path components"):
        read_checkpoint_state(str(tmp_path), name)
    with pytest.raises(ConfigError, match="'latest_filename' must not contain path components"):
        write_checkpoint_state(str(tmp_path), CheckpointState("/a", ("/a",)), name)


def test_the_name_of_the_state_file_is_not_that_of_the_checkpoints():
    with pytest.raises(ConfigError, match="collides with 'save_path'"):
        check_latest_filename("model.ckpt", "/run/model.ckpt")
    check_latest_filename("checkpoint", "/run/model.ckpt")


# monolith_checkpoint


def test_all_three_fields_come_back_in_order(tmp_path):
    folder = str(tmp_path)
    wanted = MonolithCheckpointState(("b", "a", "/c"), 123, TableKind.CUCKOO_HASH_MAP)
    assert update_monolith_checkpoint(folder, seed=wanted) == wanted
    assert load_monolith_checkpoint(folder) == wanted
    message = monolith_checkpoint_pb2.MonolithCheckpointState(
        exempt_model_checkpoint_paths=["b", "a", "/c"],
        last_checkpoint_save_timestamp=123,
        builtin_hash_table_type=1,
    )
    assert (tmp_path / "monolith_checkpoint").read_text() == text_format.MessageToString(message)
    assert message.DESCRIPTOR.full_name == "monolith.native_training.MonolithCheckpointState"


def test_no_file_is_none(tmp_path):
    assert read_monolith_checkpoint(str(tmp_path)) is None
    assert load_monolith_checkpoint(str(tmp_path)) is None


def test_one_that_does_not_parse_is_none_with_a_warning_to_readers(tmp_path, caplog):
    put(tmp_path / "monolith_checkpoint", "oops")
    assert read_monolith_checkpoint(str(tmp_path)) is None
    assert "oops" in caplog.text
    with pytest.raises(CorruptFileError):
        load_monolith_checkpoint(str(tmp_path))


def test_another_name_may_be_given(tmp_path):
    put(tmp_path / "mine", 'exempt_model_checkpoint_paths: "a"\n')
    assert read_monolith_checkpoint(str(tmp_path), "mine") == MonolithCheckpointState(("a",))


def test_entries_without_a_checkpoint_are_left_out_in_memory_only(tmp_path, caplog):
    text = "".join(f'exempt_model_checkpoint_paths: "{entry}"\n' for entry in ("a", "/b", "c"))
    path = put(tmp_path / "monolith_checkpoint", text)
    there = {f"{tmp_path}/a", "/b"}
    state = read_monolith_checkpoint(str(tmp_path), exists=there.__contains__)
    assert state == MonolithCheckpointState((f"{tmp_path}/a", "/b"))
    assert f"exempt checkpoint {tmp_path}/c does not exist" in caplog.text
    assert path.read_text() == text
    assert update_monolith_checkpoint(str(tmp_path)).exempt_model_checkpoint_paths == ("a", "/b", "c")


def test_an_entry_whose_files_cannot_be_checked_stays(tmp_path, caplog):
    put(tmp_path / "monolith_checkpoint", 'exempt_model_checkpoint_paths: "/a"\n')

    def fail(_):
        raise FilesystemError("the network is down")

    assert read_monolith_checkpoint(str(tmp_path), exists=fail) == MonolithCheckpointState(("/a",))
    assert "the network is down" in caplog.text


def test_a_new_file_has_no_time_until_something_was_saved(tmp_path):
    folder = str(tmp_path)
    kind = TableKind.MULTI_CUCKOO_HASH_MAP
    assert update_monolith_checkpoint(folder, table_kind=kind) == MonolithCheckpointState((), None, kind)
    assert "timestamp" not in (tmp_path / "monolith_checkpoint").read_text()
    assert update_monolith_checkpoint(folder, saved_at=12.9) == MonolithCheckpointState((), 12, kind)
    assert update_monolith_checkpoint(folder) == MonolithCheckpointState((), 12, kind)


@pytest.mark.parametrize("text", ["", "builtin_hash_table_type: UNKNOWN\n"])
def test_the_kind_of_table_is_set_where_it_is_not_known(tmp_path, text):
    put(tmp_path / "monolith_checkpoint", text)
    update_monolith_checkpoint(str(tmp_path))
    assert (tmp_path / "monolith_checkpoint").read_text() == text, "nothing is known, nothing changes"
    state = update_monolith_checkpoint(str(tmp_path), table_kind=TableKind.MULTI_CUCKOO_HASH_MAP)
    assert state.builtin_hash_table_type is TableKind.MULTI_CUCKOO_HASH_MAP
    state = update_monolith_checkpoint(str(tmp_path), table_kind=TableKind.CUCKOO_HASH_MAP)
    assert state.builtin_hash_table_type is TableKind.MULTI_CUCKOO_HASH_MAP, "chosen once"


def test_an_edit_in_the_last_moment_is_kept(tmp_path, monkeypatch):
    """The user saves the file while the new one is being begun."""
    path = put(tmp_path / "monolith_checkpoint", 'exempt_model_checkpoint_paths: "a"\n')
    honest = LocalBackend.create

    def create(self, name):
        put(path, 'exempt_model_checkpoint_paths: "b"\n')
        return honest(self, name)

    monkeypatch.setattr(LocalBackend, "create", create)
    seed = MonolithCheckpointState(("c",))
    assert update_monolith_checkpoint(str(tmp_path), seed=seed).exempt_model_checkpoint_paths == ("b", "c")


def test_a_file_that_does_not_parse_is_not_replaced_but_copied(tmp_path):
    path = put(tmp_path / "monolith_checkpoint", 'exempt_model_checkpoint_paths: "a\n')
    for _ in range(2):
        with pytest.raises(CorruptFileError):
            update_monolith_checkpoint(str(tmp_path), saved_at=1.0)
    assert path.read_text() == 'exempt_model_checkpoint_paths: "a\n'
    (copy,) = tmp_path.glob("monolith_checkpoint.bad-*")
    assert copy.read_text() == path.read_text()
    put(path, 'exempt_model_checkpoint_paths: "a"\n')
    assert update_monolith_checkpoint(str(tmp_path), saved_at=1.0) == MonolithCheckpointState(("a",), 1)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_does_not_say_keeps_its_rows_as_the_checkpoint_has_them():
    single, merged = TableKind.CUCKOO_HASH_MAP, TableKind.MULTI_CUCKOO_HASH_MAP
    assert choose_table_kind(None, None) is merged
    for kind in (None, TableKind.UNKNOWN, single):
        assert choose_table_kind(None, MonolithCheckpointState((), 1, kind)) is single
    assert choose_table_kind(None, MonolithCheckpointState((), 1, merged)) is merged
    assert choose_table_kind(single, MonolithCheckpointState((), 1, merged)) is single
    assert choose_table_kind(TableKind.UNKNOWN, None) is merged


# The cache


def test_a_state_is_read_again_when_the_step_moves_on():
    reads = []

    def read(folder):
        reads.append(folder)
        return CheckpointState(f"{folder}/{len(reads)}", (f"{folder}/{len(reads)}",))

    latest = LatestState(read)
    first = latest.get("/a", 10)
    assert first is not None
    assert latest.get("/a", 10) is first
    assert latest.get("/a", 3) is first
    second = latest.get("/a", 11)
    assert second is not first
    assert latest.get("/a", 11) is second
    latest.get("/b", 1)
    assert reads == ["/a", "/a", "/b"]


def test_no_state_is_looked_for_each_time():
    found: list[CheckpointState | None] = [None, None, CheckpointState("/a/1", ("/a/1",))]
    latest = LatestState(lambda _: found.pop(0))
    assert [latest.get("/a", step) is None for step in (5, 5, 3, 3)] == [True, True, False, False]


# The journal


def test_a_journal_moves_with_its_folder(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()

    def journal(folder):
        a, b = f"{folder}/a", f"{folder}/b"
        return Journal((a, b), (b,), {b: (a, "/elsewhere/c")})

    write_journal(str(old), journal(old))
    assert read_journal(str(old)) == journal(old)
    old.rename(new)
    assert read_journal(str(new)) == journal(new)


def test_an_empty_journal_is_no_file(tmp_path):
    folder = str(tmp_path)
    assert read_journal(folder) == Journal()
    write_journal(folder, Journal(("/a",)))
    write_journal(folder, Journal())
    assert list(tmp_path.iterdir()) == []
    assert read_journal(folder) == Journal()


def test_every_byte_of_the_journal_counts(tmp_path):
    write_journal(str(tmp_path), Journal((f"{tmp_path}/model.ckpt-1",)))
    path = tmp_path / "checkpoint.journal"
    data = path.read_bytes()
    for position in range(len(data) - 1):
        for broken in (data[:position], data[:position] + bytes([data[position] ^ 2]) + data[position + 1 :]):
            put(path, broken)
            with pytest.raises(CorruptFileError, match="Move it away"):
                read_journal(str(tmp_path))


def test_a_journal_of_another_version_is_refused(tmp_path):
    body = b'{"version": 2}'
    put(tmp_path / "checkpoint.journal", b"%s\n%08x\n" % (body, zlib.crc32(body)))
    with pytest.raises(CorruptFileError, match="version 2, this program reads 1"):
        read_journal(str(tmp_path))


# Names


def test_names_are_made_of_a_path_and_a_step():
    names = SaveNames("/run/model.ckpt")
    assert names.prefix(12) == "/run/model.ckpt-12"
    assert names.assets("/run/model.ckpt-12") == "/run/model.ckpt-12.assets/"
    assert SaveNames("m", pad_step_number=True).prefix(12) == "m-00000012"
    assert SaveNames("m", pad_step_number=True).prefix(1234567890) == "m-1234567890"


@pytest.mark.parametrize(
    "prefix, step",
    [
        ("/run/model.ckpt-12", 12),
        ("/run/model.ckpt-00000012", 12),
        ("model.ckpt", 0),
        ("/a-b/model.ckpt", 0),
        ("/a-7/model.ckpt", 0),
        ("/a-7/my-model.ckpt-3", 3),
        ("my-model.ckpt", 0),
        ("model.ckpt-1x", 0),
        ("model.ckpt-", 0),
        ("model.ckpt-٣", 0),
        ("hdfs://host/model.ckpt-5", 5),
    ],
)
def test_the_step_is_the_number_at_the_end_of_the_name(prefix, step):
    assert SaveNames.step_of(prefix) == step


def test_the_steps_there_are_come_from_the_state_file(tmp_path):
    names = SaveNames(f"{tmp_path}/model.ckpt")
    assert names.existing_steps() == set()
    paths = tuple(names.prefix(step) for step in (10, 20, 300))
    write_checkpoint_state(str(tmp_path), CheckpointState(paths[-1], paths))
    assert names.existing_steps() == {10, 20, 300}


# ckpt.info


def test_counts_come_back(tmp_path):
    info = CkptInfo({0: 1, 3: 5}, {"user": 7})
    assert write_ckpt_info(str(tmp_path), 0, info) == f"{tmp_path}/ckpt.info-0"
    assert read_ckpt_info(str(tmp_path), 0) == info
    text = (tmp_path / "ckpt.info-0").read_text()
    assert "slot_counts {\n  key: 3\n  value: 5\n}\n" in text
    assert 'feature_counts {\n  key: "user"\n  value: 7\n}\n' in text


def test_counts_of_shards_are_added_up_and_high_slots_counted_together():
    info = CkptInfo.counting(
        slots=[(1, 2), (1, 3), (LAST_SLOT, 1), (LAST_SLOT + 1, 1), (200_000, 1)],
        tables=[("a", 1), ("b", 2), ("a", 3)],
    )
    assert info == CkptInfo({1: 5, 102399: 3}, {"a": 4, "b": 2})


def test_missing_and_broken_counts_are_told_apart(tmp_path):
    with pytest.raises(FileMissingError):
        read_ckpt_info(str(tmp_path), 1)
    put(tmp_path / "ckpt.info-1", "slot_counts {")
    with pytest.raises(CorruptFileError):
        read_ckpt_info(str(tmp_path), 1)


def test_files_are_replaced_in_one_step_everywhere():
    folder = "memory://state-files"
    filesystem.make_dirs(folder)
    state = CheckpointState(f"{folder}/m-1", (f"{folder}/m-1",), (1.5,), 0.5)
    write_checkpoint_state(folder, state)
    write_checkpoint_state(folder, state)
    assert read_checkpoint_state(folder) == state
    assert b'"m-1"' in filesystem.read_bytes(f"{folder}/checkpoint")
    update_monolith_checkpoint(folder, saved_at=1)
    assert load_monolith_checkpoint(folder) == MonolithCheckpointState((), 1)
