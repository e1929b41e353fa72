from monolith.cuda.device import CudaDevice, Device, DeviceEvent, DeviceStream, device_of
from monolith.cuda.graphs import ModuleGraph
from monolith.cuda.kernels import THREADS, KernelCompiler, Kernels, blocks_for
from monolith.cuda.transfers import Landing, PinnedPool, Sent, Staged, Transfers

__all__ = [
    "THREADS",
    "CudaDevice",
    "Device",
    "DeviceEvent",
    "DeviceStream",
    "KernelCompiler",
    "Kernels",
    "Landing",
    "ModuleGraph",
    "PinnedPool",
    "Sent",
    "Staged",
    "Transfers",
    "blocks_for",
    "device_of",
]
