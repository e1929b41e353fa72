from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BundleHeader(_message.Message):
    __slots__ = ("num_shards", "endianness", "version")
    class Endianness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LITTLE: _ClassVar[BundleHeader.Endianness]
        BIG: _ClassVar[BundleHeader.Endianness]
    LITTLE: BundleHeader.Endianness
    BIG: BundleHeader.Endianness
    class Version(_message.Message):
        __slots__ = ("producer", "min_consumer")
        PRODUCER_FIELD_NUMBER: _ClassVar[int]
        MIN_CONSUMER_FIELD_NUMBER: _ClassVar[int]
        producer: int
        min_consumer: int
        def __init__(self, producer: _Optional[int] = ..., min_consumer: _Optional[int] = ...) -> None: ...
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    ENDIANNESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    num_shards: int
    endianness: BundleHeader.Endianness
    version: BundleHeader.Version
    def __init__(self, num_shards: _Optional[int] = ..., endianness: _Optional[_Union[BundleHeader.Endianness, str]] = ..., version: _Optional[_Union[BundleHeader.Version, _Mapping]] = ...) -> None: ...

class BundleShape(_message.Message):
    __slots__ = ("dim", "unknown_rank")
    class Dim(_message.Message):
        __slots__ = ("size",)
        SIZE_FIELD_NUMBER: _ClassVar[int]
        size: int
        def __init__(self, size: _Optional[int] = ...) -> None: ...
    DIM_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_RANK_FIELD_NUMBER: _ClassVar[int]
    dim: _containers.RepeatedCompositeFieldContainer[BundleShape.Dim]
    unknown_rank: bool
    def __init__(self, dim: _Optional[_Iterable[_Union[BundleShape.Dim, _Mapping]]] = ..., unknown_rank: _Optional[bool] = ...) -> None: ...

class BundleSlice(_message.Message):
    __slots__ = ("extent",)
    class Extent(_message.Message):
        __slots__ = ("start", "length")
        START_FIELD_NUMBER: _ClassVar[int]
        LENGTH_FIELD_NUMBER: _ClassVar[int]
        start: int
        length: int
        def __init__(self, start: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    extent: _containers.RepeatedCompositeFieldContainer[BundleSlice.Extent]
    def __init__(self, extent: _Optional[_Iterable[_Union[BundleSlice.Extent, _Mapping]]] = ...) -> None: ...

class BundleEntry(_message.Message):
    __slots__ = ("dtype", "shape", "shard_id", "offset", "size", "crc32c", "slices")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    dtype: int
    shape: BundleShape
    shard_id: int
    offset: int
    size: int
    crc32c: int
    slices: _containers.RepeatedCompositeFieldContainer[BundleSlice]
    def __init__(self, dtype: _Optional[int] = ..., shape: _Optional[_Union[BundleShape, _Mapping]] = ..., shard_id: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., crc32c: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[BundleSlice, _Mapping]]] = ...) -> None: ...
