#!/bin/sh
# Loads the version of a kernel module that is installed on this host: load NAME. There is no kernel
# of its own to load it into: /sys/module, /proc/driver and /dev show what a kernel would.
home=/opt/hostlab
installed=$home/installed/$1
[ -e "$installed" ] || exit 1
if [ "$1" = nvidia ] && ! lspci -n | grep -q ' 0302: 10de:'; then
  echo "modprobe: ERROR: could not insert 'nvidia': No such device" >&2
  exit 1
fi
mkdir -p "$home/module/$1"
cat "$installed" >"$home/module/$1/version"
if [ "$1" = nvidia ]; then
  mkdir -p $home/driver/nvidia
  echo "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  $(cat "$installed")  Release Build" \
    >$home/driver/nvidia/version
  [ -e /dev/nvidiactl ] || mknod /dev/nvidiactl c 195 255
  index=0
  for device in $home/pci/devices/*; do
    [ "$(cat "$device/vendor")" = 0x10de ] || continue
    [ -e /dev/nvidia$index ] || mknod /dev/nvidia$index c 195 $index
    index=$((index + 1))
  done
fi
