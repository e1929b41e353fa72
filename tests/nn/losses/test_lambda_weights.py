from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from monolith.errors import LayerArgumentError
from monolith.nn.losses import (
    DCGLambdaWeight,
    LambdaWeight,
    PositionListMLEWeight,
    PrecisionLambdaWeight,
    ReciprocalRankLambdaWeight,
    inverse_max_dcg,
)

LABELS = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
RANKS = torch.tensor([[3.0, 1.0, 2.0, 4.0]])


def discount(rank: float) -> float:
    return 1 / math.log(1 + rank)


def pair_table(weights: Tensor) -> dict[tuple[int, int], float]:
    n = weights.shape[1]
    assert torch.equal(weights, weights.transpose(1, 2))
    return {(i, j): weights[0, i, j].item() for i in range(n) for j in range(i + 1, n)}


def test_the_greatest_dcg_is_that_of_the_best_order() -> None:
    best = 3 * discount(1) + 1 * discount(2)
    assert inverse_max_dcg(LABELS).item() == pytest.approx(1 / best)
    assert inverse_max_dcg(LABELS, topn=1).item() == pytest.approx(1 / (3 * discount(1)))
    assert inverse_max_dcg(torch.tensor([[0.0, -1.0]])).item() == 0.0


@pytest.mark.parametrize("smooth", [0.0, 0.3, 1.0])
def test_dcg_weighs_a_pair_by_what_its_swap_changes(smooth: float) -> None:
    best = 3 * discount(1) + 1 * discount(2)
    found = pair_table(DCGLambdaWeight(smooth_fraction=smooth).pair_weights(LABELS, RANKS))
    for (i, j), weight in found.items():
        if j == 3:  # padding
            assert weight == 0.0
            continue
        gain = abs(2 ** LABELS[0, i].item() - 2 ** LABELS[0, j].item()) / best
        a, b = RANKS[0, i].item(), RANKS[0, j].item()
        relative = abs(discount(abs(a - b)) - discount(abs(a - b) + 1))
        absolute = abs(discount(a) - discount(b))
        assert weight == pytest.approx(gain * ((1 - smooth) * relative + smooth * absolute), rel=1e-5)


def test_dcg_may_go_without_normalisation() -> None:
    weighed = DCGLambdaWeight(normalized=False).pair_weights(LABELS, RANKS)
    ratio = DCGLambdaWeight().pair_weights(LABELS, RANKS)
    torch.testing.assert_close(weighed * inverse_max_dcg(LABELS).item(), ratio)


def test_dcg_weighs_items_by_gain_and_place() -> None:
    found = DCGLambdaWeight(normalized=False).item_weights(LABELS, RANKS)[0].tolist()
    assert found == pytest.approx([3 * discount(3), 0.0, 1 * discount(2), 0.0])


def test_below_topn_a_pair_weighs_nothing() -> None:
    for weight in (DCGLambdaWeight(topn=1), ReciprocalRankLambdaWeight(topn=1)):
        found = pair_table(weight.pair_weights(LABELS, RANKS))
        assert found[0, 2] == 0.0  # ranks 3 and 2
        assert found[0, 1] > 0.0  # ranks 3 and 1


def test_reciprocal_rank_weighs_relevant_against_irrelevant() -> None:
    found = pair_table(ReciprocalRankLambdaWeight(smooth_fraction=1.0).pair_weights(LABELS, RANKS))
    assert found[0, 1] == pytest.approx(1 - 1 / 3)
    assert found[1, 2] == pytest.approx(1 - 1 / 2)
    assert found[0, 2] == 0.0  # both relevant
    assert found[0, 3] == 0.0  # padding
    near = pair_table(ReciprocalRankLambdaWeight().pair_weights(LABELS, RANKS))
    assert near[0, 1] == pytest.approx(1 / 2 - 1 / 3)


def test_precision_weighs_pairs_across_the_border() -> None:
    found = pair_table(PrecisionLambdaWeight(2).pair_weights(LABELS, RANKS))
    assert found[0, 1] == 1.0  # relevant outside, irrelevant inside
    assert found[1, 2] == 0.0  # both inside
    assert found[0, 2] == 0.0  # both relevant
    assert found[1, 3] == 0.0  # padding


def test_the_head_of_a_list_matters_most() -> None:
    found = PositionListMLEWeight().item_weights(LABELS, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert found.tolist() == [[7.0, 3.0, 1.0, 0.0]]


def test_a_kind_refuses_what_it_has_no_weights_for() -> None:
    with pytest.raises(LayerArgumentError, match="PositionListMLEWeight has no weights for pairs"):
        PositionListMLEWeight().pair_weights(LABELS, RANKS)
    with pytest.raises(LayerArgumentError, match="PrecisionLambdaWeight has no weights for items"):
        PrecisionLambdaWeight(1).item_weights(LABELS, RANKS)
    assert issubclass(DCGLambdaWeight, LambdaWeight)


def test_lambda_weights_check_their_arguments() -> None:
    with pytest.raises(LayerArgumentError, match="topn"):
        PrecisionLambdaWeight(0)
    with pytest.raises(LayerArgumentError, match="smooth_fraction"):
        DCGLambdaWeight(smooth_fraction=1.5)
    with pytest.raises(LayerArgumentError, match="smooth_fraction"):
        ReciprocalRankLambdaWeight(smooth_fraction=-0.5)
