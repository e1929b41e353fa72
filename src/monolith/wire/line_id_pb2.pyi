from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LineId(_message.Message):
    __slots__ = ("uid", "req_time", "item_id", "actions", "chnid", "pre_actions", "sample_rate", "special_strategies", "device_type", "cid", "user_id", "is_draw", "rank", "data_source_name")
    UID_FIELD_NUMBER: _ClassVar[int]
    REQ_TIME_FIELD_NUMBER: _ClassVar[int]
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    CHNID_FIELD_NUMBER: _ClassVar[int]
    PRE_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_STRATEGIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    CID_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_DRAW_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_NAME_FIELD_NUMBER: _ClassVar[int]
    uid: int
    req_time: int
    item_id: int
    actions: _containers.RepeatedScalarFieldContainer[int]
    chnid: int
    pre_actions: _containers.RepeatedScalarFieldContainer[int]
    sample_rate: float
    special_strategies: _containers.RepeatedScalarFieldContainer[int]
    device_type: str
    cid: str
    user_id: str
    is_draw: bool
    rank: int
    data_source_name: str
    def __init__(self, uid: _Optional[int] = ..., req_time: _Optional[int] = ..., item_id: _Optional[int] = ..., actions: _Optional[_Iterable[int]] = ..., chnid: _Optional[int] = ..., pre_actions: _Optional[_Iterable[int]] = ..., sample_rate: _Optional[float] = ..., special_strategies: _Optional[_Iterable[int]] = ..., device_type: _Optional[str] = ..., cid: _Optional[str] = ..., user_id: _Optional[str] = ..., is_draw: _Optional[bool] = ..., rank: _Optional[int] = ..., data_source_name: _Optional[str] = ...) -> None: ...
