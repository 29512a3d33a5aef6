#!/bin/sh
# Puts the mocked hardware at its real paths, for this host alone. Runs at every boot.
set -e
home=/opt/hostlab

# Places for it: in a container, /sys is read-only, without /sys/module and without a bus of PCI.
mkdir -p /run/hostlab/class/infiniband /run/hostlab/class/infiniband_verbs /run/hostlab/class/dmi/id
mkdir -p /run/hostlab/bus/pci/devices /run/hostlab/vm
mount -t overlay hostlab-class -o lowerdir=/run/hostlab/class:/sys/class /sys/class
mount -t overlay hostlab-bus -o lowerdir=/run/hostlab/bus:/sys/bus /sys/bus
mount -o remount,rw /sys
mkdir -p /sys/module
mount -o remount,ro /sys

# No module of the last boot is loaded.
rm -rf $home/module/* $home/driver/*

# A device that is late at one boot is late at each.
if [ -e $home/faults/efa-device-late ] && [ -e $home/class/infiniband/rdmap86s0 ]; then
  mkdir -p $home/away/class/infiniband
  mv $home/class/infiniband/rdmap86s0 $home/away/class/infiniband/
fi

# Directories of ordinary files: what changes there is seen at once.
mount --bind $home/class/infiniband /sys/class/infiniband
mount --bind $home/class/infiniband_verbs /sys/class/infiniband_verbs
mount --bind $home/dmi /sys/class/dmi/id
mount --bind $home/pci/devices /sys/bus/pci/devices
mount --bind $home/block /sys/block
mount --bind $home/module /sys/module
mount --bind $home/driver /proc/driver

# vm.* of this host alone: the real ones are the machine's, and read-only here.
cp --no-preserve=all /proc/sys/vm/* /run/hostlab/vm/ 2>/dev/null || true
for file in /proc/sys/vm/*; do
  [ -e "/run/hostlab/vm/${file##*/}" ] || : >"/run/hostlab/vm/${file##*/}"
done
mount --bind /run/hostlab/vm /proc/sys/vm

# A boot loads the modules that are installed, in their newest version.
for module in $home/installed/*; do
  [ ! -e "$module" ] || $home/load "${module##*/}" || true
done

for node in $home/dev/*; do
  [ ! -e "$node" ] || mknod "/dev/${node##*/}" $(cat "$node")
done
# Arrays are put together before anything asks, where there is mdadm.
rm -rf $home/block/md127 $home/block/*/holders/*
[ ! -e $home/md ] || [ ! -x /sbin/mdadm ] || /sbin/mdadm --assemble --scan --run || true
mkdir -p /dev/infiniband
for device in $home/class/infiniband_verbs/*; do
  [ -e "$device" ] || continue
  number=${device##*uverbs}
  mknod "/dev/infiniband/uverbs$number" c 231 $((192 + number))
done
