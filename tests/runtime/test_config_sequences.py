"""Models of sequences in a file: trained, measured, exported and served without Python."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from monolith import Predictor
from monolith.cli.main import main
from monolith.errors import StaleAnswerError
from monolith.serve import Client, ClientOptions
from monolith.serve.server import InferenceServer, ServeConfig, ServedFolder
from monolith.serve.server.catalog import ServableCatalog

ITEMS = 12
CONFIG = """
[data]
train = "{folder}/train.jsonl"
evaluate = "{folder}/held.jsonl"

[features]
item = {{ kind = "int" }}
action = {{ kind = "string" }}
history = {{ kind = "sequence", of = "item", max = 6, with = ["action", "time"] }}

{labels}

[examples]
event_time = "time"

[model]
type = "{model}"
dim = 16
layers = 1
optimizer = {{ type = "Adam", learning_rate = 0.02 }}

{candidates}

[task]
batch_size = 64
dense_rate = 0.01

[train]
model_dir = "{folder}/run"
epochs = 20
summary_every_steps = "none"

[export]
when_saving = true
"""


def write_project(folder: Path, model: str) -> Path:
    """Write users who step from each item to the third after it, with a label for what is to be ranked."""
    rng = random.Random(5)
    for part, records in (("train", 400), ("held", 60)):
        lines = []
        for _ in range(records):
            first, length = rng.randrange(ITEMS), rng.randrange(1, 9)
            steps = [(first + 3 * n) % ITEMS for n in range(length + 1)]
            times = [1_700_000_000 + 60 * n for n in range(length + 1)]
            lines.append(
                {
                    "item": steps[-1],
                    "time": times[-1],
                    "action": "click",
                    "click": int(steps[-2] < ITEMS // 2),
                    "history": steps[:-1],
                    "history.action": [rng.choice(["view", "click"]) for _ in steps[:-1]],
                    "history.time": times[:-1],
                }
            )
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "items.csv").write_text("item\n" + "".join(f"{n}\n" for n in range(ITEMS)))
    retrieves = model != "sequence_ranker"
    config = folder / "steps.toml"
    candidates = f'[candidates]\npath = "{folder}/items.csv"\nks = [1]' if retrieves else ""
    labels = "" if retrieves else "[labels.click]"
    config.write_text(CONFIG.format(folder=folder, model=model, candidates=candidates, labels=labels))
    return config


def request_of(*histories: list[int], item: list[int] | None = None) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "history": list(histories),
        "history.action": [["view"] * len(one) for one in histories],
        "history.time": [[1_700_000_000 + 60 * n for n in range(len(one))] for one in histories],
        "time": [1_700_000_000 + 60 * len(one) for one in histories],
    }
    return columns if item is None else {**columns, "item": item}


@pytest.fixture(scope="module", params=["hstu", "sasrec"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    config = write_project(folder, request.param)
    assert main(["train", "--config", str(config), "--quiet"]) == 0
    return folder


def test_a_file_trains_and_measures_a_model_of_sequences(project: Path, capsys: Any) -> None:
    assert main(["evaluate", "--config", str(project / "steps.toml"), "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told)["metrics"]["hit_rate@1"] > 0.9


def test_served_scores_are_those_of_the_model(project: Path) -> None:
    to = project / "predictions.jsonl"
    words = ["--config", str(project / "steps.toml"), "--checkpoint", "latest", "--quiet"]
    assert main(["predict", *words, "--to", str(to)]) == 0
    wanted = torch.tensor([json.loads(line)["prediction"] for line in to.read_text().splitlines()])
    held = [json.loads(line) for line in (project / "held.jsonl").read_text().splitlines()]
    columns = {name: [one[name] for one in held] for name in held[0] if name not in ("action", "click")}
    with Predictor(str(project / "run" / "exported_models")) as predictor:
        for rows in (slice(0, len(held)), slice(0, 1), slice(1, 8)):
            some = {name: one[rows] for name, one in columns.items()}
            found = predictor.predict(some).outputs["prediction"]
            assert_close(found, wanted[rows], rtol=1e-5, atol=1e-5)


def test_a_server_finds_the_next_item_of_a_history(project: Path) -> None:
    config = ServeConfig(http_port=0, grpc_port=0, threads=4, poll=timedelta(seconds=0.05))
    folders = [ServedFolder(folder=str(project / "run" / "exported_models"), name="steps")]
    with (
        InferenceServer(config, folders, ServableCatalog({"threads": 1})) as server,
        Client(str(server.http_url)) as client,
    ):
        asked = request_of([1, 4, 7], [2, 5], [0])
        for options in (None, ClientOptions(max_staleness=timedelta(days=1))):
            answer = client.topk("steps", asked, 1, options=options)
            assert [one for (one,) in answer.items] == [10, 8, 3]
        with pytest.raises(StaleAnswerError) as stale:
            client.topk("steps", asked, 1, options=ClientOptions(max_staleness=timedelta(0)))
        assert [one for (one,) in stale.value.answer.items] == [10, 8, 3]
        for histories in ([[1, 4, 7], [1, 4, 7]], [[1, 4, 7]]):  # one for all items, too
            scores = client.predict("steps", request_of(*histories, item=[10, 9])).outputs["prediction"]
            assert scores[0] > scores[1]


def test_a_file_trains_a_ranker_of_histories(tmp_path: Path, capsys: Any) -> None:
    config = write_project(tmp_path, "sequence_ranker")
    assert main(["train", "--config", str(config), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["click/auc"] > 0.95
    with Predictor(str(tmp_path / "run" / "exported_models")) as predictor:
        found = predictor.predict(request_of([9, 0, 3], [9, 6], [], item=[6, 9, 1])).outputs["click"]
        assert found[0] > 0.5 > found[1]


@pytest.mark.parametrize("model", ["hstu", "sasrec", "gru4rec"])
def test_events_that_arrive_train_a_model_of_the_histories_before_them(
    tmp_path: Path, capsys: Any, model: str
) -> None:
    rng = random.Random(7)
    last, lines = dict.fromkeys(range(20), 0), []
    for number in range(1600):
        user = rng.randrange(20)
        last[user] = (last[user] + 3) % ITEMS if rng.random() < 0.95 else rng.randrange(ITEMS)
        time = 1_700_000_000 + 60 * number
        lines.append(f"user {user},item {last[user]},{rng.choice(['view', 'click'])},{time}")
    for name, part in (("events-1", lines[:800]), ("events-2", lines[800:1500]), ("held", lines[1500:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item,action,time", *part]) + "\n")
    (tmp_path / "items.csv").write_text("item\n" + "".join(f"item {n}\n" for n in range(ITEMS)))
    config = tmp_path / "online.toml"
    text = CONFIG.format(
        folder=tmp_path,
        model=model,
        labels="",
        candidates=f'[candidates]\npath = "{tmp_path}/items.csv"\nks = [1]',
    )
    for old, new in (
        (f'train = "{tmp_path}/train.jsonl"', f'watch = "{tmp_path}/events-*.csv"\nstop_after = "0s"'),
        ("held.jsonl", "held.csv"),
        ('"int" }', '"string" }\nuser = { kind = "string" }'),
        ('"time"] }', '"time"], by = "user" }'),
        ("epochs = 20\n", ""),
        ("batch_size = 64", "batch_size = 20"),
        ("[export]\nwhen_saving = true\n", ""),
    ):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    assert main(["train", "--config", str(config), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 1500
    assert main(["evaluate", "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["hit_rate@1"] > 0.6  # by chance 0.08
    assert f"histories beginning with the events of {tmp_path}/events-*.csv;" in found["protocol"]
