#!/usr/bin/env bash
# A job of several nodes under Slurm:   sbatch examples/cluster/slurm.sh [arguments of train.py]
# Submit it from the root of the project, in a folder that all nodes see.
#SBATCH --job-name=gshard
#SBATCH --nodes=2
# One task a node: `gshard launch`, which starts the node's processes and ends them together.
#SBATCH --ntasks-per-node=1
# Nobody else's job on these nodes: the ports between them are open to whoever is on them.
#SBATCH --exclusive
# GPU nodes: take away one # (one process for each GPU). CPU nodes: leave it as it is.
##SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
# A minute before the time is up the launchers get SIGTERM (not this script, which waits for them).
#SBATCH --signal=TERM@60
# May be put back into the queue, here below or when Slurm preempts it. The log goes on.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=gshard-%j.out
set -euo pipefail

# Process 0 listens on the first node, at the address that this name has. Jobs have ports of their
# own, below those that the system hands out by itself (32768 and up on Linux).
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))"

# --kill-on-bad-exit=0, --wait=0: the node that has stopped first does not end the others, which
#   may still save. The launchers end theirs when a peer is lost.
# bash -c: SLURM_NODEID is another one on every node, so each task has to read it. exec: the
#   launcher itself gets Slurm's signals.
# --grace: shorter than the 60 s of --signal.
rc=0
srun --kill-on-bad-exit=0 --wait=0 bash -c 'exec gshard launch \
    --nnodes "$SLURM_JOB_NUM_NODES" --rank "$SLURM_NODEID" --master "$MASTER" \
    --max_restarts 3 --grace 45 --log_dir "log/$SLURM_JOB_ID" \
    examples/train.py "$@"' gshard "$@" || rc=$?

# 75: told to stop, and the state is saved. The same job again, under the same number.
if [ "$rc" = 75 ]; then
    echo "stopped in order: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$rc"
