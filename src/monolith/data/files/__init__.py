"""Files as a source: found, shared out, put in order, read."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
