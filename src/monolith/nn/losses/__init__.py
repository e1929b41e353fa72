"""Losses: scalars to minimise, computed so that no logit is too large for them.

In-batch losses compare the rows of a batch, classification heads return a prediction
beside their loss, and ranking losses look at lists.
"""

from monolith.nn.losses.classification import LossAndPred, sigmoid_loss_and_pred, softmax_loss_and_pred
from monolith.nn.losses.lambda_weights import (
    DCGLambdaWeight,
    LambdaWeight,
    PositionListMLEWeight,
    PrecisionLambdaWeight,
    ReciprocalRankLambdaWeight,
    inverse_max_dcg,
)
from monolith.nn.losses.ranking import (
    RANKING_LOSSES,
    REDUCTIONS,
    LossFn,
    approx_ndcg_loss,
    approx_ranks,
    list_mle_loss,
    make_loss_fn,
    mean_squared_loss,
    pairwise_hinge_loss,
    pairwise_logistic_loss,
    pairwise_soft_zero_one_loss,
    sigmoid_cross_entropy_loss,
    softmax_loss,
)
from monolith.nn.losses.retrieval import (
    accidental_hits,
    batch_softmax_loss,
    inbatch_auc_log_likelihood,
    inbatch_auc_loss,
    sampled_softmax_loss,
)
from monolith.nn.losses.targets import Target

__all__ = [
    "RANKING_LOSSES",
    "REDUCTIONS",
    "DCGLambdaWeight",
    "LambdaWeight",
    "LossAndPred",
    "LossFn",
    "PositionListMLEWeight",
    "PrecisionLambdaWeight",
    "ReciprocalRankLambdaWeight",
    "Target",
    "accidental_hits",
    "approx_ndcg_loss",
    "approx_ranks",
    "batch_softmax_loss",
    "inbatch_auc_log_likelihood",
    "inbatch_auc_loss",
    "inverse_max_dcg",
    "list_mle_loss",
    "make_loss_fn",
    "mean_squared_loss",
    "pairwise_hinge_loss",
    "pairwise_logistic_loss",
    "pairwise_soft_zero_one_loss",
    "sampled_softmax_loss",
    "sigmoid_cross_entropy_loss",
    "sigmoid_loss_and_pred",
    "softmax_loss",
    "softmax_loss_and_pred",
]
