"""Ready models by the names and settings of a file."""

from __future__ import annotations

import pytest
import torch

from monolith.data import Records
from monolith.errors import ConfigError
from monolith.feature import FeatureSpec, FloatFeature, HistoryFeature, IdFeature, Label, SequenceFeature
from monolith.model import (
    DLRM,
    FFM,
    HSTU,
    DCNv2,
    DeepFM,
    DeepInterest,
    GRU4Rec,
    MMoE,
    SASRec,
    SequenceRanker,
    TwoTower,
)
from monolith.model.by_name import MODELS, ModelConfig
from monolith.store import LocalStore
from monolith.table import Adagrad, RandomUniform
from monolith.tensors import RaggedTensor

SPEC = FeatureSpec(
    features={"user": IdFeature(), "item": IdFeature(), "price": FloatFeature()},
    labels={"click": Label(), "buy": Label()},
)
WITH_HISTORY = FeatureSpec(
    features={
        "item": IdFeature(),
        "user": IdFeature(),
        "seen": SequenceFeature(length=3, shares="item", times="seen_at"),
        "price": FloatFeature(),
    },
    event_time="time",
)
WITH_STEPS = FeatureSpec(
    features={
        "item": IdFeature(),
        "history": HistoryFeature(of="item", max=3, with_=("time",), column="seen"),
    },
    event_time="time",
)
FILES: dict[str, dict[str, object]] = {
    "deepfm": {"dim": 4, "hidden": [8], "dropout": 0.1},
    "dcnv2": {"dim": 4, "cross_layers": 1, "hidden": [8]},
    "dlrm": {"dim": 4, "bottom": [4], "top": [8]},
    "ffm": {"pairs": [["user", "item", 4]]},
    "mmoe": {"dim": 4, "num_experts": 2, "experts": [8], "hidden": [4]},
    "din": {"dim": 4, "attention": [4], "hidden": [8]},
    "two_tower": {
        "item": ["item", "price"],
        "dim": 4,
        "hidden": [8],
        "out": 4,
        "similarity": "cosine",
        "temperature": 0.2,
        "negatives": "batch",
        "correction": False,
    },
    "sequence_ranker": {"encoder": "sasrec", "dim": 4, "hidden": [8]},
    "sasrec": {"dim": 4, "heads": 2, "negatives": 16, "negatives_from": "batch", "dropout": 0.1},
    "hstu": {"dim": 4, "layers": 1, "similarity": "dot", "steps": "last"},
    "gru4rec": {"dim": 4, "hidden": 8, "history": "history"},
}
CLASSES = {
    "deepfm": DeepFM,
    "dcnv2": DCNv2,
    "dlrm": DLRM,
    "ffm": FFM,
    "mmoe": MMoE,
    "din": DeepInterest,
    "two_tower": TwoTower,
    "sequence_ranker": SequenceRanker,
    "sasrec": SASRec,
    "hstu": HSTU,
    "gru4rec": GRU4Rec,
}
SPECS = {"din": WITH_HISTORY} | dict.fromkeys(("sequence_ranker", "sasrec", "hstu", "gru4rec"), WITH_STEPS)


def records() -> Records:
    def one_each(*values: float, dtype: torch.dtype = torch.int64) -> RaggedTensor:
        return RaggedTensor.from_row_lengths(
            torch.tensor(values, dtype=dtype), torch.ones(2, dtype=torch.int64)
        )

    lengths = torch.tensor([2, 0])
    return Records(
        2,
        {
            "user": one_each(1, 2),
            "item": one_each(3, 4),
            "price": one_each(0.5, 2, dtype=torch.float32),
            "time": one_each(100, 100),
            "seen": RaggedTensor.from_row_lengths(torch.tensor([3, 9]), lengths),
            "seen.time": RaggedTensor.from_row_lengths(torch.tensor([20, 90]), lengths),
            "seen_at": RaggedTensor.from_row_lengths(torch.tensor([20, 90]), lengths),
            **{name: one_each(0, 1, dtype=torch.float32) for name in ("click", "buy", "label")},
        },
    )


def test_every_model_is_tried_here() -> None:
    assert MODELS == CLASSES
    assert FILES.keys() == MODELS.keys()


@pytest.mark.parametrize("kind", FILES)
def test_a_file_makes_the_model_and_goes_back_to_plain_values(kind: str) -> None:
    plain = {"type": kind, **FILES[kind]}
    config = ModelConfig.from_dict(plain)
    assert config.to_dict() == plain
    spec = SPECS.get(kind, SPEC)
    model = config.make(spec, seed=3)
    assert isinstance(model, CLASSES[kind])
    model.embeddings.bind(LocalStore.from_configs)
    logits = model(spec.make(records()))
    for each in logits.values() if isinstance(logits, dict) else [logits]:
        assert tuple(each.shape) == (2,)
    assert model.spec == spec


def test_a_model_of_a_file_is_that_of_its_class() -> None:
    by_file = ModelConfig.from_dict({"type": "deepfm", **FILES["deepfm"]}).make(SPEC, seed=3)
    by_hand = DeepFM(SPEC, dim=4, hidden=(8,), dropout=0.1, seed=3)
    pairs = zip(by_file.parameters(), by_hand.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_optimizers_and_initializers_are_tables() -> None:
    config = ModelConfig.from_dict(
        {
            "type": "deepfm",
            "optimizer": {"type": "Adagrad", "learning_rate": 0.5},
            "initializer": {"type": "RandomUniform", "low": -0.5, "high": 0.5},
        }
    )
    assert config.settings["optimizer"] == Adagrad(learning_rate=0.5)
    assert config.settings["initializer"] == RandomUniform(low=-0.5, high=0.5)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"type": "deepfm", "hiden": [8]}, r"unknown key model\.hiden .*nearest known key is model\.hidden"),
        ({"type": "deepfm", "device": "cuda"}, r"unknown key model\.device"),
        ({"type": "deepfm", "dim": "wide"}, r"model\.dim .*expected int"),
        ({"type": "ffm"}, r"model\.pairs is required"),
        ({"type": "DeepFM"}, "did you mean 'deepfm'"),
        ({"type": "xgboost"}, "there are deepfm, dcnv2"),
        ({"dim": 4}, r"model\.type is required"),
        ({"type": "two-tower"}, "did you mean 'two_tower'"),
        ({"type": "two_tower"}, r"model\.item is required"),
        ({"type": "two_tower", "item": ["item"], "negatives": "none"}, r"model\.negatives.*'batch'"),
        ({"type": "hstu", "negatives_from": "none"}, r"model\.negatives_from.*'sampled'"),
        ({"type": "gru4rec", "negatives_from": 3}, r"model\.negatives_from"),
    ],
)
def test_what_is_wrong_is_said_with_the_nearest_name(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(plain)
