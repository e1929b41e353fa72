"""The emulated device, and kernels as g++ makes them of their source."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from services.emulated_cuda.tensors import DEVICE, HostStays, free_bytes
from torch import Tensor

from monolith import native
from monolith.cuda.kernels import THREADS, Argument, Headers, Kernels, kernel_signatures
from monolith.errors import AcceleratorError

HERE = Path(__file__).parent
# Sources define the same names differently, so that none may be shared between what is made of them.
ALONE = ["-fvisibility=hidden", "-fno-gnu-unique", "-Wl,-Bsymbolic"]
OPTIONS = ["-std=c++17", "-Og", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
HOST_MEMORY = torch.device("cpu")
_streams = itertools.count(1)


class EmulationError(AssertionError):
    """A kernel does what it must not do on a GPU."""


@dataclass(frozen=True, slots=True)
class EmulatedEvent:
    """A moment, which has come."""

    seconds: float = field(default_factory=time.perf_counter)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def milliseconds_since(self, earlier: EmulatedEvent) -> float:
        return 1000 * (self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True)
class EmulatedStream:
    """A stream by its handle; all that is put there is done at once."""

    handle: int = 0

    def wait_for(self, other: EmulatedStream) -> None:
        pass

    def wait_for_event(self, event: EmulatedEvent) -> None:
        pass

    def record(self, *, timed: bool = False) -> EmulatedEvent:
        del timed
        return EmulatedEvent()

    def keep(self, tensor: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class EmulatedGraph:
    """Work that is done again by each replay, and not when it is captured.

    A graph has only what the device did: tensors of the host that the work has changed are put back.
    """

    work: Callable[[], None]

    def replay(self) -> None:
        with HostStays():
            self.work()


@dataclass(frozen=True)
class EmulatedDevice:
    """A `Device` whose tensors are `DeviceTensor`: they and tensors in host memory do not mix.

    Args:
        torch_device: `HOST_MEMORY` makes its tensors plain CPU tensors, which mix with those of the host, for
            tests of what `DeviceTensor` cannot do: sparse gradients, random numbers by a generator.
        seed: The order in which threads go on; 0 for the plain one, which is faster.
        processors: Few, so that few threads do much work each.
    """

    seed: int = 0
    processors: int = 2
    torch_device: torch.device = field(default=DEVICE)
    _own: threading.local = field(default_factory=threading.local, compare=False, repr=False)

    @property
    def name(self) -> str:
        return "an emulated device"

    @property
    def free_bytes(self) -> int:
        return free_bytes()

    def give_back(self) -> None:
        pass

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.torch_device

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self) -> EmulatedStream:
        return getattr(self._own, "stream", EmulatedStream())

    def new_stream(self) -> EmulatedStream:
        return EmulatedStream(next(_streams))

    @contextmanager
    def on(self, stream: EmulatedStream) -> Iterator[None]:
        before = self.current_stream()
        self._own.stream = stream
        try:
            yield
        finally:
            self._own.stream = before

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, work: Callable[[], None]) -> EmulatedGraph:
        return EmulatedGraph(work)

    def kernels(self, source: str, name: str, headers: Headers = ()) -> EmulatedKernels:
        return _kernels(source, name, headers, self.seed, self.torch_device)

    def compile_ahead(self, source: str, name: str, headers: Headers = ()) -> None:
        pass


class EmulatedKernels(Kernels):
    """The kernels of one source, run at once. Thread-safe.

    The core launches them as it does on a GPU, through the functions of `driver.cc`.
    """

    where: torch.device
    """The device whose tensors they take."""

    def launch(
        self, kernel: str, blocks: int, *arguments: Argument, stream: int, threads: int = THREADS
    ) -> None:
        assert isinstance(stream, int)
        for number, one in enumerate(arguments):
            if isinstance(one, Tensor) and one.device != self.where:
                raise EmulationError(f"kernel {kernel!r}: argument {number} is a tensor in host memory")
        try:
            super().launch(kernel, blocks, *arguments, stream=stream, threads=threads)
        except AcceleratorError as error:
            raise EmulationError(str(error)) from error


@functools.cache
def _kernels(source: str, name: str, headers: Headers, seed: int, where: torch.device) -> EmulatedKernels:
    library, driver = load(source, name, headers), native.CudaDriver(str(_made_of("driver")), seed)
    made = EmulatedKernels(driver, str(library).encode(), kernel_signatures(source, headers))
    made.where = where
    return made


# Compiling


@functools.cache
def load(source: str, name: str, headers: Headers = ()) -> Path:
    """Return a source as a library; compiled once in all processes, until its text changes."""
    ctypes.CDLL(str(_made_of("runtime")), mode=ctypes.RTLD_GLOBAL)  # kernels find what they need of it
    kernels = "\n".join(f"EMULATED_KERNEL({kernel})" for kernel in kernel_signatures(source, headers))
    text = f'#include "cuda.h"\n#line 1 "{name}.cu"\n{source}\n#line 1 "launches"\n{kernels}\n'
    return _compiled(text, name, ALONE, headers)


@functools.cache
def _made_of(name: str) -> Path:
    return _compiled((HERE / f"{name}.cc").read_text("utf-8"), name, ["-O2"])


def _compiled(text: str, name: str, more: list[str], headers: Headers = ()) -> Path:
    options = [*OPTIONS, *more]
    own = [(HERE / header).read_text("utf-8") for header in ("cuda.h", "runtime.h")]
    about = "\0".join([text, *own, *(part for header in headers for part in header), *options])
    made = _folder() / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:32]}.so"
    if made.exists():
        return made
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():  # nobody else was faster
            aside = made.with_suffix(f".{os.getpid()}")
            with tempfile.TemporaryDirectory() as included:
                for header, content in headers:
                    Path(included, header).write_text(content, "utf-8")
                folders = [f"-I{included}", f"-I{HERE}"]
                command = ["g++", *options, *folders, "-x", "c++", "-", "-o", str(aside), "-lm", "-ldl"]
                found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            if found.returncode:
                raise EmulationError(f"{name} does not compile:\n{found.stderr}")
            aside.replace(made)
    return made


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"monolith-emulated-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to somebody else"
    return folder
