"""Metrics of training: what is measured, over which window, and the AUC natively."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
