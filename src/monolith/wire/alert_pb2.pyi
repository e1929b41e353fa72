from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AlertMessage(_message.Message):
    __slots__ = ("user",)
    USER_FIELD_NUMBER: _ClassVar[int]
    user: str
    def __init__(self, user: _Optional[str] = ...) -> None: ...

class KafkaAlert(_message.Message):
    __slots__ = ("topic", "group")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class TrainingAlert(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class AlertProto(_message.Message):
    __slots__ = ("alert_message", "kafka_alert", "training_alert", "start_delay_sec", "check_interval_sec")
    ALERT_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KAFKA_ALERT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_ALERT_FIELD_NUMBER: _ClassVar[int]
    START_DELAY_SEC_FIELD_NUMBER: _ClassVar[int]
    CHECK_INTERVAL_SEC_FIELD_NUMBER: _ClassVar[int]
    alert_message: AlertMessage
    kafka_alert: KafkaAlert
    training_alert: TrainingAlert
    start_delay_sec: int
    check_interval_sec: int
    def __init__(self, alert_message: _Optional[_Union[AlertMessage, _Mapping]] = ..., kafka_alert: _Optional[_Union[KafkaAlert, _Mapping]] = ..., training_alert: _Optional[_Union[TrainingAlert, _Mapping]] = ..., start_delay_sec: _Optional[int] = ..., check_interval_sec: _Optional[int] = ...) -> None: ...
