#!/usr/bin/env bash
# Slurm on this one machine, for `pytest -m slurm`: Debian's packages, one node, one partition, and
# no cgroups, so that it runs within containers too. Run as root. Does nothing where Slurm answers.
set -euo pipefail

answers() { sinfo --noheader --states=idle,mixed,allocated 2>/dev/null | grep -q .; }
if answers; then exit; fi

if ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge >/dev/null
fi

if ! munge --no-input 2>/dev/null | unmunge >/dev/null 2>&1; then
  install -d -o munge -g munge -m 0755 /run/munge
  [ -s /etc/munge/munge.key ] || mungekey --create
  chown munge:munge /etc/munge/munge.key
  runuser -u munge -- munged
fi

node=$(hostname -s)
mkdir -p /etc/slurm /var/spool/slurmctld /var/spool/slurmd
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=$node Default=YES State=UP
CONF
pidof slurmctld >/dev/null || slurmctld
pidof slurmd >/dev/null || slurmd

for _ in $(seq 60); do
  if answers; then exit; fi
  sleep 1
done
echo 'Slurm does not come up:' >&2
sinfo >&2 || true
tail -n 20 /var/log/slurm*/*.log /var/log/slurm*.log >&2 2>/dev/null || true
exit 1
