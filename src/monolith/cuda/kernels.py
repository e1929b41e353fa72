"""Kernels: CUDA source, compiled when first used and kept, launched on torch's stream.

The compiler is NVRTC, which every CUDA build of torch brings, and the driver loads what it made: a user needs
neither nvcc nor a compiler, and a machine without a GPU never imports this. Compiled kernels are cached in a
folder of the user's, by source, options, architecture and compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from monolith.errors import AcceleratorError

THREADS = 256
"""Threads of a block, where nothing speaks for another number."""

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
OPTIONS = ("--std=c++17", "--fmad=false", "-default-device")
"""What every source is compiled with: no product is fused with a sum, so that bits are those of the host."""

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Name and text of every file that a source includes, directly or not."""

Plain = ctypes._SimpleCData | ctypes.Structure | ctypes.Array  # type: ignore[type-arg]
Argument = Tensor | Plain | None


class Kernels(Protocol):
    """The kernels of one source, made for one device. Thread-safe."""

    def launch(
        self, kernel: str, blocks: int, *arguments: Argument, stream: int, threads: int = THREADS
    ) -> None:
        """Put a launch on a stream, by its handle; nothing is waited for.

        Args:
            blocks: How many; none launches nothing.
            arguments: Tensors as pointers to their first element, None as a null pointer, numbers, arrays
                and structures of ctypes as they are. Who calls answers for their types, as in C.
        """


class CudaKernels:
    """`Kernels` of a CUDA device.

    Args:
        source: CUDA C++, with `extern "C"` kernels.
        name: Of the source, for messages.
        headers: The files that it includes.

    Raises:
        AcceleratorError: There is no CUDA device or no compiler, or the source does not compile.
    """

    def __init__(self, source: str, name: str, device: torch.device, headers: Headers = ()) -> None:
        self._device = device
        self._driver = _Driver(device)
        image = _compiled(source, name, device, headers)
        self._module = self._driver.load(image)
        self._lock = threading.Lock()
        self._functions: dict[str, ctypes.c_void_p] = {}

    def launch(
        self, kernel: str, blocks: int, *arguments: Argument, stream: int, threads: int = THREADS
    ) -> None:
        if blocks <= 0:
            return
        with self._lock:
            function = self._functions.get(kernel)
            if function is None:
                function = self._functions[kernel] = self._driver.function(self._module, kernel)
        packed = [pack(one) for one in arguments]
        self._driver.launch(function, blocks, threads, ctypes.c_void_p(stream), pointers_to(packed))


def pack(argument: Argument) -> Plain:
    """Return an argument of a kernel as C has it."""
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_void_p(None) if argument is None else argument


def pointers_to(packed: Sequence[Plain]) -> ctypes.Array[ctypes.c_void_p]:
    """Return arguments as a launch takes them: by their addresses, good for as long as `packed` lives."""
    return (ctypes.c_void_p * len(packed))(*(ctypes.addressof(one) for one in packed))


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


class _Driver:
    """What is needed of the CUDA driver."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as cause:
            raise AcceleratorError(f"the CUDA driver cannot be loaded: {cause}") from cause
        self._check(self._cuda.cuInit(0))
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device.index))
        # The context that torch works in, too.
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number))

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self._check(self._cuda.cuCtxSetCurrent(self._context))
        self._check(self._cuda.cuModuleLoadData(ctypes.byref(module), image))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self._check(self._cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
        return found

    def launch(
        self,
        function: ctypes.c_void_p,
        blocks: int,
        threads: int,
        stream: ctypes.c_void_p,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        sizes = [ctypes.c_uint(one) for one in (blocks, 1, 1, threads, 1, 1, 0)]
        status = self._cuda.cuLaunchKernel(function, *sizes, stream, arguments, None)
        if status == _NO_CONTEXT:  # a thread that has not computed on the device before, such as autograd's
            self._check(self._cuda.cuCtxSetCurrent(self._context))
            status = self._cuda.cuLaunchKernel(function, *sizes, stream, arguments, None)
        self._check(status)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise AcceleratorError(f"CUDA: {(text.value or b'').decode()} (error {status})")


# Compiling


def _compiled(source: str, name: str, device: torch.device, headers: Headers) -> bytes:
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}"
    compiler = KernelCompiler(_nvrtc())
    texts = [part for header in headers for part in header]
    about = "\0".join([source, *texts, *OPTIONS, architecture, compiler.version])
    kept = _cache_folder() / f"{name}-{hashlib.sha256(about.encode()).hexdigest()[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        image = compiler.compile(source, f"{name}.cu", architecture, headers)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(image)
        unfinished.replace(kept)
    except OSError:
        pass  # compiled again next time
    return image


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
