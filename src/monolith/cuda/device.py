"""Devices: the part of CUDA that code for a GPU uses, as interfaces.

`CudaDevice` is NVIDIA's; tests have an emulated device that runs the same kernels on the CPU, and one whose
copies take as long as the test says. Nothing here waits for the device unless its name says so. Tensors,
streams and events are torch's own: a kernel may be given any tensor that torch made on `Device.torch_device`.

Work is ordered by streams. A stream does its work in order; two streams are ordered only where one waits for
the other (`wait_for`) or for an event of it. torch reuses the memory of a tensor once the work that was put
on its own stream before it was freed is done, so a tensor that another stream reads must be kept for that
stream (`keep`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from monolith.cuda.kernels import Headers, Kernels, compile_ahead, compiled_kernels
from monolith.errors import AcceleratorError, DeviceFullError


class DeviceEvent(Protocol):
    """A moment on a stream: it is reached when all work put there before it is done."""

    def query(self) -> bool:
        """Return whether the moment was reached."""

    def synchronize(self) -> None:
        """Wait on the host until the moment is reached."""

    def milliseconds_since(self, earlier: Self) -> float:
        """Return the time between two events that were recorded as `timed`; waits for both."""


class DeviceStream(Protocol):
    """Work that a device does in order. Equal streams are one stream."""

    @property
    def handle(self) -> int:
        """The stream's handle, as launches take it."""

    def wait_for(self, other: Self) -> None:
        """Start later work of this stream after all present work of another; the host does not wait."""

    def wait_for_event(self, event: Any) -> None:
        """Start later work of this stream after an event of the same device; the host does not wait."""

    def record(self, *, timed: bool = False) -> DeviceEvent:
        """Return an event that is reached when all present work of the stream is done."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor of another stream until all present work of this one is done."""

    def synchronize(self) -> None:
        """Wait on the host until all present work of the stream is done."""


class DeviceGraph(Protocol):
    """Launches that were captured, to be made again as one."""

    def replay(self) -> None:
        """Put all launches on the current stream, with the arguments that they were captured with."""


class Device(Protocol):
    """A device that kernels run on. Equal devices are one device; thread-safe."""

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""

    @property
    def name(self) -> str:
        """The device's product name, for messages."""

    @property
    def processors(self) -> int:
        """The number of multiprocessors."""

    @property
    def free_bytes(self) -> int:
        """Bytes of free memory that this process may take."""

    def give_back(self) -> None:
        """Return memory to the driver that torch caches for later tensors."""

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of this device."""

    def active(self) -> AbstractContextManager[None]:
        """Make this the current device of the thread: launches and new streams belong to it."""

    def current_stream(self) -> DeviceStream:
        """Return the stream that torch puts the work of this thread on."""

    def new_stream(self) -> DeviceStream: ...

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream of this device the current one of this thread."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized CPU tensor in pinned memory: copies to and from it run asynchronously."""

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Capture all that `work` launches on the current stream, which must not be the default one.

        Nothing of it runs. Memory that it allocates stays allocated as long as the graph, and is shared by
        all graphs of the device: what one has left there is overwritten by the next that is replayed.

        Raises:
            AcceleratorError: Something in it cannot be captured; says what, if the device does.
        """

    def kernels(self, source: str, name: str, headers: Headers = ()) -> Kernels:
        """Return the kernels of a source, compiled once in a process.

        Args:
            source: CUDA C++, with `extern "C"` kernels.
            name: Of the source, for messages.
            headers: The files that it includes; see `headers_of`.

        Raises:
            AcceleratorError: There is no compiler, or the source does not compile.
        """

    def compile_ahead(self, source: str, name: str, headers: Headers = ()) -> None:
        """Start to compile kernels that `kernels` will be asked for; returns at once."""


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
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allowed = torch.cuda.get_per_process_memory_fraction(self.torch_device) * total
        return max(0, min(int(free), int(allowed) - torch.cuda.memory_reserved(self.torch_device)))

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    @property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    # Both are called dozens of times in a step, and torch's own functions take several microseconds each.

    def active(self) -> AbstractContextManager[None]:
        if _current_device() == self.torch_device.index:
            return nullcontext()
        return torch.cuda.device(self.torch_device)

    def current_stream(self) -> CudaStream:
        known = _streams_of(self.torch_device)
        handle = _current_handle(self.torch_device.index)
        found = known.get(handle)
        if found is None:
            found = known[handle] = CudaStream(torch.cuda.current_stream(self.torch_device))
        return found

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: CudaStream) -> Iterator[None]:
        with torch.cuda.stream(stream.stream):
            yield

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        graph = torch.cuda.CUDAGraph()
        # Relaxed: other threads of this process continue to allocate memory and to query events, and
        # so does the caching allocator of this one. What cannot be captured, such as reading a number from
        # the device, fails in every mode.
        pool = _graph_pool(self.torch_device, len(_left_pools(self.torch_device)))[0]
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            work()
        except BaseException as cause:
            try:
                graph.capture_end()
            except RuntimeError:  # the capture is invalid already, and that is what it says
                _leave_pool(self.torch_device, pool)
            if isinstance(cause, RuntimeError):  # torch's errors, of which CUDA's are a kind
                raise AcceleratorError(f"cannot be captured: {cause}") from cause
            raise
        try:
            graph.capture_end()
        except RuntimeError as cause:
            _leave_pool(self.torch_device, pool)
            raise AcceleratorError(f"cannot be captured: {cause}") from cause
        return graph

    def kernels(self, source: str, name: str, headers: Headers = ()) -> Kernels:
        return _kernels(source, name, headers, self.torch_device)

    def compile_ahead(self, source: str, name: str, headers: Headers = ()) -> None:
        compile_ahead(source, name, self.torch_device, headers)


def device_of(device: torch.device | Device | None) -> Device:
    """Return a device that torch may name; the current CUDA device for None.

    Raises:
        AcceleratorError: There is no such device.
    """
    return CudaDevice.of(device) if device is None or isinstance(device, torch.device) else device


def is_full(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is that a device has no room."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, DeviceFullError | torch.OutOfMemoryError):
            return True
        if isinstance(found, RuntimeError) and any(said in str(found) for said in _SAID_IF_FULL):
            return True
        found = found.__cause__
    return False


def room_for_rows(device: Device) -> int:
    """Return the bytes that rows may safely take of a device: a part of what is free, now that torch has
    returned what it caches. The rest is for weights, gradients and batches."""
    device.give_back()
    return device.free_bytes * 3 // 4


_SAID_IF_FULL = ("CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED")
"""By CUDA and its libraries about memory that they take by themselves, not by torch's allocator."""

_c: Any = torch._C  # has these two if torch was built with CUDA; triton calls them, too


def _current_device() -> int:
    return int(_c._cuda_getDevice())


def _current_handle(device: int) -> int:
    return int(_c._cuda_getCurrentRawStream(device))


@functools.cache
def _streams_of(device: torch.device) -> dict[int, CudaStream]:  # noqa: ARG001
    """Return the streams of a device by their handles: torch has few, and never gives one up."""
    return {}


def _leave_pool(device: torch.device, pool: Any) -> None:
    """Have torch's allocator leave the memory of a capture whose end failed; later captures get other memory.

    Otherwise torch behaves as if it were capturing: it takes no memory back that another stream has used, and
    refuses the next capture of the process ("already recording to mempool_id").
    """
    with suppress(RuntimeError):  # it was left already
        _c._cuda_endAllocateToPool(device.index, pool)
    _left_pools(device).append(pool)


@functools.cache
def _left_pools(device: torch.device) -> list[Any]:  # noqa: ARG001
    """Return the pools of captures on a device that failed."""
    return []


@functools.cache
def _graph_pool(device: torch.device, number: int) -> tuple[Any, Any]:  # noqa: ARG001
    """Return the memory that all graphs of a device share: no two of them run at the same time.

    torch drops such memory with the last graph in it, and refuses to capture into it again. So a graph of one
    launch stays there.

    Args:
        number: How many captures on the device have failed before; see `_leave_pool`.
    """
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        pool, stays = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        stays.capture_begin(pool=pool, capture_error_mode="relaxed")
        torch.zeros(1, device=device)
        stays.capture_end()
    return pool, stays


@functools.cache
def _kernels(source: str, name: str, headers: Headers, device: torch.device) -> Kernels:
    """Return the compiled kernels of a source: once in a process, since tables of equal rows share them."""
    return compiled_kernels(source, name, device, headers)
