#!/usr/bin/env bash
# Installs the servers that the tests talk to, and says what it did.
#
# One function per server, named install_<server>, listed in SERVERS. A function
# prints one line: what it installed, or that it was already there. The tests
# start and stop the servers themselves; whatever cannot come from a system
# package goes below .services, which git ignores.
set -euo pipefail
cd "$(dirname "$0")/.."

SERVERS=()

if [ ${#SERVERS[@]} -eq 0 ]; then
  echo "services: the tests need no server yet; nothing installed."
  exit 0
fi
for server in "${SERVERS[@]}"; do
  printf 'services: %s: ' "$server"
  "install_$server"
done
