from monolith.cuda.device import CudaDevice, Device, DeviceEvent, DeviceGraph, DeviceStream, device_of
from monolith.cuda.graphs import ModuleGraph
from monolith.cuda.kernels import THREADS, KernelCompiler, Kernels, blocks_for
from monolith.cuda.transfers import Carrier, Carriers, Landing, PinnedPool, Sent, Staged, Transfers
from monolith.cuda.verdict import BatchVerdict, Kept

__all__ = [
    "THREADS",
    "BatchVerdict",
    "Carrier",
    "Carriers",
    "CudaDevice",
    "Device",
    "DeviceEvent",
    "DeviceGraph",
    "DeviceStream",
    "Kept",
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
