"""The errors that say what is missing: a package, or memory."""

from __future__ import annotations

import errno

import pytest

from monolith.errors import MissingExtraError, OutOfMemoryError, TableError, lacks_memory, optional_package


def load(error: Exception, *modules: str) -> None:
    with optional_package("confluent-kafka", "kafka", "reading topics", *modules):
        raise error


@pytest.mark.parametrize(
    ("module", "modules"), [("confluent_kafka", ()), ("confluent_kafka.admin", ()), ("other", ("other",))]
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    module: str, modules: tuple[str, ...]
) -> None:
    with pytest.raises(MissingExtraError, match=r"needs the package 'confluent-kafka'.*\[kafka\]"):
        load(ModuleNotFoundError(f"No module named {module!r}", name=module), *modules)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libarrow.so.2300: failed to map segment from shared object: Cannot allocate memory"),
        ImportError("libssl.so.3: cannot open shared object file: No such file or directory"),
        ModuleNotFoundError("No module named 'fastavro'", name="fastavro"),
        MemoryError(),
    ],
)
def test_a_package_that_cannot_be_loaded_is_not_called_missing(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        load(error)
    assert raised.value is error


def caused_by(cause: Exception) -> TableError:
    error = TableError("the table cannot grow")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (caused_by(MemoryError()), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libx.so: failed to map segment: Cannot allocate memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("can't start new thread"), True),
        (OutOfMemoryError("parameter server 1 cannot allocate memory"), False),  # another process
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("no"), False),
        (None, False),
    ],
)
def test_it_is_told_whether_this_process_has_no_memory_left(error: Exception | None, lacks: bool) -> None:
    assert lacks_memory(error) is lacks
