from monolith.cuda.device import CudaDevice, Device, DeviceEvent, DeviceStream, device_of
from monolith.cuda.kernels import THREADS, CudaKernels, KernelCompiler, Kernels, blocks_for

__all__ = [
    "THREADS",
    "CudaDevice",
    "CudaKernels",
    "Device",
    "DeviceEvent",
    "DeviceStream",
    "KernelCompiler",
    "Kernels",
    "blocks_for",
    "device_of",
]
