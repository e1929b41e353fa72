from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FidList(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class FloatList(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, value: _Optional[_Iterable[float]] = ...) -> None: ...

class Int64List(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class BytesList(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, value: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Feature(_message.Message):
    __slots__ = ("name", "fid", "float_value", "int64_value", "bytes_value", "fid_list", "float_list", "int64_list", "bytes_list")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FID_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    INT64_VALUE_FIELD_NUMBER: _ClassVar[int]
    BYTES_VALUE_FIELD_NUMBER: _ClassVar[int]
    FID_LIST_FIELD_NUMBER: _ClassVar[int]
    FLOAT_LIST_FIELD_NUMBER: _ClassVar[int]
    INT64_LIST_FIELD_NUMBER: _ClassVar[int]
    BYTES_LIST_FIELD_NUMBER: _ClassVar[int]
    name: str
    fid: _containers.RepeatedScalarFieldContainer[int]
    float_value: _containers.RepeatedScalarFieldContainer[float]
    int64_value: _containers.RepeatedScalarFieldContainer[int]
    bytes_value: _containers.RepeatedScalarFieldContainer[bytes]
    fid_list: _containers.RepeatedCompositeFieldContainer[FidList]
    float_list: _containers.RepeatedCompositeFieldContainer[FloatList]
    int64_list: _containers.RepeatedCompositeFieldContainer[Int64List]
    bytes_list: _containers.RepeatedCompositeFieldContainer[BytesList]
    def __init__(self, name: _Optional[str] = ..., fid: _Optional[_Iterable[int]] = ..., float_value: _Optional[_Iterable[float]] = ..., int64_value: _Optional[_Iterable[int]] = ..., bytes_value: _Optional[_Iterable[bytes]] = ..., fid_list: _Optional[_Iterable[_Union[FidList, _Mapping]]] = ..., float_list: _Optional[_Iterable[_Union[FloatList, _Mapping]]] = ..., int64_list: _Optional[_Iterable[_Union[Int64List, _Mapping]]] = ..., bytes_list: _Optional[_Iterable[_Union[BytesList, _Mapping]]] = ...) -> None: ...
