"""`monolith doctor`: it tells the truth about a machine, and fails only for what is required."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import os
import re
import shutil
import socket
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from monolith.cli import doctor, measuring
from monolith.cli.doctor import Check, Status
from monolith.cli.options.jobs import DoctorOptions
from monolith.errors import ConfigError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# What is installed


def test_the_requirements_are_those_of_the_project() -> None:
    declared = dict(requirement.split(">=") for requirement in PROJECT["dependencies"])
    assert declared == doctor.REQUIRED


def test_each_extra_it_names_installs_the_package_it_is_named_for() -> None:
    for name, (extra, _) in doctor.OPTIONAL.items():
        declared = [requirement.split(">=")[0] for requirement in PROJECT["optional-dependencies"][extra]]
        assert name in declared


def test_a_missing_requirement_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"torch": "2.13.0+cpu", "numpy": "1.20.3"}.get)
    checks = by_name(list(doctor.check_required()))
    assert checks["torch"] == Check("installed", "torch", Status.OK, "2.13.0+cpu")
    assert checks["numpy"] == Check(
        "installed", "numpy", Status.MISSING, "1.20.3", "pip install 'numpy>=1.26'"
    )
    assert checks["tyro"] == Check(
        "installed", "tyro", Status.MISSING, "not installed", "pip install 'tyro>=0.9'"
    )


def test_an_absent_extra_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"kazoo": "2.10.0"}.get)
    checks = by_name(list(doctor.check_optional()))
    assert checks["kazoo"].status is Status.OK
    assert checks["ray"].status is Status.ABSENT
    assert checks["ray"].advice == "pip install 'monolith-recsys[ray]'"


def test_versions_are_those_of_the_installed_distributions() -> None:
    assert doctor.installed_version("numpy") == importlib.metadata.version("numpy")
    assert doctor.installed_version("no-such-distribution") is None


@pytest.mark.parametrize("version, key", [("2.13.0+cpu", (2, 13, 0)), ("2.11rc1", (2,)), ("3", (3,))])
def test_versions_compare_by_their_leading_numbers(version: str, key: tuple[int, ...]) -> None:
    assert doctor.version_key(version) == key


# What the machine is


def test_an_arm_machine_is_known_by_its_part(tmp_path: Path) -> None:
    write(tmp_path, proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd crc32\nCPU part\t: 0xd0c\n")
    checks = by_name(list(doctor.check_cpu(tmp_path, "aarch64")))
    assert checks["cpu"].found.startswith("Neoverse N1, ")
    assert checks["crc32"].status is Status.OK
    assert checks["atomics"].status is Status.ADVICE


def test_an_x86_machine_is_known_by_its_model_name(tmp_path: Path) -> None:
    write(tmp_path, proc__cpuinfo="model name\t: Some CPU @ 3 GHz\nflags\t\t: fpu sse4_2 avx2 fma\n")
    checks = by_name(list(doctor.check_cpu(tmp_path, "x86_64")))
    assert checks["cpu"].found.startswith("Some CPU @ 3 GHz, ")
    assert checks["avx2"].status is Status.OK
    assert checks["avx512f"].status is Status.ADVICE


def test_an_unknown_machine_is_no_failure(tmp_path: Path) -> None:
    checks = by_name(list(doctor.check_cpu(tmp_path, "riscv64")))
    assert "not known for riscv64" in checks["cpu features"].found
    assert list(doctor.check_memory(tmp_path)) == []
    assert doctor.check_huge_pages(tmp_path).status is Status.OK


def test_memory_and_the_limits_of_the_control_group_are_shown(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal:       4194304 kB\nMemFree: 1 kB\nMemAvailable:   1048576 kB\n",
        proc__self__cgroup="0::/jobs/mine\n",
        sys__fs__cgroup__jobs__mine__memory="",
    )
    group = tmp_path / "sys/fs/cgroup/jobs/mine"
    (group / "memory.max").write_text("2147483648\n")
    (group / "cpu.max").write_text("150000 100000\n")
    checks = by_name(list(doctor.check_memory(tmp_path)))
    assert checks["memory"].found == "1 GiB free of 4 GiB"
    assert checks["memory limit"].found == "2 GiB"
    assert checks["cpu limit"].found == "1.5 cores"


@pytest.mark.parametrize("memory, cpu", [("max", "max 100000"), ("9223372036854771712", "max 100000")])
def test_a_control_group_without_limits_says_none(tmp_path: Path, memory: str, cpu: str) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(memory)
    (group / "cpu.max").write_text(cpu)
    checks = by_name(list(doctor.check_memory(tmp_path)))
    assert checks["memory limit"].found == "none"
    assert checks["cpu limit"].found == "none"


def test_an_older_control_group_is_read_too(tmp_path: Path) -> None:
    for name, text in {"memory/memory.limit_in_bytes": "1024", "cpu/cpu.cfs_quota_us": "50000"}.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000")
    checks = by_name(list(doctor.check_memory(tmp_path)))
    assert checks["memory limit"].found == "1 KiB"
    assert checks["cpu limit"].found == "0.5 cores"


@pytest.mark.parametrize(
    "setting, status, found",
    [
        ("always [madvise] never", Status.OK, "madvise"),
        ("always madvise [never]", Status.ADVICE, "never: lookups run slower"),
    ],
)
def test_huge_pages_that_are_off_bring_advice(
    tmp_path: Path, setting: str, status: Status, found: str
) -> None:
    write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=setting + "\n")
    check = doctor.check_huge_pages(tmp_path)
    assert (check.status, check.found) == (status, found)
    assert ("sudo tee /sys/kernel/mm" in check.advice) == (status is Status.ADVICE)


def test_the_disk_is_the_one_asked_for(tmp_path: Path) -> None:
    assert f"at {tmp_path.resolve()}" in doctor.check_disk(tmp_path).found
    with pytest.raises(ConfigError, match=r"--path .*nowhere"):
        doctor.check_disk(tmp_path / "nowhere")


def test_the_disk_is_measured_when_asked_and_the_file_is_gone(tmp_path: Path) -> None:
    asked = doctor.check_cold_rows(None)
    assert "`monolith doctor --disk FOLDER`" in asked.found
    assert "measured" not in asked.as_json()
    check = doctor.check_cold_rows((tmp_path,))
    assert re.match(
        r"[\d,]+ random reads of 4 KiB per second by 32 threads, [\d,]+ MB/s written", check.found
    )
    measured = check.as_json()["measured"]
    assert isinstance(measured, dict)
    assert measured["reads_per_s"] > 0
    assert measured["write_bytes_per_s"] > 0
    assert measured["file_bytes"] <= 256 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_brings_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = measuring.DiskSpeed(str(tmp_path), 900.0, 32, 80e6, 1 << 28, 1 << 40)
    monkeypatch.setattr(measuring, "measure_disk", lambda folder: network)  # noqa: ARG005
    check = doctor.check_cold_rows((tmp_path,))
    assert check.status is Status.ADVICE
    assert check.found.startswith("900 random reads of 4 KiB per second by 32 threads, 80 MB/s written")
    assert "local SSD" in check.advice


@pytest.mark.parametrize(
    "where, raised, said",
    [
        (
            "filesystem.temporary_folder",
            OSError(errno.EROFS, "Read-only file system"),
            "Read-only file system",
        ),
        ("os.pwrite", OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    ],
)
def test_a_folder_that_cannot_be_measured_is_advice_and_stays_empty(
    where: str, raised: OSError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:  # noqa: ARG001
        raise raised

    monkeypatch.setattr(f"monolith.cli.measuring.{where}", fail)
    check = doctor.check_cold_rows((tmp_path,))
    monkeypatch.undo()
    assert check.status is Status.ADVICE
    assert re.search(said, check.found)
    assert "storage_dir" in check.advice
    assert list(tmp_path.iterdir()) == []


def test_without_reads_past_the_cache_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    assert "no reads past the kernel's cache (O_DIRECT)" in doctor.check_cold_rows((tmp_path,)).found
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_filled_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)  # noqa: ARG005
    assert "has 1,048,576 free bytes, too few to measure with" in doctor.check_cold_rows((tmp_path,)).found


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk .*nowhere is not a folder"):
        doctor.check_cold_rows((tmp_path / "nowhere",))


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (1 << 45, "32 TiB")]
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert doctor.size(count) == text


# Who answers


def test_addresses_come_from_flags_then_the_environment_then_the_usual_ports() -> None:
    addresses = doctor.service_addresses(
        DoctorOptions(zookeeper="zk:1"), {"MONOLITH_ZOOKEEPER": "other:2", "MONOLITH_KAFKA": "broker:3"}
    )
    assert addresses == {"zookeeper": "zk:1", "kafka": "broker:3", "consul": "localhost:8500"}


def test_a_service_that_listens_is_told_from_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and nobody else can take it
        open_port, closed_port = server.getsockname()[1], unused.getsockname()[1]
        addresses = {"kafka": f"127.0.0.1:{open_port}", "consul": f"127.0.0.1:{closed_port}"}
        kafka, consul = doctor.check_services(addresses, timeout=1.0)
    assert (kafka.status, kafka.found) == (Status.OK, f"127.0.0.1:{open_port} accepts connections")
    assert (consul.status, consul.found) == (Status.ABSENT, f"127.0.0.1:{closed_port}: Connection refused")


def test_an_address_may_be_ipv6_and_must_have_a_port() -> None:
    assert doctor.parse_address("kafka", "[::1]:9092") == ("::1", 9092)
    for address in ("localhost", "localhost:", ":9092", "localhost:kafka", "localhost:99999"):
        with pytest.raises(ConfigError, match="address of kafka must be host:port"):
            doctor.parse_address("kafka", address)


# The report


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    checks = [
        Check("installed", "torch", Status.OK, "2.13.0"),
        Check("optional", "ray", Status.ABSENT, "not installed", "pip install 'monolith-recsys[ray]'"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda options, environment: iter(checks))  # noqa: ARG005
    return checks


def test_it_succeeds_when_only_optional_things_are_absent(report: list[Check]) -> None:  # noqa: ARG001
    assert doctor.run(DoctorOptions()) == 0


def test_it_fails_and_says_so_when_a_requirement_is_missing(
    report: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    report.append(Check("installed", "compiled core", Status.MISSING, "no"))
    assert doctor.run(DoctorOptions()) == 1
    assert "Required and missing: compiled core." in capsys.readouterr().out


def test_json_is_one_object_with_every_check(report: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(DoctorOptions(json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    assert [check["name"] for check in printed["checks"]] == [check.name for check in report]
    assert printed["checks"][1] == {
        "area": "optional",
        "name": "ray",
        "status": "absent",
        "found": "not installed",
        "advice": "pip install 'monolith-recsys[ray]'",
    }


def test_the_table_shows_brackets_as_they_are(report: list[Check]) -> None:
    screen = io.StringIO()
    doctor.render(report, True, Console(file=screen, width=200))
    assert "pip install 'monolith-recsys[ray]'" in screen.getvalue()
    assert "Everything required is installed." in screen.getvalue()


def test_this_very_machine_can_be_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.run(DoctorOptions(json=True, timeout=0.2, path=tmp_path))
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if printed["ok"] else 1)
    found = {check["name"]: check for check in printed["checks"]}
    assert found["torch"]["status"] == "ok"
    assert found["compiled core"]["status"] == "ok"
    assert re.search(r"\d+ of \d+ cores usable", found["cpu"]["found"])
    assert {"memory", "open files", "disk", "zookeeper", "kafka", "consul", "huge pages"} <= found.keys()
