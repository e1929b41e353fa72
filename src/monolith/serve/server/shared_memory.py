"""Shared memory: inputs and outputs that a client on the same machine leaves in memory, and does not send.

A client creates a POSIX shared memory object and registers a part of it under a name, as a *region*. Its
requests then name a region in place of the values of an input, and of an output:

    register "in" = bytes 0 to 4096 of /shop_in      input "price": region "in", 16 bytes at offset 64
    register "out" = bytes 0 to 4096 of /shop_out    output "click": region "out", up to 16 bytes at offset 0

The objects belong to clients, and a client can shrink one at any moment. The server therefore maps none of
them: touching a mapped page that is gone ends a process (SIGBUS). It copies inputs out with `pread` and
outputs in with `pwrite`, which return an error instead. The model computes on the copy, and the copy is
logged: a client that writes to the memory meanwhile changes neither.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from monolith import concurrency, filesystem
from monolith.errors import ForbiddenError, RequestError, RequestTooLargeError
from monolith.serve.server.batching import Reservation

EXTENSION = "system_shared_memory"
"""The extension of a server whose clients may register memory."""
REGION = "shared_memory_region"
BYTE_SIZE = "shared_memory_byte_size"
OFFSET = "shared_memory_offset"
PARAMETERS = (REGION, BYTE_SIZE, OFFSET)
"""Parameters of an input or output that is in a region; the offset is 0 by default."""
FOLDER = Path("/dev/shm")
"""The folder in which Linux has the objects; the key /NAME is the file NAME."""
MOST_REGIONS = 256
"""Each has a file descriptor."""
NO_CUDA = (
    "this server registers no memory of a GPU; register system shared memory "
    "(/v2/systemsharedmemory/region/NAME/register), or send the tensors"
)
_OFF = (
    "this server does not use the memory of its clients; start it with --shared-memory PREFIX, on the "
    "machine of the client"
)
_LONGEST_NAME = 255
_KEY = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What a region was registered as."""

    name: str
    key: str
    """The key of the object, with or without its slash."""
    offset: int
    byte_size: int

    @classmethod
    def read(cls, name: str, said: Mapping[str, object]) -> RegionStatus:
        """Return the region that the body of a register describes, or an item of a status.

        Raises:
            RequestError: It has no key, or numbers that are no number of bytes.
        """
        key, what = said.get("key"), f"the region {name[:80]!r}"
        if not isinstance(key, str):
            raise RequestError(f'{what} needs a key: {{"key": "/NAME", "offset": 0, "byte_size": 4096}}')
        offset, size = said.get("offset", 0), said.get("byte_size")
        return cls(name, key, _whole(what, "offset", offset), _whole(what, "byte_size", size))


class Region:
    """A registered part of a shared memory object.

    A request keeps the region that it names: its file is closed when the region was unregistered and the last
    such request has ended. A descriptor that is closed earlier could be the one of another file by the time
    that it is used.
    """

    def __init__(self, status: RegionStatus, descriptor: int) -> None:
        self.status = status
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """The bytes of a region that an input is in, or an output is written to."""

    what: str
    """The input or output, for errors."""
    region: Region
    offset: int
    """From the start of the region."""
    byte_size: int

    def read(self) -> bytes:
        """Return a copy of the bytes.

        Raises:
            RequestError: The object is shorter than it was.
        """
        data = os.pread(self.region.descriptor, self.byte_size, self._begin)
        if len(data) < self.byte_size:
            raise self._truncated()
        return data

    def check(self, data: bytes) -> None:
        """Refuse an output that does not fit.

        Raises:
            RequestError: It is larger than the slice.
        """
        if len(data) > self.byte_size:
            raise RequestError(
                f"{self.what} has {len(data)} bytes; the request gives it {self.byte_size} bytes of the "
                f"region {self.region.status.name!r}"
            )

    def write(self, data: bytes) -> dict[str, bool | int | float | str]:
        """Write an output that `check` has passed; return the parameters by which an answer says so.

        Raises:
            RequestError: The object is shorter than it was, or the machine has no memory left for it.
        """
        descriptor = self.region.descriptor
        # Writing after the end would let the object grow again. The client may shrink it after this line, so
        # it may still grow; never to more than was registered.
        if os.fstat(descriptor).st_size < self._begin + len(data):
            raise self._truncated()
        try:
            written = os.pwrite(descriptor, data, self._begin)
        except OSError as cause:
            raise RequestError(
                f"cannot write {self.what} to the region {self.region.status.name!r}: {cause.strerror}"
            ) from cause
        if written < len(data):
            raise RequestError(
                f"cannot write {self.what} to the region {self.region.status.name!r}: no memory is left on "
                f"{FOLDER} after {written} of {len(data)} bytes"
            )
        return {REGION: self.region.status.name, OFFSET: self.offset, BYTE_SIZE: len(data)}

    @property
    def _begin(self) -> int:
        return self.region.status.offset + self.offset

    def _truncated(self) -> RequestError:
        size = os.fstat(self.region.descriptor).st_size
        return RequestError(
            f"{self.what}: the shared memory object {self.region.status.key!r} has {size} bytes now, fewer "
            f"than when the region {self.region.status.name!r} was registered. Create and register it again."
        )


class SharedMemoryRegions:
    """The regions that clients have registered. Thread-safe.

    Args:
        prefix: What the keys of objects begin with, without the slash; empty registers none.
        most_bytes: The most bytes that the inputs of one request may have in regions.
    """

    def __init__(self, prefix: str, most_bytes: int) -> None:
        self._prefix = prefix.removeprefix("/")
        self.most_bytes = most_bytes
        self._changing = concurrency.Lock()
        self._regions: dict[str, Region] = {}
        """Replaced as a whole by the thread that holds `_changing`, so that requests take no lock."""

    @property
    def is_on(self) -> bool:
        return bool(self._prefix)

    def register(self, status: RegionStatus) -> None:
        """Open a shared memory object, and let requests name a part of it.

        Raises:
            ForbiddenError: This server uses no memory of clients, or not that of this key.
            RequestError: The name is taken, or there is no such object, or it is too small.
        """
        self._check_on()
        if not 0 < len(status.name) <= _LONGEST_NAME:
            raise RequestError(f"a region needs a name of 1 to {_LONGEST_NAME} characters")
        with self._changing:
            if status.name in self._regions:
                raise RequestError(f"the region {status.name!r} is registered already; unregister it first")
            if len(self._regions) >= MOST_REGIONS:
                raise RequestError(
                    f"{MOST_REGIONS} regions are registered, which is the limit. Unregister those that are "
                    "not used, or register one large region and use parts of it."
                )
            self._regions = {**self._regions, status.name: Region(status, self._open(status))}

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all; requests that use one finish. A name that is not registered is fine.

        Raises:
            ForbiddenError: This server uses no memory of clients.
        """
        self._check_on()
        with self._changing:
            self._regions = {one: region for one, region in self._regions.items() if name and one != name}

    def status(self, name: str = "") -> list[RegionStatus]:
        """Return what is registered: all regions, or one.

        Raises:
            ForbiddenError: This server uses no memory of clients.
            RequestError: There is no such region.
        """
        self._check_on()
        if name:
            return [self._find(name).status]
        return [region.status for region in self._regions.values()]

    def slice_of(self, what: str, parameters: Mapping[str, object]) -> RegionSlice | None:
        """Return where an input or output is, by its parameters; None if it is in no region.

        Raises:
            ForbiddenError: This server uses no memory of clients.
            RequestError: There is no such region, or the slice is not inside it.
        """
        if REGION not in parameters:
            return None
        self._check_on()
        name, size, offset = parameters[REGION], parameters.get(BYTE_SIZE), parameters.get(OFFSET, 0)
        if not isinstance(name, str):
            raise RequestError(f"{what}: the parameter `{REGION}` must be the name of a region")
        size, offset = _whole(what, BYTE_SIZE, size), _whole(what, OFFSET, offset)
        region = self._find(name)
        if offset + size > region.status.byte_size:
            raise RequestError(
                f"{what}: bytes {offset} to {offset + size} are not inside the region {name!r}, which has "
                f"{region.status.byte_size} bytes"
            )
        return RegionSlice(what, region, offset, size)

    def _check_on(self) -> None:
        if not self._prefix:
            raise ForbiddenError(_OFF)

    def _find(self, name: str) -> Region:
        try:
            return self._regions[name]
        except KeyError:
            raise RequestError(f"no region {name[:80]!r} is registered with this server") from None

    def _open(self, status: RegionStatus) -> int:
        """Return a descriptor of an object that is what it was registered as."""
        file = status.key.removeprefix("/")
        rest = file.removeprefix(self._prefix)
        if not file.startswith(self._prefix) or len(file) > _LONGEST_NAME or not _KEY.fullmatch(rest):
            raise ForbiddenError(
                f"this server uses no shared memory object {status.key[:80]!r}: its key must be "
                f"/{self._prefix} (--shared-memory) and then letters, digits, _ and -"
            )
        if status.byte_size < 1:
            raise RequestError(f"the region {status.name!r} must have at least 1 byte")
        try:
            descriptor = filesystem.open_regular(FOLDER / file, os.O_RDWR)
        except OSError as cause:
            why = cause.strerror or str(cause)
            raise RequestError(f"cannot open the shared memory object {status.key!r}: {why}") from cause
        found = os.fstat(descriptor)
        if status.offset + status.byte_size > found.st_size:
            os.close(descriptor)
            raise RequestError(
                f"the shared memory object {status.key!r} has {found.st_size} bytes; the region "
                f"{status.name!r} would end at byte {status.offset + status.byte_size}"
            )
        return descriptor


class SharedInputs:
    """Reads those inputs of one request that are in regions, within the limits of a request.

    Args:
        reservation: Counts the memory of the copies.
    """

    def __init__(self, regions: SharedMemoryRegions, reservation: Reservation) -> None:
        self._regions = regions
        self._reservation = reservation
        self._left = regions.most_bytes

    def read(self, what: str, parameters: Mapping[str, object]) -> bytes | None:
        """Return a copy of an input; None if it is in no region.

        Raises:
            RequestError: There is no such region, or it does not have these bytes.
            RequestTooLargeError: The inputs of the request have more bytes than a request may.
            UnavailableError: Requests in flight use too much memory.
        """
        found = self._regions.slice_of(what, parameters)
        if found is None:
            return None
        if found.byte_size > self._left:
            raise RequestTooLargeError(
                f"the inputs of the request have more than {self._regions.most_bytes} bytes in shared "
                "memory, which are the most (--max-request-bytes)"
            )
        self._left -= found.byte_size
        self._reservation.add(found.byte_size)
        return found.read()


def _whole(what: str, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise RequestError(f"{what}: `{name}` must be a number of bytes")
    return value
