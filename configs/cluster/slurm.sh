#!/usr/bin/env bash
# Trains on a Slurm cluster, one process a node: sbatch configs/cluster/slurm.sh [CONFIG]
# Submit it where the configuration's paths begin, in a folder that all nodes share, with autoshard on the PATH.
# Two minutes before its time is over Slurm sends SIGTERM: all processes save the same step, and the job is queued again.
#SBATCH --job-name=autoshard-demo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=autoshard-%j.log
set -euo pipefail

config=${1:-configs/train/demo.yaml}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
coordinator=${nodes%%$'\n'*}:$((20000 + SLURM_JOB_ID % 10000)) # the first node; jobs that share it have other ports

# The first process that ends leaves the others two minutes to save: one that is lost ends them within the heartbeat.
code=0
# shellcheck disable=SC2016 # each task has its own SLURM_PROCID
srun --kill-on-bad-exit=0 --wait=120 bash -c \
	'exec autoshard train "$1" --coordinator "$2" --processes "$SLURM_NTASKS" --id "$SLURM_PROCID"' \
	train "$config" "$coordinator" || code=$?

# srun gives the highest code of the tasks. 143: stopped, and saved. 75: a process was lost. 137, 134: that process, where
# it was killed or aborted. All go on from the newest checkpoint; an error of the configuration, 2, does not.
case $code in
75 | 134 | 137 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
