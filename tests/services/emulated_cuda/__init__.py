"""A CUDA device that is none: the kernels of GPUs, compiled by g++ and run on the CPU.

    table = CudaTable(config, device=EmulatedDevice())

Tensors of the device are in CPU memory and do not mix with tensors of the host (`DeviceTensor`). What comes
out has the bits of a GPU, since neither fuses products with sums; only functions that no standard fixes,
such as tanh, may differ. It finds kernels that wait for one another in vain, read lanes that take no part,
depend on the order of threads (by a seed) or are launched with arguments of another size. It does not see
what streams do beside one another: here everything is done when a call returns.
"""

from services.emulated_cuda.device import (
    HOST_MEMORY,
    EmulatedDevice,
    EmulatedEvent,
    EmulatedKernels,
    EmulatedStream,
    EmulationError,
)
from services.emulated_cuda.devices import device_named, device_names, on_devices
from services.emulated_cuda.tensors import DeviceTensor, Room, limited
from services.emulated_cuda.waiting import nothing_waits

__all__ = [
    "HOST_MEMORY",
    "DeviceTensor",
    "EmulatedDevice",
    "EmulatedEvent",
    "EmulatedKernels",
    "EmulatedStream",
    "EmulationError",
    "Room",
    "device_named",
    "device_names",
    "limited",
    "nothing_waits",
    "on_devices",
]
