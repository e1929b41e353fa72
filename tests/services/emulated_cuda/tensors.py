"""Tensors of the emulated device: CPU memory that refuses what memory of a GPU refuses.

A tensor of the device wraps a CPU tensor, its `memory`. Every operation of torch on it comes to
`__torch_dispatch__`, which computes on the memory and wraps the result. So a tensor in host memory and one of
the device cannot meet in an operation by accident, as on a GPU: torch's own message says so. Only copies,
single numbers (0-dimensional tensors) and indices may come from the host.

    there = torch.zeros(3, device=DEVICE)      # torch_device.type == "lazy"
    there + torch.ones(3)                      # RuntimeError: Expected all tensors to be on the same device
    there + torch.ones(3).to(DEVICE)           # a DeviceTensor
    there.numpy()                              # TypeError

torch has a device type `lazy`, which nothing else uses unless it is initialized: autograd computes it on the
calling thread, and it needs no guard, stream or allocator of its own. Tensors made without an argument on the
device, such as `torch.empty(3, device=DEVICE)`, come to the functions that are registered for it below.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
_HOST = torch.device("cpu")
_COPIES = frozenset(["copy_", "_to_copy", "_copy_from", "_foreach_copy_"])
_INDEXED = frozenset(["index", "index_put", "index_put_", "_index_put_impl_"])


class Room:
    """Memory of the device, counted. What an operation computes from other tensors takes none of it.

    Attributes:
        most: The bytes there are; None for any number.
        used: Bytes of the tensors there are now.
        peak: The most there were at a time.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.used = self.peak = 0
        self._lock = threading.RLock()  # reentrant: tensors go whenever Python collects them

    def take(self, tensor: Tensor, size: int) -> None:
        """Count a new tensor, until it is gone.

        Raises:
            torch.OutOfMemoryError: There is no room for it.
        """
        with self._lock:
            if self.most is not None and self.used + size > self.most:
                free = self.most - self.used
                raise torch.OutOfMemoryError(f"no room for {size:,} bytes, {free:,} are free")
            self._add(size)
        weakref.finalize(tensor, self._add, -size)

    def _add(self, size: int) -> None:
        with self._lock:
            self.used += size
            self.peak = max(self.peak, self.used)


_rooms: list[Room] = []


@contextmanager
def limited(most: int | None = None) -> Iterator[Room]:
    """Have emulated devices with so much memory in a block, that of tensors made before it not counted."""
    room = Room(most)
    _rooms.append(room)
    try:
        yield room
    finally:
        _rooms.remove(room)


def free_bytes() -> int:
    """Return the bytes of the device that are free."""
    return min([1 << 34, *(room.most - room.used for room in _rooms if room.most is not None)])


class DeviceTensor(Tensor):
    """A tensor of the emulated device.

    Attributes:
        memory: The same elements as a CPU tensor, which kernels read and write.
    """

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> DeviceTensor:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: DeviceTensor = make(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )
        made.memory = memory
        return made

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def tolist(self) -> Any:
        return self.memory.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.memory.detach().numpy()
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            "host memory first."
        )

    def __array__(self, dtype: Any = None) -> NoReturn:
        del dtype
        self.numpy()
        raise AssertionError

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.memory!r} on {DEVICE}"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to = kwargs.get("device")
        if name not in _COPIES:
            _check_one_device(name, args, kwargs)
        found = func(*tree_map(_memory, args), **tree_map(_memory, kwargs))
        if to is not None and to.type != DEVICE.type:
            return found  # asked for in host memory
        written = _written(func, args, kwargs)
        return tree_map(_there, found) if written is None else written


class HostStays(TorchDispatchMode):
    """Puts tensors of the host back as they were at the end of a block, but for copies from the device."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if not any(isinstance(one, DeviceTensor) for one in _tensors(args, kwargs)):
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
            for one in func._schema.arguments:
                if one.alias_info and one.alias_info.is_write:
                    self._before += [(tensor, tensor.clone()) for tensor in _tensors(given.get(one.name))]
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)


def _memory(argument: Any) -> Any:
    """Return an argument as an operation on the CPU takes it."""
    if isinstance(argument, DeviceTensor):
        return argument.memory
    return _HOST if isinstance(argument, torch.device) and argument.type == DEVICE.type else argument


def _there(found: Any) -> Any:
    return DeviceTensor(found) if isinstance(found, Tensor) else found


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation writes to and returns; None if it returns something else."""
    schema = func._schema
    if not schema.returns or not all(one.alias_info and one.alias_info.is_write for one in schema.returns):
        return None
    given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
    written = [given[one.name] for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    for tensor in written:
        if isinstance(tensor, DeviceTensor) and tensor.shape != tensor.memory.shape:
            raise NotImplementedError(f"{func} changes a shape in place, which the emulated device does not")
    return written[0] if len(schema.returns) == 1 else tuple(written)


def _check_one_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _INDEXED and isinstance(args[0], DeviceTensor):
        args = (args[0], None, *args[2:])  # a GPU takes indices from the host
    for tensor in _tensors(args, kwargs):
        if tensor.ndim and not isinstance(tensor, DeviceTensor):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and {tensor.device}! (when computing {name})"
            )


def _tensors(*arguments: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))


# Tensors that are made of no other


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    # `torch.tensor(values, device=DEVICE)` copies without `__torch_dispatch__`.
    del non_blocking
    _memory(to).copy_(_memory(source))
    return to


def _make_there(name: str) -> Callable[..., Tensor]:
    """Return an operation that makes a tensor, for the device."""
    packet, _, overload = name.partition(".")
    make = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def made(*args: Any, **kwargs: Any) -> Tensor:
        tensor = DeviceTensor(make(*tree_map(_memory, args), **tree_map(_memory, kwargs)))
        for room in _rooms:
            room.take(tensor, tensor.untyped_storage().nbytes())
        return tensor

    return made


# torch makes all others of an empty one: zeros, full, rand, ... These begin with one of another shape.
_MADE = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace")
_LIBRARY = torch.library.Library("aten", "IMPL")  # registered for as long as it lives
_LIBRARY.impl("_copy_from", _copy_from, "Lazy")
for _name in (*_MADE, "randperm", "randperm.generator"):
    _LIBRARY.impl(_name, _make_there(_name), "Lazy")
