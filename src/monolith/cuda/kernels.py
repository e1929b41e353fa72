"""Kernels: CUDA source, compiled when first used and kept, launched on torch's stream.

The compiler is NVRTC, which every CUDA build of torch brings, and the driver loads its output: a user needs
neither nvcc nor a host compiler, and importing this needs no GPU. A program takes NVRTC seconds, so programs
are compiled by several threads at once, and their images are cached in a folder of the user, by source,
options, architecture, compiler and driver.

NVRTC is called by ctypes, a few times in the life of a process. Launches happen many times per step, so the
compiled core does them (`native.CudaDriver`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from monolith import filesystem, native
from monolith.errors import AcceleratorError

_log = logging.getLogger(__name__)

THREADS = 256
"""Threads of a block, unless a kernel needs another number."""

OPTIONS = ("--std=c++17", "--fmad=false", "-default-device")
"""What every source is compiled with: no product is fused with a sum, so that bits are those of the host."""

_DRIVER = "libcuda.so.1"
_DIGEST_BYTES = 32
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)'
)
_LETTERS = {"int": "i", "unsigned": "I", "u32": "I", "i64": "q", "long long": "q", "u64": "Q", "float": "f"}
_QUALIFIERS = {"const", "__grid_constant__", "CONSTANT"}

Argument: TypeAlias = Tensor | float | ctypes.Structure | ctypes.Array[Any] | bytes | memoryview | None
Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Name and text of every file that a source includes, directly or not."""


class Kernels:
    """The kernels of one source, loaded on one device. Thread-safe.

    A launch is prepared once per kernel: the types of its parameters are read from the source, and the
    compiled core packs the arguments of each launch by them.

    Args:
        driver: The driver, on the device.
        image: The compiled source.
        signatures: The letter of each parameter's type by kernel; see `kernel_signatures`.

    Raises:
        AcceleratorError: The driver does not accept the image.
    """

    def __init__(self, driver: native.CudaDriver, image: bytes, signatures: Mapping[str, str]) -> None:
        self._signatures = signatures
        self._kernels: dict[str, native.CudaKernel] = {}
        with _translated():
            self._module = driver.load(image)

    def launch(
        self, kernel: str, blocks: int, *arguments: Argument, stream: int, threads: int = THREADS
    ) -> None:
        """Put a launch on a stream, by its handle; nothing is waited for.

        Args:
            blocks: The size of the grid; 0 launches nothing.
            arguments: A tensor is passed as the pointer to its first element, None as a null pointer, a
                number as the type that the kernel declares, and a struct as a buffer of its bytes, such as a
                ctypes one.

        Raises:
            AcceleratorError: The driver refuses the launch; names the kernel and the CUDA error.
            ValueError: An argument does not fit its parameter, or there are too many or too few.
        """
        if blocks <= 0:
            return
        found = self._kernels.get(kernel)
        if found is None:
            # Two threads may both prepare it: either result is as good.
            with _translated():
                found = self._kernels[kernel] = self._module.kernel(kernel, self._signatures[kernel])
        try:
            found.launch(blocks, threads, stream, arguments)
        except native.CudaError as cause:
            raise AcceleratorError(str(cause)) from cause


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except native.CudaError as cause:
        raise AcceleratorError(str(cause)) from cause


def compile_ahead(source: str, name: str, device: torch.device, headers: Headers = ()) -> None:
    """Start to compile a source on another thread, so that `compiled_kernels` has less to wait for.

    An error is raised by `compiled_kernels`.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    _compiling(source, name, device, headers)


def compiled_kernels(source: str, name: str, device: torch.device, headers: Headers = ()) -> Kernels:
    """Compile a source for a CUDA device, unless the cache has it, and load it.

    Args:
        source: CUDA C++, with `extern "C"` kernels.
        name: Of the source, for messages.
        headers: The files that it includes.

    Raises:
        AcceleratorError: There is no CUDA device or no compiler, or the source does not compile.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with _translated():
        driver = native.CudaDriver(_DRIVER, device.index)
    asked = time.perf_counter()
    image = _compiling(source, name, device, headers).result()
    began = time.perf_counter()
    made = Kernels(driver, image, kernel_signatures(source, headers))
    _cache().note_wait(time.perf_counter() - asked)
    _log.debug("kernels %s: loaded on %s in %.3f s", name, device, time.perf_counter() - began)
    return made


def kernel_signatures(source: str, headers: Headers = ()) -> dict[str, str]:
    """Return a letter for each parameter of each kernel, as `native.CudaModule.kernel` takes them.

    The source is the only place that declares them: `void f(const i64* ids, int n, Cells cells)` is "Pis".
    """
    text = "\n".join([source, *(header for _, header in headers)])
    return {
        name: "".join(_letter(parameter) for parameter in parameters.split(",") if parameter.strip())
        for name, parameters in _KERNEL.findall(text)
    }


def _letter(parameter: str) -> str:
    if "*" in parameter:
        return "P"
    *words, _ = parameter.split()
    return _LETTERS.get(" ".join(word for word in words if word not in _QUALIFIERS), "s")


def headers_of(source: str, folders: Sequence[Traversable], made: Mapping[str, str] | None = None) -> Headers:
    """Return all files that a source includes by `#include "name"`, directly or not.

    Args:
        folders: The folders to look in, in this order.
        made: Files that are on no disk, by name.
    """
    found: dict[str, str] = dict(made or {})
    waiting = [source, *found.values()]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found:
                file = next(path for folder in folders if (path := folder.joinpath(name)).is_file())
                found[name] = file.read_text("utf-8")
                waiting.append(found[name])
    return tuple(sorted(found.items()))


def blocks_for(work: int, *, per_block: int = THREADS) -> int:
    """Return how many blocks do so much work."""
    return -(-work // per_block)


# Compiling


@functools.cache
def _compiling(source: str, name: str, device: torch.device, headers: Headers) -> Future[bytes]:
    """Return the image of a source, which a thread compiles or reads: once in a process."""
    return _threads().submit(_compiled, source, name, device, headers)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # NVRTC is called without the GIL, and compiles one program per thread.
    return ThreadPoolExecutor(os.cpu_count() or 1, "compiles-kernels")


def _compiled(source: str, name: str, device: torch.device, headers: Headers) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}"
    compiler = KernelCompiler(_nvrtc())
    texts = [part for header in headers for part in header]
    about = "\0".join([source, *texts, *OPTIONS, architecture, compiler.version, str(_driver_version())])
    return _cache().image(name, about, lambda: compiler.compile(source, f"{name}.cu", architecture, headers))


@dataclass(frozen=True, slots=True)
class KernelCounts:
    """The programs that a process has loaded on GPUs, and how long it waited for them."""

    compiled: int = 0
    cached: int = 0
    """Those that another process, or an earlier one, had compiled."""
    seconds: float = 0.0
    """In which a thread waited for a program to be compiled, read and loaded."""


def kernel_counts() -> KernelCounts:
    """Return the programs of this process so far. From any thread."""
    return _cache().counts


@functools.cache
def _cache() -> KernelCache:
    return KernelCache(_cache_folder())


class KernelCache:
    """Images of programs in a folder, one file each. Several processes may use it at the same time.

    A file is the SHA-256 of the image, then the image. A file that is damaged counts as absent: a machine
    that lost power may leave one.

    Args:
        folder: Made when first written to. If that fails, every process compiles its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.counts = KernelCounts()  # set under the lock

    def note_wait(self, seconds: float) -> None:
        """Count the seconds in which a thread waited for a program."""
        with self._lock:
            self.counts = replace(self.counts, seconds=self.counts.seconds + seconds)

    def image(self, name: str, about: str, compile_it: Callable[[], bytes]) -> bytes:
        """Return an image from the cache, or compile it and keep it.

        Args:
            name: Names the program in files and messages.
            about: All that the image depends on.
        """
        began = time.perf_counter()
        kept = self._folder / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:32]}.image"
        image, cached = self._read(kept), 1
        if image is None:
            image, cached = compile_it(), 0
            self._write(kept, image)
        with self._lock:
            now = self.counts
            self.counts = replace(now, compiled=now.compiled + 1 - cached, cached=now.cached + cached)
        what = "read from the cache" if cached else "compiled"
        _log.debug("kernels %s: %s in %.3f s (%s)", name, what, time.perf_counter() - began, kept)
        return image

    def _read(self, kept: Path) -> bytes | None:
        try:
            with os.fdopen(filesystem.open_regular(kept, os.O_RDONLY, own=True), "rb") as file:
                found = file.read()
        except OSError:
            return None
        digest, image = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if hashlib.sha256(image).digest() == digest:
            return image
        _log.warning("the compiled kernels in %s are damaged; they are compiled again", kept)
        return None

    def _write(self, kept: Path, image: bytes) -> None:
        try:
            filesystem.make_dirs(self._folder)
            # Processes and threads may compile the same program. The last one to rename its file wins, and
            # all files are the same.
            with filesystem.atomic_write(kept, private=True) as file:
                file.write(hashlib.sha256(image).digest() + image)
        except OSError as error:
            _log.debug("compiled kernels are not cached, and will be compiled again: %s", error)


def _driver_version() -> int:
    """Return the version of the CUDA driver, such as 13000; 0 if it does not say."""
    version = ctypes.c_int()
    ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "monolith", "kernels")


class KernelCompiler:
    """NVRTC, which needs no GPU.

    Args:
        nvrtc: The library.
    """

    def __init__(self, nvrtc: ctypes.CDLL) -> None:
        self._nvrtc = nvrtc
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, name: str, architecture: str, headers: Headers = ()) -> bytes:
        """Return the image of a source and the files it includes, for an architecture such as sm_90.

        Raises:
            AcceleratorError: It does not compile; says what the compiler says.
        """
        options = (*OPTIONS, f"--gpu-architecture={architecture}")
        program = ctypes.c_void_p()
        words = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
        strings = ctypes.c_char_p * len(headers)
        names = strings(*(one.encode() for one, _ in headers))
        texts = strings(*(text.encode() for _, text in headers))
        self._check(
            self._nvrtc.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
            )
        )
        try:
            if self._nvrtc.nvrtcCompileProgram(program, len(options), words):
                raise AcceleratorError(f"{name} does not compile:\n{self._text(program)}")
            size = ctypes.c_size_t()
            self._check(self._nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            image = ctypes.create_string_buffer(size.value)
            self._check(self._nvrtc.nvrtcGetCUBIN(program, image))
            return image.raw
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self._check(self._nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._check(self._nvrtc.nvrtcGetProgramLog(program, log))
        return log.value.decode(errors="replace")

    def _check(self, status: int) -> None:
        if status:
            self._nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            text = self._nvrtc.nvrtcGetErrorString(status) or b""
            raise AcceleratorError(f"NVRTC: {text.decode()} (error {status})")


def load_nvrtc(library: Path) -> ctypes.CDLL:
    """Load the compiler, with the part of itself that it would look for where the system has libraries.

    Raises:
        OSError: It is not there, or not for this machine.
    """
    for part in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def _nvrtc() -> ctypes.CDLL:
    """Load the compiler that torch was built with: where torch's own packages have it, or the system."""
    if torch.version.cuda is None:
        raise AcceleratorError("this torch was built without CUDA; install a CUDA build of torch")
    file = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    packages = Path(torch.__file__).parents[1]
    places = [*packages.glob(f"nvidia/*/lib/{file}"), Path(torch.__file__).parent / "lib" / file, Path(file)]
    for place in places:
        try:
            return load_nvrtc(place)
        except OSError:
            continue
    raise AcceleratorError(
        f"{file} was not found, which compiles the kernels of tables on the GPU. It comes with torch's CUDA "
        "packages: pip install nvidia-cuda-nvrtc"
    )
