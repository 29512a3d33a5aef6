#!/bin/sh
# Starts one process of a fleet in a container: start.sh FILE, the same file that a node's systemd unit
# starts from. The launcher is the units' own: it refuses taken ports, and puts a fresh generation in.
set -eu
[ $# -eq 1 ] || {
  echo "start.sh takes one file: what is to be started, as /etc/kvdeploy has it on a node" >&2
  exit 2
}
launcher=$(dirname "$(readlink -f "$0")")/launcher.py
python3 -I "$launcher" check "$1"
exec python3 -I "$launcher" exec "$1"
