"""Data: where batches of examples come from."""

from monolith.data.click_log import ClickLog, ClickLogConfig

__all__ = ["ClickLog", "ClickLogConfig"]
