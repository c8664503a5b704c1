#!/usr/bin/env bash
# Two hosts by Slurm, one task a host, which starts the ranks there: `sbatch examples/launch/slurm.sh`, in the folder of the project.
#SBATCH --job-name=zerobubble
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
set -euo pipefail
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${HOSTS%%$'\n'*}
export HEAD NODES=$SLURM_JOB_NUM_NODES
# A rank that fails ends all of them with one error each, so there is nothing to wait for when the first host has ended badly.
srun --kill-on-bad-exit=1 bash -c 'NODE=$SLURM_NODEID exec examples/multihost.sh'
