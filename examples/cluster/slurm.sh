#!/usr/bin/env bash
# A job of several nodes under Slurm:   sbatch examples/cluster/slurm.sh [arguments of train.py]
# Submit it from the root of the project, in a folder that all nodes see.
#SBATCH --job-name=gshard
#SBATCH --nodes=2
# One task a node: `gshard launch`, which starts the node's processes and ends them together.
#SBATCH --ntasks-per-node=1
# No other jobs on these nodes: anyone on a node can connect to the ports of this job.
#SBATCH --exclusive
# GPU nodes: remove one # (one process per GPU). CPU nodes: leave the line as it is.
##SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
# A minute before the time limit the launchers get SIGTERM. (This script does not; it waits for
# them.)
#SBATCH --signal=TERM@60
# The job may be requeued, below or when Slurm preempts it. The log is appended to.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gshard-%j.out
set -euo pipefail

# Process 0 listens on the first node, at the address of this name. Each job gets a port of its own,
# below the range that the system assigns itself (32768 and up on Linux).
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"

# --kill-on-bad-exit=0, --wait=0: the node that stops first does not end the others, which may still
#   be saving. The launchers end their processes when a peer is lost.
# bash -c: SLURM_NODEID differs on every node, so each task has to read it. exec: Slurm's signals
#   reach the launcher itself.
# --grace: shorter than the 60 s of --signal.
rc=0
srun --kill-on-bad-exit=0 --wait=0 bash -c 'exec gshard launch \
    --nnodes "$SLURM_JOB_NUM_NODES" --rank "$SLURM_NODEID" --master "$MASTER" \
    --max_restarts 3 --grace 45 --log_dir "log/$SLURM_JOB_ID" \
    examples/train.py "$@"' gshard "$@" || rc=$?

# 75: the job was told to stop, and the state is saved. Requeue it under the same job ID.
if [ "$rc" = 75 ]; then
    echo "stopped cleanly: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$rc"
