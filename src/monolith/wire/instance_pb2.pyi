from monolith.wire import feature_pb2 as _feature_pb2
from monolith.wire import line_id_pb2 as _line_id_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LabelTag(_message.Message):
    __slots__ = ("key", "val")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VAL_FIELD_NUMBER: _ClassVar[int]
    key: int
    val: float
    def __init__(self, key: _Optional[int] = ..., val: _Optional[float] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("fid", "value", "label", "instance_weight", "line_id", "dense", "label_tag", "next_fid", "feature", "data_source_key")
    FID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LINE_ID_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    LABEL_TAG_FIELD_NUMBER: _ClassVar[int]
    NEXT_FID_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_KEY_FIELD_NUMBER: _ClassVar[int]
    fid: _containers.RepeatedScalarFieldContainer[int]
    value: _containers.RepeatedScalarFieldContainer[float]
    label: _containers.RepeatedScalarFieldContainer[float]
    instance_weight: float
    line_id: _line_id_pb2.LineId
    dense: _containers.RepeatedScalarFieldContainer[float]
    label_tag: LabelTag
    next_fid: _containers.RepeatedScalarFieldContainer[int]
    feature: _containers.RepeatedCompositeFieldContainer[_feature_pb2.Feature]
    data_source_key: int
    def __init__(self, fid: _Optional[_Iterable[int]] = ..., value: _Optional[_Iterable[float]] = ..., label: _Optional[_Iterable[float]] = ..., instance_weight: _Optional[float] = ..., line_id: _Optional[_Union[_line_id_pb2.LineId, _Mapping]] = ..., dense: _Optional[_Iterable[float]] = ..., label_tag: _Optional[_Union[LabelTag, _Mapping]] = ..., next_fid: _Optional[_Iterable[int]] = ..., feature: _Optional[_Iterable[_Union[_feature_pb2.Feature, _Mapping]]] = ..., data_source_key: _Optional[int] = ...) -> None: ...
