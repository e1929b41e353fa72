"""What ranks do together that one store alone has not to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from services.emulated_cuda import device_named, device_names
from store.ranks import all_at_once, connected
from torch import Tensor, nn

from monolith.errors import ClusterError, RequestError, TableArgumentError, UnavailableError
from monolith.store import AllToAllStore, LocalStore, RankGroups, TableIds
from monolith.store.row_requests import HEADER_BYTES, RowCall, RowHeader
from monolith.table import Adagrad, Segment, TableConfig, Zeros

CONFIGS = {
    "a": TableConfig(
        name="a", segments=(Segment(dim=2, initializer=Zeros(), optimizer=Adagrad(), learning_rate=0.1),)
    )
}


def store_of(groups: RankGroups) -> AllToAllStore:
    return AllToAllStore(LocalStore.from_configs(CONFIGS, threads=1), CONFIGS, groups)


def of(*ids: int) -> TableIds:
    return TableIds(torch.tensor(ids, dtype=torch.int64), torch.tensor([len(ids)]))


def trained(stores: list[AllToAllStore], ids: list[TableIds], gradients: list[Tensor], **more: int) -> None:
    calls = zip(stores, ids, gradients, strict=True)
    all_at_once(*(partial(store.apply_gradients, *given, **more) for store, *given in calls))


def test_each_rank_holds_the_ids_that_hash_to_it() -> None:
    with connected(3) as groups:
        stores = [store_of(one) for one in groups]
        trained(stores, [of(0, 1, 2, 3, 4, 5, -1)] * 3, [torch.ones(14)] * 3)
        held = [
            [rank for rank, store in enumerate(stores) if store.inner.lookup(of(id_)).any()]
            for id_ in (0, 1, 2, 3, 4, 5)
        ]
    assert held == [[0], [1], [2], [0], [1], [2]]


def test_gradients_of_one_id_are_one_step_with_their_sum_in_the_order_of_ranks() -> None:
    """These three add up to another float in any other order."""
    given = [torch.tensor([1e8, 0.0]), torch.tensor([-1e8, 0.0]), torch.tensor([3.14159, 1.0])]
    alone = LocalStore.from_configs(CONFIGS, threads=1)
    alone.apply_gradients(of(7), (given[0] + given[1]) + given[2])
    with connected(3) as groups:
        stores = [store_of(one) for one in groups]
        trained(stores, [of(7)] * 3, given)
        found = all_at_once(*(partial(store.lookup, of(7)) for store in stores))
    assert [rows.tolist() for rows in found] == [alone.lookup(of(7)).tolist()] * 3


def test_ranks_may_have_different_event_times_and_the_latest_counts() -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]
        all_at_once(
            *(
                partial(store.apply_gradients, of(1, 2), torch.ones(4), event_time=time)
                for store, time in zip(stores, (10, 20), strict=True)
            )
        )
        assert stores[0].stats()["a"].max_event_time == 20
        assert stores[1].stats()["a"].rows == 2


def test_when_one_rank_is_given_nonsense_all_refuse_and_nothing_has_happened() -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]

        def right() -> str:
            with pytest.raises(ClusterError, match="rank 1 refused the arguments of this call"):
                stores[0].apply_gradients(of(1), torch.ones(2))
            return "refused"

        def wrong() -> str:
            with pytest.raises(TableArgumentError, match="gradients"):
                stores[1].apply_gradients(of(2), torch.ones(3))
            return "refused"

        assert all_at_once(right, wrong) == ["refused", "refused"]
        assert stores[0].stats()["a"].rows == 0
        trained(stores, [of(1), of(2)], [torch.ones(2)] * 2)  # and it goes on
        assert stores[0].stats()["a"].rows == 2


def test_a_request_of_the_size_of_the_last_one_takes_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]
        made: list[Sequence[int]] = []
        real = groups[0].pushes.all_to_all

        def counted(given: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
            made.append(sent)
            return real(given, sent, received)

        monkeypatch.setattr(groups[0].pushes, "all_to_all", counted)

        def exchanges(many: int) -> int:
            before = len(made)
            trained(stores, [of(*range(many)), of(1)], [torch.ones(2 * many), torch.ones(2)])
            return len(made) - before

        found = [exchanges(many) for many in (8, 8, 4, 200, 200)]
    assert found == [2, 1, 1, 2, 1], "the first request, and those that are larger, have no space yet"


def test_requests_of_any_sizes_arrive_whole() -> None:
    """Some fit in their space and others do not, on one rank or on several."""
    draw = torch.Generator().manual_seed(3)
    alone = LocalStore.from_configs(CONFIGS, threads=1)
    with connected(3) as groups:
        stores = [store_of(one) for one in groups]
        for step in range(30):
            ids = [
                of(*torch.randperm(300, generator=draw)[: int(many)].tolist())
                for many in torch.randint(0, 60, (3,), generator=draw)
            ]
            gradients = [torch.randn(2 * len(one.ids), generator=draw) for one in ids]
            together = TableIds(
                torch.cat([one.ids for one in ids]), torch.cat([one.sizes for one in ids]), batches=3
            )
            alone.apply_gradients(together, torch.cat(gradients), step=step)
            trained(stores, ids, gradients, step=step)
            found = all_at_once(*(partial(store.lookup, one) for store, one in zip(stores, ids, strict=True)))
            assert [rows.tolist() for rows in found] == [alone.lookup(one).tolist() for one in ids]


def test_a_refusal_does_not_change_the_space_of_later_requests() -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]

        def refused(store: AllToAllStore, given: Tensor) -> str:
            with pytest.raises((ClusterError, TableArgumentError)):
                store.apply_gradients(of(*range(50)), given)
            return "refused"

        for many in (2, 20, 3):
            trained(stores, [of(*range(many)), of(1)], [torch.zeros(2 * many), torch.zeros(2)])
            all_at_once(
                partial(refused, stores[0], torch.ones(100)), partial(refused, stores[1], torch.ones(3))
            )
        trained(stores, [of(*range(90)), of(1)], [torch.ones(180), torch.zeros(2)])
        assert stores[0].stats()["a"].rows == 90
        assert (all_at_once(*(partial(store.lookup, of(*range(90))) for store in stores))[1] != 0).all()


def test_a_rank_of_another_version_is_refused_and_none_hangs() -> None:
    """Ranks of version 1 sent the headers of parameter servers in an exchange of their own."""
    with connected(2) as groups:
        store = store_of(groups[0])

        def new() -> str:
            with pytest.raises(ClusterError, match=r"rank 1 sent .* version 1, .* run the same version"):
                store.lookup(of(1))
            return "refused"

        def old() -> str:
            header = RowHeader(RowCall.LOOKUP, 0, 1, 1, number=1).packed()
            given = torch.frombuffer(bytearray(header * 2), dtype=torch.uint8)
            received = groups[1].lookups.all_to_all(given, [HEADER_BYTES] * 2, [HEADER_BYTES] * 2)
            with pytest.raises(RequestError, match="Both sides must run the same version"):
                RowHeader.read(received.numpy()[:HEADER_BYTES].tobytes())
            return "refused"

        assert all_at_once(new, old) == ["refused"] * 2


def test_when_a_rank_is_gone_waiting_ranks_get_the_reason() -> None:
    with connected(3) as groups:
        stores = [store_of(one) for one in groups]

        def waits(store: AllToAllStore) -> str:
            with pytest.raises(UnavailableError, match="rank 2 cannot continue: no disk"):
                store.lookup(of(2))
            return "told"

        told = all_at_once(
            *(partial(waits, one) for one in stores[:2]), lambda: groups[2].fail("no disk") or ""
        )
    assert told == ["told", "told", ""]


def test_what_goes_to_other_ranks_is_counted() -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]
        trained(stores, [of(1), of(0)], [torch.ones(2)] * 2)
        assert groups[0].traffic.sent == groups[1].traffic.received > 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ten_steps_of_adagrad_are_those_of_a_dense_embedding(size: int) -> None:
    """Each rank has a batch of its own; the dense table sees all of them together."""
    rows, dim, batch = 20, 2, 6
    draw = torch.Generator().manual_seed(1)
    embedding = torch.nn.Embedding(rows, dim)
    torch.nn.init.zeros_(embedding.weight)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1, initial_accumulator_value=0.1, eps=0.0)
    with connected(size) as groups:
        stores = [store_of(one) for one in groups]
        everything = of(*range(rows))
        for step in range(10):
            batches = torch.randint(0, rows, (size, batch), generator=draw)
            optimizer.zero_grad()
            (embedding(batches.flatten()) * (step + 1)).sum().backward()
            optimizer.step()
            keys, gradients = [], []
            for ids in batches:
                distinct, counts = torch.unique(ids, return_counts=True)
                keys.append(TableIds(distinct, torch.tensor([len(distinct)])))
                gradients.append((counts * (step + 1.0)).repeat_interleave(dim))
            trained(stores, keys, gradients, step=step)
            found = all_at_once(*(partial(store.lookup, everything) for store in stores))
            for one in found:
                torch.testing.assert_close(one.view(rows, dim), embedding.weight.detach())


def test_a_rank_can_fail_while_another_of_its_threads_waits_for_other_ranks() -> None:
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]

        def looks_up() -> str:
            with pytest.raises(UnavailableError):
                stores[0].lookup(of(1))
            return "told"

        def adds_up() -> str:
            with pytest.raises(UnavailableError, match="rank 0 cannot continue: no disk"):
                groups[1].dense.sum(torch.ones(1))
            groups[1].close()
            return "told"

        def fails() -> str:
            groups[0].fail("no disk")
            return "failed"

        assert all_at_once(looks_up, adds_up, fails) == ["told", "told", "failed"]


def test_an_interpreter_that_was_a_rank_ends_as_it_should() -> None:
    lines = "from store.ranks import connected\nwith connected(2):\n    pass"
    folder = Path(__file__).parent.parent

    ended = subprocess.run(
        [sys.executable, "-c", lines], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr  # that the other rank is gone may be said


def test_a_rank_that_has_closed_keeps_no_connection_even_if_its_error_is_kept() -> None:
    def connections() -> int:
        names = []
        for thread in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # it has just ended
                names.append((thread / "comm").read_text())
        return names.count("gloo_tcp_loop\n")

    before = connections()
    with connected(2) as groups:
        store = store_of(groups[0])
        groups[1].close()
        with pytest.raises(UnavailableError) as kept:
            store.lookup(of(1))
    assert connections() == before, f"{kept.value} still holds them"


@pytest.mark.parametrize("name", device_names())
def test_gradients_of_weights_on_a_device_are_added_up(name: str) -> None:
    where = device_named(name).torch_device
    weights = [[nn.Parameter(torch.zeros(2, device=where)) for _ in "ab"] for _ in range(2)]
    with connected(2) as groups:
        stores = [store_of(one) for one in groups]
        for rank, (store, mine) in enumerate(zip(stores, weights, strict=True)):
            store.attach_dense({"a": mine[0], "b": mine[1]}, torch.optim.SGD(mine, lr=1.0))
            mine[0].grad = torch.tensor([1.0, 2.0], device=where) * (rank + 1)
        all_at_once(*(store.push_dense for store in stores))
    for mine in weights:
        assert [weight.tolist() for weight in mine] == [[-3, -6], [0, 0]]
