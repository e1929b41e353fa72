"""Many tables on one device: calls over all of them, which are few launches, against calls by table."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from services.emulated_cuda import EmulatedDevice, device_named, device_names, nothing_waits
from torch import Tensor
from torch.overrides import TorchFunctionMode

from monolith.cuda import Device
from monolith.errors import ServingTableError, TableArgumentError, TableClosedError
from monolith.table import (
    Adagrad,
    CudaTable,
    DelayCompensated,
    Fp16,
    MultiTable,
    NativeTable,
    OneBit,
    RandomUniform,
    Rows,
    Segment,
    Sgd,
    SlotThresholds,
    Table,
    TableConfig,
    TouchedKeySet,
    iterate,
    make_filter,
)
from monolith.table.cuda.fused import FusedBatch, FusedTables

WIDE = Segment(dim=8, optimizer=Adagrad(), initializer=RandomUniform(), learning_rate=0.5)
NARROW = Segment(dim=1, optimizer=Sgd(), initializer=RandomUniform(), learning_rate=0.25)
STEEP = Segment(dim=8, compressor=OneBit(step_size=2, amplitude=0.5), learning_rate=0.125)
LATE = Segment(dim=2, optimizer=DelayCompensated(Sgd(), lambda_=1.0), learning_rate=0.5)


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return device_named(request.param)


def config(name: str, segment: Segment = WIDE, **options: Any) -> TableConfig:
    return TableConfig(name=name, segments=(segment,), **options)


def on_device(device: Device, configs: Sequence[TableConfig], **options: Any) -> MultiTable:
    return MultiTable({one.name: CudaTable(one, device=device, **options) for one in configs})


def of_host(device: Device, numbers: Sequence[int]) -> Tensor:
    """Return a tensor that an emulated device does not take for its own."""
    return device.pinned((len(numbers),), torch.int64).copy_(torch.tensor(numbers))


class Draw:
    """Random batches for tables."""

    def __init__(self, dims: Sequence[int], seed: int = 0) -> None:
        self._dims = dims
        self._random = torch.Generator().manual_seed(seed)

    def ids(self, sizes: Sequence[int], most: int = 200) -> Tensor:
        return torch.randint(-most, most, (sum(sizes),), generator=self._random)

    def floats(self, sizes: Sequence[int]) -> Tensor:
        widths = list(self._dims) * (len(sizes) // len(self._dims))
        return torch.randn(sum(n * dim for n, dim in zip(sizes, widths, strict=True)), generator=self._random)

    def sizes(self, batches: int, most: int = 300) -> list[int]:
        """Return sizes of cells, some of them empty and one of them with long runs of equal ids."""
        cells = batches * len(self._dims)
        drawn = torch.randint(0, most, (cells,), generator=self._random)
        return (drawn * (torch.rand(cells, generator=self._random) < 0.7)).tolist()

    def times(self, sizes: Sequence[int]) -> Tensor:
        return torch.randint(0, 1 << 32, (sum(sizes),), generator=self._random)


def apply_by_table(
    tables: Sequence[Table], ids: Tensor, sizes: list[int], by: Tensor, **options: Any
) -> None:
    """Do what a fused call is to do, table after table."""
    count = len(tables)
    floats = [n * tables[cell % count].dim for cell, n in enumerate(sizes)]
    times, latest = options.pop("event_time", 0), options.pop("latest_values", None)
    for number, table in enumerate(tables):

        def own(column: Tensor, lengths: list[int], number: int = number) -> Tensor:
            return torch.cat(column.split_with_sizes(lengths)[number::count])

        table.apply_gradients(
            own(ids, sizes),
            own(by, floats).view(-1, table.dim),
            event_time=own(times, sizes) if isinstance(times, Tensor) else times,
            latest_values=None if latest is None else own(latest, floats).view(-1, table.dim),
            **options,
        )


def content(table: Table) -> Rows:
    return Rows.concat(list(iterate(table)))


def assert_same(expected: Sequence[Table], found: Sequence[Table]) -> None:
    """The same rows to the bit, and the same counted."""
    for one, other in zip(expected, found, strict=True):
        wanted, got = content(one), content(other)
        for name in ("ids", "event_times", "values", "state"):
            assert torch.equal(getattr(wanted, name), getattr(got, name)), (one.config.name, name)
        for name in ("rows", "inserted", "filtered", "refused", "non_finite", "max_event_time"):
            assert getattr(one.stats(), name) == getattr(other.stats(), name), (one.config.name, name)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_fused_calls_are_calls_by_table_to_the_bit(device: Device, dedup: bool, batches: int) -> None:
    """Widths that alternate, so that answers lie anywhere; ids that repeat, in a table and in several."""
    configs = [config(f"t{k}", NARROW if k in (1, 4) else WIDE, seed=k == 5) for k in range(6)]
    fused = on_device(device, configs)
    plain, host = [CudaTable(one, device=device) for one in configs], [NativeTable(one) for one in configs]
    draw = Draw([one.dim for one in configs], seed=batches)
    for step in range(5):
        sizes = draw.sizes(batches)
        # Every table grows more than once; then some ids come so often that blocks sum their gradients.
        ids, by = draw.ids(sizes, [50, 100, 4000, 3, 200][step]), draw.floats(sizes)
        if step == 2 and len(by):
            by[len(by) // 2], by[-1] = float("nan"), 1e30
        times: int | Tensor = draw.times(sizes) if step % 2 else 7 + step
        options: dict[str, Any] = {"step": step, "event_time": times, "dedup": dedup}
        for tables in (plain, host):
            apply_by_table(tables, ids, sizes, by, **options)
        fused.fused_apply_gradients(
            ids.to(fused.device), torch.tensor(sizes), by.to(fused.device), num_batches=batches, **options
        )
        found = fused.fused_lookup(ids, torch.tensor(sizes), num_batches=batches)
        cells = ids.split_with_sizes(sizes)
        one_by_one = [plain[k % 6].lookup(cell).flatten() for k, cell in enumerate(cells)]
        assert torch.equal(found.embeddings, torch.cat(one_by_one)), step
    assert_same(plain, list(fused.tables.values()))
    assert_same(host, list(fused.tables.values()))


def test_runs_that_blocks_sum_are_those_of_their_own_table(device: Device) -> None:
    """Stretches of one table may begin anywhere in the batch."""
    configs = [config(f"t{k}", NARROW if k == 1 else WIDE) for k in range(4)]
    fused, host = on_device(device, configs), [NativeTable(one) for one in configs]
    draw = Draw([one.dim for one in configs])
    for sizes in ([100, 700, 1300, 600], [513, 3, 511, 1029]):
        ids, by = draw.ids(sizes, 1), draw.floats(sizes)
        apply_by_table(host, ids, sizes, by, dedup=True)
        fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=1, dedup=True)
    assert_same(host, list(fused.tables.values()))


class _Counting(EmulatedDevice):
    """Counts launches by kernel."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "launches", Counter[str]())

    def kernels(self, source: str, name: str, headers: Any = ()) -> Any:
        inner, launches = super().kernels(source, name, headers), self.launches  # type: ignore[attr-defined]

        class Counted:
            def launch(self, kernel: str, blocks: int, *arguments: Any, **options: Any) -> None:
                launches[kernel] += blocks > 0
                inner.launch(kernel, blocks, *arguments, **options)

        return Counted()


class _Operations(TorchFunctionMode):
    """Counts what torch is asked to compute, copy or make."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


needs_emulation = pytest.mark.skipif("emulated" not in device_names(), reason="needs g++")


def _asked_of_the_device(tables: int) -> tuple[Counter[str], Counter[str]]:
    device = _Counting()
    fused = on_device(device, [config(f"t{k:02}", initial_rows=4096) for k in range(tables)])
    draw, sizes = Draw([8] * tables), [600] + [20] * (tables - 1)
    ids, by, times = draw.ids(sizes), draw.floats(sizes), draw.times(sizes)
    many = of_host(device, sizes)
    for step in range(2):
        device.launches.clear()  # type: ignore[attr-defined]
        with _Operations() as operations, nothing_waits(device):
            fused.fused_lookup(ids, many, num_batches=1)
            fused.fused_apply_gradients(ids, many, by, num_batches=1, event_time=times, step=step, dedup=True)
    return device.launches, operations.seen  # type: ignore[attr-defined]


@needs_emulation
def test_a_step_takes_as_many_launches_whatever_the_number_of_tables() -> None:
    launches, operations = _asked_of_the_device(2)
    more_launches, more_operations = _asked_of_the_device(40)
    assert more_launches == launches
    assert more_operations == operations
    assert launches == dict.fromkeys(
        [
            "lookup_tables",
            "claim_tables",
            "settle_tables",
            "sum_long_runs_of_tables",
            "train_tables",
        ],
        1,
    )
    assert operations["sort"] == 1


def test_batches_of_the_same_sizes_are_not_taken_for_the_same(device: Device) -> None:
    """What was worked out for a batch serves the next, unless a table grew or it is summed otherwise."""
    configs = [config(f"t{k}", replace(WIDE, learning_rate=float)) for k in range(3)]
    fused, host = on_device(device, configs), [NativeTable(one) for one in configs]
    draw, sizes = Draw([8] * 3), [40, 530, 30]
    many = torch.tensor(sizes)
    for step, (most, dedup) in enumerate([(40, True), (40, True), (40, False), (2000, True), (2000, True)]):
        ids, by = draw.ids(sizes, most), draw.floats(sizes)
        apply_by_table(host, ids, sizes, by, step=step, dedup=dedup)
        fused.fused_apply_gradients(ids, many, by, num_batches=1, step=step, dedup=dedup)
        found = fused.fused_lookup(ids, many, num_batches=1).embeddings
        cells = zip(host, ids.split_with_sizes(sizes), strict=True)
        assert torch.equal(found, torch.cat([table.lookup(cell).flatten() for table, cell in cells]))
    assert_same(host, list(fused.tables.values()))


def test_more_tables_than_a_launch_takes_are_several(device: Device) -> None:
    configs = [config(f"t{k:03}", NARROW) for k in range(100)]
    fused, host = on_device(device, configs), [NativeTable(one) for one in configs]
    draw, sizes = Draw([1] * 100), [3] * 99 + [5]
    for step in range(2):
        ids, by = draw.ids(sizes, 9), draw.floats(sizes)
        apply_by_table(host, ids, sizes, by, step=step)
        fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=1, step=step)
    found = fused.fused_lookup(ids, torch.tensor(sizes), num_batches=1).embeddings
    by_table = zip(host, ids.split_with_sizes(sizes), strict=True)
    assert torch.equal(found, torch.cat([table.lookup(cell).flatten() for table, cell in by_table]))
    assert_same(host, list(fused.tables.values()))


def test_places_whose_numbers_need_64_bits_are_ordered_alike(device: Device) -> None:
    configs = [config(f"t{k}", NARROW if k else WIDE) for k in range(3)]
    tables, host = [CudaTable(one, device=device) for one in configs], [NativeTable(one) for one in configs]
    fused, draw = FusedTables(tables, device, most_narrow=100), Draw([8, 1, 1])
    sizes = [90, 7, 200]
    ids, by = draw.ids(sizes), draw.floats(sizes)
    apply_by_table(host, ids, sizes, by, dedup=True)
    batch = FusedBatch(
        ids.to(device.torch_device),
        np.array(sizes),
        by.to(device.torch_device),
        np.array([0.5, 0.25, 0.25], np.float32),
        step=0,
        dedup=True,
    )
    fused.apply_gradients(batch)
    assert_same(host, tables)


def test_what_a_table_must_do_by_itself_it_does(device: Device) -> None:
    """A filter, a budget: beside tables without."""
    configs = {
        "asks": config("asks"),
        "bounded": config("bounded", capacity_bytes=20_000),
        "followed": config("followed"),
        "plain": config("plain"),
        "thrifty": config("thrifty", NARROW),
    }

    def made(cls: Any, **options: Any) -> tuple[MultiTable, TouchedKeySet]:
        touched, asked = TouchedKeySet(1000), make_filter("sliding_hash_filter", SlotThresholds(default=2))
        own: dict[str, Any] = {"asks": {"admission": asked}, "followed": {"touched": touched}}
        tables = {name: cls(one, **own.get(name, {}), **options) for name, one in configs.items()}
        return MultiTable(tables), touched

    (fused, touched), (host, host_touched) = made(CudaTable, device=device), made(NativeTable)
    draw, sizes = Draw([8, 8, 8, 8, 1]), [60, 80, 40, 50, 30]
    for step in range(4):
        ids, by, times = draw.ids(sizes, 60), draw.floats(sizes), draw.times(sizes)
        for tables in (fused, host):
            where = tables.device
            tables.fused_apply_gradients(
                ids.to(where),
                torch.tensor(sizes),
                by.to(where),
                num_batches=1,
                event_time=times.to(where),
                step=step,
                dedup=True,
                counts=torch.ones_like(ids),
            )
    names = ["asks", "followed", "plain", "thrifty"]
    assert_same([host.tables[name] for name in names], [fused.tables[name] for name in names])
    assert sorted(touched.steal().tolist()) == sorted(host_touched.steal().tolist()) != []
    assert fused.stats()["bounded"].rows > 0
    assert fused.stats()["bounded"].bytes_total <= 20_000


def test_observers_of_rows_are_told(device: Device) -> None:
    """A set of touched keys, a cut that is open, changes that are tracked: each of one table."""
    configs = [config(name) for name in ("cut", "followed", "plain", "tracked")]
    fused, host = on_device(device, configs), MultiTable({one.name: NativeTable(one) for one in configs})
    draw, sizes = Draw([8] * 4), [60, 40, 50, 600]
    both: list[Any] = [fused, host]
    touched = [TouchedKeySet(1000), TouchedKeySet(1000)]

    def train(most: int, time: int) -> None:
        ids, by = draw.ids(sizes, most), draw.floats(sizes)
        for tables in both:
            where = tables.device
            tables.fused_apply_gradients(
                ids.to(where), torch.tensor(sizes), by.to(where), num_batches=1, event_time=time, dedup=True
            )

    train(30, 1)
    cuts, changes = [], []
    for tables, told in zip(both, touched, strict=True):
        tables["followed"].touch(told)
        tables["tracked"].track_changes()
        cuts.append(tables["cut"].snapshot())
    train(2000, 2)  # all of them grow
    train(50, 3)
    for tables in both:
        changes.append(tables["tracked"].snapshot())
    assert sorted(touched[0].steal().tolist()) == sorted(touched[1].steal().tolist()) != []
    for found, expected in (cuts, changes):
        for only in (False, True) if (found, expected) == tuple(changes) else (False,):
            wanted, got = (_scanned(cut, changed_only=only) for cut in (expected, found))
            for name in ("ids", "event_times", "values", "state"):
                assert torch.equal(getattr(wanted, name), getattr(got, name)), name
    for cut in (*cuts, *changes):
        cut.close(saved=False)
    assert_same(list(host.tables.values()), list(fused.tables.values()))


def _scanned(cut: Any, **how: Any) -> Rows:
    """Return the rows of a cut, in the order of their ids."""
    chunks, cursor = [], None
    while True:
        scan = cut.scan(cursor, **how)
        chunks.append(scan.rows)
        cursor = scan.cursor
        if cursor is None:
            break
    rows = Rows.concat(chunks)
    order = rows.ids.argsort()
    return Rows(*(column[order] for column in (rows.ids, rows.event_times, rows.values, rows.state)))


@pytest.mark.soak  # two layouts more to compile
@pytest.mark.parametrize("dedup", [False, True])
def test_scales_and_delays_are_those_of_each_table(device: Device, dedup: bool) -> None:
    configs = [config("a", STEEP), config("b", LATE), config("c", STEEP), config("d", LATE)]
    fused, plain = on_device(device, configs), [CudaTable(one, device=device) for one in configs]
    draw, sizes = Draw([8, 2, 8, 2]), [30, 50, 20, 40]
    plain[2].set_scales([3.0])
    fused.tables["c"].set_scales([3.0])  # type: ignore[attr-defined]
    for step in range(1, 5):
        ids, by, latest = draw.ids(sizes, 20), draw.floats(sizes), draw.floats(sizes)
        options: dict[str, Any] = {"latest_values": latest, "step": step, "dedup": dedup}
        apply_by_table(plain, ids, sizes, by, **options)
        fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=1, **options)
        found = fused.fused_lookup(ids, torch.tensor(sizes), num_batches=1).embeddings
        seen = [table.lookup(cell) for table, cell in zip(plain, ids.split_with_sizes(sizes), strict=True)]
        assert torch.equal(found, torch.cat([one.flatten() for one in seen]))
    assert_same(plain, list(fused.tables.values()))


@pytest.mark.soak  # another layout to compile
def test_tables_that_serve_are_looked_up_together(device: Device) -> None:
    configs = [config(name, replace(WIDE, compressor=Fp16()), serving=True) for name in "ab"]
    fused, draw, sizes = on_device(device, [*configs, config("c")]), Draw([8] * 3), [30, 40, 50]
    ids = draw.ids(sizes)
    for table in fused.tables.values():
        table.assign(torch.arange(-100, 100), draw.floats([200, 0, 0]).view(-1, 8))
    found = fused.fused_lookup(ids, torch.tensor(sizes), num_batches=1).embeddings
    cells = zip(fused.tables.values(), ids.split_with_sizes(sizes), strict=True)
    assert torch.equal(found, torch.cat([table.lookup(cell).flatten() for table, cell in cells]))
    with pytest.raises(ServingTableError):
        fused.fused_apply_gradients(ids, torch.tensor(sizes), draw.floats(sizes), num_batches=1)


def test_rates_are_those_of_the_step_or_of_the_call(device: Device) -> None:
    configs = [config(name, replace(NARROW, learning_rate=float)) for name in "ab"]
    fused, host = on_device(device, configs), [NativeTable(one) for one in configs]
    ids, sizes, by = torch.tensor([1, 1]), [1, 1], torch.ones(2)
    for step in (3, 4):
        fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=1, step=step)
        apply_by_table(host, ids, sizes, by, step=step)
    assert_same(host, list(fused.tables.values()))
    rates = torch.tensor([1.0, 2.0])
    fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=1, learning_rates=rates)
    for table, rate in zip(host, rates, strict=True):
        table.apply_gradients(ids[:1], by[:1, None], learning_rates=rate[None])
    assert_same(host, list(fused.tables.values()))


def test_answers_are_where_the_ids_are(device: Device) -> None:
    fused = on_device(device, [config("a"), config("b")])
    ids, sizes = torch.tensor([1, 2, 1]), torch.tensor([2, 1])
    there, by = ids.to(fused.device), torch.ones(24)
    fused.fused_apply_gradients(there, sizes, by.to(fused.device), num_batches=1)
    fused.fused_apply_gradients(ids, sizes, by, num_batches=1)
    seen = fused.fused_lookup(there, sizes, num_batches=1)
    assert seen.embeddings.device == there.device
    assert seen.id_offsets.device == torch.device("cpu")
    assert torch.equal(seen.embeddings.cpu(), fused.fused_lookup(ids, sizes, num_batches=1).embeddings)


def test_a_small_table_is_not_asked_how_full_it_is_by_every_batch(device: Device) -> None:
    """Ten ids that come a thousand times: room for as many new ones is made once, and nobody waits after."""
    fused = on_device(device, [config("a"), config("b")])
    ids = (torch.arange(2000) % 10).to(fused.device)
    sizes, by = of_host(device, [1000, 1000]), torch.ones(16000, device=fused.device)
    fused.fused_apply_gradients(ids, sizes, by, num_batches=1, dedup=True)
    with nothing_waits(device):
        for step in range(1, 8):
            fused.fused_lookup(ids, sizes, num_batches=1)
            fused.fused_apply_gradients(ids, sizes, by, num_batches=1, dedup=True, step=step)
    assert fused.feature_counts() == {"a": 10, "b": 10}


def test_an_impossible_time_on_the_device_is_complained_of_once(device: Device) -> None:
    fused = on_device(device, [config("a"), config("b", initial_rows=4096)])
    ids, sizes = torch.arange(6).to(fused.device), torch.tensor([3, 3])
    by, times = torch.ones(48).to(fused.device), torch.tensor([1, -1, 1 << 32, 4, 5, 6]).to(fused.device)
    fused.fused_apply_gradients(ids, sizes, by, num_batches=1, event_time=times)
    with pytest.raises(TableArgumentError, match="'a': event_time: 2 on the device"):
        fused.stats()
    assert fused.stats()["b"].max_event_time == 6
    assert fused["a"].lookup_rows(torch.arange(3))[1].event_times.tolist() == [1, 0, 0]
    fused.fused_apply_gradients(ids, sizes, by, num_batches=1)


def test_a_closed_table_closes_calls_over_all(device: Device) -> None:
    fused = on_device(device, [config("a"), config("b")])
    fused["b"].close()
    ids, sizes = torch.tensor([1, 1]), torch.tensor([1, 1])
    for _ in range(2):
        with pytest.raises(TableClosedError, match="'b'"):
            fused.fused_lookup(ids, sizes, num_batches=1)
        with pytest.raises(TableClosedError, match="'b'"):
            fused.fused_apply_gradients(ids, sizes, torch.ones(16), num_batches=1)
    assert len(fused["a"]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": torch.tensor([1, 1], dtype=torch.int32)},
        {"ids": torch.tensor([[1, 1]])},
        {"sizes": torch.tensor([1, 2])},
        {"sizes": torch.tensor([2])},
        {"sizes": torch.tensor([3, -1])},
        {"num_batches": 0},
        {"gradients": torch.ones(15)},
        {"gradients": torch.ones(16, dtype=torch.float64)},
        {"event_time": torch.tensor([1])},
        {"event_time": torch.tensor([1.0, 2.0])},
        {"event_time": -1},
        {"step": -1},
        {"learning_rates": torch.ones(3)},
        {"latest_values": torch.ones(3)},
        {"counts": torch.tensor([1])},
    ],
)
def test_arguments_that_do_not_fit_change_nothing(device: Device, wrong: dict[str, Any]) -> None:
    fused = on_device(device, [config("a"), config("b")])
    given: dict[str, Any] = {
        "ids": torch.tensor([1, 1]),
        "sizes": torch.tensor([1, 1]),
        "gradients": torch.ones(16),
        "num_batches": 1,
    }
    there = {name: one.to(fused.device) if name != "sizes" else one for name, one in _tensors(given | wrong)}
    for arguments in (given | wrong, given | wrong | there):
        with pytest.raises(TableArgumentError):
            fused.fused_apply_gradients(**arguments)
        if wrong.keys() & {"ids", "sizes", "num_batches"}:
            with pytest.raises(TableArgumentError):
                fused.fused_lookup(arguments["ids"], arguments["sizes"], num_batches=arguments["num_batches"])
    assert len(fused) == 0


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    cpu_only = {"learning_rates", "counts"}
    return ((name, one) for name, one in given.items() if isinstance(one, Tensor) and name not in cpu_only)


def test_calls_of_no_ids_do_nothing(device: Device) -> None:
    fused = on_device(device, [config("a"), config("b")])
    none, sizes = torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])
    fused.fused_apply_gradients(none, sizes, torch.ones(0), num_batches=1)
    assert fused.fused_lookup(none, sizes, num_batches=1).embeddings.shape == (0,)


def test_one_table_under_two_names_is_trained_by_both(device: Device) -> None:
    table = CudaTable(config("a"), device=device)
    fused, host = MultiTable({"a": table, "b": table}), NativeTable(config("a"))
    ids, by = torch.tensor([1, 2, 2, 3]), torch.randn(32)
    fused.fused_apply_gradients(ids, torch.tensor([2, 2]), by, num_batches=1)
    apply_by_table([host], ids, [4], by)
    assert_same([host], [table])
    assert len(fused.fused_lookup(ids, torch.tensor([2, 2]), num_batches=1).embeddings) == 32


def test_a_caller_that_freezes_a_table_delays_writers_but_neither_readers_nor_itself(device: Device) -> None:
    """A dump of one table reads others while it holds the first: waiting for it must not hold those."""
    fused = on_device(device, [config("a"), config("b")])
    ids, sizes = torch.tensor([1, 1]), torch.tensor([1, 1])
    writer = threading.Thread(
        target=fused.fused_apply_gradients, args=(ids, sizes, torch.ones(16)), kwargs={"num_batches": 1}
    )
    with _held_still(fused["b"]):
        writer.start()
        for _ in range(50):
            assert fused.fused_lookup(ids, sizes, num_batches=1).embeddings.count_nonzero() == 0
            assert len(fused["a"]) == 0
    writer.join(60)
    assert fused.feature_counts() == {"a": 1, "b": 1}


@contextmanager
def _held_still(table: Any) -> Iterator[None]:
    with table.frozen():
        yield


def test_threads_train_and_read_on_streams_of_their_own(device: Device) -> None:
    """Every id gets as many steps as there were calls, whoever made them."""
    fused = on_device(device, [config(f"t{k}", NARROW) for k in range(3)])
    ids, sizes = torch.arange(30).to(fused.device), torch.tensor([10, 10, 10])
    by = torch.ones(30, device=fused.device)
    first = on_device(device, [config(f"t{k}", NARROW) for k in range(3)])
    for step in range(8):
        first.fused_apply_gradients(ids, sizes, by, num_batches=1, step=step)
    device.current_stream().synchronize()

    def work() -> None:
        with device.on(device.new_stream()):
            for step in range(4):
                fused.fused_apply_gradients(ids, sizes, by, num_batches=1, step=step)
                fused.fused_lookup(ids, sizes, num_batches=1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    expected = first.fused_lookup(ids, sizes, num_batches=1).embeddings
    assert torch.equal(fused.fused_lookup(ids, sizes, num_batches=1).embeddings, expected)


def test_tables_of_several_kinds_or_places_are_called_one_by_one(device: Device) -> None:
    tables = MultiTable({"a": CudaTable(config("a"), device=device), "b": NativeTable(config("b"))})
    ids, sizes, by = torch.tensor([1, 2]), torch.tensor([1, 1]), torch.randn(16)
    tables.fused_apply_gradients(ids, sizes, by, num_batches=1)
    host = [NativeTable(config(name)) for name in "ab"]
    apply_by_table(host, ids, [1, 1], by)
    assert_same(host, list(tables.tables.values()))
    assert tables.device == torch.device("cpu")


class _ByItself:
    """A table on a device of some other kind: it does all that a `CudaTable` does, by the same calls."""

    def __init__(self, table: CudaTable) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def test_other_tables_on_the_device_are_called_by_the_cell(device: Device) -> None:
    configs = [config("a"), config("b", NARROW), config("c")]
    made, host = [CudaTable(one, device=device) for one in configs], [NativeTable(one) for one in configs]
    several: dict[str, Any] = {"a": _ByItself(made[0]), "b": made[1], "c": _ByItself(made[2])}
    fused, draw, sizes = MultiTable(several), Draw([8, 1, 8]), [20, 5, 0, 0, 7, 30]
    for step in range(20):  # until somebody asks how full the tables are
        ids, by, times = draw.ids(sizes), draw.floats(sizes), draw.times(sizes)
        options: dict[str, Any] = {"event_time": times, "step": step}
        apply_by_table(host, ids, sizes, by, **options)
        fused.fused_apply_gradients(ids, torch.tensor(sizes), by, num_batches=2, **options)
    found = fused.fused_lookup(ids, torch.tensor(sizes), num_batches=2).embeddings
    cells = zip(host * 2, ids.split_with_sizes(sizes), strict=True)
    assert torch.equal(found, torch.cat([table.lookup(cell).flatten() for table, cell in cells]))
    assert_same(host, made)
