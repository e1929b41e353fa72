"""Made-up data whose truth is known: a log of clicks, and a stream that drifts."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
