"""`python -m monolith` is `monolith`."""

import sys

from monolith.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
