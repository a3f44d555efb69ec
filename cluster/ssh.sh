#!/usr/bin/env bash
# Run cluster/node.sh on a list of hosts over ssh, from one place. usage() says the rest.
set -uo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'TEXT'
Train on a list of hosts over ssh; the kit stands at the same path on each of them.

    HOSTS="gpu1 gpu2" bash cluster/ssh.sh -m MODEL -d DATA [node.sh options]
    HOSTS=hosts.txt bash cluster/ssh.sh -m MODEL -d DATA [node.sh options]

The options are node.sh's (bash cluster/node.sh -h). Each host works in the folder that this is called from, and has
to let you in by key, without a question. Each writes its log to logs/ssh-TIME/node-N.log here; that of node 0 is also
shown. When a node fails the others are ended. Ctrl-C, SIGTERM and SIGUSR1 stop every node with a checkpoint, a second
one at once. Start it in tmux or with nohup if the connection may break: a node whose ssh is gone counts as failed.

Environment:
  HOSTS           names in one text, or a file with one name a line (# begins a comment); the first is the master
  MASTER_ADDR     node 0 as the other hosts reach it (default: the first name, without user@)
  MASTER_PORT, GPUS_PER_NODE, START_TIMEOUT, RUN_NAME   as for node.sh
  UNSLOTH_DDP_SECRET   as for node.sh (default: a new one for each job)
  SSH             command that runs another on a host (default: ssh -o BatchMode=yes and keep-alives)
  SSH_OPTIONS     more options for it
  LOGS            folder of the logs, instead of logs/ssh-TIME

Exit code: that of the training; 255 if a host could not be reached.
TEXT
}

say() { echo "ssh.sh: $*" >&2; }

refuse() {
  say "error: $*"
  exit 2
}

# ---- on a node ----

# Words that any remote shell leaves as they are: quoted by bash, then base64 in one word.
pack() { printf '%q ' "$@" | base64 | tr -d '\n'; }

# note FILE TEXT: in a file of this user's own, never through one that somebody else put there under its name.
note() {
  if [[ -O $1 && ! -L $1 ]]; then
    echo "$2" >"$1"
  else
    (umask 077 && set -o noclobber && echo "$2" >"$1")
  fi
}

# start PID_FILE FOLDER NAME=VALUE... -- WORD...: run node.sh, with its process id in PID_FILE for signals to come.
# A secret of "-" stands in the first line of standard input, since other users of a host can read command lines.
on_node_start() {
  local pid_file=$1 code
  cd "$2" || exit 2
  shift 2
  while [[ $1 != -- ]]; do
    export "${1?}"
    shift
  done
  shift
  if [[ ${UNSLOTH_DDP_SECRET:-} == - ]]; then
    IFS= read -r -t 60 UNSLOTH_DDP_SECRET
    export UNSLOTH_DDP_SECRET
  fi
  bash "$kit/cluster/node.sh" "$@" </dev/null &
  note "$pid_file" $!
  # A signal may have been faster than this.
  [[ ! -O $pid_file.early ]] || kill -s "$(cat "$pid_file.early")" $!
  wait $!
  code=$?
  rm -f -- "$pid_file" "$pid_file.early"
  exit "$code"
}

# signal PID_FILE SIGNAL: to node.sh, if it still runs, or as soon as it does. One that comes after its end leaves a
# file, which forget removes.
on_node_signal() {
  local pid=""
  [[ ! -O $1 ]] || pid=$(cat "$1" 2>/dev/null)
  # The file is empty for a moment.
  if [[ -z $pid ]]; then
    note "$1.early" "$2" 2>/dev/null
  # Another process may have the number by now. Until it becomes node.sh, it has the name of this script.
  elif grep -qz 'cluster/\(node\|ssh\).sh$' "/proc/$pid/cmdline" 2>/dev/null; then
    kill -s "$2" "$pid"
  fi
}

if [[ ${1:-} == --on-node ]]; then
  eval "set -- $(base64 -d <<<"$2")"
  case $1 in
    start) on_node_start "${@:2}" ;;
    signal) on_node_signal "${@:2}" ;;
    forget) rm -f -- "$2.early" ;;
  esac
  exit
fi

# ---- here ----

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac

[[ -n ${HOSTS:-} ]] || refuse "HOSTS is not set; set it to the names of the hosts, or to a file that lists them."
# Lists written on Windows end their lines with a carriage return.
if [[ -f $HOSTS ]]; then
  mapfile -t hosts < <(tr -d '\r' <"$HOSTS" | sed 's/#.*//' | awk 'NF {print $1}')
else
  read -ra hosts <<<"${HOSTS//[$'\r\n',]/ }"
fi
((${#hosts[@]})) || refuse "HOSTS ($HOSTS) names no host; give one a line, or several in one text."
for host in "${hosts[@]}"; do
  [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.@:%-]*$ ]] || refuse "HOSTS has '$host', which is not a host name."
done
# Another user on the same host would have the same GPUs; names of hosts are alike in capitals.
repeated=$(printf '%s\n' "${hosts[@]#*@}" | tr '[:upper:]' '[:lower:]' | sort | uniq -d | head -n 1)
[[ -z $repeated ]] || refuse "HOSTS has $repeated twice; each host runs one node.sh, with all its GPUs."

nodes=${#hosts[@]}
master=${MASTER_ADDR:-${hosts[0]#*@}}
if [[ -n ${SSH:-} ]]; then
  read -ra remote <<<"$SSH"
else
  # A host that does not answer is given up after half a minute.
  remote=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10 -o ServerAliveCountMax=3)
fi
read -ra more <<<"${SSH_OPTIONS:-}"
remote+=("${more[@]}")

logs=${LOGS:-logs/ssh-$(date +%Y%m%d-%H%M%S)-$$}
mkdir -p -- "$logs" || refuse "the folder of the logs, $logs, cannot be made; name another with LOGS."
secret=${UNSLOTH_DDP_SECRET:-$(head -c 32 /dev/urandom | base64 | tr -d '\n=')}
work=$(mktemp -d "${TMPDIR:-/tmp}/unsloth_ddp_ssh.XXXXXX") || refuse "no temporary folder can be made; see to TMPDIR."
job=$(basename "$work")

# ssh hands its words to the remote user's shell, which reads them once more; pbs_tmrsh hands them on as they are, and
# no standard input with them.
through_shell=1
[[ ${remote[0]##*/} != pbs_tmrsh ]] || through_shell=0

# The kit's script as a word that the remote shell reads as this path. Plain ones stay as they are, for any command.
script=$kit/cluster/ssh.sh
if ((through_shell)) && [[ ! $script =~ ^[A-Za-z0-9_./+-]+$ ]]; then
  script="'${script//\'/\'\\\'\'}'"
fi

# on_host NODE VERB WORD...: with this standard input.
on_host() {
  local host=${hosts[$1]}
  shift
  "${remote[@]}" "$host" bash "$script" --on-node "$(pack "$@")"
}

start_node() {
  local node=$1 variables
  shift
  variables=("NNODES=$nodes" "NODE_RANK=$node" "MASTER_ADDR=$master")
  for name in MASTER_PORT GPUS_PER_NODE START_TIMEOUT RUN_NAME; do
    [[ -z ${!name:-} ]] || variables+=("$name=${!name}")
  done
  if ((through_shell)); then variables+=(UNSLOTH_DDP_SECRET=-); else variables+=("UNSLOTH_DDP_SECRET=$secret"); fi
  on_host "$node" start "/tmp/$job.$node.pid" "$PWD" "${variables[@]}" -- "$@" 2>&1 <<<"$secret" |
    if ((node == 0)); then tee -- "$logs/node-0.log"; else cat >"$logs/node-$node.log"; fi
  # Renamed into place, so that the loop below never reads half a number.
  echo "${PIPESTATUS[0]}" >"$work/$node.code.new" && mv "$work/$node.code.new" "$work/$node.code"
}

# Killing an ssh client leaves its remote processes alive, so signals go by a connection of their own.
signals=()
signal_all() {
  local node
  for ((node = 0; node < nodes; node++)); do
    [[ ! -e $work/$node.code ]] || continue
    on_host "$node" signal "/tmp/$job.$node.pid" "$1" </dev/null >>"$work/signals.txt" 2>&1 &
    signals+=($!)
  done
}

# Once every signal has arrived: remove what those left that found their node.sh gone.
forget_signals() {
  local node code waiting=()
  ((${#signals[@]})) || return 0
  wait "${signals[@]}"
  for ((node = 0; node < nodes; node++)); do
    code=255
    [[ -e $work/$node.code ]] && read -r code <"$work/$node.code"
    ((code != 255)) || continue
    on_host "$node" forget "/tmp/$job.$node.pid" </dev/null >/dev/null 2>&1 &
    waiting+=($!)
  done
  # A wait for nobody is one for everybody, and so for a node that does not end.
  ((${#waiting[@]} == 0)) || wait "${waiting[@]}"
}

# shellcheck disable=SC2317
pass_on() {
  say "SIG$1: passed on to every node"
  signal_all "${1/INT/TERM}"
}

trap 'rm -rf -- "$work"' EXIT
trap 'pass_on TERM' TERM HUP
trap 'pass_on INT' INT
trap 'pass_on USR1' USR1

say "$nodes nodes (${hosts[*]}), master $master, logs in $logs"
for ((node = 0; node < nodes; node++)); do
  start_node "$node" "$@" &
done

# The first code that is not 0 counts: the others end because of it.
code=0 ended=0
while :; do
  running=0
  for ((node = 0; node < nodes; node++)); do
    if [[ ! -e $work/$node.code ]]; then
      running=$((running + 1))
    elif ((code == 0)); then
      read -r code <"$work/$node.code"
      ((code == 0)) || failed=$node since=$SECONDS
    fi
  done
  ((running)) || break
  if ((code)); then
    # A stop and a mistake reach every node by themselves; who is left after that is ended.
    if ((ended == 0 && (SECONDS - since >= 20 || (code != 75 && code != 2)))); then
      say "node $failed (${hosts[$failed]}) ended with exit code $code; ending the other nodes"
      ended=1
      signal_all TERM
    elif ((ended == 1 && SECONDS - since >= 400)); then
      say "nodes do not end; killing them"
      ended=2
      signal_all KILL
    elif ((ended == 2 && SECONDS - since >= 420)); then
      break
    fi
  fi
  sleep 0.5
done

forget_signals
for ((node = 0; node < nodes; node++)); do
  result=none
  [[ -e $work/$node.code ]] && read -r result <"$work/$node.code"
  [[ $result == 0 ]] || say "node $node (${hosts[$node]}): exit code $result, the end of $logs/node-$node.log: $(tail -n 1 "$logs/node-$node.log")"
done
exit "$code"
