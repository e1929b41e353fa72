from __future__ import annotations

import contextlib
import io
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.tables import host_table_classes, ids, rows
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import (
    CorruptFileError,
    FilesystemError,
    RestoreError,
    ServingTableError,
    TableArgumentError,
)
from monolith.native import snappy_decode
from monolith.table import (
    OPTIMIZERS,
    Adagrad,
    Expiry,
    MovingAverage,
    RowwiseAdagrad,
    Segment,
    Sgd,
    TableConfig,
    dump,
    encode_entry_dumps,
    entry_dumps,
    entry_dumps_of,
    export_entry_dumps,
    import_entry_dumps,
    iterate,
    load,
    tfrecord,
)
from monolith.table.entry_dumps import export_multi_rows, import_multi_entry_dumps, tables_of_multi_dump
from monolith.table.shard_files import RowLayout
from monolith.table.sharded_files import records

CONFIG = TableConfig(
    name="item",
    segments=(Segment(dim=1, optimizer=Adagrad(), learning_rate=1.0), Segment(dim=1, optimizer=Sgd())),
)
# One row by hand: id 5, values 2.5 and 1, adagrad norm 0.5 and an empty sgd, time 300.
RECORD = bytes.fromhex(
    "09050000000000000015000020401500008" + "03f" + "1a0d" + "0a070a050d0000003f" + "0a021200" + "20ac02"
)
WITHOUT_STATE = bytes.fromhex("0906000000000000001500002040150000803f")


@pytest.fixture(params=host_table_classes())
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def base(tmp_path: Path) -> str:
    return f"{tmp_path}/item"


def write(base: str, *payloads: bytes, shard: str = "-00000-of-00001") -> Path:
    path = Path(base + shard)
    path.write_bytes(b"".join(map(tfrecord, payloads)))
    return path


def content(table: Any) -> dict[int, tuple[int, list[float], list[float]]]:
    found = table.scan(limit=1 << 20).rows
    columns = (found.ids, found.event_times, found.values, found.state)
    return {i: (t, v, s) for i, t, v, s in zip(*(c.tolist() for c in columns), strict=True)}


def filled(cls: Any, n: int = 20) -> Any:
    table = cls(CONFIG)
    table.apply_gradients(torch.arange(n) - 5, -torch.rand(n, 2), event_time=torch.arange(n))
    return table


# There and back


def test_old_names_of_a_table_are_tried_in_order(cls: Any, tmp_path: Path) -> None:
    for name, many in (("older", 2), ("oldest", 3)):
        export_entry_dumps(filled(cls, many), f"{tmp_path}/{name}", num_shards=2)
    segments = CONFIG.segments
    config = TableConfig(name="new", segments=segments, extra_restore_names=("old", "older", "oldest"))
    table = cls(config)
    assert import_entry_dumps(table, f"{tmp_path}/new").rows == 2
    export_entry_dumps(filled(cls, 4), f"{tmp_path}/new")
    assert import_entry_dumps(table, f"{tmp_path}/new").rows == 4, "its own name comes first"
    strange = TableConfig(name="x", segments=segments, extra_restore_names=("y",))
    with pytest.raises(RestoreError, match=r"table 'x': there are no files .*/x-ddddd\S* nor .*/y-ddddd"):
        import_entry_dumps(cls(strange), f"{tmp_path}/x")


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_table_comes_back_as_it_was(cls: Any, base: str, num_shards: int) -> None:
    table, other = filled(cls), cls(CONFIG)
    other.assign(ids(77), rows([1, 1]))
    report = export_entry_dumps(table, base, num_shards=num_shards)
    loaded = import_entry_dumps(other, base)
    assert content(other) == content(table)
    assert (report.rows, loaded.rows) == (20, 20)
    assert report.files == loaded.files
    assert len(report.files) == num_shards
    assert report.bytes == loaded.bytes == sum(Path(file).stat().st_size for file in report.files)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"rowwise_adagrad"}))
def test_the_state_of_every_optimizer_comes_back(cls: Any, base: str, kind: str) -> None:
    dim = 1 if kind == "batch_softmax" else 3
    config = TableConfig(
        name="item",
        segments=(Segment(dim=1, optimizer=MovingAverage()), Segment(dim=dim, optimizer=OPTIMIZERS[kind]())),
    )
    table, other = cls(config), cls(config)
    for step in (1, 1 << 40):
        table.apply_gradients(ids(1, -2), torch.rand(2, 1 + dim), step=step, event_time=2**32 - 1)
    export_entry_dumps(table, base)
    import_entry_dumps(other, base)
    assert content(other) == content(table)


def test_an_optimizer_that_the_original_does_not_have_is_refused(cls: Any, base: str) -> None:
    config = TableConfig(name="item", segments=(Segment(dim=3, optimizer=RowwiseAdagrad()),))
    with pytest.raises(TableArgumentError, match="no message for the state of rowwise_adagrad"):
        export_entry_dumps(cls(config), base)


def test_a_record_made_by_hand_is_a_row(cls: Any, base: str) -> None:
    write(base, RECORD)
    table = cls(CONFIG)
    import_entry_dumps(table, base)
    assert content(table) == {5: (300, [2.5, 1.0], [0.5])}
    assert encode_entry_dumps(table.scan().rows, CONFIG) == [RECORD]


def test_a_row_without_state_starts_afresh_at_time_zero(cls: Any, base: str) -> None:
    write(base, RECORD, WITHOUT_STATE)
    table = cls(CONFIG)
    import_entry_dumps(table, base)
    found = content(table)
    assert found[5] == (300, [2.5, 1.0], [0.5])
    assert found[6] == (0, [2.5, 1.0], [pytest.approx(0.1)])


def test_chosen_ids_only(cls: Any, base: str) -> None:
    table, half = filled(cls), cls(CONFIG)
    export_entry_dumps(table, base)
    report = import_entry_dumps(half, base, keep=(1, 2))
    assert (report.rows, report.skipped) == (10, 10)
    assert all(key % 2 for key in content(half))


def test_rows_that_have_expired_by_a_given_time_are_not_written(cls: Any, base: str) -> None:
    config = TableConfig(name="item", segments=CONFIG.segments, expiry=Expiry.days(1))
    table = cls(config)
    table.assign(ids(1, 2), torch.ones(2, 2), event_time=ids(0, 86400))
    report = export_entry_dumps(table, base, expire_at=86400)
    assert (report.rows, report.expired) == (1, 1)
    assert export_entry_dumps(table, base).rows == 2


def test_a_serving_table_takes_values_and_times_and_gives_no_entries(cls: Any, base: str) -> None:
    write(base, RECORD, WITHOUT_STATE)
    serving = cls(TableConfig(name="item", segments=CONFIG.segments, serving=True))
    import_entry_dumps(serving, base)
    assert content(serving)[5] == (300, [2.5, 1.0], [])
    with pytest.raises(ServingTableError, match="export_entry_dumps"):
        export_entry_dumps(serving, base)
    with pytest.raises(ServingTableError):
        entry_dumps_of(serving, ids(5))


def test_entries_are_looked_up_without_their_id(cls: Any, base: str) -> None:
    write(base, RECORD)
    table = cls(CONFIG)
    import_entry_dumps(table, base)
    assert entry_dumps_of(table, ids(7, 5, 8, 5)) == [b"", RECORD[9:], b"", RECORD[9:]]
    assert entry_dumps_of(table, ids()) == []


def test_records_longer_than_a_chunk_are_read(cls: Any, base: str) -> None:
    config = TableConfig(name="wide", segments=(Segment(dim=1 << 20),))
    table, other = cls(config), cls(config)
    table.assign(ids(1, 2), torch.rand(2, 1 << 20))
    export_entry_dumps(table, base)
    import_entry_dumps(other, base, verify_first=False)
    assert torch.equal(other.lookup(ids(1, 2)), table.lookup(ids(1, 2)))


def test_many_records_straddle_chunks(cls: Any, base: str) -> None:
    config = TableConfig(name="many", segments=(Segment(dim=100),))
    table, other = cls(config), cls(config)
    keys = torch.arange(20_000)
    table.assign(keys, torch.rand(20_000, 100))
    (file,) = export_entry_dumps(table, base).files
    assert Path(file).stat().st_size > 8 << 20
    if cls.__name__ == "DictTable":
        keys = keys[:100]  # a dict is slow; what matters is that the file is read to its end
    assert import_entry_dumps(other, base, keep=lambda found: torch.isin(found, keys)).rows == len(keys)
    assert torch.equal(other.lookup(keys), table.lookup(keys))


def test_both_formats_hold_the_same_rows(cls: Any, base: str) -> None:
    table, ours, theirs = filled(cls), cls(CONFIG), cls(CONFIG)
    dump(table, base)
    export_entry_dumps(table, base)
    load(ours, base)
    import_entry_dumps(theirs, base)
    assert content(ours) == content(theirs)


# Files that are not as they should be


def test_the_files_must_be_one_complete_set(cls: Any, base: str) -> None:
    with pytest.raises(RestoreError, match="no files"):
        import_entry_dumps(cls(CONFIG), base)
    write(base, RECORD, shard="-00000-of-00002")
    write(base, RECORD, shard="-00001-of-00002-tmp-1234")
    with pytest.raises(RestoreError, match="missing: 1"):
        import_entry_dumps(cls(CONFIG), base)
    write(base, RECORD, shard="-00001-of-00002")
    assert import_entry_dumps(cls(CONFIG), base).rows == 2
    write(base, RECORD)
    with pytest.raises(RestoreError, match="different sets"):
        import_entry_dumps(cls(CONFIG), base)


def test_no_single_byte_can_change_unnoticed(base: str) -> None:
    path = write(base, WITHOUT_STATE, RECORD)
    data = bytearray(path.read_bytes())
    table = filled(host_table_classes()[-1], 3)
    for position in range(len(data)):
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match=f"{path.name}: corrupt at byte") as caught:
            import_entry_dumps(table, base)
        assert caught.value.offset == (
            0 if position < len(tfrecord(WITHOUT_STATE)) else len(tfrecord(WITHOUT_STATE))
        )
        data[position] ^= 1 << position % 8
    assert len(table) == 3, "nothing was touched"


def test_a_file_that_ends_inside_a_record_is_refused(base: str) -> None:
    path = write(base, WITHOUT_STATE, RECORD)
    data, whole = path.read_bytes(), len(tfrecord(WITHOUT_STATE))
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        if length == whole:  # cut between two records; this format cannot tell
            continue
        with pytest.raises(CorruptFileError, match="truncated"):
            import_entry_dumps(host_table_classes()[-1](CONFIG), base)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (WITHOUT_STATE + bytes.fromhex("150000803f"), "has 3, the row has 2"),
        (WITHOUT_STATE[:-5], "has 1, the row has 2"),
        (WITHOUT_STATE + bytes.fromhex("1a04" + "0a021200"), "adagrad is field 1"),
        (WITHOUT_STATE + bytes.fromhex("20ffffffffffffffffff01"), "from -1 to"),
        (WITHOUT_STATE + bytes.fromhex("208080808010"), "to 4294967296"),
    ],
    ids=["more values", "fewer values", "another optimizer", "negative time", "time beyond 2106"],
)
def test_a_sound_record_that_does_not_fit_is_refused(
    cls: Any, base: str, payload: bytes, reason: str
) -> None:
    write(base, RECORD, payload)
    table = filled(cls, 3)
    with pytest.raises(RestoreError, match=reason):
        import_entry_dumps(table, base)
    assert len(table) == 3
    with pytest.raises(RestoreError):
        import_entry_dumps(table, base, verify_first=False)
    assert len(table) == 0


def test_a_sound_record_that_makes_no_sense_is_corrupt(cls: Any, base: str) -> None:
    write(base, RECORD, RECORD[9:])
    with pytest.raises(CorruptFileError, match="no id") as caught:
        import_entry_dumps(cls(CONFIG), base)
    assert caught.value.offset == len(tfrecord(RECORD))


def test_a_write_that_fails_leaves_the_old_files(cls: Any, base: str) -> None:
    old = filled(cls)
    export_entry_dumps(old, base, num_shards=2)
    before = {path: path.read_bytes() for path in Path(base).parent.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(FilesystemError):
            export_entry_dumps(filled(cls, 1000), base, num_shards=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path: path.read_bytes() for path in Path(base).parent.iterdir()} == before


# Several tables in one file


def scan_of(table: Any, num_shards: int) -> Any:
    return lambda shard, limit: iterate(table, limit=limit, shard=shard, num_shards=num_shards)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_several_tables_come_back_from_one_dump(cls: Any, base: str, num_shards: int) -> None:
    other = TableConfig(name="other", segments=(Segment(dim=2, optimizer=Sgd()),))
    tables = {"a": filled(cls, 30), "b": cls(other), "none": cls(other)}
    tables["b"].assign(ids(1, 2), rows([1, 2], [3, 4]))
    sources = {
        name: (RowLayout.of(table.config), scan_of(table, num_shards)) for name, table in tables.items()
    }
    written = export_multi_rows(sources, base, num_shards=num_shards)
    assert {name: one.rows for name, one in written.items()} == {"a": 30, "b": 2, "none": 0}
    assert tables_of_multi_dump(base) == {"a": 30, "b": 2, "none": 0}
    back = {"b": cls(other), "a": cls(CONFIG)}
    back["b"].assign(ids(9), rows([9, 9]))
    assert import_multi_entry_dumps(back, base).keys() == back.keys()
    assert {name: content(one) for name, one in back.items()} == {
        name: content(tables[name]) for name in back
    }
    only = cls(other)  # the rows of the other table are skipped
    import_multi_entry_dumps({"b": only, "strange": cls(other)}, base)
    assert content(only) == content(tables["b"])


def test_a_snappy_stream_of_tensorflow_is_read() -> None:
    path = Path(__file__).parents[1] / "checkpoint/original/data/snappy_records/records.snappy"
    with entry_dumps._Records(str(path)) as found:
        assert (found.compressed, found.skip(100), found.at_end) == (True, 40, True)


def test_a_snappy_block_is_what_it_was_compressed_from() -> None:
    assert snappy_decode(b"\x00") == b""
    assert snappy_decode(b"\x03\x08abc") == b"abc"
    assert snappy_decode(b"\x09\x04ab\x1a\x02\x00") == b"ababababa", "a copy may overlap what it writes"
    codec = pytest.importorskip("pyarrow").Codec("snappy")
    texts = [b"", b"x" * 100_000, bytes(range(256)) * 300, b"abcd" * 9 + b"z"]
    for text in [*texts, random.Random(1).randbytes(70_000)]:
        assert snappy_decode(codec.compress(text, asbytes=True)) == text


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"", "no length"),
        (b"\xff\xff\xff\xff\xff\xff", "no length"),
        (b"\xff\xff\xff\xff\x0f\x00a", "cannot hold the 4294967295 that it promises"),
        (b"\x05\x08abc", "promises 5 bytes and has 3"),
        (b"\x03\x10abcde", "more output than promised"),
        (b"\x05\x10abc", "a literal is longer than the rest"),
        (b"\x09\x00a\x15\x05", "a copy from outside the output"),
        (b"\x09\x00a\x15\x00", "a copy from outside the output"),
        (b"\x09\x00a\x15", "ends inside the element"),
    ],
)
def test_a_snappy_block_that_is_not_valid_is_refused(block: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        snappy_decode(block)


@given(st.binary(max_size=60))
def test_no_bytes_make_snappy_fail_in_another_way(block: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert len(snappy_decode(block)) <= 32 * len(block)


# Records


def test_a_record_is_framed_as_tensorflow_does() -> None:
    assert tfrecord(b"").hex() == "0000000000000000" + "29039807" + "d8ea82a2"


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_records_come_back(payloads: list[bytes]) -> None:
    file = io.BytesIO(b"".join(map(tfrecord, payloads)))
    found = list(records(file, "memory"))
    assert [payload for _, payload in found] == payloads
    assert [at for at, _ in found] == [sum(len(p) + 16 for p in payloads[:n]) for n in range(len(payloads))]


def test_a_length_is_not_believed_for_its_checksum() -> None:
    from monolith.native import masked_crc32c

    length = (1 << 62).to_bytes(8, "little")
    file = io.BytesIO(length + masked_crc32c(length).to_bytes(4, "little") + b"few bytes")
    with pytest.raises(CorruptFileError, match="ends inside a record of 4611686018427387904 bytes"):
        list(records(file, "memory"))
