#!/bin/sh
# The device that is away comes back after the seconds that the fault names.
sleep "$(cat /opt/hostlab/faults/efa-device-late)"
mv /opt/hostlab/away/class/infiniband/* /opt/hostlab/class/infiniband/
