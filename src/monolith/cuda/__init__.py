"""CUDA devices: their streams, events and memory, and kernels compiled for them when first used.

Code for a GPU is written against `Device` and not against `torch.cuda`, so that it also runs on a device of
another kind: tests have one that runs the kernels on the CPU.
"""

from monolith.front_door import open_when_asked

__getattr__, __dir__ = open_when_asked(__name__)
