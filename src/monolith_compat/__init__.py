"""Names and adapters of the original system that the library itself does not need.

They are for code and clusters that move over from there. A run finds its old flag names and its schedulers
(TF_CONFIG, MLP, MPI, YARN) through entry points; the rest is imported by user code. Names are imported when
they are first used.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
