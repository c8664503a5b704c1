#!/usr/bin/env bash
# Run this on every host of a training, by whatever starts programs there: examples/launch has Slurm, Kubernetes and plain shells.
#
#   NODES=2 NODE=0 HEAD=10.0.0.1 examples/multihost.sh [PROGRAM [ARGUMENTS]]
#
# NODES  hosts in all                     NODE   this host, from 0
# HEAD   the address of host 0            PORT   a port that is free on it (29500)
# RANKS  ranks on each host (its GPUs)    IFACE  the network interface between the hosts (gloo and NCCL choose)
set -euo pipefail
: "${NODES:?how many hosts?}" "${NODE:?which host is this, from 0?}" "${HEAD:?the address of host 0?}"
here=$(dirname "$0")
if [ -n "${IFACE:-}" ]; then
  export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME="=$IFACE"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ $# = 0 ]; then
  set -- "$here/multihost.py"
fi
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$NODES" --node-rank "$NODE" --master-addr "$HEAD" --master-port "${PORT:-29500}" \
  --nproc-per-node "${RANKS:-gpu}" --max-restarts 0 "$@"
