"""The machine: what its files in /proc and /sys say, for `monolith doctor` and beside every figure."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
ARM_PARTS = {
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xd84": "Neoverse V3",
    "0xd8e": "Neoverse N3",
}


def cpu_name(info: Mapping[str, str]) -> str:
    """Return the name of the processor that /proc/cpuinfo describes."""
    part = info.get("CPU part")
    arm = ARM_PARTS.get(part, f"ARM part {part}") if part else None
    return info.get("model name") or arm or platform.processor() or platform.machine()


def huge_pages(root: Path) -> str | None:
    """Return the setting of transparent huge pages: always, madvise or never; None where there is none."""
    path = root / HUGE_PAGES
    return path.read_text().partition("[")[2].partition("]")[0] if path.is_file() else None


def read_fields(path: Path) -> dict[str, str]:
    """Return the `name: value` lines of a /proc file, the first of each name; none without the file."""
    fields: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
    return fields
