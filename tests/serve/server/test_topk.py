"""Top-k requests: the best items for users, as a brute-force search finds them, while a trainer goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serve.served_tasks import exported, trained
from serve.server.serving import PATIENCE, GrpcClient, ask_http
from serve.test_client import Awaited
from serve.test_follower import FakeTrainer, until

from monolith.data import MemorySource, Pipeline, Stream
from monolith.errors import ConfigError, RequestError, StaleAnswerError
from monolith.feature import Batch, FeatureSpec, FloatFeature, IdFeature
from monolith.model import TwoTower
from monolith.serve import Client, ClientOptions, Predictor, TopKAnswer
from monolith.serve.item_index import TopK
from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder
from monolith.serve.server.catalog import ServableCatalog
from monolith.sync.channel import MemoryChannel
from monolith.train import Mode, RetrievalTask
from monolith.wire.open_inference import message_types

USERS, ITEMS = 12, 30
PLAIN = FeatureSpec(
    features={"user": IdFeature(kind="string"), "age": FloatFeature(), "item": IdFeature()},
    group="user",
    optional=("label",),
)
RICH = FeatureSpec(
    features={
        "user": IdFeature(kind="string"),
        "item": IdFeature(kind="string", column="sku"),
        "genre": IdFeature(kind="string"),
        "price": FloatFeature(),
    },
    optional=("label",),
)
GENRES = ("drama", "noir", "western")


def likes(rows: int, *, rich: bool) -> dict[str, Any]:
    random = np.random.default_rng(3)
    users, items = random.integers(0, USERS, rows), random.integers(0, ITEMS, rows)
    common = {"user": [f"u{n}" for n in users]}
    if not rich:
        return {**common, "age": random.random(rows).tolist(), "item": items.tolist()}
    return {
        **common,
        "sku": [f"s{n}" for n in items],
        "genre": [GENRES[n % 3] for n in items],
        "price": (items / 2.0).tolist(),
    }


@dataclass(frozen=True)
class Likes(RetrievalTask):
    rich: bool = False

    def dataset(self, mode: Mode) -> Stream[Batch]:  # noqa: ARG002
        source = MemorySource(likes(300, rich=self.rich), batch_size=50)
        return Pipeline(source).to_batches(RICH if self.rich else PLAIN)

    def candidates(self) -> Stream[Batch]:
        raise NotImplementedError

    def model(self) -> TwoTower:
        if self.rich:
            item = ("item", "genre", "price")
            return TwoTower(RICH, item=item, dim=4, hidden=(8,), out=6, similarity="cosine", threads=1)
        return TwoTower(PLAIN, item=("item",), dim=4, hidden=(8,), out=6, temperature=0.5, threads=1)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {}
    for name in ("plain", "rich"):
        folder = tmp_path_factory.mktemp(name)
        task = Likes(rich=name == "rich")
        exported(trained(folder / "run", task), folder / "out", task=task)
        found[name] = folder / "out"
    rows = [f"s{n},{GENRES[n % 3]},{n / 2},{2000 + n},{'yes' if n % 2 else 'no'}" for n in range(ITEMS + 2)]
    (found["rich"].parent / "items.csv").write_text("\n".join(["sku,genre,price,year,sale", *rows]) + "\n")
    return found


@contextmanager
def serving(
    roots: Mapping[str, Path], *names: str, items: Sequence[str] = (), **given: Any
) -> Iterator[InferenceServer]:
    config = ServeConfig(
        http_port=0, grpc_port=0, threads=8, poll=timedelta(seconds=0.02), items=tuple(items)
    )
    folders = [ServedFolder(folder=str(roots[name]), name=name) for name in names]
    with InferenceServer(config, folders, ServableCatalog({"threads": 1}), **given) as server:
        yield server


@pytest.fixture(scope="module")
def served(roots):
    with serving(roots, "plain", "rich", items=[f"rich={roots['rich'].parent}/items.csv"]) as server:
        yield server


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


def ask(server: InferenceServer, model: str, inputs: list[Any], status: int = 200, **parameters: Any) -> Any:
    port = int(str(server.http_url).rpartition(":")[2])
    body = {"inputs": inputs, "parameters": parameters}
    found, answer, _ = ask_http(port, "POST", f"/v2/models/{model}/topk", body)
    assert found == status, answer
    return answer["error"] if status != 200 else listed(answer)


def listed(answer: Mapping[str, Any]) -> list[list[tuple[Any, float]]]:
    """Return the items of each user with their scores."""
    found = {one["name"]: one["data"] for one in answer["outputs"]}
    pairs = list(zip(found["item"], found["score"], strict=True))
    ends = found["item.row_splits"]
    return [pairs[begin:end] for begin, end in pairwise(ends)]


def users(*names: str) -> list[dict[str, Any]]:
    return [tensor("user", "BYTES", list(names)), tensor("age", "FP32", [0.5] * len(names))]


def brute_force(
    root: Path, user: str, items: Sequence[Any], *, rich: bool = False
) -> list[tuple[Any, float]]:
    """Score all items with one user by the model's own graph of scores, the best first."""
    columns: dict[str, Any] = {"user": [user] * len(items)}
    if rich:
        numbers = [int(one[1:]) for one in items]
        columns |= {"sku": list(items), "genre": [GENRES[n % 3] for n in numbers]}
        columns["price"] = [n / 2 for n in numbers]
    else:
        columns |= {"age": [0.5] * len(items), "item": list(items)}
    with Predictor(str(root), show=False) as predictor:
        (scores,) = predictor.predict(columns).outputs.values()
    return sorted(zip(items, scores.tolist(), strict=True), key=lambda one: -one[1])


def assert_same(found: Sequence[tuple[Any, float]], wanted: Sequence[tuple[Any, float]]) -> None:
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], rel=1e-5, abs=1e-6)


def trained_items(*, rich: bool = False) -> list[Any]:
    return sorted(set(likes(300, rich=rich)["sku" if rich else "item"]))


def test_the_item_table_is_the_catalogue_of_a_tower_that_reads_ids(served, roots):
    found = ask(served, "plain", users("u1", "u2"), k=7)
    for user, items in zip(("u1", "u2"), found, strict=True):
        assert_same(items, brute_force(roots["plain"], user, trained_items())[:7])


def test_items_of_a_file_are_found_if_they_were_trained(served, roots):
    (found,) = ask(served, "rich", [tensor("user", "BYTES", ["u1"])], k=100)
    assert_same(found, brute_force(roots["rich"], "u1", trained_items(rich=True), rich=True))


def test_grpc_answers_as_http_does(served):
    message = message_types().ModelInferRequest(model_name="rich")
    message.inputs.add(name="user", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"u3")
    message.parameters["k"].int64_param = 4
    message.parameters["filter"].string_param = json.dumps({"genre": "noir"})
    with GrpcClient(served.grpc_address) as client:
        answer = client.ModelInfer(message)
    scores = np.frombuffer(answer.raw_output_contents[2], np.float32)
    assert [one.name for one in answer.outputs] == ["item", "item.row_splits", "score"]
    (wanted,) = ask(served, "rich", [tensor("user", "BYTES", ["u3"])], k=4, filter={"genre": "noir"})
    assert scores.tolist() == pytest.approx([score for _, score in wanted])
    assert wanted[0][0].encode() in answer.raw_output_contents[0]


@pytest.mark.parametrize(
    ("wanted", "keeps"),
    [
        ({"genre": "noir"}, lambda n: n % 3 == 1),
        ({"genre": ["noir", "western"], "sale": "yes"}, lambda n: n % 3 and n % 2),
        ({"year": {"min": 2005, "max": 2010}}, lambda n: 5 <= n <= 10),
        ({"year": 2007}, lambda n: n == 7),
        ({"genre": "opera"}, lambda _: False),
    ],
)
def test_items_are_filtered_by_attributes_of_the_file(served, roots, wanted, keeps):
    (found,) = ask(served, "rich", [tensor("user", "BYTES", ["u1"])], k=100, filter=wanted)
    every = brute_force(roots["rich"], "u1", trained_items(rich=True), rich=True)
    assert_same(found, [one for one in every if keeps(int(one[0][1:]))])


def test_excluded_items_are_not_returned(served):
    (best,), (other,) = (ask(served, "plain", users(user), k=3) for user in ("u1", "u2"))
    seen = [item for item, _ in best[:2]]
    (found,) = ask(served, "plain", [*users("u1"), tensor("exclude", "INT64", [*seen, 9999])], k=3)
    assert found[0] == best[2]
    splits = tensor("exclude.row_splits", "INT64", [0, 2, 2])
    both = ask(served, "plain", [*users("u1", "u2"), tensor("exclude", "INT64", seen), splits], k=3)
    assert_same(both[0], found)
    assert [item for item, _ in both[1]] == [item for item, _ in other]


@pytest.mark.parametrize(
    ("model", "inputs", "parameters", "says"),
    [
        ("plain", users("u1"), {"k": 0}, "`k` must be"),
        ("plain", users("u1"), {"filter": {"genre": "noir"}}, "no attribute 'genre'"),
        ("rich", [tensor("user", "BYTES", ["u1"])], {"filter": {"color": 1}}, "no attribute 'color'"),
        ("rich", [tensor("user", "BYTES", ["u1"])], {"filter": {"year": {"above": 1}}}, "min and max"),
        ("rich", [tensor("user", "BYTES", ["u1"])], {"filter": {"year": "old"}}, "cannot be compared"),
        ("plain", [*users("u1"), tensor("item", "INT64", [1])], {}, "no column 'item'"),
        ("plain", [*users("u1", "u2"), tensor("exclude", "INT64", [1])], {}, "'exclude' must have"),
    ],
)
def test_what_is_wrong_is_said(served, model, inputs, parameters, says):
    assert says in ask(served, model, inputs, 400, **parameters)


def test_without_a_file_that_it_needs_a_model_answers_all_but_top_k(roots):
    with serving(roots, "rich") as server:
        assert "--items rich=FILE" in ask(server, "rich", [tensor("user", "BYTES", ["u1"])], 400)
    with pytest.raises(ConfigError, match="write NAME=FILE"), serving(roots, "rich", items=["other=x.csv"]):
        pass


def test_a_changed_file_is_read_again(roots, tmp_path):
    path = tmp_path / "items.jsonl"
    line = {"sku": "s1", "genre": "noir", "price": 0.5}
    path.write_text(json.dumps(line) + "\n")
    with serving(roots, "rich", items=[str(path)]) as server:
        inputs = [tensor("user", "BYTES", ["u1"])]
        assert [item for item, _ in ask(server, "rich", inputs)[0]] == ["s1"]
        path.write_text(json.dumps({**line, "sku": "s2"}) + "\n" + json.dumps(line) + "\n")
        until(lambda: {item for item, _ in ask(server, "rich", inputs)[0]} == {"s1", "s2"})


def test_a_sampled_request_is_compared_with_brute_force(served):
    ask(served, "plain", users("u1"), k=5)
    name = 'monolith_serve_index_recall{model="plain"}'
    until(lambda: f"{name} 1.0" in served.inference.render_metrics().decode())


def test_an_index_that_missed_an_update_shows(roots):
    with serving(roots, "plain") as server, server.inference.repository.lease("plain") as held:
        index = server.inference.indexes[held.model]
        user = torch.ones(1, 6)
        assert index.check_recall(user, TopK(5)) == 1.0
        index._vectors.neg_()
        assert index.check_recall(user, TopK(5)) < 0.5


# Clients


@pytest.fixture(params=[Client, Awaited], ids=["threads", "loop"])
def client_of(request):
    return request.param


@pytest.fixture(params=["http", "grpc"])
def client(client_of, request, served):
    with client_of(served.http_url if request.param == "http" else f"grpc://{served.grpc_address}") as made:
        yield made


def pairs(answer: TopKAnswer) -> list[list[tuple[Any, float]]]:
    return [
        list(zip(items, scores.tolist(), strict=True))
        for items, scores in zip(answer.items, answer.scores, strict=True)
    ]


def test_a_client_gets_the_best_items_of_each_user(client, served):
    answer = client.topk("plain", [{"user": "u1", "age": 0.5}, {"user": "u2", "age": 0.5}], 7)
    for found, wanted in zip(pairs(answer), ask(served, "plain", users("u1", "u2"), k=7), strict=True):
        assert_same(found, wanted)
    assert (answer.model, answer.version, answer.step) == ("plain", "6", 6)
    assert answer.staleness is not None


def test_a_client_filters_and_excludes_items(client, served):
    inputs, wanted = [tensor("user", "BYTES", ["u1"])], {"genre": ["noir", "western"], "year": {"min": 2003}}
    (every,) = ask(served, "rich", inputs, k=100, filter=wanted)
    seen = {item for item, _ in every[::2]}
    answer = client.topk("rich", {"user": ["u1"], "shoe": [38]}, 100, filters=wanted, exclude=seen)
    assert_same(*pairs(answer), every[1::2])
    assert answer.ignored == ("shoe",)


def test_a_client_excludes_items_of_each_user(client, served):
    best = ask(served, "plain", users("u1", "u2"), k=3)
    seen = np.array([item for item, _ in best[0][:2]])
    answer = client.topk("plain", {"user": ["u1", "u2"], "age": [0.5, 0.5]}, 1, exclude=[seen, None])
    assert answer.items == [[best[0][2][0]], [best[1][0][0]]]


@pytest.mark.parametrize(
    ("model", "how", "says"),
    [
        ("plain", {"k": 0}, "`k` must be"),
        ("rich", {"filters": {"color": 1}}, "no attribute 'color'"),
        ("rich", {"filters": {"genre": {"noir"}}}, "cannot be sent as JSON"),
        ("rich", {"exclude": "s1"}, "list of items"),
        ("plain", {"exclude": [[1], [2]]}, "'exclude' must have"),
    ],
)
def test_a_client_says_what_is_wrong(client, model, how, says):
    with pytest.raises(RequestError, match=says):
        client.topk(model, [{"user": "u1"}], **how)


def test_items_of_a_server_that_is_too_far_behind_are_an_error_that_has_them(client):
    options = ClientOptions(max_staleness=timedelta(0))
    with pytest.raises(StaleAnswerError) as raised:
        client.topk("plain", [{"user": "u1", "age": 0.5}], 2, options=options)
    assert len(raised.value.answer.items[0]) == 2


def test_a_client_ranks_items_for_one_row_of_the_user(client, roots):
    items = trained_items(rich=True)
    numbers = [int(one[1:]) for one in items]
    columns = {"user": ["u1"], "sku": items, "genre": [GENRES[n % 3] for n in numbers]}
    answer = client.predict("rich", columns | {"price": np.array(numbers) / 2})
    (scores,) = answer.outputs.values()
    found = sorted(zip(items, scores.tolist(), strict=True), key=lambda one: -one[1])
    assert_same(found, brute_force(roots["rich"], "u1", items, rich=True))


# Following


def test_an_item_is_found_when_it_is_trained_and_gone_when_it_is_removed(roots):
    channel = MemoryChannel()
    trainer = FakeTrainer(roots["plain"] / "6", channel)
    with serving(roots, "plain", follow=channel.reader) as server:
        (before,) = ask(server, "plain", users("u1"), k=100)
        # The row of the best item, so that the new one is as good.
        best = torch.tensor([before[0][0]])
        trainer.tables["item"].assign(torch.tensor([777]), trainer.tables["item"].lookup(best))
        trainer.publisher.publish_now()
        until(lambda: 777 in [item for item, _ in ask(server, "plain", users("u1"), k=2)[0]])
        trainer.tables["item"].remove(torch.tensor([777]))
        trainer.tables["item"].remove(best)
        trainer.publisher.publish_now()
        # Removed rows are zeros until the items are listed anew.
        others = [item for item, _ in before[1:]]
        until(lambda: [item for item, _ in ask(server, "plain", users("u1"), k=100)[0]] == others)


def test_scores_follow_rows_and_weights_and_are_never_made_of_two_models(roots):
    channel = MemoryChannel()
    trainer = FakeTrainer(roots["plain"] / "6", channel)
    with serving(roots, "plain", follow=channel.reader) as server, ThreadPoolExecutor(4) as threads:
        trainer.change("item", by=0.5)
        trainer.dense = {name: one * 1.25 + 0.01 for name, one in trainer.dense.items()}
        asked = [threads.submit(ask, server, "plain", users("u1", "u4"), k=5) for _ in range(20)]
        trainer.publisher.publish_now()
        asked += [threads.submit(ask, server, "plain", users("u1", "u4"), k=5) for _ in range(20)]
        until(lambda: server.followers["plain"].standing)
        assert all(len(one.result(PATIENCE)) == 2 for one in asked)
        with server.inference.repository.lease("plain") as held:
            index = server.inference.indexes[held.model]
            columns = {"user": ["u1"] * 30, "age": [0.5] * 30, "item": list(range(30))}

            def is_equal() -> bool:
                assert index.wait_idle(PATIENCE)
                (scores,) = held.model.predict(columns).outputs.values()
                (found,) = ask(server, "plain", users("u1"), k=30)
                known = dict(found)
                return all(abs(known[n] - float(scores[n])) < 1e-4 for n in trained_items())

            until(lambda: is_equal() and server.followers["plain"].target._dense is not None)
