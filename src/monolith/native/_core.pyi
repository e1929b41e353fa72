"""
Monolith's compiled core: tables, filters, touched keys, checksums. See monolith.native.
"""

from collections.abc import Mapping, Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


def crc32c(buffer: object, seed: int = 0) -> int:
    """
    CRC-32C of the bytes of `buffer`; `seed` is the CRC of the bytes before them.
    """

def masked_crc32c(buffer: object) -> int:
    """CRC-32C as a TFRecord stores it."""

class DecodedEntries:
    """Rows read from EntryDump records, and how far reading got."""

    @property
    def ids(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 of shape (n,)."""

    @property
    def event_times(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """int64 of shape (n,)."""

    @property
    def values(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """float32 of shape (n, dim)."""

    @property
    def state(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """
        float32 of shape (n, state_dim); a segment whose state was not in the record is zeros.
        """

    @property
    def state_missing(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """uint8 of shape (n,): 1 where a segment's state was not in the record."""

    @property
    def consumed(self) -> int:
        """Bytes read as whole records."""

    @property
    def failure(self) -> tuple[int, str] | None:
        """
        (offset of the record, reason) where reading stopped short of the end, else None.
        """

    @property
    def truncated(self) -> bool:
        """
        Whether the failure is that the buffer ends inside a record: more bytes may mend it.
        """

class EntryDumpCodec:
    """Rows as columns to EntryDump messages and back. Thread-safe."""

    def __init__(self, segments: Sequence[tuple[str, int]]) -> None:
        """`segments` are (optimizer name, dim)."""

    @property
    def dim(self) -> int: ...

    @property
    def state_dim(self) -> int: ...

    def encode(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], event_times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> bytes:
        """All rows as TFRecords, one after another."""

    def encode_messages(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, event_times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> list[bytes]:
        """
        One EntryDump message per row, unframed; with `ids` None the messages carry no id.
        """

    def decode(self, buffer: object, limit: int | None = None) -> DecodedEntries:
        """
        Read TFRecords until the end, the first bad one, or `limit` of them; see `failure`.
        """

def snappy_decode(block: object) -> bytes:
    """
    Decompress one snappy block. Raises ValueError, which says why, if it is not valid.
    """

class Admission:
    """Says which unseen ids earn a row. Thread-safe."""

    def refuses(self, id: int, count: int = 1) -> bool:
        """Record `count` sightings of an id; true when it must wait."""

class SlidingFilterMeta:
    """What a checkpoint says of a sliding filter."""

    def __init__(self, *, split_num: int, max_forward_step: int, max_backward_step: int, max_step: int, head: int, head_increment: int, failure_count: int) -> None: ...

    @property
    def split_num(self) -> int: ...

    @property
    def max_forward_step(self) -> int: ...

    @property
    def max_backward_step(self) -> int: ...

    @property
    def max_step(self) -> int: ...

    @property
    def head(self) -> int: ...

    @property
    def head_increment(self) -> int: ...

    @property
    def failure_count(self) -> int: ...

class FilterSplitMeta:
    """What a checkpoint says of one split of a sliding filter."""

    def __init__(self, *, failure_count: int, total_size: int, num_elements: int, fill_rate: float) -> None: ...

    @property
    def failure_count(self) -> int: ...

    @property
    def total_size(self) -> int: ...

    @property
    def num_elements(self) -> int: ...

    @property
    def fill_rate(self) -> float: ...

class SlidingFilter(Admission):
    """Admits an id after enough sightings; old sightings fade. Thread-safe."""

    def __init__(self, capacity: int = 300000000, split_num: int = 7, *, default_threshold: int = 0, thresholds: Mapping[int, int] = {}) -> None:
        """
        `thresholds` maps a slot to its threshold; thresholds are 1 to 15, 0 asks nothing.
        """

    def refuse(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Record `counts` sightings of each id (None is one each), in order; a uint8 mask, 1 where the id must wait.
        """

    def add(self, id: int, count: int = 1) -> int:
        """
        Record sightings; the count before them, 15 when there is no cell for the id.
        """

    def get(self, id: int) -> int:
        """What `add` would answer, nothing recorded."""

    def should_be_filtered(self, id: int, count: int, threshold: int) -> bool:
        """As `refuses`, with a threshold of one's own."""

    def __len__(self) -> int:
        """Cells in use."""

    @property
    def failures(self) -> int:
        """Sightings that found no cell."""

    @property
    def split_num(self) -> int:
        """Splits, and so files of a checkpoint."""

    @property
    def cells_per_split(self) -> int: ...

    @property
    def capacity_per_split(self) -> int: ...

    def meta(self) -> SlidingFilterMeta: ...

    def split_meta(self, split: int) -> FilterSplitMeta: ...

    def read_cells(self, split: int, offset: int = 0, count: int | None = None) -> Annotated[NDArray[numpy.uint16], dict(shape=(None,))]:
        """
        A copy of up to `count` cells (None is the rest) as uint16. Hold sightings back between calls to save one moment.
        """

    def copy(self) -> SlidingFilter:
        """The filter at this moment, as another one."""

    def restore(self, meta: SlidingFilterMeta) -> None:
        """
        Empty every split and take over the head; `restore_split` and `write_cells` follow.
        """

    def restore_split(self, split: int, meta: FilterSplitMeta) -> None:
        """
        Check that a saved split fits, and take over its failure count; elements are counted from the cells.
        """

    def write_cells(self, split: int, offset: int, cells: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class ProbabilisticFilter(Admission):
    """Admits an id by chance. Thread-safe."""

    def __init__(self, *, equal_probability: bool, default_threshold: int = 0, thresholds: Mapping[int, int] = {}, seed: int) -> None: ...

    def refuse(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Record `counts` sightings of each id (None is one each), in order; a uint8 mask, 1 where the id must wait.
        """

    @property
    def draws(self) -> int:
        """How often it has drawn, which is all there is to save."""

    @draws.setter
    def draws(self, arg: int, /) -> None: ...

    @staticmethod
    def admission_rate(equal_probability: bool, count: int, threshold: int) -> float:
        """The probability that `count` sightings admit an id."""

class TouchedKeySet:
    """The ids changed since they were last taken. Thread-safe."""

    def __init__(self, capacity: int = 2097152) -> None: ...

    def insert(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        Add ids; a set past its capacity is emptied first. Returns how many keys that dropped.
        """

    def steal(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Take all keys, as int64 in no order."""

    def __len__(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def lost(self) -> int:
        """Keys dropped because there were too many, ever."""

class Workers:
    """Threads that share batches with the thread that calls. Thread-safe."""

    def __init__(self, threads: int) -> None:
        """`threads` counts the caller: 1 starts none."""

    @property
    def threads(self) -> int: ...

    def fix(self, threads: int) -> None:
        """
        Give calls so many threads from now on; 0, as at first, as many as were found to be fastest.
        """

class KeptMemory:
    """Large arrays whose memory is used again. Thread-safe."""

    def __init__(self) -> None: ...

    def floats(self, size: int) -> NDArray[numpy.float32]:
        """
        An array that is not initialised; its memory is reused for the next one once it is freed.
        """

    @property
    def bytes(self) -> int:
        """Bytes of idle memory, ready for the next array."""

class RawRows:
    """Rows at known positions: the limit a table is measured against."""

    def __init__(self, rows: int, width: int, workers: Workers) -> None: ...

    @property
    def width(self) -> int: ...

    def gather(self, positions: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def update(self, positions: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

class CompressorKind(enum.Enum):
    FP32 = 0

    FP16 = 1

    FIXED_R8 = 2

    ONE_BIT = 3

class ValueCoding(enum.Enum):
    FLOAT32 = 0

    BFLOAT16 = 1

    FLOAT16 = 2

    INT8 = 3

class OptimizerSpec:
    """A sparse optimizer and its settings, by the names of the configs."""

    def __init__(self, kind: str) -> None: ...

    @property
    def initial_accumulator_value(self) -> float: ...

    @initial_accumulator_value.setter
    def initial_accumulator_value(self, arg: float, /) -> None: ...

    @property
    def weight_decay(self) -> float: ...

    @weight_decay.setter
    def weight_decay(self, arg: float, /) -> None: ...

    @property
    def beta(self) -> float: ...

    @beta.setter
    def beta(self, arg: float, /) -> None: ...

    @property
    def beta1(self) -> float: ...

    @beta1.setter
    def beta1(self, arg: float, /) -> None: ...

    @property
    def beta2(self) -> float: ...

    @beta2.setter
    def beta2(self, arg: float, /) -> None: ...

    @property
    def epsilon(self) -> float: ...

    @epsilon.setter
    def epsilon(self, arg: float, /) -> None: ...

    @property
    def rho(self) -> float: ...

    @rho.setter
    def rho(self, arg: float, /) -> None: ...

    @property
    def momentum(self) -> float: ...

    @momentum.setter
    def momentum(self, arg: float, /) -> None: ...

    @property
    def l1(self) -> float: ...

    @l1.setter
    def l1(self, arg: float, /) -> None: ...

    @property
    def l2(self) -> float: ...

    @l2.setter
    def l2(self, arg: float, /) -> None: ...

    @property
    def delay_compensation(self) -> float: ...

    @delay_compensation.setter
    def delay_compensation(self, arg: float, /) -> None: ...

    @property
    def use_nesterov(self) -> bool: ...

    @use_nesterov.setter
    def use_nesterov(self, arg: bool, /) -> None: ...

    @property
    def decouple_weight_decay(self) -> bool: ...

    @decouple_weight_decay.setter
    def decouple_weight_decay(self, arg: bool, /) -> None: ...

    @property
    def lazy_decay(self) -> bool: ...

    @lazy_decay.setter
    def lazy_decay(self, arg: bool, /) -> None: ...

    @property
    def decay_rate(self) -> float: ...

    @decay_rate.setter
    def decay_rate(self, arg: float, /) -> None: ...

    @property
    def delay_compensated(self) -> bool: ...

    @delay_compensated.setter
    def delay_compensated(self, arg: bool, /) -> None: ...

    @property
    def stochastic_rounding(self) -> bool: ...

    @stochastic_rounding.setter
    def stochastic_rounding(self, arg: bool, /) -> None: ...

class CompressorSpec:
    def __init__(self, kind: CompressorKind) -> None: ...

    @property
    def range(self) -> float: ...

    @range.setter
    def range(self, arg: float, /) -> None: ...

    @property
    def step_size(self) -> int: ...

    @step_size.setter
    def step_size(self, arg: int, /) -> None: ...

    @property
    def init_scale(self) -> float: ...

    @init_scale.setter
    def init_scale(self, arg: float, /) -> None: ...

    @property
    def max_scale(self) -> float: ...

    @max_scale.setter
    def max_scale(self, arg: float, /) -> None: ...

    @property
    def amplitude(self) -> float: ...

    @amplitude.setter
    def amplitude(self, arg: float, /) -> None: ...

class SegmentSpec:
    def __init__(self, dim: int, optimizer: OptimizerSpec, initial: tuple[float, float], compressor: CompressorSpec) -> None: ...

class TableStats:
    @property
    def rows(self) -> int: ...

    @property
    def inserted(self) -> int: ...

    @property
    def filtered(self) -> int: ...

    @property
    def refused(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def removed(self) -> int: ...

    @property
    def non_finite(self) -> int: ...

    @property
    def bytes_total(self) -> int: ...

    @property
    def bytes_rows(self) -> int: ...

    @property
    def bytes_index(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def partitions(self) -> int: ...

    @property
    def max_event_time(self) -> int: ...

class Table:
    """Maps int64 ids to rows of floats. Thread-safe."""

    def __init__(self, *, segments: Sequence[SegmentSpec], serving: bool, coding: ValueCoding, round_by_chance: bool, skip_zero: bool, expire_when_full: bool, seed: int, initial_rows: int, capacity_bytes: int, expire_seconds: int, slot_expire_seconds: Sequence[tuple[int, int]], admission: Admission | None, touched: TouchedKeySet | None, workers: Workers | None) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def state_dim(self) -> int: ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""

    @property
    def refused(self) -> int: ...

    @property
    def max_event_time(self) -> int: ...

    def __len__(self) -> int: ...

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> int:
        """
        Copy one embedding per id into `out`, zeros for an unseen id; returns how many were seen.
        """

    def lookup_rows(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Copy whole rows into columns."""

    def contains(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def assign(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], times: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def assign_add(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], times: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def apply_gradients(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], rates: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], step: int, times: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], dedup: bool, latest: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, counts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def reinitialize(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], now: int, status: Annotated[NDArray[numpy.int8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def restore(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], times: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, fresh_state: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None: ...

    def remove(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def evict(self, now: int) -> int: ...

    def count_expired(self, now: int) -> int: ...

    def clear(self, rows: int = 0) -> None:
        """
        Drop all rows; with room for `rows` new ones, which need not then grow it step by step.
        """

    def scan(self, cursor: int, last: int, limit: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], int | None]:
        """
        (ids, times, values, state, cursor or None): rows with hashes from `cursor` to `last`, in their order.
        """

    def track_changes(self, on: bool) -> None:
        """
        Track from now on which rows change and which are removed, for snapshots to list; or stop.
        """

    def touch(self, set: TouchedKeySet) -> None:
        """Tell `set` from now on which ids get another row or lose theirs."""

    def untouch(self, set: TouchedKeySet) -> None: ...

    def digests(self, buckets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], number: int, total: int, sums: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Fill `sums` with the sum of the digests of each bucket's rows that are `number` modulo `total`.
        """

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    @property
    def scales(self) -> list[float]: ...

    @scales.setter
    def scales(self, arg: Sequence[float], /) -> None: ...

    def stats(self) -> TableStats: ...

def row_digests(ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], digests: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')]) -> None:
    """Fill `digests` with one for each id and its values."""

class TableSnapshot:
    """A table as it was at one moment, while training continues."""

    def __init__(self, table: Table) -> None: ...

    @property
    def rows(self) -> int: ...

    @property
    def max_event_time(self) -> int: ...

    @property
    def scales(self) -> list[float]: ...

    @property
    def captured_bytes(self) -> int:
        """Bytes of rows copied because they changed."""

    @property
    def tracked(self) -> bool:
        """Whether it lists the changes since the previous snapshot."""

    @property
    def cleared(self) -> bool: ...

    def removed(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Ids removed since the previous snapshot, as int64; some may have a row again.
        """

    def scan(self, cursor: int, last: int, limit: int, changed_only: bool) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], int | None]:
        """
        As Table.scan; with `changed_only`, only rows that changed since the previous snapshot.
        """

    def close(self, saved: bool) -> None:
        """
        Free the copies; if not `saved`, the next snapshot lists the same changes again.
        """

def fused_offsets(dims: NDArray[numpy.int64], sizes: NDArray[numpy.int64], num_shards: int, num_ids: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    (recv_splits, id_offsets, float_offsets) of a fused call over tables of these dims.
    """

class FoundRows:
    """The rows that a batch finds in the tables of a group."""

    @property
    def rows(self) -> list[int]:
        """By table: distinct ids that have a row."""

    @property
    def distinct(self) -> list[int]:
        """By table: distinct ids, with a row or without."""

    @property
    def sightings(self) -> list[int]:
        """By table: positions of the batch whose id has a row."""

class TableGroup:
    """One call for many tables. Thread-safe."""

    def __init__(self, tables: Sequence[Table], workers: Workers | None = None) -> None:
        """Keeps the tables alive."""

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_shards: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Copy one embedding per id into `out`; sizes[shard * tables + table] says whose ids are whose.
        """

    def read(self, ids: NDArray[numpy.int64], sizes: NDArray[numpy.int64], num_shards: int, memory: KeptMemory) -> NDArray[numpy.float32]:
        """Like lookup, into an array of `memory`."""

    def find(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> FoundRows:
        """Find which ids of one batch, table after table, have a row."""

    def take(self, found: FoundRows, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Move found rows out of the tables into these columns, table after table.
        """

    def put(self, rows: Sequence[tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.uint8], NDArray[numpy.float32], NDArray[numpy.float32]]]) -> list[int]:
        """
        Restore rows, table after table: hashes, times, whether there is a row, values and state. Return how many each table was given.
        """

    def apply_gradients(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_shards: int, gradients: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], rates: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], step: int, times: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], dedup: bool, latest: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, counts: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """Step every table once, with its ids of all shards in shard order."""

class ColdDamageError(ValueError):
    """A cold file makes no sense: (path, offset, reason)."""

def first_bad_block(blocks: object, block_bytes: int, stamp: int, number: int) -> int:
    """
    Of blocks of a cold file, from block `number` on, the index of the first that is not as it was written; -1 if all are.
    """

class BlockReader:
    """Threads that read blocks of files; tables may share them."""

    def __init__(self, threads: int = 32) -> None: ...

    @property
    def threads(self) -> int: ...

    def read(self, descriptor: int, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], block_bytes: int) -> None:
        """Read a block at each offset and drop it: to time a disk."""

class TierSizes:
    """What a tiered table of so many rows takes, reckoned without one."""

    def __init__(self, *, row_bytes: int, memory_bytes: int, buffer_bytes: int, recent_bytes: int, rows: int) -> None: ...

    @property
    def hot_rows(self) -> int:
        """Rows that fit into the memory."""

    @property
    def hot_bytes(self) -> int:
        """Memory of a hot row with all that belongs to it."""

    @property
    def index_bytes(self) -> int:
        """Memory of the index of the cold rows."""

    @property
    def record_bytes(self) -> int:
        """Of a row in a file."""

    @property
    def block_bytes(self) -> int:
        """Of one read."""

    @property
    def file_bytes(self) -> float:
        """Of a row in a file, with its part of blocks and directory."""

class ColdStats:
    @property
    def rows(self) -> int: ...

    @property
    def files(self) -> int: ...

    @property
    def bytes_index(self) -> int: ...

    @property
    def bytes_buffers(self) -> int: ...

    @property
    def bytes_recent(self) -> int: ...

    @property
    def bytes_files(self) -> int: ...

    @property
    def bytes_live(self) -> int: ...

    @property
    def rows_found(self) -> int: ...

    @property
    def rows_recent(self) -> int: ...

    @property
    def reads(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def rows_written(self) -> int: ...

    @property
    def bytes_written(self) -> int: ...

    @property
    def compactions(self) -> int: ...

    @property
    def rows_compacted(self) -> int: ...

class TieredExpiry:
    """How far rows of a tiered table have expired."""

class TieredTable:
    """A table with its hot rows in memory and all others in files."""

    def __init__(self, *, hot: Table, reader: BlockReader, folder: str, name: str, memory_bytes: int, most_hot_rows: int, buffer_bytes: int, recent_bytes: int) -> None: ...

    @property
    def cold_rows(self) -> int: ...

    @property
    def hot_rows_allowed(self) -> int: ...

    @property
    def most_rows(self) -> int:
        """
        Rows for which the memory has an index; new ids beyond them are refused.
        """

    @property
    def cold_memory_bytes(self) -> int:
        """Bytes of memory other than those of the hot table."""

    @property
    def evicted(self) -> int:
        """Cold rows that expired."""

    @property
    def removed(self) -> int:
        """Cold rows that were removed."""

    @property
    def must_shrink(self) -> bool: ...

    @property
    def trouble(self) -> str:
        """Why nothing can be written; empty if it can."""

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def lookup_rows(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None: ...

    def contains(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def remove(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """Remove rows of either tier; moves no cold row in."""

    def count_missing(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        Note a batch that is to be written; returns how many distinct ids have no hot row.
        """

    def spill(self, incoming: int) -> int:
        """
        Move some hot rows out if so many more do not fit; returns how many are still too many.
        """

    def bring(self, elsewhere: int = 0) -> int:
        """
        Move the cold rows of the batch in; returns how many of its ids have no row. New ids leave room in the index for so many rows that are elsewhere.
        """

    def shrink(self) -> None:
        """Give back memory that hot rows no longer need."""

    def wait_for_room(self, seconds: float) -> bool: ...

    def flush(self) -> None:
        """Wait until everything is written and compacted."""

    def count_expired(self, now: int) -> int: ...

    def expiry(self, now: int) -> TieredExpiry: ...

    def find_expired(self, expiry: TieredExpiry) -> bool:
        """
        Find the next expired rows, while others write; False if there are no more.
        """

    def drop_expired(self, expiry: TieredExpiry) -> int:
        """Drop what find_expired found; returns how many."""

    def clear(self, rows: int = 0) -> None: ...

    def digests(self, buckets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], number: int, total: int, sums: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu')]) -> None: ...

    def scan_cold(self, cursor: int, last: int, limit: int, of_snapshot: bool, changed_only: bool, unlinked: bool) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float32], NDArray[numpy.float32], int | None]: ...

    def track_changes(self, on: bool) -> None: ...

    def open_snapshot(self) -> int:
        """Returns how many cold rows there are."""

    def close_snapshot(self, saved: bool) -> None: ...

    def links(self) -> list[tuple[str, int, int, NDArray[numpy.uint8]]]:
        """
        Files that a checkpoint of the open snapshot may link to: path, rows, those in the snapshot, and a bit for each row. `scan_cold` leaves these rows out if `unlinked`.
        """

    def adopt(self, path: str, alive: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """
        Take over the rows of a file in this table's folder that have a bit; returns how many.
        """

    @property
    def adopted(self) -> int:
        """Rows of adopted files, since the table was made."""

    def stats(self) -> ColdStats: ...

class FrozenDamageError(ValueError):
    """A file makes no sense: (path, offset, reason)."""

class FrozenCoding(enum.Enum):
    """How a segment's values are kept."""

    FP32 = 0

    FP16 = 1

    INT8 = 2

    INT4 = 3

class FrozenTable:
    """Rows in a mapped file. Never changes. Thread-safe."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Maps the file; `path` is for messages."""

    @property
    def dim(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def checked_bytes(self) -> int:
        """What `verify` can check, from 0 on."""

    @property
    def name(self) -> str: ...

    @property
    def segments(self) -> list[tuple[int, FrozenCoding]]:
        """(dim, coding) of each."""

    @property
    def largest_error(self) -> float: ...

    @property
    def mean_error(self) -> float: ...

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """Copy one row per id into `out`; an id without a row reads as zeros."""

    def contains(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Write to `found` whether each id has a row."""

    def matches(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], same: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Write to `same` whether each id has a row of the bytes that its values would be written as.
        """

    def scan(self, first: int, last: int) -> tuple[NDArray[numpy.int64], NDArray[numpy.float32]]:
        """
        Ids, and their values one after another, whose hashes are from `first` to `last`.
        """

    @property
    def index_bytes(self) -> int: ...

    @property
    def kept_row_bytes(self) -> int:
        """What a row takes of bounded memory."""

    def bound_memory(self, descriptor: int, row_bytes: int, reader: BlockReader) -> None:
        """
        Before the first lookup: keep the index and so many bytes of rows in memory, and read all others.
        """

    @property
    def cache_stats(self) -> RowCacheStats:
        """Of a table that is bounded."""

    def verify(self, start: int, size: int) -> None:
        """Check bytes, in whole MiB, against their checksums."""

    def prefault(self, start: int, size: int) -> None:
        """Bring bytes of the file into memory."""

class RowCacheStats:
    """Of the rows of a file that are kept in memory."""

    @property
    def found(self) -> int:
        """Rows that were asked for,"""

    @property
    def in_memory(self) -> int:
        """and of these without a read."""

    @property
    def reads(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Of memory, those of the index included."""

class FrozenGroup:
    """One call for many frozen tables. Thread-safe."""

    def __init__(self, tables: Sequence[FrozenTable], workers: Workers | None = None) -> None:
        """Keeps the tables alive."""

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_batches: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Copy one row per id into `out`; sizes[batch * tables + table] says whose ids are whose.
        """

class OverlaidGroup:
    """One call for many frozen tables with rows over them. Thread-safe."""

    def __init__(self, below: Sequence[FrozenTable], above: Sequence[Table], workers: Workers | None = None) -> None:
        """Keeps the tables alive."""

    def lookup(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_batches: int, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """As FrozenGroup.lookup; a row above counts, whatever is below."""

class FrozenWriter:
    """Rows into the bytes of a file, in order. Not thread-safe."""

    def __init__(self, segments: Sequence[tuple[int, FrozenCoding]], name: str, max_rows: int) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def size(self) -> int:
        """Of the file so far."""

    @property
    def crc(self) -> int:
        """Of the file so far."""

    @property
    def largest_error(self) -> float: ...

    @property
    def mean_error(self) -> float: ...

    def begin(self) -> bytes:
        """What the file begins with."""

    def add(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Write row_bytes bytes for each id to `out`."""

    def finish(self) -> NDArray[numpy.uint8]:
        """All that follows the rows."""

class Routes:
    """The ids of one call, spread over servers. Never changes."""

    def __init__(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], widths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_batches: int, num_servers: int) -> None:
        """
        sizes[batch * tables + table] says whose ids are whose; a width for each table.
        """

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """Ids of each cell that each server gets, server after server."""

    @property
    def num_ids(self) -> list[int]:
        """By server."""

    @property
    def num_floats(self) -> list[int]:
        """By server."""

    @property
    def floats(self) -> int:
        """Of all rows."""

    def request_bytes(self, numbers: int, rows: int) -> list[int]:
        """
        By server: bytes of a request with so many arrays of a number per id, and of a row per id.
        """

    def write_requests(self, numbers: Sequence[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]], rows: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]], to: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]]) -> None:
        """
        Write the request to each server: sizes of its cells, numbers, then rows.
        """

    def gather_rows(self, servers: Sequence[Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]], rows: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Write the rows of each server where the caller has them."""

def ranking_metrics(scores: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], relevance: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ks: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """
    Write recall, NDCG, hit rate and reciprocal rank at each k, and the reciprocal rank among all, of each query to a row of `out`.
    """

def hash_strings(text: bytes, splits: NDArray[numpy.int64], slot: int | None, version: int) -> NDArray[numpy.int64]:
    """
    One fid per string, or without a slot its hash; string i is text[splits[i]:splits[i + 1]].
    """

def hash_floats(values: NDArray[numpy.float32], slot: int, version: int) -> NDArray[numpy.int64]:
    """One fid per number."""

def hash_integers(values: NDArray[numpy.int64], slot: int, version: int) -> NDArray[numpy.int64]:
    """One fid per integer."""

class RawKind(enum.Enum):
    """What a raw column of ids holds, and what becomes of it."""

    HASHED = 0

    WHOLE_TEXTS = 1

    INTS = 2

    INT_BUCKETS = 3

    FLOAT_BUCKETS = 4

class IdPacker:
    """Packs the ids of many features of a batch in one call. Thread-safe."""

    def __init__(self, features: Sequence[tuple[RawKind | None, RawKind | None, RawKind | None, Sequence[float], Sequence[float], str | None, int | None]], lists: Sequence[tuple[Sequence[tuple[RowColumnKind, tuple[RawKind | None, RawKind | None, RawKind | None, Sequence[float], Sequence[float], str | None, int | None], tuple[int, bool, int, int]]], int, bool, bool]], uint8: object, int64: object, float32: object) -> None:
        """
        Features are (kind of texts, of ints, of floats, boundaries of ints, of floats, separator, slot). Lists are features of several columns, or of which a row keeps some values: (columns, how many values are kept, 0 for all, whether the last ones, whether each step must have a value in each column), and a column is (kind, feature, how its times are read). The types are torch's.
        """

    def pack(self, columns: list[tuple[object, object | None, object]]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]] | None:
        """
        (ids, splits) of a column for each feature: tensors of (values, splits of texts, splits of rows). None if something cannot be read, or is no plain tensor on the CPU.
        """

    def pack_rows(self, blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, rows: NDArray[numpy.int64], ids: Sequence[int], numbers: Sequence[tuple[int, RowNumbers, int, bool, str | None]], times: tuple[int, int, bool, int, int] | None, lists: Sequence[Sequence[int]]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64] | bool | None, NDArray[numpy.float32], list[int], tuple[NDArray[numpy.int64], NDArray[numpy.int64] | None, int] | None, tuple[int, list[int], NDArray[numpy.float32] | None]]:
        """
        (ids, splits, numbers, missing, times, lists) of rows of blocks, given the column of each feature; the column, kind and count per row of numbers, whether texts are read and their separator; and the column of times, per second (0: by size), ISO texts alone, the oldest and the latest second. Splits are True if every cell has one id, None if an id cannot be read. A row without numbers has NaN; `missing` is how many rows lack a number, -1 if some cannot be read. Times are (seconds, splits if a row has none, forms), None if one cannot be read. Given the columns of the first lists, lists are (how many were packed behind the ids, all before one that cannot be read; the forms of times in each of their columns; weights of all ids, None if no list has any).
        """

class RowColumnKind(enum.Enum):
    """What a column of a list holds."""

    IDS = 0

    WEIGHTS = 1

    SECONDS = 2

    GAPS = 3

class RowNumbers(enum.Enum):
    """Which numbers a row may have, other than none."""

    ANY = 0

    CLASSES = 1

def pack_numbers(columns: Sequence[tuple[NDArray[numpy.int64] | None, NDArray[numpy.float32] | None, NDArray[numpy.int64]]], rows: int, out: NDArray[numpy.float32]) -> bool:
    """
    Copy columns, (ints, floats, rows), of one finite number per row; False where one has others.
    """

def hash_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], separator: str | None, slot: int | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    (ids, splits, bad): an id for each item of each text, a fid of version 2 where there is a slot.
    """

def read_whole_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], separator: str | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    (values, splits, bad): the whole numbers that texts hold, and the rows where some are none.
    """

def read_number_cells(text: object, splits: NDArray[numpy.int64], rows: NDArray[numpy.int64], separator: str | None) -> tuple[NDArray[numpy.float32], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    (values, splits, bad): the numbers that texts hold, and the rows where some are none.
    """

def cross_cells(columns: Sequence[tuple[NDArray[numpy.int64], NDArray[numpy.int64]]], most: int, slot: int | None) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64]]:
    """
    (ids, splits, bad): an id for every way to take one id of each of the columns, (ids, splits) each.
    """

class WireType(enum.Enum):
    """What an input of a request holds."""

    TEXTS = 0

    INTS = 1

    FLOATS = 2

class WireRequest:
    """A request of the Open Inference Protocol, read in its buffer."""

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def outputs(self) -> list[tuple[str, bool | None]]:
        """Names of the wanted outputs, and whether each is wanted raw."""

    @property
    def binary_outputs(self) -> bool:
        """Whether outputs are wanted raw if they do not say so themselves."""

    @property
    def typed(self) -> bool:
        """Whether a gRPC message has its values outside of raw contents."""

class PackedRows:
    """The features of some rows, as a batch has them. Never changes."""

    @property
    def rows(self) -> int: ...

    @property
    def ids(self) -> NDArray[numpy.int64]:
        """Of all features, cell after cell."""

    @property
    def splits(self) -> NDArray[numpy.int64]:
        """Where each cell begins, then the end."""

    @property
    def floats(self) -> NDArray[numpy.float32]:
        """Feature after feature."""

    def part(self, begin: int, end: int) -> PackedRows:
        """Some of the rows."""

class PackedRanking:
    """
    Ranking requests: the features of users, and of the items of each. Never changes.
    """

    @property
    def own(self) -> bytes:
        """
        By input of the plan: 1 if it has a row per item, 0 if it has one per user.
        """

    @property
    def shared(self) -> PackedRows:
        """The features of users, a row each."""

    @property
    def items(self) -> PackedRows:
        """The other features, a row per item."""

    @property
    def counts(self) -> NDArray[numpy.int64]:
        """Items of each user."""

    def part(self, begin: int, end: int) -> PackedRanking:
        """Some of the items of the only user."""

    def full(self, most: int) -> PackedRows | None:
        """
        A row per item with all features; None if it has more than `most` ids or numbers.
        """

class RequestPlan:
    """How the inputs of a model become its features. Thread-safe."""

    def __init__(self, inputs: Sequence[tuple[str, WireType, bool]], ids: Sequence[tuple[int, RawKind, Sequence[float], str | None, int | None]], floats: Sequence[int]) -> None:
        """
        Inputs are (name, type, whether of one dimension); ids are (number of the input, kind, boundaries, separator, slot); floats are numbers of inputs.
        """

    def pack(self, request: WireRequest) -> PackedRows | PackedRanking | None:
        """
        The features of a request; None if it does not have exactly the inputs of the model, or a value cannot be read.
        """

def join_rows(parts: Sequence[PackedRows]) -> PackedRows:
    """Rows that one plan has packed, one after another."""

def join_rankings(parts: Sequence[PackedRanking]) -> PackedRanking:
    """The same of ranking requests with equal `own`."""

def read_grpc_request(message: bytes) -> WireRequest | None:
    """
    A ModelInferRequest; None if it is malformed or unusual, and must be read in another way.
    """

def read_http_request(body: bytes, head: int) -> WireRequest | None:
    """
    The body of a request, whose first `head` bytes are JSON; None as above.
    """

class Pooling(enum.Enum):
    """How the rows of one cell become one."""

    SUM = 0

    MEAN = 1

    MAX = 2

    FIRST_N = 3

    EACH = 4

class LayoutBatch:
    """One batch, planned. Never changes."""

    @property
    def ids(self) -> NDArray[numpy.int64]:
        """Distinct ids, table after table."""

    @property
    def sizes(self) -> NDArray[numpy.int64]:
        """How many distinct ids each table has."""

    @property
    def counts(self) -> NDArray[numpy.int64]:
        """How often each distinct id was met."""

    @property
    def batch_size(self) -> int: ...

    @property
    def floats(self) -> int:
        """Of the distinct ids' rows, one after another."""

    @property
    def one_each(self) -> bool:
        """Whether every cell that is read has exactly one id."""

class Layouts:
    """From looked-up rows to a model's inputs, and back. Thread-safe."""

    def __init__(self, table_dims: Sequence[int], features: Sequence[tuple[int, Pooling, int]], uses: Sequence[tuple[int, int, int, int, int, int, bool]], output_floats: Sequence[int], workers: Workers | None) -> None:
        """
        features: (table, pooling, length); uses: (feature, start, width, output, offset, stride, adds).
        """

    def plan(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], shared: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], where: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], batch_size: int, weights: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> LayoutBatch:
        """Find the distinct ids of each table."""

    def gather(self, batch: LayoutBatch, rows: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], outputs: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None:
        """Fill the outputs from one row per distinct id."""

    @overload
    def read_rows(self, group: FrozenGroup, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], shared: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], where: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], batch_size: int, outputs: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None:
        """
        Find the distinct ids of a batch and their rows in a group, and fill the outputs with them.
        """

    @overload
    def read_rows(self, group: OverlaidGroup, ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], shared: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], where: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], batch_size: int, outputs: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None: ...

    @overload
    def read_packed(self, group: FrozenGroup, packed: PackedRows, where: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], outputs: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None:
        """The same for the features of requests that a plan has packed."""

    @overload
    def read_packed(self, group: OverlaidGroup, packed: PackedRows, where: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], outputs: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu')]]) -> None: ...

    def scatter(self, batch: LayoutBatch, rows: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, gradients: Sequence[Annotated[NDArray[numpy.float32], dict(order='C', device='cpu', writable=False)] | None], scale: float, out: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """Fill `out` with the gradient of each distinct id's row."""

    def number(self, batch: LayoutBatch, out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Fill `out`, table after table, with the number of each id that is read among the distinct ones.
        """

    def newest(self, batch: LayoutBatch, times: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """
        Fill `out`, for each distinct id, with the newest time of the examples that contain it.
        """

    def moves(self, batch: LayoutBatch, uses: Sequence[int]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float32]]:
        """
        (from, to, scale): the moves that gathering by these uses makes, for another device to make.
        """

class SplitStream:
    """The whole records that a buffer begins with."""

    @property
    def starts(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Where each record begins."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Where each payload begins."""

    @property
    def lengths(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """The bytes of each payload."""

    @property
    def headers(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Frames with a tag: that number of each."""

    @property
    def consumed(self) -> int:
        """Bytes of whole records; a failure begins there."""

    @property
    def failure(self) -> str:
        """Why splitting stopped before the end; empty if it did not."""

    @property
    def truncated(self) -> bool:
        """
        Whether the failure is that the buffer ends inside a record: more bytes may mend it.
        """

class FrameHeader:
    """What stands before the length of a frame."""

    def __init__(self, *, tag: bool = False, kafka_dump_prefix: bool = False, sort_id: bool = False, kafka_dump: bool = False) -> None: ...

def split_tfrecords(buffer: object) -> SplitStream:
    """
    Find the payloads of TFRecords, checksums checked, up to the first bad record.
    """

def split_frames(buffer: object, header: FrameHeader) -> SplitStream:
    """Find the payloads of frames, up to the first bad one."""

def seal_tfrecords(data: object, splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bytes:
    """Payloads data[splits[i]:splits[i + 1]] as TFRecords."""

def seal_frames(data: object, splits: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], header: FrameHeader, tags: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bytes:
    """
    Payloads data[splits[i]:splits[i + 1]] as frames; `tags` has one each if the header has a tag.
    """

class ExampleKind(enum.Enum):
    """The messages that carry examples."""

    TF_EXAMPLE = 0

    EXAMPLE = 1

    INSTANCE = 2

    EXAMPLE_BATCH = 3

class ParsedExamples:
    """Records by column, and the payloads that were none."""

    @property
    def records(self) -> int: ...

    @property
    def bad(self) -> list[tuple[int, str]]:
        """(index of the payload, reason), by index."""

    def take_columns(self) -> list[tuple[str, bool, NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]:
        """
        (name, shared, values, row splits, splits of strings) by name; there are none the next time.
        """

class ExampleParser:
    """Payloads straight to columns. Thread-safe."""

    def __init__(self, kind: ExampleKind, columns: Sequence[str] | None = None, workers: Workers | None = None) -> None:
        """`columns` are those to read; None is all."""

    def parse(self, buffer: object, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> ParsedExamples:
        """One record per payload, bad ones left out. Not for EXAMPLE_BATCH."""

    def parse_batches(self, buffer: object, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> list[ParsedExamples]:
        """EXAMPLE_BATCH: one answer per payload."""

def encode_examples(kind: ExampleKind, records: int, columns: list[tuple[str, bool, bool, NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]], workers: Workers | None = None) -> tuple[bytes, NDArray[numpy.int64]]:
    """
    (payloads end to end, their splits) of columns (name, shared, ids, values, row splits, splits of strings).
    """

class ColumnType(enum.Enum):
    """What the values of a column are."""

    INT64 = 0

    FLOAT = 1

    BYTES = 2

class CsvDialect:
    """What separates fields and the values in them."""

    def __init__(self, delimiter: str, list_separator: str | None, record_bytes: int) -> None:
        """A record that is longer than `record_bytes` is cut there, and bad."""

def first_csv_record(dialect: CsvDialect, buffer: object, last: bool) -> tuple[int, list[bytes] | None]:
    """
    (its end, its fields); None if the buffer, which `last` calls the file's end, has none. ValueError if it is no record.
    """

def find_csv_chunk_end(dialect: CsvDialect, buffer: object, last: bool, chunk_bytes: int) -> tuple[bool, int]:
    """
    (whole, end) of the chunk of records that begin in the first `chunk_bytes`, at least one. If not whole: drop `end` bytes, and show the rest again with more. `last`: the file ends there.
    """

class CsvSniffer:
    """Finds the narrowest types that fit the first records."""

    def __init__(self, dialect: CsvDialect, fields: int, rows: int) -> None:
        """Counts records with this number of fields, up to `rows` of them."""

    def take(self, buffer: object, last: bool) -> int:
        """Look at the next bytes; return how many need not be shown again."""

    @property
    def done(self) -> bool:
        """Whether there were records enough."""

    @property
    def types(self) -> list[ColumnType]:
        """Of each column; BYTES where there were no values."""

class ParsedCsv:
    """Records by column, and the lines that were none."""

    @property
    def whole(self) -> bool:
        """If not: drop `next` bytes, and show the rest again with more."""

    @property
    def next(self) -> int:
        """The position in the buffer to continue from."""

    @property
    def records(self) -> int: ...

    @property
    def bad(self) -> list[tuple[int, int, str, int | None, bytes]]:
        """
        (begin, size, reason, column, value), in order; a column where its value is what is wrong.
        """

    def take_block(self) -> ColumnBlock:
        """
        The columns as asked for, to gather rows of; there are none the next time.
        """

class CsvParser:
    """Bytes of CSV straight to columns. Thread-safe."""

    def __init__(self, dialect: CsvDialect, fields: int, columns: Sequence[tuple[int, ColumnType]]) -> None:
        """
        Records have this number of fields; `columns` are (position, type) of those to read, by position.
        """

    def parse(self, buffer: object, last: bool, chunk_bytes: int) -> ParsedCsv:
        """
        Read the records that begin in the first `chunk_bytes`, at least one. `last`: the file ends there.
        """

    def parse_texts(self, texts: list[bytes], workers: Workers | None = None) -> list[ParsedCsv]:
        """
        Read a record from each text, which is one line; in one part or, with workers, in several. What is bad begins at the number of its text.
        """

def find_lines_chunk_end(buffer: object, last: bool, chunk_bytes: int, record_bytes: int) -> tuple[bool, int]:
    """
    (whole, end) of the chunk of lines that begin in the first `chunk_bytes`, at least one. If not whole: drop `end` bytes, and show the rest again with more. `last`: the file ends there.
    """

class ParsedJson:
    """Records by column, and the texts that only Python can judge."""

    @property
    def records(self) -> int: ...

    @property
    def odd(self) -> list[tuple[int, int, int]]:
        """
        (records before it, begin, size), in order; of texts, begin is the number of the text.
        """

    def take_block(self) -> ColumnBlock:
        """
        The columns as asked for, to gather rows of; there are none the next time.
        """

class JsonParser:
    """Objects of plain values straight to columns. Thread-safe."""

    def __init__(self, columns: Sequence[tuple[str, ColumnType, bool]], others: Sequence[str] | None) -> None:
        """
        `columns` are (key, type, whether whole numbers are taken as texts), `others` the keys to ignore; None ignores all.
        """

    def parse_lines(self, buffer: object, record_bytes: int) -> ParsedJson:
        """Read an object per line; a longer line is cut, and odd."""

    def parse_texts(self, texts: list[bytes], workers: Workers | None = None) -> list[ParsedJson]:
        """
        Read an object per text; the texts in one part or, with workers, in several.
        """

class ColumnBlock:
    """The columns of some records, to gather rows of. Immutable."""

    def __init__(self, rows: int, columns: list[tuple[object, object | None, object]], types: tuple[object, object, object]) -> None:
        """
        Columns are tensors of (values, splits of texts, splits of rows), which are kept; `types` are torch's uint8, int64 and float32.
        """

    def mark(self, key: object, found: NDArray[numpy.uint8]) -> None:
        """
        Keep what was found about each row for `marked_rows`, before another thread has the block.
        """

    def __len__(self) -> int: ...

    @property
    def types(self) -> list[ColumnType]:
        """What the values of each column are."""

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""

def gather_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, rows: NDArray[numpy.int64], columns: Sequence[int] | None = None) -> list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]:
    """
    (values, splits of rows, splits of texts) of each column, or of some, for these rows of these blocks, in order; the blocks have the same columns.
    """

def permutation(count: int, state: int) -> NDArray[numpy.int64]:
    """
    The numbers from 0 to `count` - 1 in an order that `state` decides: by mix(mix(i ^ state) + state).
    """

def hash_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, rows: NDArray[numpy.int64], columns: Sequence[tuple[int, bool]], seed: int) -> NDArray[numpy.uint64]:
    """
    A hash of what each of these rows has in some columns, given as (number, whether it holds times).
    """

def drawn_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, rows: NDArray[numpy.int64], columns: Sequence[tuple[int, bool]], seed: int, low: float, high: float) -> NDArray[numpy.uint8]:
    """
    Whether the hash of each row, as a number from 0 to below 1, is in [low, high).
    """

def marked_rows(blocks: tuple[ColumnBlock, ...], block_of: NDArray[numpy.int32] | None, rows: NDArray[numpy.int64], key: object) -> NDArray[numpy.uint8] | None:
    """The mark that each row got under this key; None if a block has none."""

class RowTest:
    """What a filter asks of the values of a row. Immutable, thread-safe."""

    def __init__(self, how: str, *, ints: Sequence[int] = (), decimals: Sequence[float] = (), texts: Sequence[bytes] = (), wishes: Sequence[int] = (), shift: int = 0, bits: int = 18446744073709551615, any: int = 0, none: int = 0, all: int = 0) -> None:
        """
        Operands are of one type. Of `one of` each has `wishes`, a bit for each wish that a value which equals it fulfils; a value that passes gt, ge, lt, le, between, startswith or endswith fulfils the first. A row passes if its values together fulfil one of `any`, none of `none` and all of `all`.
        """

    def __getstate__(self) -> tuple[int, list[int], list[float], list[bytes], list[int], int, int, int, int, int]: ...

    def __setstate__(self, arg: tuple[int, Sequence[int], Sequence[float], Sequence[bytes], Sequence[int], int, int, int, int, int], /) -> None: ...

    def passing(self, views: list[tuple[tuple[ColumnBlock, ...], NDArray[numpy.int32] | None, NDArray[numpy.int64], Sequence[int]]], size: int, *, empty: bool | None = None, single: bool = False) -> NDArray[numpy.uint8]:
        """
        Whether each row passes: 0 or 1, `empty` for one without a value, and 2 for one with several if it must be a `single` one. A view is (blocks, block of each row, rows, numbers of columns).
        """

def rows_that_reach(views: list[tuple[tuple[ColumnBlock, ...], NDArray[numpy.int32] | None, NDArray[numpy.int64], Sequence[int]]], thresholds: NDArray[numpy.float32]) -> NDArray[numpy.uint8]:
    """
    Whether a row has as many numbers as there are thresholds, and one reaches that of its place.
    """

class MarkedIds:
    """Ids with a mark each. Immutable, thread-safe."""

    def __init__(self, ids: NDArray[numpy.int64], marks: NDArray[numpy.uint64]) -> None:
        """An id that comes again has the bits of all its marks."""

    def find(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.uint64]:
        """The mark of each id, 0 for one that has none."""

class Histories:
    """The last events of each user, by event time. Not thread-safe."""

    def __init__(self, max: int, max_users: int, types: Sequence[ColumnType]) -> None:
        """`types` are those of the user and of each value."""

    def build(self, block: ColumnBlock, seconds: NDArray[numpy.int64], roles: NDArray[numpy.uint8]) -> tuple[list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]], NDArray[numpy.int64], int]:
        """
        The history of each record as (values, splits of rows, splits of texts) of each value, the records that entered, and how many lacked a value. The block has the user and the values of each record; bit 0 of a role is whether it has a history, bit 1 whether it enters.
        """

    def enter(self, block: ColumnBlock) -> None:
        """Enters users with their seconds and values, as `dump` returns them."""

    def dump(self) -> list[tuple[NDArray[numpy.int64] | NDArray[numpy.float32] | NDArray[numpy.uint8], NDArray[numpy.int64], NDArray[numpy.int64] | None]]:
        """
        The users in the order of their last events, the seconds of their events, and each value.
        """

    @property
    def users(self) -> int:
        """How many users have events."""

    @property
    def events(self) -> int:
        """How many events all users have."""

    @property
    def nbytes(self) -> int:
        """Memory of all events, about."""

class CudaError(RuntimeError):
    pass

class CudaKernel:
    """A kernel with typed parameters. Thread-safe."""

    def launch(self, blocks: int, threads: int, stream: int, arguments: tuple[object, ...]) -> None:
        """
        Put a launch on a stream, by its handle, and return. A pointer is given as a tensor, an address or None; a struct as a buffer of its bytes.
        """

class CudaModule:
    """The kernels of a compiled image."""

    def kernel(self, name: str, signature: str) -> CudaKernel:
        """
        The kernel of that name. `signature` has a letter for each parameter, as in Python's struct module: P pointer, i int32, I uint32, q int64, Q uint64, f float; s is a struct.
        """

class CudaDriver:
    """The CUDA driver, on one device. Thread-safe."""

    def __init__(self, library: str, device: int) -> None:
        """Open the driver's library and a device by its number."""

    def load(self, image: bytes) -> CudaModule:
        """Load a cubin, or PTX."""

class HttpLoadSeen:
    """What the connections of `load_http` saw."""

    @property
    def answers(self) -> dict[int, int]:
        """Status -> number of answers."""

    @property
    def bytes(self) -> int:
        """Bytes of the answers, heads included."""

    @property
    def closed(self) -> int:
        """Connections that the server closed with a request in flight."""

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""

    @property
    def processor_seconds(self) -> float:
        """Of the calling thread meanwhile."""

    def quantile(self, share: float) -> float:
        """
        Return the seconds within which a share of the requests, 0 to 1, was answered; at most 0.8 % too many. Without an answer, infinity.
        """

def load_http(host: str, port: int, request: bytes, connections: int, seconds: float, patience: float = 60.0) -> HttpLoadSeen:
    """
    Send the same bytes over so many connections, again as soon as they are answered, for so many seconds. Answers must be HTTP/1.1 with a content-length.
    """

def keep_freed_memory() -> None:
    """
    Lets malloc keep what is freed, in place of giving it back to the system.
    """
