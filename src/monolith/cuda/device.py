"""Devices: what code that computes on a GPU needs of CUDA.

Nothing here waits for the device unless its name says so. Tensors, streams and events go together with
torch's own: a tensor made by torch on `Device.torch_device` is one a kernel may be given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from monolith.cuda.kernels import Headers, Kernels, compiled_kernels
from monolith.errors import AcceleratorError


class DeviceEvent(Protocol):
    """A moment on a stream: when all that was put there before it is done."""

    def query(self) -> bool:
        """Whether the moment has come."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""

    def milliseconds_since(self, earlier: Self) -> float:
        """Return the time between two events that were recorded as `timed`; waits for both."""


class DeviceStream(Protocol):
    """Work that a device does in order. Equal streams are one stream."""

    @property
    def handle(self) -> int:
        """The stream as kernels are launched on it."""

    def wait_for(self, other: Self) -> None:
        """Have what follows here begin after what stands on another stream now."""

    def wait_for_event(self, event: Any) -> None:
        """Have what follows here begin after an event of the same device."""

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """Return the event of all that stands on the stream now."""

    def keep(self, tensor: Tensor) -> None:
        """Have the memory of a tensor of another stream outlive what stands on this one now."""

    def synchronize(self) -> None:
        """Wait on the host until all that stands here is done."""


class Device(Protocol):
    """A device that kernels run on. Equal devices are one device; thread-safe."""

    @property
    def torch_device(self) -> torch.device:
        """Where torch puts tensors of this device."""

    @property
    def name(self) -> str:
        """What it calls itself, for people."""

    @property
    def processors(self) -> int:
        """How many multiprocessors it has."""

    @property
    def free_bytes(self) -> int:
        """Memory that is to be had."""

    def give_back(self) -> None:
        """Give memory back that torch keeps for tensors to come."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of this device."""

    def active(self) -> AbstractContextManager[None]:
        """Make it the current device of this thread: launches and streams are of the current one."""

    def current_stream(self) -> DeviceStream:
        """Return the stream that torch and this thread put work on."""

    def new_stream(self) -> DeviceStream: ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream of this device the current one of this thread."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a CPU tensor, not filled, that copies to and from the device need not wait for."""

    def kernels(self, source: str, name: str, headers: Headers = ()) -> Kernels:
        """Return the kernels of a source, compiled once in a process.

        Args:
            source: CUDA C++, with `extern "C"` kernels.
            name: Of the source, for messages.
            headers: The files that it includes; see `headers_of`.

        Raises:
            AcceleratorError: There is no compiler, or the source does not compile.
        """


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A `DeviceEvent` of CUDA."""

    event: torch.cuda.Event

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()

    def milliseconds_since(self, earlier: CudaEvent) -> float:
        earlier.synchronize()
        self.synchronize()
        return float(earlier.event.elapsed_time(self.event))


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A `DeviceStream` of CUDA."""

    stream: torch.cuda.Stream

    @property
    def handle(self) -> int:
        return int(self.stream.cuda_stream)

    def wait_for(self, other: CudaStream) -> None:
        self.stream.wait_stream(other.stream)

    def wait_for_event(self, event: CudaEvent) -> None:
        self.stream.wait_event(event.event)

    def record(self, *, timed: bool = False) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return CudaEvent(event)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A `Device` of NVIDIA. `CudaDevice.of` makes one."""

    torch_device: torch.device

    @classmethod
    def of(cls, device: torch.device | None = None) -> CudaDevice:
        """Return the device that torch calls so; the current one without a number.

        Raises:
            AcceleratorError: There is none.
        """
        if device is not None and device.type != "cuda":
            raise AcceleratorError(f"{device} is no CUDA device; name one as torch does, cuda:0")
        if not torch.cuda.is_available():
            raise AcceleratorError(
                "no CUDA device is there; it needs a machine with an NVIDIA GPU and a CUDA build of torch"
            )
        index = None if device is None else device.index
        if index is None:
            index = torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise AcceleratorError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()}")
        return cls(torch.device("cuda", index))

    @property
    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.torch_device))

    @property
    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    @property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def active(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.torch_device)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: CudaStream) -> Iterator[None]:
        with torch.cuda.stream(stream.stream):
            yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def kernels(self, source: str, name: str, headers: Headers = ()) -> Kernels:
        return _kernels(source, name, headers, self.torch_device)


def device_of(device: torch.device | Device | None) -> Device:
    """Return a device that torch may name; the current CUDA device for None.

    Raises:
        AcceleratorError: There is no such device.
    """
    return CudaDevice.of(device) if device is None or isinstance(device, torch.device) else device


@functools.cache
def _kernels(source: str, name: str, headers: Headers, device: torch.device) -> Kernels:
    """Return the compiled kernels of a source: once in a process, since tables of equal rows share them."""
    return compiled_kernels(source, name, device, headers)
