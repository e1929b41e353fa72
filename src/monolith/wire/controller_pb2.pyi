from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopTrainingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopTrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTrainingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlockStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlockStatusResponse(_message.Message):
    __slots__ = ("blocked_indices", "unblocked_indices")
    BLOCKED_INDICES_FIELD_NUMBER: _ClassVar[int]
    UNBLOCKED_INDICES_FIELD_NUMBER: _ClassVar[int]
    blocked_indices: _containers.RepeatedScalarFieldContainer[int]
    unblocked_indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocked_indices: _Optional[_Iterable[int]] = ..., unblocked_indices: _Optional[_Iterable[int]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainingStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTrainingStatusResponse(_message.Message):
    __slots__ = ("global_step",)
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    def __init__(self, global_step: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps", "seconds")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    seconds: float
    def __init__(self, steps: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("path", "steps", "seconds")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    path: str
    steps: int
    seconds: float
    def __init__(self, path: _Optional[str] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("action", "version", "reason")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    action: str
    version: str
    reason: str
    def __init__(self, action: _Optional[str] = ..., version: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: str
    def __init__(self, shares: _Optional[str] = ...) -> None: ...

class ControllerHooksProto(_message.Message):
    __slots__ = ("action",)
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[ControllerHooksProto.Action]
        TRIGGER_SAVE: _ClassVar[ControllerHooksProto.Action]
        STOP: _ClassVar[ControllerHooksProto.Action]
    UNKNOWN: ControllerHooksProto.Action
    TRIGGER_SAVE: ControllerHooksProto.Action
    STOP: ControllerHooksProto.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    action: ControllerHooksProto.Action
    def __init__(self, action: _Optional[_Union[ControllerHooksProto.Action, str]] = ...) -> None: ...
