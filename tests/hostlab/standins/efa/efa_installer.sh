#!/bin/bash
# Stand-in for the EFA installer: its options, its words, and the effects that a playbook can see.
# It installs real packages with apt, and "loads" the module into this host's mocked /sys/module.

version=@VERSION@
list=/opt/amazon/efa_installed_packages
hostlab=/opt/hostlab

usage() {
  cat <<EOF
usage: $(basename "$0") [options]

Options:
 -d, --debug-packages	Install debug packages
 -u, --uninstall	Uninstall EFA packages
 -y, --yes		Run installer without prompting for confirmation
 -n, --no-verify	Skip EFA device verification and test
 -l, --skip-limit-conf	Skip EFA limit configuration
 -k, --skip-kmod	Skip EFA kmod installation
 -g, --enable-gdr	Not needed: GPUDirect RDMA is enabled by default
 -m, --minimal		Only install kernel module and rdma-core, do not install openmpi and libfabric
 --skip-mpi		Skip Open MPI installation
 --skip-plugin		Skip the NCCL plugin
 --skip-rdma-core	Skip rdma-core installation
 --build-ngc, --disable-ngc, --enable-ngc	For containers
EOF
}

echo "= Starting Amazon Elastic Fabric Adapter Installation Script ="
echo "= EFA Installer Version: $version ="
echo

if [ ! -e common.sh ]; then
  echo "Please cd into the installer directory." >&2
  exit 1
fi

long=debug-packages,no-verify,uninstall,yes,skip-limit-conf,skip-kmod,minimal,enable-gdr
long=$long,skip-mpi,skip-plugin,skip-rdma-core,build-ngc,disable-ngc,enable-ngc
if ! options=$(getopt -n efa_installer.sh -o :dnuylkmg --long $long -- "$@"); then
  usage
  exit 1
fi
eval set -- "$options"
debug=no yes=0 uninstall=0 verify=1 limits=1 kmod=1 minimal=0
while :; do
  case $1 in
    -d | --debug-packages) debug=yes ;;
    -u | --uninstall) uninstall=1 ;;
    -y | --yes) yes=1 ;;
    -n | --no-verify) verify=0 ;;
    -l | --skip-limit-conf) limits=0 ;;
    -k | --skip-kmod) kmod=0 ;;
    -m | --minimal) minimal=1 ;;
    --) break ;;
  esac
  shift
done
if [ "$(id -u)" -ne 0 ]; then
  echo "Error: root privileges are required." >&2
  exit 1
fi
if [ $yes -ne 1 ]; then
  echo "This script will install the EFA kernel driver and required user space packages. Do you wish to continue? [y/n]"
  read -r answer && [ "$answer" = y ] || exit 1
fi
echo "$(date +%s) $version $options" >>/var/log/hostlab-efa-installer.log

if [ $uninstall -eq 1 ]; then
  if [ ! -f $list ]; then
    echo "Error: EFA is not installed, exiting." >&2
    exit 1
  fi
  echo "== Uninstalling EFA packages =="
  dpkg --purge libfabric1-aws efa-profile efa-config efa >/dev/null 2>&1
  rm -f $list
  printf '\nEFA uninstall complete.\n'
  exit 0
fi

echo "== Installing EFA dependencies =="
export DEBIAN_FRONTEND=noninteractive
if ! apt-get install -y pciutils libnl-3-200 libnl-route-3-200; then
  echo "Error: Failed to install packages." >&2
  echo "Error: failed to install third-party dependencies, exiting" >&2
  exit 1
fi

echo "== Installing EFA packages =="
packages=()
for package in DEBS/*.deb; do
  name=$(basename "$package" .deb)
  case $name in
    efa-config_*) [ $limits -eq 1 ] || continue ;;
    efa_*) [ $kmod -eq 1 ] || continue ;;
    libfabric* | efa-profile_*)
      if [ $minimal -eq 1 ]; then
        echo "skipping $name because of minimal installation"
        continue
      fi
      ;;
  esac
  packages+=("./$package")
done
if [ -e $hostlab/faults/efa-installer-fails ]; then
  # What was installed before it failed stays, as it does with the real one.
  apt-get install -y "${packages[0]}"
  echo "Error: Failed to install packages." >&2
  echo "Error: failed to install EFA packages, exiting" >&2
  exit 1
fi
if ! apt-get install -y --allow-downgrades "${packages[@]}"; then
  echo "Error: Failed to install packages." >&2
  echo "Error: failed to install EFA packages, exiting" >&2
  exit 1
fi
names=()
for package in "${packages[@]}"; do names+=("$(basename "$package" .deb)"); done
cat >$list <<EOF
# EFA installer version: $version
# Debug packages installed: $debug
# Packages installed:
${names[*]}
EOF

action=logout/login
if [ $kmod -eq 1 ]; then
  echo "Updating boot ramdisk"
  if [ -e $hostlab/module/efa ] && [ -e $hostlab/faults/efa-needs-reboot ]; then
    echo "Failed to unload EFA kernel module."
    echo "Reboot is needed!" >&2
    action=reboot
  else
    echo "Reloading EFA kernel module"
    $hostlab/load efa
  fi
fi

if [ $verify -eq 1 ] && [ $minimal -eq 0 ] && lspci -n | grep -q 1d0f:efa; then
  echo "== Testing EFA device =="
  if ! /opt/amazon/efa/bin/fi_info -p efa >/dev/null; then
    cat <<EOF
===================================================
EFA installation is complete and an EFA device has
been detected but a ping test failed. Please consult
the EFA documentation to verify your configuration.
- Libfabric was installed in /opt/amazon/efa
===================================================
EOF
    exit 1
  fi
fi
cat <<EOF
===================================================
EFA installation complete.
- Please $action to complete the installation.
EOF
[ $minimal -eq 1 ] || echo "- Libfabric was installed in /opt/amazon/efa"
echo "==================================================="
