"""`monolith doctor`: what this machine offers, what is missing, and what to do about it.

A report is a flat list of checks. Each says what was found and, where that is
less than it could be, what to do. Only a missing requirement makes the report
fail; an absent extra or a slow setting is advice.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monolith import __version__
from monolith.cli.options.jobs import DoctorOptions
from monolith.errors import ConfigError, FilesystemError
from monolith.observe.machine import HUGE_PAGES, cpu_name, huge_pages, read_fields, usable_cores

INSTALL = "pip install 'monolith-recsys[{extra}]'"

REQUIRED = {
    "torch": "2.10",
    "numpy": "1.26",
    "fsspec": "2024.6",
    "msgspec": "0.19",
    "prometheus-client": "0.20",
    "protobuf": "7.35",
    "rich": "13.7",
    "safetensors": "0.5",
    "tyro": "0.9",
}
"""Distribution -> the oldest version that will do."""

OPTIONAL = {
    "pyarrow": ("arrow", "Parquet files and bulk transfer between processes"),
    "faiss-cpu": ("ann", "an index of embeddings for approximate search"),
    "grpcio": ("grpc", "the Open Inference Protocol and Primus"),
    "confluent-kafka": ("kafka", "training from a live stream"),
    "kazoo": ("zookeeper", "discovery through ZooKeeper"),
    "httpx": ("serve", "clients over HTTP, and discovery through Consul"),
    "opentelemetry-sdk": ("otel", "spans of served requests"),
    "ray": ("ray", "launching on a cluster"),
    "mpi4py": ("mpi", "launching under MPI"),
    "tensorboard": ("tensorboard", "summaries"),
    "uvicorn": ("serve", "predictions over HTTP"),
}
"""Distribution -> (the extra that installs it, what it is for)."""

SERVICES = {"zookeeper": "localhost:2181", "kafka": "localhost:9092", "consul": "localhost:8500"}

CPU_FEATURES = {
    "x86_64": {
        "sse4_2": "CRC32C in hardware",
        "avx2": "8 floats at a time",
        "fma": "",
        "avx512f": "16 floats at a time",
    },
    "aarch64": {
        "asimd": "4 floats at a time",
        "crc32": "CRC32C in hardware",
        "atomics": "locks in one instruction",
    },
}
"""Machine -> the flags in /proc/cpuinfo that matter to the core, and why."""

ENOUGH_FILES = 4096
ENOUGH_READS = 20_000
"""Random reads of 4 KiB per second that any local SSD does; disks of networks often do less."""
ENOUGH_WRITES = 200e6
"""Bytes per second."""
UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 say "no limit" by a number beyond any machine."""


class Status(StrEnum):
    OK = "ok"
    ADVICE = "advice"
    """Works, could be better."""
    ABSENT = "absent"
    """Optional and not there."""
    MISSING = "missing"
    """Required and not there."""


COLOURS = {Status.OK: "green", Status.ADVICE: "yellow", Status.ABSENT: "dim", Status.MISSING: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do if that is not enough."""

    area: str
    name: str
    status: Status
    found: str
    advice: str = ""
    measured: Mapping[str, float | str] = field(default_factory=dict)
    """Figures by name, for programs."""

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "measured" or value}


def run(options: DoctorOptions) -> int:
    """Print the report; return 1 when something required is missing."""
    if options.cluster is not None:
        from monolith.cli import doctor_cluster

        return doctor_cluster.run(options)
    if options.config is not None:
        raise ConfigError("doctor: --config needs --cluster, too: it names the registry of a cluster")
    checks = list(examine(options, os.environ))
    healthy = all(check.status is not Status.MISSING for check in checks)
    if options.json:
        report = {"version": __version__, "ok": healthy, "checks": [check.as_json() for check in checks]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        render(checks, healthy, Console())
    return 0 if healthy else 1


def examine(options: DoctorOptions, environment: Mapping[str, str]) -> Iterator[Check]:
    root = Path("/")
    yield check_python()
    yield from check_required()
    yield check_core()
    yield check_cuda()
    yield from check_optional()
    yield from check_cpu(root, platform.machine())
    yield from check_memory(root)
    yield check_huge_pages(root)
    yield from check_limits()
    yield check_disk(options.path)
    yield check_cold_rows(options.disk)
    yield from check_services(service_addresses(options, environment), options.timeout)


# What is installed


def check_python() -> Check:
    found = f"{platform.python_version()} ({platform.python_implementation()}, {platform.machine()})"
    return Check("installed", "python", Status.OK, found)


def check_required() -> Iterator[Check]:
    for name, oldest in REQUIRED.items():
        version = installed_version(name)
        if version is None:
            yield Check("installed", name, Status.MISSING, "not installed", f"pip install '{name}>={oldest}'")
        elif version_key(version) < version_key(oldest):
            yield Check("installed", name, Status.MISSING, version, f"pip install '{name}>={oldest}'")
        else:
            yield Check("installed", name, Status.OK, version)


def check_core() -> Check:
    """Look for the compiled core; its file name tells which Pythons it was built for."""
    name = "compiled core"
    try:
        core = importlib.import_module("monolith.native._core")
    except ImportError as error:
        return Check(
            "installed",
            name,
            Status.MISSING,
            f"cannot be imported: {error}",
            "build it: pip install -e . (needs C++20)",
        )
    path = Path(core.__file__ or "")
    python = f"for Python {sys.version_info.major}.{sys.version_info.minor} only"
    abi = "stable ABI, for Python 3.12 and later" if ".abi3." in path.name else python
    return Check("installed", name, Status.OK, f"{path.name}, {abi}, {size(path.stat().st_size)}")


def check_cuda() -> Check:
    """Say which accelerator torch was built for and sees. Absent is fine: the tables live in memory."""
    if installed_version("torch") is None:
        return Check("installed", "cuda", Status.ABSENT, "no torch to ask")
    import torch

    if torch.version.cuda is None:
        return Check("installed", "cuda", Status.ABSENT, "torch was built for the CPU")
    if not torch.cuda.is_available():
        return Check(
            "installed",
            "cuda",
            Status.ABSENT,
            f"torch was built for CUDA {torch.version.cuda} and sees no device",
        )
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("installed", "cuda", Status.OK, f"CUDA {torch.version.cuda}: {', '.join(devices)}")


def check_optional() -> Iterator[Check]:
    for name, (extra, purpose) in OPTIONAL.items():
        version = installed_version(name)
        if version is None:
            found = f"not installed; for {purpose}"
            yield Check("optional", name, Status.ABSENT, found, INSTALL.format(extra=extra))
        else:
            yield Check("optional", name, Status.OK, version)


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_key(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# What the machine is


def check_cpu(root: Path, machine: str) -> Iterator[Check]:
    info = read_fields(root / "proc/cpuinfo")
    usable = f"{usable_cores()} of {os.cpu_count()} cores usable"
    yield Check("machine", "cpu", Status.OK, f"{cpu_name(info)}, {usable}")
    wanted = CPU_FEATURES.get(machine)
    flags = set((info.get("flags") or info.get("Features") or "").split())
    if not wanted or not flags:
        yield Check("machine", "cpu features", Status.OK, f"not known for {machine} on {platform.system()}")
        return
    for flag, purpose in wanted.items():
        if flag in flags:
            yield Check("machine", flag, Status.OK, purpose or "yes")
        else:
            yield Check("machine", flag, Status.ADVICE, f"no {purpose or flag}", "works, only slower")


def check_memory(root: Path) -> Iterator[Check]:
    info = read_fields(root / "proc/meminfo")
    if "MemTotal" in info:
        total, available = (int(info[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        yield Check("machine", "memory", Status.OK, f"{size(available)} free of {size(total)}")
    limit = cgroup_value(root, "memory.max", "memory/memory.limit_in_bytes")
    if limit is not None:
        limited = limit.isdigit() and int(limit) < UNLIMITED_BYTES
        yield Check("machine", "memory limit", Status.OK, size(int(limit)) if limited else "none")
    quota = cgroup_value(root, "cpu.max", "cpu/cpu.cfs_quota_us")
    if quota is not None:
        period = cgroup_value(root, "cpu.max", "cpu/cpu.cfs_period_us") or ""
        yield Check("machine", "cpu limit", Status.OK, cpu_limit(quota.split()[0], period.split()[-1]))


def cgroup_value(root: Path, unified: str, legacy: str) -> str | None:
    """Return a setting of the control group this process is in (version 2, else version 1)."""
    path = root / "proc/self/cgroup"
    groups = path.read_text().splitlines() if path.is_file() else []
    own = next((line.removeprefix("0::").lstrip("/") for line in groups if line.startswith("0::")), "")
    mount = root / "sys/fs/cgroup"
    for path in (mount / own / unified, mount / unified, mount / legacy):
        if path.is_file():
            return path.read_text().strip()
    return None


def cpu_limit(quota: str, period: str) -> str:
    """Return a quota in cores: 150000 of every 100000 microseconds are 1.5; "max" and -1 are none."""
    return f"{int(quota) / int(period):g} cores" if quota.isdigit() and period.isdigit() else "none"


def check_huge_pages(root: Path) -> Check:
    """Rows are read at random over gigabytes; small pages make most reads miss the TLB as well."""
    name = "huge pages"
    chosen = huge_pages(root)
    if chosen is None:
        return Check("machine", name, Status.OK, f"no setting on {platform.system()}")
    if chosen == "never":
        return Check(
            "machine",
            name,
            Status.ADVICE,
            "never: lookups run slower",
            f"echo madvise | sudo tee /{HUGE_PAGES}",
        )
    return Check("machine", name, Status.OK, chosen)


def check_limits() -> Iterator[Check]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if files != unlimited and files < ENOUGH_FILES:
        yield Check(
            "machine",
            "open files",
            Status.ADVICE,
            str(files),
            f"a server wants more: ulimit -n {ENOUGH_FILES}",
        )
    else:
        yield Check("machine", "open files", Status.OK, "unlimited" if files == unlimited else str(files))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Check("machine", "locked memory", Status.OK, "unlimited" if locked == unlimited else size(locked))


def check_disk(path: Path) -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        raise ConfigError(f"cannot look at the disk of --path {path}: {error.strerror}") from error
    return Check(
        "machine", "disk", Status.OK, f"{size(usage.free)} free of {size(usage.total)} at {path.resolve()}"
    )


def check_cold_rows(folders: tuple[Path, ...] | None) -> Check:
    """Measure the disk of cold rows, if asked to: that takes a second and writes a file."""
    name = "cold rows"
    if folders is None:
        found = "disk not measured; `monolith doctor --disk FOLDER` does, for tiered tables"
        return Check("machine", name, Status.OK, found)
    if len(folders) > 1:
        raise ConfigError(f"doctor: --disk takes one folder, got {' '.join(map(str, folders))}")
    folder = folders[0] if folders else Path(tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"doctor: --disk {folder} is not a folder; make it first")
    try:
        from monolith.cli.measuring import measure_disk

        disk = measure_disk(folder)
    except (ImportError, FilesystemError) as error:
        advice = "tiered tables need storage_dir to be a folder on a local disk that can be written"
        return Check("machine", name, Status.ADVICE, f"disk not measured: {error}", advice)
    slow = disk.reads_per_s < ENOUGH_READS or disk.write_bytes_per_s < ENOUGH_WRITES
    found = (
        f"{disk.reads_per_s:,.0f} random reads of 4 KiB per second by {disk.threads} threads, "
        f"{disk.write_bytes_per_s / 1e6:,.0f} MB/s written, "
        f"{size(disk.free_bytes)} free at {folder.resolve()}"
    )
    return Check(
        "machine",
        name,
        Status.ADVICE if slow else Status.OK,
        found,
        "slow for tiered tables, as disks of networks are: set storage_dir to a folder on a local SSD; "
        "`monolith plan --disk-reads-per-s` says how many servers such a disk takes"
        if slow
        else "",
        asdict(disk),
    )


# Who answers


def service_addresses(options: DoctorOptions, environment: Mapping[str, str]) -> dict[str, str]:
    given = {"zookeeper": options.zookeeper, "kafka": options.kafka, "consul": options.consul}
    return {
        name: given[name] or environment.get(f"MONOLITH_{name.upper()}") or default
        for name, default in SERVICES.items()
    }


def check_services(addresses: Mapping[str, str], timeout: float) -> Iterator[Check]:
    parsed = {name: parse_address(name, address) for name, address in addresses.items()}
    with ThreadPoolExecutor(len(parsed)) as pool:
        refusals = pool.map(lambda address: refusal(address, timeout), parsed.values())
        for (name, address), reason in zip(addresses.items(), refusals, strict=True):
            if reason is None:
                yield Check("services", name, Status.OK, f"{address} accepts connections")
            else:
                yield Check("services", name, Status.ABSENT, f"{address}: {reason}")


def refusal(address: tuple[str, int], timeout: float) -> str | None:
    """Try to connect; return why it failed, or None when it did not."""
    try:
        socket.create_connection(address, timeout).close()
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None


def parse_address(name: str, address: str) -> tuple[str, int]:
    """Split host:port; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"the address of {name} must be host:port, got {address!r}")
    return host.strip("[]"), int(port)


# How it is shown


def render(checks: list[Check], healthy: bool, console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(overflow="fold")
    for area, group in itertools.groupby(checks, key=lambda check: check.area):
        table.add_row("", f"[bold]{area}[/]")
        for check in group:
            status = f"[{COLOURS[check.status]}]{check.status}[/]"
            advice = f"\n[cyan]{escape(check.advice)}[/]" if check.advice else ""
            table.add_row(status, check.name, escape(check.found) + advice)
        table.add_row()
    console.print(table)
    if healthy:
        console.print("Everything required is installed.", style="green")
    else:
        missing = ", ".join(check.name for check in checks if check.status is Status.MISSING)
        console.print(f"Required and missing: {missing}.", style="bold red")


def size(count: int) -> str:
    """Return bytes for people: 1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
