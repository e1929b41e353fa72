"""Dense optimizers: AdaMom, RMSProp and Shampoo, as torch optimizers.

For Adagrad and the others use torch's own, and for Adam `EagerAdam`, which is torch's and starts
sooner; with `RateSchedule` they follow the same schedules.
"""

from __future__ import annotations

from monolith.nn.optimizers.adaptive import Adamom, RMSprop
from monolith.nn.optimizers.dense_optimizer import DenseOptimizer, EagerAdam, EagerOptimizer, Rate, rule_of
from monolith.nn.optimizers.shampoo import Shampoo, eigen_inverse_root

__all__ = [
    "Adamom",
    "DenseOptimizer",
    "EagerAdam",
    "EagerOptimizer",
    "RMSprop",
    "Rate",
    "Shampoo",
    "eigen_inverse_root",
    "rule_of",
]
