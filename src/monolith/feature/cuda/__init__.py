"""Layouts on a CUDA device: rows, what is made of them, and their gradients stay in its memory."""

from monolith.feature.cuda.device_gathering import DeviceBatch, DeviceGatherer, DeviceIds, PaddedSteps

__all__ = ["DeviceBatch", "DeviceGatherer", "DeviceIds", "PaddedSteps"]
