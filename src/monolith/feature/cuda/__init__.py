"""Layouts on a CUDA device: rows, what is made of them, and their gradients stay in its memory."""

from monolith.feature.cuda.device_gathering import DeviceBatch, DeviceGatherer

__all__ = ["DeviceBatch", "DeviceGatherer"]
