"""The page: what runs and servers say of themselves, drawn, live, in a browser of this machine."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
