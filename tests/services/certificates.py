"""Real certificates, made by the openssl command: two authorities, and what each has signed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificates(folder: Path) -> Path:
    """Write two authorities, `ca` and `other`, and a certificate for localhost signed by each."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed, so no certificates can be made")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for authority in ("ca", "other"):
        openssl(
            *("req", "-x509", *key, "-days", "2", "-subj", f"/CN={authority}"),
            *("-keyout", f"{authority}.key", "-out", f"{authority}.crt"),
        )
        openssl(
            *("req", *key, "-subj", "/CN=localhost"),
            *("-keyout", f"{authority}-node.key", "-out", f"{authority}-node.csr"),
        )
        openssl(
            *("x509", "-req", "-days", "2", "-in", f"{authority}-node.csr", "-extfile", "names"),
            *("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial"),
            *("-out", f"{authority}-node.crt"),
        )
    return folder
