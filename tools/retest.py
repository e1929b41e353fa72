"""Run the tests again that failed in the last `make test`, if there are few of them.

Tests start real servers and wait for deadlines, so one of many thousands can fail because the machine stood
still. One that fails again, by itself, has found a defect. Both runs are printed: a test that fails only in
the first one is to be mended, too (docs/decisions/0079).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
"""More tests than this do not fail by chance."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Return the exit status: 0 if every failed test passes now."""
    try:
        failed = json.loads(FAILED.read_text())
    except FileNotFoundError:
        sys.exit("retest: no test has failed; what failed is something else")
    if len(failed) > MOST:
        sys.exit(f"retest: {len(failed)} tests failed, which is more than {MOST}: not run again")
    sys.stdout.write("\n  ".join(["retest: once more, by themselves:", *failed]) + "\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "--last-failed", "--last-failed-no-failures", "none"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
