"""Servables: folders of models that can be asked, by version."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
