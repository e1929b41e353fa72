"""Tables: rows that are looked up by id, trained, admitted and expired.

table = DictTable(TableConfig(name="item", segments=(Segment(dim=8, optimizer=Adagrad()),)))
table.apply_gradients(ids, gradients, step=1)
embeddings = table.lookup(ids)
"""

from monolith.table.admission import (
    FILTERS,
    AdmissionFilter,
    NoFilter,
    ProbabilisticFilter,
    SlidingFilter,
    SlotThresholds,
    intercept_gradient,
    make_filter,
)
from monolith.table.admission_config import AdmissionConfig
from monolith.table.compressors import COMPRESSORS, Compressor, FixedR8, Fp16, Fp32, OneBit
from monolith.table.config import Segment, TableConfig
from monolith.table.cuda import CudaTable, SpillingTable, device_shares
from monolith.table.cuts import DumpableTable, TableCut
from monolith.table.dict_table import DictTable
from monolith.table.digests import bucket_of, digest_rows, in_share, iterate_buckets
from monolith.table.dumps import (
    ChangesReport,
    DumpManifest,
    DumpReport,
    LoadReport,
    dump,
    dump_changes,
    dump_cut,
    load,
    load_changes,
    read_dump_manifest,
    table_basename,
)
from monolith.table.entry_dumps import (
    encode_entry_dumps,
    entry_dumps_of,
    export_entry_dumps,
    import_entry_dumps,
)
from monolith.table.event_clock import EventClock
from monolith.table.expiry import Expiry
from monolith.table.frozen_table import (
    FrozenInfo,
    FrozenSegment,
    FrozenTable,
    FrozenTables,
    FrozenTableWriter,
    TableIdsLike,
    open_frozen_writer,
    write_frozen_table,
)
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
from monolith.table.multi_table import FusedRows, MultiTable
from monolith.table.native_table import NativeTable
from monolith.table.numbered_files import sharded_names, validate_sharded
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
from monolith.table.overlaid_tables import OverlaidTables, RowOverlay
from monolith.table.shard_files import ShardInfo, inspect
from monolith.table.table import FollowedTable, Rows, Scan, Table, TableStats, iterate
from monolith.table.tfrecords import tfrecord
from monolith.table.touched_keys import (
    TOUCHED_KEY_SET_CAPACITY,
    TOUCHED_KEY_SET_CONCURRENCY_LEVEL,
    TouchedKeySet,
)

__all__ = [
    "COMPRESSORS",
    "FILTERS",
    "INITIALIZERS",
    "OPTIMIZERS",
    "STATE_FIELDS",
    "TOUCHED_KEY_SET_CAPACITY",
    "TOUCHED_KEY_SET_CONCURRENCY_LEVEL",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdmissionConfig",
    "AdmissionFilter",
    "Amsgrad",
    "BatchSoftmax",
    "BatchSoftmaxInit",
    "ChangesReport",
    "Compressor",
    "Constant",
    "ConstantRate",
    "CudaTable",
    "DelayCompensated",
    "DictTable",
    "DumpManifest",
    "DumpReport",
    "DumpableTable",
    "DynamicWdAdagrad",
    "EventClock",
    "Expiry",
    "FixedR8",
    "FollowedTable",
    "Fp16",
    "Fp32",
    "FrozenInfo",
    "FrozenSegment",
    "FrozenTable",
    "FrozenTableWriter",
    "FrozenTables",
    "Ftrl",
    "FusedRows",
    "GroupAdagrad",
    "GroupFtrl",
    "Initializer",
    "LearningRate",
    "LoadReport",
    "MergedTable",
    "Momentum",
    "MovingAverage",
    "MultiTable",
    "NativeTable",
    "NoFilter",
    "OneBit",
    "Ones",
    "Optimizer",
    "OverlaidTables",
    "PolynomialDecay",
    "ProbabilisticFilter",
    "RandomUniform",
    "Rmsprop",
    "RmspropV2",
    "RowOverlay",
    "Rows",
    "Scan",
    "Segment",
    "Sgd",
    "ShardInfo",
    "SlidingFilter",
    "SlotThresholds",
    "SpillingTable",
    "StateField",
    "StochasticRounding",
    "Table",
    "TableConfig",
    "TableCut",
    "TableIdsLike",
    "TableStats",
    "TouchedKeySet",
    "Zeros",
    "bucket_of",
    "device_shares",
    "digest_rows",
    "dump",
    "dump_changes",
    "dump_cut",
    "encode_entry_dumps",
    "entry_dumps_of",
    "export_entry_dumps",
    "from_upstream",
    "import_entry_dumps",
    "in_share",
    "inspect",
    "intercept_gradient",
    "iterate",
    "iterate_buckets",
    "legacy_names",
    "load",
    "load_changes",
    "make_filter",
    "merge",
    "merged_name",
    "open_frozen_writer",
    "read_dump_manifest",
    "sharded_names",
    "table_basename",
    "tfrecord",
    "validate_sharded",
    "warmup",
    "write_frozen_table",
]
