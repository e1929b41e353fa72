"""Tables: rows that are looked up by id, trained, admitted and expired.

table = DictTable(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Adagrad()),)))
table.apply_gradients(ids, gradients, step=1)
embeddings = table.lookup(ids)
"""

from monolith.table.compressors import COMPRESSORS, Compressor, FixedR8, Fp16, Fp32, OneBit
from monolith.table.config import Segment, TableConfig
from monolith.table.dict_table import DictTable
from monolith.table.expiry import Expiry
from monolith.table.initializers import (
    INITIALIZERS,
    BatchSoftmaxInit,
    Constant,
    Initializer,
    Ones,
    RandomUniform,
    Zeros,
)
from monolith.table.learning_rates import ConstantRate, LearningRate, PolynomialDecay, warmup
from monolith.table.merging import MergedTable, legacy_names, merge, merged_name
from monolith.table.optimizers import (
    OPTIMIZERS,
    STATE_FIELDS,
    Adadelta,
    Adagrad,
    Adam,
    Amsgrad,
    BatchSoftmax,
    DelayCompensated,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    Optimizer,
    Rmsprop,
    RmspropV2,
    Sgd,
    StateField,
    StochasticRounding,
    from_upstream,
)
from monolith.table.table import Rows, Scan, Table, TableStats, iterate

__all__ = [
    "COMPRESSORS",
    "INITIALIZERS",
    "OPTIMIZERS",
    "STATE_FIELDS",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Amsgrad",
    "BatchSoftmax",
    "BatchSoftmaxInit",
    "Compressor",
    "Constant",
    "ConstantRate",
    "DelayCompensated",
    "DictTable",
    "DynamicWdAdagrad",
    "Expiry",
    "FixedR8",
    "Fp16",
    "Fp32",
    "Ftrl",
    "GroupAdagrad",
    "GroupFtrl",
    "Initializer",
    "LearningRate",
    "MergedTable",
    "Momentum",
    "MovingAverage",
    "OneBit",
    "Ones",
    "Optimizer",
    "PolynomialDecay",
    "RandomUniform",
    "Rmsprop",
    "RmspropV2",
    "Rows",
    "Scan",
    "Segment",
    "Sgd",
    "StateField",
    "StochasticRounding",
    "Table",
    "TableConfig",
    "TableStats",
    "Zeros",
    "from_upstream",
    "iterate",
    "legacy_names",
    "merge",
    "merged_name",
    "warmup",
]
