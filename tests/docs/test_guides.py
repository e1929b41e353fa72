"""The code of the README, of the guides and of CONTRIBUTING runs as it stands, block after block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from services import warm

from monolith.checkpoint import read_manifest, saved_spec
from monolith.data import format_of
from monolith.runtime.report import read_run_manifest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
ELSEWHERE = {"kafka.md"}
"""Pages that need a server, with a test of their own."""
GUIDES = [page for page in sorted((ROOT / "docs" / "guides").glob("*.md")) if page.name not in ELSEWHERE]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path) -> None:
    program = "import sys; from docs import test_guides; test_guides.run_page(sys.argv[1])"
    done = warm.run(["-c", program, str(page)], cwd=TESTS)  # the processes it starts are warm, too
    assert done.returncode == 0, done.stderr


def run_page(path: str) -> None:
    page = Path(path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    CLAIMS[page.name](names)


def check_readme(names: dict[str, Any]) -> None:
    stats = names["model"].embeddings.store.stats()
    assert set(stats) == {"user", "item", "context"}  # the history shares the rows of items
    assert names["sparse"].global_step == 100


def check_notebook(names: dict[str, Any]) -> None:
    result = names["result"]
    assert (result.outcome, result.exit_status) == ("finished", 0)
    assert result.report["step"] == 800  # 40,000 records in batches of 50, each once, whatever was killed
    assert names["worker"].role == "worker"
    assert "put" in str(names["error_text"]).lower()
    assert names["resumed"].wait().report["steps"] == 0


def check_table(names: dict[str, Any]) -> None:
    assert tuple(names["embeddings"].shape) == (3, 16)
    assert len(names["item"]) == 0  # all expired


def check_models(names: dict[str, Any]) -> None:
    assert tuple(names["logits"].shape) == (3,)
    assert names["mine"].embeddings.features == ("history", "item")
    assert [tuple(scores.shape) for scores in names["scores"]] == [(512,)] * 10
    assert names["sparse"].global_step == 110  # those of the first loop, and those of the lane


def check_live(names: dict[str, Any]) -> None:
    newest = (names["folder"] / "live" / "checkpoint").read_text().split('"')[1]
    parts = read_manifest(str(names["folder"] / "live" / Path(newest).name)).manifest.parts
    places = {Path(path).name: place for path, place in parts["position"]["value"]["grown"].items()}
    assert set(places) == {"monday.csv", "tuesday.csv"}
    assert all(place == size and not skip for place, size, skip in places.values())


def check_data(names: dict[str, Any]) -> None:
    kept = names["kept"]
    assert 50 < len(kept) < 100
    assert set(kept.columns) >= {"item", "label", "line_id.sample_rate"}


def check_training(names: dict[str, Any]) -> None:
    runs = ("first", "second", "report", "back", "started")
    assert [names[run].step for run in runs] == [120, 200, 300, 300, 340]
    assert "will do" in names["stopped"].stop_reason
    listed = (Path(names["run"]) / "checkpoint").read_text()
    assert listed.count("all_model_checkpoint_paths") == 3  # max_to_keep


def check_distributed(names: dict[str, Any]) -> None:
    model = names["folder"] / "model"
    steps = sorted(int(path.suffixes[0].split("-")[1]) for path in model.glob("model.ckpt-*.manifest"))
    assert 40 <= steps[0] <= 60  # the chief saves at its first step from 40 on; the other may be ahead
    assert steps[-1] == 80
    assert [start["from_step"] for start in read_run_manifest(str(model))] == [60, 0]


def check_evaluation(names: dict[str, Any]) -> None:
    assert "stopped early" in names["report"].stop_reason or names["report"].step == 200
    assert names["lines"][-1]["step"] == names["report"].step


def check_features(names: dict[str, Any]) -> None:
    assert names["report"].step == 16
    assert names["scores"]["click/auc"] > 0.6
    manifest = read_manifest(str(names["folder"] / "run" / "model.ckpt-16")).manifest
    assert saved_spec("run", manifest.parts["features"]["value"]) == names["fitted"]
    assert names["fitted"].features["price_level"].boundaries is not None


def check_first_hour(names: dict[str, Any]) -> None:
    lines = Path(names["to"]).read_text().splitlines()
    assert lines[0] == "prediction.click,label.click,user,movie"
    assert 450 < len(lines) < 750  # a tenth of 6000
    rows = [line.split(",") for line in lines[1:]]
    of = {label: [float(row[0]) for row in rows if row[1] == label] for label in ("0.0", "1.0")}
    means = {label: sum(found) / len(found) for label, found in of.items()}
    assert means["1.0"] > means["0.0"] + 0.1
    assert (names["folder"] / "run" / "features.json").exists()


def check_targets(names: dict[str, Any]) -> None:
    metrics, measured = names["metrics"], names["measured"]
    assert {"seconds/rmse", "seconds/mae", "liked/auc"} <= metrics.keys()
    assert metrics["seconds/mae"] < 40  # a mean of 60 s, from 20 to 100 by user
    assert 0 < measured["within_20_percent"] <= 1


def check_changing(names: dict[str, Any]) -> None:
    runs = names["folder"] / "runs"
    old = read_run_manifest(str(runs / "1"))
    steps = [start["from_step"] for start in read_run_manifest(str(runs / "2"))]
    best = json.loads((runs / "1" / "best_checkpoint").read_text())["step"]
    assert steps[-1] == best  # the newest start is first
    assert steps[0] > best  # it resumed its own
    assert len(old) == 1


def check_retrieval(names: dict[str, Any]) -> None:
    assert names["scores"]["recall@5"] > 0.3  # by chance 0.1
    assert names["candidates"].vectors.shape == (50, 16)
    first, cheap, others = (names[one]["item"] for one in ("first", "cheap", "others"))
    assert len(first) == 3
    assert all(int(item[1:]) % 3 == 1 for item in first)  # u4 likes films
    assert all(int(item[1:]) % 2 and int(item[1:]) < 12 for item in cheap)
    assert not set(first) & set(others)
    (found,), (scores,) = names["found"].items, names["found"].scores
    assert len(found) == 3
    assert all(int(item[1:]) % 2 for item in found)
    (ranked,) = names["ranked"].outputs.values()
    assert ranked.tolist() == pytest.approx(scores.tolist(), rel=1e-5)


def check_contributing(names: dict[str, Any]) -> None:
    assert names["optimizer"].param_groups[0]["step"] == 1
    assert 0 < names["report"].step < 40  # stopped by the hook


def check_tuning(names: dict[str, Any]) -> None:
    assert names["decayed"].tolist() == pytest.approx([0.9**3, 0.9])
    assert names["all_decayed"].tolist() == pytest.approx([0.9**3, 0.9**3])
    rows = {name: one.segments for name, one in names["model"].embeddings.slot_tables.configs.items()}
    assert rows["user"][0].optimizer.learning_rate == 0.2
    assert rows["user"][1].optimizer.weight_decay == 1.0


def check_serving(names: dict[str, Any]) -> None:
    clicks = names["clicks"].tolist()
    assert len(set(clicks)) == 3
    assert all(0 < click < 1 for click in clicks)
    assert names["said"] == "row 0 of 1: features.price: column 'price' is [inf]"
    assert len(set(names["ranked"].tolist())) > 50
    served = names["served_clicks"]
    assert names["client_clicks"].tolist() == pytest.approx(served, abs=1e-6)
    assert names["both"] == pytest.approx([served[0]] * 2, abs=1e-6)
    assert names["shared_clicks"] == pytest.approx(served, abs=1e-6)
    assert names["asked_step"] > 0
    assert names["asked_age"].total_seconds() > 0
    assert served[0] > served[1]  # u0004 likes drama, u0001 does not like westerns
    assert names["served"]["parameters"]["step"] > 0
    assert names["status"] == 0


def check_closed_loop(names: dict[str, Any]) -> None:
    joined = [chunk.records for chunk in format_of(names["joined"]).chunks(names["joined"])]
    labels = [label for records in joined for label in records["label"].flat_values.tolist()]
    assert len(labels) == 120
    pairs = [
        (int(user[1:]), movie)
        for _, rows in names["served"]
        for user, movie in zip(rows["user"][1], rows["movie"][1], strict=True)
    ]
    assert sum(labels) == sum((user + movie) % 3 == 0 for user, movie in pairs)
    newest = Path(names["folder"], "second", "checkpoint").read_text().split('"')[1]
    manifest = read_manifest(str(Path(names["folder"], "second", Path(newest).name))).manifest
    assert manifest.step == 22  # 20 on the raw data, and 2 on what was served
    assert (names["same"], names["skewed"]) == (0, 1)


def check_page(names: dict[str, Any]) -> None:
    sources, curves = names["state"]["sources"], names["state"]["curves"]
    assert [(one["name"], one["up"]) for one in sources] == [("mine", True)]
    assert [(one["chart"], one["points"]) for one in curves] == [("auc", [[1_700_000_000.0, 0.731]])]


def check_publishing(names: dict[str, Any]) -> None:
    (compare,) = names["compare"]
    assert compare.learned.step == names["report"].step == 20
    assert all(trained == followed > 5 for trained, followed in compare.rows.values())


CLAIMS = {
    "notebook.md": check_notebook,
    "changing.md": check_changing,
    "closed-loop.md": check_closed_loop,
    "CONTRIBUTING.md": check_contributing,
    "distributed.md": check_distributed,
    "features.md": check_features,
    "first-hour.md": check_first_hour,
    "data.md": check_data,
    "live.md": check_live,
    "evaluation.md": check_evaluation,
    "page.md": check_page,
    "publishing.md": check_publishing,
    "README.md": check_readme,
    "retrieval.md": check_retrieval,
    "serving.md": check_serving,
    "table.md": check_table,
    "targets.md": check_targets,
    "models.md": check_models,
    "training.md": check_training,
    "tuning.md": check_tuning,
}
