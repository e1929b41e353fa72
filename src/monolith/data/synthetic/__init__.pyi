"""Made-up data whose truth is known: a log of clicks, and a stream that drifts."""

from monolith.data.synthetic.click_log import ClickLog, ClickLogConfig
from monolith.data.synthetic.drift import DriftConfig, DriftingStream

__all__ = [
    "ClickLog",
    "ClickLogConfig",
    "DriftConfig",
    "DriftingStream",
]
