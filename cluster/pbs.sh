#!/usr/bin/env bash
#PBS -N unsloth-ddp
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -r y
#
# Train on the nodes of a PBS job with LoRA, QLoRA or full training. Takes the options of node.sh. From the kit's folder:
#
#   qsub -l select=2:ngpus=8:ncpus=64 -v ARGS="-m MODEL -d DATA --method lora" cluster/pbs.sh      (PBS Pro, OpenPBS)
#   qsub -l nodes=2:ppn=64:gpus=8 -F "-m MODEL -d DATA --method lora" cluster/pbs.sh               (Torque)
#
# Options of qsub override the #PBS lines. The nodes are those of $PBS_NODEFILE; node.sh is started on them by
# pbs_tmrsh, which PBS Pro brings along and which keeps every process under the job, or by ssh where there is none.
# Each node writes logs/pbs-JOB/node-N.log. When the job is stopped (qdel, the time limit, a preemption) PBS sends
# SIGTERM first: the training writes a checkpoint, if the time between SIGTERM and SIGKILL is long enough for it
# (kill_delay of the queue). A job that PBS requeues (-r y; preemption, node failure) resumes from it. If the job was
# submitted with REQUEUE=1, it also requeues itself after it stopped on its own (exit code 75; --max_time).
# The job's exit code is that of the training.
#
# Environment, with qsub -v: ARGS (the options, with shell quotes around words with spaces), MASTER_PORT (default: from
# the job id), GPUS_PER_NODE (default: all that a node shows), RUN_NAME (default: pbs-JOB; --run_name, or run_name in
# the --config, wins over it), REQUEUE, UNSLOTH_DDP_HOME (the kit's folder, if the job is submitted from elsewhere).
set -uo pipefail

say() { echo "pbs.sh: $*" >&2; }

refuse() {
  say "error: $*"
  exit 2
}

kit=${UNSLOTH_DDP_HOME:-${PBS_O_WORKDIR:-$PWD}}
[[ -f $kit/cluster/ssh.sh ]] ||
  refuse "there is no cluster/ssh.sh in $kit; submit from the kit's folder, or set UNSLOTH_DDP_HOME to it."
[[ -n ${PBS_JOBID:-} && -n ${PBS_NODEFILE:-} ]] ||
  refuse "this is a job file for PBS; start it with qsub (bash cluster/ssh.sh takes a list of hosts without PBS)."
[[ -s $PBS_NODEFILE ]] || refuse "the list of nodes, PBS_NODEFILE=$PBS_NODEFILE, is missing or empty."
cd "${PBS_O_WORKDIR:-$PWD}" || exit 2

words=("$@")
if [[ -n ${ARGS:-} ]]; then
  # Splits as a shell would with its quotes, and expands nothing.
  mapfile -t given < <(xargs -r -n 1 printf '%s\n' <<<"$ARGS" 2>/dev/null)
  wait $! || refuse "ARGS has a quote that does not end: $ARGS"
  words+=("${given[@]}")
fi

# "123.server" and "123[4].server" as a number and a plain name.
number=${PBS_JOBID%%[!0-9]*}
job=${PBS_JOBID%%.*}
job=${job//[^A-Za-z0-9_-]/-}
[[ -n $number ]] || refuse "PBS_JOBID is $PBS_JOBID, which begins with no number."

# A node stands there once a processor; its first mention counts. Node 0 is the one that this script runs on.
HOSTS=$(awk 'NF && !seen[$1]++ {print $1}' "$PBS_NODEFILE")
export HOSTS
# Two ports a job (the preflight takes the second), below those that systems hand out by themselves.
export MASTER_PORT=${MASTER_PORT:-$((10000 + 2 * (10#$number % 10000)))}
export LOGS=logs/pbs-$job
if [[ -z ${SSH:-} ]] && command -v pbs_tmrsh >/dev/null; then
  export SSH=pbs_tmrsh
fi

# A requeued job keeps its id, and so finds its run again.
export RUN_NAME=${RUN_NAME:-pbs-$job}

say "job $PBS_JOBID on ${HOSTS//$'\n'/ }: port $MASTER_PORT, logs in $LOGS"
bash "$kit/cluster/ssh.sh" "${words[@]}" &
step=$!

# A signal ends `wait` early. Bash lets background commands ignore SIGINT, so that one goes on as SIGTERM.
interrupted=0
trap 'interrupted=1; kill -TERM "$step"' TERM INT
trap 'interrupted=1; kill -USR1 "$step"' USR1
while :; do
  interrupted=0
  wait "$step"
  code=$?
  ((interrupted)) || break
done

if ((code == 75)) && [[ ${REQUEUE:-0} == 1 ]]; then
  say "stopped with a checkpoint; back into the queue to go on from it"
  qrerun "$PBS_JOBID"
fi
say "ended with exit code $code"
exit "$code"
