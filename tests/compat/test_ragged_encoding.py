from __future__ import annotations

import pytest
import torch

from monolith.errors import TensorArgumentError
from monolith.tensors import RaggedTensor
from monolith_compat import ParseSteps, contract_ragged, expand_ragged


def test_a_ragged_tensor_is_expanded_to_what_is_asked_for() -> None:
    ragged = RaggedTensor.from_list([[], [1], [2, 3]])
    everything = expand_ragged(ragged, with_nrows=True, with_value_rowids=True)
    assert {name: tensor.tolist() for name, tensor in everything.items()} == {
        "values": [1, 2, 3],
        "row_splits": [0, 0, 1, 3],
        "nrows": 3,
        "value_rowids": [1, 2, 2],
    }
    assert expand_ragged(ragged, with_nrows=False).keys() == {"values", "row_splits"}


def test_contracting_keeps_what_was_precomputed() -> None:
    ragged = RaggedTensor.from_list([[], [1], [2, 3]])
    encoded = expand_ragged(ragged, with_value_rowids=True)
    back = contract_ragged(encoded)
    assert back.to_list() == ragged.to_list()
    assert back.value_rowids is encoded["value_rowids"]
    assert contract_ragged(expand_ragged(ragged)).value_rowids.tolist() == [1, 2, 2]


def test_what_was_not_expanded_cannot_be_contracted() -> None:
    with pytest.raises(TensorArgumentError, match="row_splits"):
        contract_ragged({"values": torch.ones(1)})
    with pytest.raises(TensorArgumentError, match="value_rowids"):
        contract_ragged(
            {"values": torch.ones(1), "row_splits": torch.tensor([0, 1]), "value_rowids": torch.ones(2)}
        )
    with pytest.raises(TensorArgumentError, match="ragged rank 1"):
        expand_ragged(RaggedTensor.from_list([[[1]]]))


def test_steps_run_once_in_the_order_they_were_added() -> None:
    steps = ParseSteps()
    steps.add(lambda features: {**features, "order": [1]})
    steps.add(lambda features: {**features, "order": [*features["order"], 2]})
    assert len(steps) == 2
    assert steps.run({"x": 0}) == {"x": 0, "order": [1, 2]}
    assert steps.run({"x": 0}) == {"x": 0}
