#!/bin/sh
# Runs the EFA installer: install.sh FOLDER MARKER FLAG...
#
# MARKER says that an installation is under way until it has ended well: the installer writes its list
# of packages before it has loaded its driver, so that the list alone proves nothing. It ends by saying
# that a reboot is due, and in which boot that was so. One at a time: a run that lost its connection may
# still be at work.
folder=$1 marker=$2
shift 2
mkdir -p "${marker%/*}" || exit
exec 9>"$marker.lock"
flock --wait 1800 9 || {
  echo "another run of the EFA installer has not ended in 30 minutes" >&2
  exit 1
}
echo installing >"$marker" || exit
sync "$marker"
cd "$folder/aws-efa-installer" || exit
DEBIAN_FRONTEND=noninteractive ./efa_installer.sh --yes "$@" >"$folder/log" 2>&1 </dev/null 9>&-
code=$?
tail -n 40 "$folder/log"
[ $code -eq 0 ] || exit $code
if grep -qi -e 'please reboot' -e 'reboot is needed' "$folder/log"; then
  echo "reboot $(cat /proc/sys/kernel/random/boot_id)" >"$marker"
else
  rm "$marker"
fi
rm -rf "$folder/aws-efa-installer" "$folder"/aws-efa-installer-*.tar.gz
