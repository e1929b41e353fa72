"""The compiled core. Arrays go in and out as numpy views; nothing here knows torch.

What the classes do is said by the rooms that wrap them, `monolith.table` above all.
"""

from monolith.native._core import (
    Admission,
    CompressorKind,
    CompressorSpec,
    DecodedEntries,
    EntryDumpCodec,
    FilterSplitMeta,
    OptimizerSpec,
    ProbabilisticFilter,
    RawRows,
    SegmentSpec,
    SlidingFilter,
    SlidingFilterMeta,
    Table,
    TableGroup,
    TableStats,
    TouchedKeySet,
    Workers,
    crc32c,
    fused_offsets,
    masked_crc32c,
)

__all__ = [
    "Admission",
    "CompressorKind",
    "CompressorSpec",
    "DecodedEntries",
    "EntryDumpCodec",
    "FilterSplitMeta",
    "OptimizerSpec",
    "ProbabilisticFilter",
    "RawRows",
    "SegmentSpec",
    "SlidingFilter",
    "SlidingFilterMeta",
    "Table",
    "TableGroup",
    "TableStats",
    "TouchedKeySet",
    "Workers",
    "crc32c",
    "fused_offsets",
    "masked_crc32c",
]
