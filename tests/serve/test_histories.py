"""Histories in ranking requests: encoded once for all items, and never cached beyond their time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serve.fake_trainer import PATIENCE, STAMPS, FakeTrainer, until
from serve.served_tasks import exported, trained
from serve.server.serving import ask_http
from torch import nn

from monolith.data import MemorySource, Pipeline, Stream
from monolith.errors import StaleAnswerError
from monolith.feature import Batch, FeatureSpec, FloatFeature, HistoryFeature, IdFeature, Label
from monolith.model import SequenceRanker
from monolith.observe.metrics import Metrics
from monolith.serve import Client, ClientOptions, Predictor
from monolith.serve.candidates import CandidateColumns
from monolith.serve.histories import HistoryCache, items_of
from monolith.serve.metrics import HistoryMetrics
from monolith.serve.overlay import FollowedTables
from monolith.serve.rows import UNKNOWN, ClaimCell
from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder
from monolith.serve.server.catalog import ServableCatalog
from monolith.sync.channel import MemoryChannel
from monolith.table import FrozenTable, Rows
from monolith.tensors import RaggedTensor
from monolith.train import Mode, Task
from monolith.wire.open_inference import SPLITS

NOW = 1_700_000_000
MAX = 12
LISTS = ("history", "history.action", "history.time")
USER = ("user", "action", "time", *LISTS)
"""Columns of which a ranking request has one row."""


def spec_of(*, timed: bool) -> FeatureSpec:
    history = HistoryFeature(of="item", max=MAX, with_=("action", "time") if timed else ("action",))
    return FeatureSpec(
        features={
            "user": IdFeature(),
            "item": IdFeature(),
            "action": IdFeature(kind="string"),
            "price": FloatFeature(),
            "history": history,
        },
        labels={"click": Label()},
        event_time="time",
    )


def history_of(length: int, seed: int) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    return {
        "history": random.integers(0, 30, length).tolist(),
        "history.action": [("view", "buy")[one] for one in random.integers(0, 2, length)],
        "history.time": (NOW - 1 - np.sort(random.integers(0, 10**6, length))[::-1]).tolist(),
    }


def columns(rows: int = 96, seed: int = 0) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    found: dict[str, list[Any]] = {
        "user": random.integers(0, 20, rows).tolist(),
        "item": random.integers(0, 30, rows).tolist(),
        "action": [("view", "buy")[one] for one in random.integers(0, 2, rows)],
        "price": random.random(rows).round(2).tolist(),
        "time": (NOW + np.arange(rows)).tolist(),
        "click": random.integers(0, 2, rows).astype(float).tolist(),
    }
    for number in range(rows):
        for name, values in history_of(int(random.integers(0, MAX)), number).items():
            found.setdefault(name, []).append(values)
    return found


@dataclass(frozen=True)
class Ranked(Task):
    """Learns clicks by what users did before."""

    encoder: str = "hstu"
    timed: bool = True

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        given = columns() if self.timed else {n: v for n, v in columns().items() if n != "history.time"}
        return Pipeline(MemorySource(given, batch_size=32)).to_batches(spec_of(timed=self.timed))

    def model(self) -> nn.Module:
        made = SequenceRanker(
            spec_of(timed=self.timed),
            encoder=self.encoder,  # type: ignore[arg-type]
            dim=8,
            heads=2,
            hidden=(8,),
            threads=1,
        )
        for (
            weight
        ) in made.dense.encoder.parameters():  # as if it had trained for long: what a user did counts
            weight.data.mul_(2.5)
        return made


TASKS = {"hstu": Ranked(), "sasrec": Ranked("sasrec", timed=False)}
EXPORTED: dict[str, Path] = {}
"""By the name of the task."""


@pytest.fixture(scope="session", params=TASKS)
def servable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_once(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_once("hstu", tmp_path_factory)


def exported_once(name: str, folders: pytest.TempPathFactory) -> Path:
    if name not in EXPORTED:
        EXPORTED[name] = exported_task(TASKS[name], folders.mktemp(name))
    return EXPORTED[name]


def exported_task(task: Ranked, folder: Path) -> Path:
    exported(trained(folder / "run", task, steps=3), folder / "out", step=3, task=task)
    return folder / "out"


@pytest.fixture
def predictor(servable: Path) -> Iterator[Predictor]:
    with Predictor(str(servable), show=False, threads=1) as predictor:
        yield predictor


def names_of(predictor: Predictor) -> set[str]:
    return {one.name for one in predictor.signature.inputs}


def ranking(predictor: Predictor, items: int, *, length: int = 7, seed: int = 1) -> dict[str, Any]:
    """Return the columns of a request that ranks items."""
    given = columns(max(items, 1), seed)
    user = {name: values[:1] for name, values in given.items() if name in USER}
    user |= {name: [values] for name, values in history_of(length, seed).items()}
    own = {name: given[name][:items] for name in ("item", "price")}
    return {name: values for name, values in {**user, **own}.items() if name in names_of(predictor)}


def full(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the same with a row of the user for each item."""
    items = len(asked["item"])
    return {name: values * items if name in USER else values for name, values in asked.items()}


def together(*asked: dict[str, Any]) -> CandidateColumns:
    """Return several ranking requests as one batch, as a server merges them."""
    joined = {name: [one for some in asked for one in some[name]] for name in asked[0]}
    return CandidateColumns(
        {name: values for name, values in joined.items() if name in USER},
        {name: values for name, values in joined.items() if name not in USER},
        np.array([len(one["item"]) for one in asked], np.int64),
    )


def clicks(predictor: Predictor, asked: Any) -> torch.Tensor:
    return predictor.predict(asked).outputs["click"]


@pytest.mark.parametrize("items", [1, 2, 9])
@pytest.mark.parametrize("length", [0, 1, 7, MAX, MAX + 5])
def test_items_are_ranked_as_in_full_rows(predictor: Predictor, items: int, length: int) -> None:
    asked = ranking(predictor, items, length=length)
    wanted = predictor.predict_batch(predictor.read(full(asked))).outputs["click"]
    torch.testing.assert_close(clicks(predictor, asked), wanted, rtol=1e-5, atol=1e-6)
    assert items == 1 or len(wanted.unique()) > 1


def test_the_history_counts(predictor: Predictor) -> None:
    one, other = (
        clicks(predictor, ranking(predictor, 4) | history) for history in ({}, {"history": [[9] * 7]})
    )
    assert not torch.allclose(one, other, rtol=1e-3)


def test_users_of_one_batch_have_their_own_histories(predictor: Predictor) -> None:
    asked = [
        ranking(predictor, items, length=length, seed=seed)
        for seed, (items, length) in enumerate(((3, 5), (0, 4), (1, 0), (6, MAX), (2, 5)))
    ]
    wanted = torch.cat([clicks(predictor, full(one)) for one in asked if one["item"]])
    for cached in (False, True, True):
        if cached:
            predictor.keep_histories(HistoryCache(1 << 20), "ranked")
        torch.testing.assert_close(clicks(predictor, together(*asked)), wanted, rtol=1e-5, atol=1e-6)


def test_histories_that_differ_by_item_are_ranked_in_full_rows(
    predictor: Predictor, caplog: pytest.LogCaptureFixture
) -> None:
    asked = full(ranking(predictor, 3)) | {"user": [3]}
    wanted = clicks(predictor, asked | {"user": [3] * 3})
    torch.testing.assert_close(clicks(predictor, asked), wanted, rtol=1e-5, atol=1e-6)
    assert "a history is encoded once only if all of its columns" in caplog.text


def test_items_are_counted_by_history() -> None:
    items, places = items_of(np.array([2, 0, 3]))
    assert places.tolist() == [0, 1, 6, 7, 8]
    assert items.flatten()[places].tolist() == [0, 1, 2, 3, 4]


# The cache


def counts(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    found = {}
    for outcome in ("hit", "miss"):
        name = f'monolith_serve_history_cache_lookups_total{{model="ranked",outcome="{outcome}"}} '
        found[outcome] = sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))
    return found


def test_a_history_is_encoded_again_only_if_something_changed(predictor: Predictor) -> None:
    metrics, asked = Metrics(), ranking(predictor, 5)
    cache = HistoryCache(1 << 20, HistoryMetrics(metrics))
    wanted = clicks(predictor, asked)
    assert predictor.keep_histories(cache, "ranked")
    for _ in range(3):
        assert torch.equal(clicks(predictor, asked), wanted)
    assert counts(metrics) == {"hit": 2, "miss": 1}
    other_items = ranking(predictor, 3) | {"item": [1, 2, 3]}
    torch.testing.assert_close(clicks(predictor, other_items), clicks(predictor, full(other_items)))
    assert counts(metrics) == {"hit": 3, "miss": 1}
    longer = asked | {name: [[*asked[name][0], asked[name][0][-1]]] for name in LISTS if name in asked}
    torch.testing.assert_close(clicks(predictor, longer), clicks(predictor, full(longer)))
    assert counts(metrics) == {"hit": 3, "miss": 2}
    assert f"monolith_serve_history_cache_bytes {cache.bytes}" in metrics.render().decode().replace(
        ".0\n", "\n"
    )


def test_other_weights_make_all_entries_useless_at_once(predictor: Predictor) -> None:
    cache, asked = HistoryCache(1 << 20), ranking(predictor, 5)
    predictor.keep_histories(cache, "ranked")
    weights = dict(predictor.histories.weights)  # type: ignore[union-attr]
    before = clicks(predictor, asked)
    predictor.swap_weights({name: one * 1.1 for name, one in weights.items()})
    assert (len(cache), cache.bytes) == (0, 0)
    after = clicks(predictor, asked)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, clicks(predictor, full(asked)), rtol=1e-5, atol=1e-6)
    predictor.swap_weights(weights)
    assert torch.equal(clicks(predictor, asked), before)


# One change at a time: an entry is found only if nothing that it was made of has changed.

HISTORY = [3, 5, 3, 8]  # one item twice
NOT_IN_IT = 20


class Changed:
    """A predictor whose rows and weights are changed one at a time, as deltas change them."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.asked = ranking(predictor, 5, length=len(HISTORY)) | {"history": [HISTORY]}
        self.asked["history.action"] = [["view", "buy", "view", "view"]]
        self.metrics = Metrics()
        self._rows = FollowedTables()
        predictor.rows.follow(
            lambda files, threads: (self._rows.attach(files, threads=threads), ClaimCell(UNKNOWN))
        )
        assert predictor.keep_histories(HistoryCache(1 << 20, HistoryMetrics(self.metrics)), "ranked")
        clicks(predictor, self.asked)
        assert self.misses() == 0

    def misses(self) -> int:
        """Ask again: return how many histories had to be encoded, and check the answer."""
        before = counts(self.metrics)["miss"]
        found = clicks(self.predictor, self.asked)
        # A row of the user for each item is answered by the whole graph, which no cache is in front of.
        torch.testing.assert_close(found, clicks(self.predictor, full(self.asked)), rtol=1e-5, atol=1e-6)
        return int(counts(self.metrics)["miss"] - before)

    def ids(self, feature: str) -> list[int]:
        """Return the IDs of a feature that the request has, each once."""
        found = self.predictor.read(self.asked).ids[feature]
        flat = found.flat_values if isinstance(found, RaggedTensor) else found
        return sorted(set(flat.tolist()))

    def change_row(self, table: str, number: int, place: int) -> None:
        file = FrozenTable(f"{self.predictor.folder}/{self.predictor.servable.tables[table].file}")
        every, values = file.core.scan(0, (1 << 64) - 1)
        row = torch.from_numpy(values.reshape(len(every), -1)[every.tolist().index(number)]).clone()
        row[place] += 0.01
        ids = torch.tensor([number])
        self._rows.apply({table: Rows(ids, torch.zeros_like(ids), row[None], torch.empty(1, 0))}, {})

    def remove_row(self, table: str, number: int) -> None:
        self._rows.apply({}, {table: torch.tensor([number])})


@pytest.fixture
def changed(predictor: Predictor) -> Changed:
    return Changed(predictor)


def test_one_number_of_one_row_of_a_history_makes_a_new_entry(changed: Changed) -> None:
    for table, feature in (("item", "history"), ("action", "history.action")):
        for number in changed.ids(feature):
            for place in (0, 7):
                changed.change_row(table, number, place)
                assert (changed.misses(), changed.misses()) == (1, 0)
            changed.remove_row(table, number)
            assert (changed.misses(), changed.misses()) == (1, 0)


def test_a_row_that_is_in_no_step_leaves_the_entry_where_it_is(changed: Changed) -> None:
    items = set(changed.ids("item")) - set(changed.ids("history"))
    for number in items:
        changed.change_row("item", number, 0)
    changed.change_row("user", *changed.ids("user"), 0)
    before = clicks(changed.predictor, changed.asked)
    assert changed.misses() == 0
    changed.asked["item"] = [NOT_IN_IT] * len(changed.asked["item"])
    assert changed.misses() == 0
    assert not torch.equal(clicks(changed.predictor, changed.asked), before)


def test_one_number_of_one_weight_makes_a_new_entry(changed: Changed) -> None:
    graphs = changed.predictor.histories
    assert graphs is not None
    for name, weight in graphs.weights.items():
        other = weight.clone()
        other.view(-1)[-1] += 0.01
        changed.predictor.swap_weights({**graphs.weights, name: other})
        assert (changed.misses(), changed.misses()) == (1, 0), name


def test_an_entry_of_a_request_that_began_before_other_weights_is_not_found_after_them(
    changed: Changed,
) -> None:
    graphs = changed.predictor.histories
    assert graphs is not None
    before = graphs.now
    changed.predictor.swap_weights({name: one * 1.1 for name, one in graphs.weights.items()})
    graphs._now, now = before, graphs.now  # what the request has read, and encodes with only now
    clicks(changed.predictor, changed.asked)
    graphs._now = now
    assert (changed.misses(), changed.misses()) == (1, 0)


def test_one_step_or_time_of_a_history_makes_a_new_entry(changed: Changed) -> None:
    lists = {name: changed.asked[name][0] for name in LISTS if name in changed.asked}
    mutants: list[dict[str, list[Any]]] = []
    for name, values in lists.items():
        for place, value in enumerate(values):
            others = {"history": NOT_IN_IT, "history.action": "buy" if value == "view" else "view"}
            other = others.get(name) or value + 1
            mutants.append({name: [*values[:place], other, *values[place + 1 :]]})
        if name != "history.time":
            mutants.append({name: [values[0], *values[2:0:-1], values[3]]})  # two steps change places
    mutants.append({name: one[1:] for name, one in lists.items()})
    mutants.append({name: one[:-1] for name, one in lists.items()})
    whole = changed.asked
    for mutant in mutants:
        changed.asked = whole | {name: [values] for name, values in mutant.items()}
        assert (changed.misses(), changed.misses()) == (1, 0), mutant
    changed.asked = whole
    assert changed.misses() == 0


def test_the_time_of_the_request_is_no_part_of_an_entry_and_counts_all_the_same(timed: Path) -> None:
    with Predictor(str(timed), show=False, threads=1) as predictor:
        changed = Changed(predictor)
        before = clicks(predictor, changed.asked)
        changed.asked = changed.asked | {"time": [NOW + 10**6]}
        assert changed.misses() == 0
        assert not torch.equal(clicks(predictor, changed.asked), before)


def test_a_closed_version_leaves_nothing_in_the_cache(servable: Path) -> None:
    cache = HistoryCache(1 << 20)
    with Predictor(str(servable), show=False) as one, Predictor(str(servable), show=False) as other:
        for predictor in (one, other):
            predictor.keep_histories(cache, "ranked")
            clicks(predictor, ranking(predictor, 2))
        assert len(cache) == 2
        one.close()
        assert len(cache) == 1
    assert (len(cache), cache.bytes) == (0, 0)


def test_no_answer_mixes_weights_or_has_old_ones_while_they_change(predictor: Predictor) -> None:
    """Each answer must be that of weights which were current at some time while it was computed."""
    base = dict(predictor.histories.weights)  # type: ignore[union-attr]
    sets = [{name: one * (1 + 0.2 * number) for name, one in base.items()} for number in range(4)]
    users = [ranking(predictor, 4, length=5 + seed, seed=seed) for seed in range(3)]
    wanted = []
    for weights in sets:
        predictor.swap_weights(weights)
        wanted.append([clicks(predictor, asked) for asked in users])
    predictor.swap_weights(sets[0])
    cache = HistoryCache(8 << 10)  # so small that entries fall out all the time
    predictor.keep_histories(cache, "ranked")
    begun, done, wrong, stop = [0], [0], [], threading.Event()

    def ask(user: int) -> None:
        while not stop.is_set():
            first = done[0]
            found = clicks(predictor, users[user])
            last = begun[0]
            possible = [wanted[number % 4][user] for number in range(first, last + 1)]
            if not any(torch.allclose(found, one, rtol=1e-5, atol=1e-6) for one in possible):
                wrong.append((first, last, found))

    askers = [threading.Thread(target=ask, args=(number % 3,)) for number in range(4)]
    for one in askers:
        one.start()
    for number in range(1, 60):
        begun[0] = number
        predictor.swap_weights(sets[number % 4])
        done[0] = number
    stop.set()
    for one in askers:
        one.join()
    assert not wrong
    assert cache.bytes <= 8 << 10


def key(number: int, owner: object = "a") -> tuple[object, int, bytes]:
    return owner, 0, bytes([number])


def test_the_last_used_entries_stay() -> None:
    entry = torch.zeros(4, 8)
    cache = HistoryCache(3 * (entry.nbytes + 512))
    cache.put({key(1): entry, key(2): entry, key(3): entry})
    cache.find("m", [key(1)])
    cache.put({key(4): entry})
    assert [one is not None for one in cache.find("m", [key(1), key(2), key(3), key(4)])] == [
        True,
        False,
        True,
        True,
    ]
    cache.put({key(5): torch.zeros(1000, 8)})  # larger than all
    assert len(cache) == 3
    assert cache.bytes <= 3 * (entry.nbytes + 512)


def test_entries_of_another_version_stay() -> None:
    cache, owner = HistoryCache(1 << 20), object()
    cache.put({key(1, owner): torch.zeros(2, 2), key(1): torch.zeros(2, 2)})
    cache.drop(owner)
    assert [one is None for one in cache.find("m", [key(1, owner), key(1)])] == [True, False]


# Served


def tensors(predictor: Predictor, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of a request in the form of JSON."""
    found = []
    for one in predictor.signature.inputs:
        values = asked[one.name]
        if one.name in LISTS:
            splits = np.cumsum([0, *map(len, values)]).tolist()
            name = one.name + SPLITS
            found.append({"name": name, "datatype": "INT64", "shape": [len(splits)], "data": splits})
            values = [value for row in values for value in row]
        datatype = "BYTES" if values and isinstance(values[0], str) else one.datatype
        found.append({"name": one.name, "datatype": datatype, "shape": [len(values)], "data": values})
    return found


def as_json(server: InferenceServer, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    assert server.http_url is not None
    port = int(server.http_url.rpartition(":")[2])
    status, answer, _ = ask_http(port, "POST", "/v2/models/ranked/infer", {"inputs": inputs})
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def clicks_of(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(answer["outputs"][0]["data"])


@contextmanager
def serving(root: Path, **more: Any) -> Iterator[InferenceServer]:
    config = ServeConfig(
        http_port=0,
        grpc_port=0 if more.pop("grpc", False) else None,
        threads=8,
        history_cache_bytes=more.pop("cache", 1 << 20),
    )
    folders = [ServedFolder(folder=str(root), name="ranked")]
    with InferenceServer(config, folders, ServableCatalog({"threads": 1}), **more) as server:
        yield server


def test_each_transport_answers_with_the_history_encoded_once_and_then_from_the_cache(timed: Path) -> None:
    metrics = Metrics()
    with (
        Predictor(str(timed), show=False, threads=1) as predictor,
        serving(timed, metrics=metrics, grpc=True) as server,
    ):
        asked = ranking(predictor, 6)
        wanted = clicks(predictor, full(asked))
        options = ClientOptions(max_staleness=timedelta(days=1))
        for _ in range(2):
            found = clicks_of(as_json(server, tensors(predictor, asked)))
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            nested = [
                {**one, "shape": [1], "data": asked[one["name"]]} if one["name"] in LISTS else one
                for one in tensors(predictor, asked)
                if not one["name"].endswith(SPLITS)
            ]
            torch.testing.assert_close(clicks_of(as_json(server, nested)), wanted, rtol=1e-5, atol=1e-6)
            for url in (server.http_url, f"grpc://{server.grpc_address}"):
                assert url is not None
                with Client(url, options=options) as client:
                    answer = client.predict("ranked", asked)
                assert answer.staleness is not None
                torch.testing.assert_close(
                    torch.from_numpy(answer.outputs["click"].copy()), wanted, rtol=1e-5, atol=1e-6
                )
        assert counts(metrics) == {"hit": 7, "miss": 1}
        with Client(str(server.http_url), options=ClientOptions(max_staleness=timedelta(0))) as client:
            with pytest.raises(StaleAnswerError) as stale:
                client.predict("ranked", asked)
            old = torch.from_numpy(stale.value.answer.outputs["click"].copy())
        torch.testing.assert_close(old, wanted, rtol=1e-5, atol=1e-6)


def test_concurrent_users_get_their_own_answers(timed: Path) -> None:
    with Predictor(str(timed), show=False, threads=1) as predictor, serving(timed, cache=3000) as server:
        asked = [ranking(predictor, 1 + seed % 4, length=seed, seed=seed) for seed in range(8)]
        wanted = [clicks(predictor, full(one)) for one in asked]
        bodies = [tensors(predictor, one) for one in asked]

        def is_right(number: int) -> bool:
            found = clicks_of(as_json(server, bodies[number % 8]))
            return torch.allclose(found, wanted[number % 8], rtol=1e-5, atol=1e-6)

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(is_right, range(80), timeout=PATIENCE))


def settled(said: dict[str, Any]) -> bool:
    """Whether all rows are of the step that an answer names: a publisher allows for one step more."""
    return "newest_step" in said and said["newest_step"] == said["step"] + 1


def reached(said: dict[str, Any], step: int) -> bool:
    """Whether a step is served; of the first one, a snapshot, nothing is said of the newest."""
    return said.get("step") == step and (step == 10 or settled(said))


def test_an_answer_is_of_the_rows_that_it_names_while_a_trainer_publishes(timed: Path) -> None:
    """A server without a cache, which follows the same trainer, says what each step answers."""
    channel, metrics = MemoryChannel(), Metrics()
    trainer = FakeTrainer(timed / "3", channel)
    stop = threading.Event()
    seen: list[tuple[int, torch.Tensor]] = []
    with (
        Predictor(str(timed), show=False, threads=1) as predictor,
        serving(timed, metrics=metrics, follow=channel.reader) as server,
        serving(timed, cache=0, follow=channel.reader) as plain,
    ):
        body = tensors(predictor, ranking(predictor, 4))

        def ask() -> None:
            while not stop.is_set():
                answer = as_json(server, body)
                said = answer["parameters"]
                if settled(said):
                    seen.append((said["step"], clicks_of(answer)))

        askers = [threading.Thread(target=ask) for _ in range(3)]
        wanted = {}
        for thread in askers:
            thread.start()
        try:
            for step in range(10, 22, 2):
                trainer.learned = replace(STAMPS, step=step, newest_step=step)
                trainer.change("item", by=0.1)
                trainer.publisher.publish_now()
                for one in (plain, server):
                    until(lambda one=one, step=step: reached(as_json(one, body)["parameters"], step))  # type: ignore[misc]
                wanted[step] = clicks_of(as_json(plain, body))
        finally:
            stop.set()
            for thread in askers:
                thread.join()
        before = clicks_of(as_json(server, body))
        trainer.dense = {name: one * 1.1 for name, one in trainer.dense.items()}
        trainer.publisher.publish_now()
        until(lambda: not torch.equal(clicks_of(as_json(server, body)), before))
        until(lambda: not torch.equal(clicks_of(as_json(plain, body)), before))
        torch.testing.assert_close(
            clicks_of(as_json(server, body)), clicks_of(as_json(plain, body)), rtol=1e-5, atol=1e-6
        )
    trainer.publisher.close()
    assert len({step for step, _ in seen}) > 1
    for step, found in seen:
        torch.testing.assert_close(found, wanted[step], rtol=1e-5, atol=1e-6)
    assert counts(metrics)["hit"] > 0
    assert counts(metrics)["miss"] > 1


def test_each_update_that_a_server_follows_is_in_its_next_answer(timed: Path) -> None:
    """A server without a cache, which follows the same trainer, answers the same after each of them."""
    channel, metrics, random = MemoryChannel(), Metrics(), np.random.default_rng(3)
    trainer = FakeTrainer(timed / "3", channel)
    with (
        Predictor(str(timed), show=False, threads=1) as predictor,
        serving(timed, metrics=metrics, follow=channel.reader) as server,
        serving(timed, cache=0, follow=channel.reader) as plain,
    ):
        asked = ranking(predictor, 5, length=len(HISTORY)) | {"history": [HISTORY]}
        batch = predictor.read(asked).ids
        rows = {"item": batch["history"], "action": batch["history.action"], "user": batch["user"]}
        body = tensors(predictor, asked)

        def answers() -> list[torch.Tensor]:
            return [clicks_of(as_json(one, body)) for one in (server, server, plain)]

        def publish(step: int) -> None:
            trainer.learned = replace(STAMPS, step=step, newest_step=step)
            trainer.publisher.publish_now()
            for one in (server, plain):
                until(lambda one=one: reached(as_json(one, body)["parameters"], step))  # type: ignore[misc]

        publish(10)
        answers()
        for number, kind in enumerate(["item", "weight", "action", "removed", "user", "item", "weight"]):
            if kind == "weight":
                name = sorted(trainer.dense)[int(random.integers(len(trainer.dense)))]
                trainer.dense = {**trainer.dense, name: trainer.dense[name] * 1.2 + 0.1}
            elif kind == "removed":
                trainer.tables["item"].remove(rows["item"].flat_values[number % 4, None])
            else:
                ids = rows[kind].flat_values
                one = ids[int(random.integers(len(ids)))][None]
                trainer.tables[kind].assign(one, torch.from_numpy(random.normal(0, 0.3, (1, 8))).float())
            publish(12 + 2 * number)
            found = answers()
            for one in found:
                torch.testing.assert_close(one, found[-1], rtol=1e-5, atol=1e-6)
    trainer.publisher.close()
    assert counts(metrics)["hit"] > 3


def test_a_model_without_histories_says_that_the_cache_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported(trained(tmp_path / "run"), tmp_path / "out")
    with caplog.at_level("INFO"), serving(tmp_path / "out"):
        pass
    assert "model 'ranked' has no history that is encoded once for many items" in caplog.text
