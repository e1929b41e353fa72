"""Following: a served model that is brought up to date by what a trainer publishes."""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
