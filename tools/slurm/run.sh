#!/usr/bin/env bash
# The steps of a training job, called by the batch scripts beside this file: examine the nodes, train, requeue.
# Arguments are overrides of the configuration (train.steps=1000). Settings are environment variables:
#
#   CONFIG          training configuration
#   LOGS            folder of the logs, one file per process and step; runs/slurm/JOB
#   IMAGE           container for pyxis: a squashfs file, or an image of a registry; empty: no container
#   MOUNTS          what the container sees, as pyxis names it; the current directory
#   DOCTOR          0 leaves the examination of the nodes out
#   DOCTOR_SECONDS  longest wait for a node during the examination; 300
#   LEAVE_SECONDS   time that processes have to end after the first one has ended; 180
#   MAX_REQUEUES    times that a stopped run is put into the queue again; 100. 0: never
#   NCCL's settings: see nccl.sh
set -euo pipefail

config=${CONFIG:?set CONFIG to the training configuration}
logs=${LOGS:-runs/slurm/${SLURM_JOB_ID:?this script runs inside a SLURM job: see the .sbatch files}}
stopped_exit_code=75 # of `steptron pretrain`: stopped as asked, with a checkpoint; the same command goes on

mkdir -p "$logs"
# shellcheck source=tools/slurm/nccl.sh
source "$(dirname "${BASH_SOURCE[0]}")/nccl.sh"

# Rank 0 holds a connection to each process; 4,096 of them are above the usual limit of open files. srun passes
# this shell's limits on.
ulimit -n "$(ulimit -Hn)"
# From Slurm 22.05 on, srun does not take --cpus-per-task from the batch script: without this, one CPU per process.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

container=()
if [[ -n ${IMAGE:-} ]]; then
    container=(--container-image="$IMAGE" --container-mounts="${MOUNTS:-$PWD:$PWD}" --container-workdir="$PWD")
fi

signalled=0
stopping=0
# SIGTERM goes to the processes, which finish their step and write a checkpoint. Not to srun: it would kill them.
# shellcheck disable=SC2329 # called by the trap
ask_to_stop() {
    signalled=1
    stopping=1
    echo "steptron: asked to stop; the processes finish their step and write a checkpoint" >&2
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap ask_to_stop USR1 TERM

# run NAME COMMAND...: one process per task of the job; returns the largest of their exit codes.
#
# The processes of a run end one after the other, with 75 as well as with 0, so the first one to end must not take
# the others along (--kill-on-bad-exit=0), but none may stay for ever (--wait). Ranks of a node are consecutive
# (--distribution): expert-parallel groups lie inside nodes. Each process sees all GPUs of its node and takes the one
# of its local rank (--gpu-bind=none).
run() {
    local name=$1 code=0 next=0 pid
    shift
    srun --kill-on-bad-exit=0 --wait="${LEAVE_SECONDS:-180}" --distribution=block:block --gpu-bind=none \
        --output="$logs/$name-%4t.log" --open-mode=append "${container[@]}" "$@" &
    pid=$!
    wait "$pid" || code=$?
    while ((signalled)); do # a signal interrupts `wait`
        signalled=0
        next=0
        wait "$pid" 2>/dev/null || next=$?
        ((next == 127)) || code=$next # 127: it had ended before the signal came
    done
    return "$code"
}

requeue() {
    if ((${SLURM_RESTART_COUNT:-0} >= ${MAX_REQUEUES:-100})); then
        echo "steptron: stopped; not put into the queue again (MAX_REQUEUES is ${MAX_REQUEUES:-100})" >&2
        exit "$stopped_exit_code"
    fi
    echo "steptron: stopped; job $SLURM_JOB_ID goes into the queue again and continues from its checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit "$stopped_exit_code"
}

# ---- Reserved for the metrics server, which this version of Steptron does not have: nothing is started here.
# ---- Its place is here, before the trainer: a step of its own on a node without training processes, whose address
# ---- the trainer is then given.

if [[ ${DOCTOR:-1} != 0 ]]; then
    echo "steptron: examining the nodes; report in $logs/doctor-0000.log" >&2
    code=0
    run doctor steptron doctor --nodes --timeout "${DOCTOR_SECONDS:-300}" --json "$logs/doctor.json" \
        --config "$config" "$@" || code=$?
    if ((stopping)); then
        requeue
    elif ((code)); then
        grep -h "^To mend" "$logs"/doctor-*.log >&2 || tail -n 20 "$logs/doctor-0000.log" >&2
        echo "steptron: the nodes are not fit for the run (exit code $code); nothing was trained" >&2
        exit "$code"
    fi
fi

if ((stopping)); then # between the two
    requeue
fi
echo "steptron: training; output of rank 0 in $logs/pretrain-0000.log" >&2
code=0
run pretrain steptron pretrain "$config" "$@" || code=$?
# 143: asked to stop in the first instant, before the processes listened.
if ((code == stopped_exit_code || (stopping && code == 143))); then
    requeue
elif ((code)); then
    # What failed first says why; the others report that it is gone.
    echo "steptron: training ended with exit code $code; last lines of rank 0:" >&2
    tail -n 20 "$logs/pretrain-0000.log" >&2
fi
exit "$code"
