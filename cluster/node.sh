#!/usr/bin/env bash
# Run one training on this node. Run the same command on every node of the job. See usage() for the options.
set -uo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
  cat <<'TEXT'
Train on one machine or several: run the same command on every node.

    bash cluster/node.sh -m MODEL -d DATA [options] [train_ddp.py options]

  -m, --model MODEL      model folder, or id on the Hub
  -d, --dataset DATA     file of training rows, or id on the Hub; repeat the option for more
  --method METHOD        lora (default), qlora or full
  --sharding SHARDING    none (default, DDP), zero2, zero3 or fsdp2; add _offload for CPU offload; fsdp2_hybrid keeps
                         one replica of the model on each node
  --max_restarts N       restart after a failure from the last complete checkpoint, at most N times without a new
                         checkpoint (default 0)
  --min_nodes N          go on with N nodes or more if nodes are lost, and take them back when node.sh is started there
                         again (torchrun's elastic launch; node 0 cannot be lost). Needs --run_name and an --output_dir
                         that all nodes share; sharding none or fsdp2; --max_restarts is then 3 unless given
  --no_preflight         skip the check of nodes and network
  --cpu                  train on the CPU; GPUS_PER_NODE then counts processes (default 1)
  -h, --help             this text
Every other option goes to train_ddp.py. Without a model, a dataset and a --config the demo is trained.

Environment of each node:
  NNODES                 number of nodes (default 1); the same everywhere
  NODE_RANK              0 on the master, then 1, 2, ...; different on each node
  MASTER_ADDR            name or address of node 0, as the other nodes reach it; the same everywhere
  MASTER_PORT            a free TCP port of node 0 (default 6001); the preflight takes the next one
  GPUS_PER_NODE          GPUs to use on each node (default: all that are visible); the same everywhere
  START_TIMEOUT          seconds that nodes wait for each other when they start (default 300)
  RUN_NAME               name of the run, unless the options or the --config give one (job files set the job's id)
  UNSLOTH_DDP_SECRET     a shared secret, the same everywhere (job files create one); the ranks of several nodes use it
                         to authenticate each other (docs/security.md)

Two nodes:
    NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash cluster/node.sh -m Qwen/Qwen3-8B -d chats.jsonl    # on 10.0.0.1
    NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 bash cluster/node.sh -m Qwen/Qwen3-8B -d chats.jsonl    # on the other

Exit code: that of the training. 0 done; 2 a mistake in options, settings or data; 75 stopped on request (SIGTERM,
SIGINT, SIGUSR1 or --max_time) with a complete checkpoint: run the same command again to resume; 1 anything else.
TEXT
}

say() { echo "node.sh: $*" >&2; }

refuse() {
  say "error: $*"
  exit 2
}

# ---- what was given ----

sharding=none method="" max_restarts="" min_nodes=0 preflight=1 cpu=0 model="" config=""
datasets=() train_options=()

read_options() {
  while (($#)); do
    # --name=value as --name value, and --two-words as --two_words, as train_ddp.py has it.
    if [[ $1 == --*=* ]]; then
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
    fi
    local name=$1
    [[ $name == --* ]] && name=${name//-/_} && name=--${name#__}
    case $name in
      -h | --help)
        usage
        exit 0
        ;;
      -m | --model | -d | --dataset | --method | --sharding | --max_restarts | --min_nodes | --config)
        if (($# == 1)) || [[ -z $2 ]]; then
          refuse "$1 takes a value and has none; bash cluster/node.sh -h lists the options."
        fi
        ;;&
      -m | --model) model=$2 && shift 2 ;;
      -d | --dataset)
        # Every word up to the next option, as train_ddp.py takes several.
        shift
        while (($#)) && [[ $1 != -* ]]; do datasets+=("$1") && shift; done
        ;;
      --method) method=$2 && shift 2 ;;
      --sharding) sharding=$2 && shift 2 ;;
      --max_restarts) max_restarts=$2 && shift 2 ;;
      --min_nodes) min_nodes=$2 && shift 2 ;;
      --config) config=$2 && shift 2 ;;
      --no_preflight) preflight=0 && shift ;;
      --cpu) cpu=1 && shift ;;
      *) train_options+=("$1") && shift ;;
    esac
  done
}

# A path on this node rather than an id on the Hub ("name" or "owner/name").
is_path() {
  [[ $1 == [./~]* || $1 == */*/* || $1 =~ \.(jsonl|json|parquet|csv)$ || -e $1 ]]
}

check_options() {
  [[ $method =~ ^(|lora|qlora|full)$ ]] || refuse "--method is $method, but it is one of lora, qlora and full."
  [[ $sharding =~ ^(none|fsdp2_hybrid|(zero2|zero3|fsdp2)(_offload)?)$ ]] ||
    refuse "--sharding is $sharding, but it is one of none, zero2, zero3, fsdp2 and fsdp2_hybrid (or zero2_offload, ...)."
  [[ $min_nodes =~ ^[0-9]{1,6}$ ]] || refuse "--min_nodes is $min_nodes, but it takes the least number of nodes to go on with."
  min_nodes=$((10#$min_nodes))
  max_restarts=${max_restarts:-$((min_nodes ? 3 : 0))}
  [[ $max_restarts =~ ^[0-9]{1,3}$ ]] ||
    refuse "--max_restarts is $max_restarts, but it takes a whole number below 1000, the restarts to allow."
  max_restarts=$((10#$max_restarts))
  ((cpu == 0)) || [[ $sharding == none ]] ||
    refuse "--sharding $sharding needs GPUs; leave --cpu out, or take --sharding none."

  accelerate_config=$kit/accelerate_configs/multi_node.yaml
  ((cpu)) && accelerate_config=$kit/accelerate_configs/cpu.yaml
  [[ $sharding == none ]] || accelerate_config=$kit/accelerate_configs/$sharding.yaml
  [[ -f $accelerate_config ]] ||
    refuse "$accelerate_config is missing on this node; bring the kit to the same state on every node (git status)."

  local where="${NNODES:+ (node ${NODE_RANK:-0}, $(hostname))}" data file
  [[ -z $config || -f $config ]] || refuse "--config $config: there is no such file on this node$where; copy it here."
  if [[ -n $model ]] && is_path "$model" && [[ ! -d ${model/#\~/$HOME} ]]; then
    refuse "-m $model: there is no such folder on this node$where; copy the model here, or mount the disk that has it."
  fi
  for data in "${datasets[@]}"; do
    file=${data/#\~/$HOME}
    # A weight (:3) and a slice ([:10%]) may follow the name.
    [[ -e $file || ! $file =~ ^(.*):[0-9.]+$ ]] || file=${BASH_REMATCH[1]}
    [[ -e $file ]] || file=${file%%\[*}
    if is_path "$file" && [[ ! -e $file ]]; then
      refuse "-d $data: there is no such file on this node$where; copy it here, or mount the disk that has it."
    fi
  done
}

# number NAME DEFAULT LOWEST HIGHEST WHAT: the variable as a number without leading zeros, or a refusal.
number() {
  local value=${!1:-$2}
  [[ $value =~ ^[0-9]{1,9}$ ]] || refuse "$1 is '$value', but it takes a whole number, $5."
  ((10#$value >= $3 && 10#$value <= $4)) || refuse "$1 is $value, but it is from $3 to $4, $5."
  printf -v "$1" %d "$((10#$value))"
}

check_nodes() {
  number NNODES 1 1 100000 "the number of nodes"
  if ((NNODES > 1)) && [[ -z ${NODE_RANK:-} ]]; then
    refuse "NODE_RANK is not set and NNODES is $NNODES; set it to 0 on the master, and to 1, 2, ... on the other nodes."
  fi
  number NODE_RANK 0 0 999999999 "0 on the master, then 1, 2, ..."
  ((NODE_RANK < NNODES)) ||
    refuse "NODE_RANK is $NODE_RANK and NNODES is $NNODES; ranks go from 0 to $((NNODES - 1)), a different one on each node."
  given_port=${MASTER_PORT:-}
  number MASTER_PORT 6001 1024 "$((65535 - preflight))" "a free port of node 0 (the preflight takes the next one)"
  number START_TIMEOUT 300 10 86400 "seconds that nodes wait for each other"

  if ((min_nodes)); then
    ((min_nodes <= NNODES)) || refuse "--min_nodes is $min_nodes and NNODES is $NNODES; it is from 1 to the number of nodes."
    [[ $sharding =~ ^(none|fsdp2(_offload)?)$ ]] ||
      refuse "--min_nodes goes on with another number of processes, which checkpoints of --sharding $sharding do not allow;" \
        "take --sharding none or fsdp2."
    is_named || [[ -n ${RUN_NAME:-} ]] ||
      refuse "--min_nodes needs --run_name, the same on every node, so that a node that returns finds the run."
  fi
  ((NNODES > 1)) || return 0
  [[ -n ${MASTER_ADDR:-} ]] ||
    refuse "MASTER_ADDR is not set and NNODES is $NNODES; set it on every node to the name or address of node 0."
  [[ $MASTER_ADDR =~ ^[A-Za-z0-9._:][A-Za-z0-9._:%-]*$ ]] ||
    refuse "MASTER_ADDR is '$MASTER_ADDR', which is not a name or address; give the one of node 0, without a port."
  case $MASTER_ADDR in
    localhost | localhost.* | 127.* | ::1 | 0.0.0.0 | ::)
      refuse "MASTER_ADDR is $MASTER_ADDR, which on every node means itself; give the address by which the others reach node 0."
      ;;
  esac
}

# Count the visible GPUs of this node: those of nvidia-smi that CUDA_VISIBLE_DEVICES allows, or torch's without nvidia-smi.
visible_gpus() {
  local shown listed
  if command -v nvidia-smi >/dev/null; then
    shown=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^ *\(GPU\|MIG\)')
    # A GPU in MIG mode is listed as its MIG devices.
    listed=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^ *MIG')
    ((listed)) && shown=$listed
  else
    in_environment 2>/dev/null
    shown=$(python -c 'import torch; print(torch.accelerator.device_count())' 2>/dev/null) || shown=0
  fi
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    # CUDA stops at the first invalid entry, which is why people pass -1.
    listed=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d' | grep -c '[^ ]')
    ((listed < shown)) && shown=$listed
  fi
  echo "$shown"
}

check_gpus() {
  local visible
  if ((cpu)); then
    number GPUS_PER_NODE 1 1 1024 "with --cpu the number of processes on each node"
    return
  fi
  visible=$(visible_gpus)
  ((visible > 0)) ||
    refuse "this node ($(hostname)) shows no GPU; check its driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or add --cpu."
  number GPUS_PER_NODE "$visible" 1 1024 "the GPUs to use on each node"
  ((GPUS_PER_NODE <= visible)) ||
    refuse "GPUS_PER_NODE is $GPUS_PER_NODE, but this node ($(hostname)) shows $visible; give at most $visible, on every node alike."
}

# ---- the network ----

# Print the interface between this node and the master, if the routing table is unambiguous.
interface_to_master() {
  command -v ip >/dev/null && command -v getent >/dev/null || return 1
  local address device
  address=$(getent ahosts "$MASTER_ADDR" | awk '{print $1; exit}')
  [[ -n $address && $address != 127.* && $address != ::1 ]] || return 1
  # The master's route to itself goes over lo: the interface that carries the address is meant.
  device=$(ip -o addr show to "$address" 2>/dev/null | awk '{sub(/@.*/, "", $2); print $2; exit}')
  [[ -n $device ]] || device=$(ip -o route get "$address" 2>/dev/null | grep -oP '(?<= dev )\S+')
  [[ -n $device && $device != lo ]] && echo "$device"
}

choose_interface() {
  ((NNODES > 1)) || return 0
  [[ -n ${GLOO_SOCKET_IFNAME:-} && -n ${NCCL_SOCKET_IFNAME:-} ]] && return
  local device
  if device=$(interface_to_master); then
    # "=" is NCCL's mark for this very name, instead of every name that begins with it.
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$device}
    say "node $NODE_RANK reaches $MASTER_ADDR over $device: GLOO_SOCKET_IFNAME=\"$GLOO_SOCKET_IFNAME\"" \
      "NCCL_SOCKET_IFNAME=\"$NCCL_SOCKET_IFNAME\" (set them yourself to use another)"
  fi
}

# ---- running ----

# Check whether the active environment (a container, conda, uv run) holds the kit and its dependencies.
is_equipped() {
  command -v accelerate-launch >/dev/null && python -c '
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(name) for name in ("unsloth_ddp", "accelerate", "trl", "unsloth")))' 2>/dev/null
}

# Otherwise put the kit's own environment first on PATH. uv creates or updates it if necessary.
in_environment() {
  local prefix
  is_equipped && return
  if command -v uv >/dev/null; then
    prefix=$(uv run --project "$kit" python -c 'import sys; print(sys.prefix)') || return 1
  else
    prefix=$kit/.venv
  fi
  [[ -x $prefix/bin/accelerate-launch ]] && PATH=$prefix/bin:$PATH
}

# The last signal received, and whether one arrived since wait began.
stop="" interrupted=0 child=""

# Ask the launcher to stop (called by traps). It forwards the signal to its ranks.
# shellcheck disable=SC2317
pass_on() {
  stop=$1 interrupted=1
  # Bash lets background commands ignore SIGINT until they set a handler, so Ctrl-C is forwarded as SIGTERM.
  [[ -z $child ]] || kill -s "${1/INT/TERM}" "$child" 2>/dev/null
}

# Run a command to its end and set `code`. In a session of its own: Ctrl-C reaches it once, through pass_on.
run() {
  setsid "$@" </dev/null &
  child=$!
  # A signal that arrived between two commands was not forwarded.
  [[ -z $stop ]] || pass_on "$stop"
  while :; do
    interrupted=0
    wait "$child"
    code=$?
    # A signal ends `wait` early, with the signal's code instead of the command's.
    ((interrupted)) || break
  done
  child=""
}

# End ranks that outlived their launcher (killed, or cut off in its own clean-up): as they would be stopped, with a
# minute for their checkpoint, and then at once.
end_strays() {
  local strays since=$SECONDS told=0
  while true; do
    strays=$(job_processes | grep -o '[0-9]*')
    [[ -n $strays ]] || return 0
    if ((told == 0)); then
      say "node $NODE_RANK: ending processes that outlived their launcher: ${strays//$'\n'/ }"
      # shellcheck disable=SC2086
      kill -TERM $strays 2>/dev/null
      told=1
    elif ((SECONDS - since > 90)); then
      # A process that waits for a dead disk or driver cannot be ended.
      say "node $NODE_RANK: these do not end: ${strays//$'\n'/ }"
      return
    elif ((SECONDS - since > 60)); then
      # shellcheck disable=SC2086
      kill -KILL $strays 2>/dev/null
    fi
    sleep 0.5
  done
}

launch() {
  local port=$1
  shift
  local alone=() machines=(--num_machines "$NNODES" --num_processes "$((NNODES * GPUS_PER_NODE))" --machine_rank "$NODE_RANK")
  if ((NNODES > 1)); then
    machines+=(--main_process_ip "$MASTER_ADDR" --main_process_port "$port" --rdzv_conf "timeout=$START_TIMEOUT")
  else
    # Alone, any free port does unless one was asked for.
    machines+=(--main_process_port "$([[ -n $given_port ]] && echo "$port" || echo 0)")
    # The launcher's own meeting is in a file, because the store that it uses otherwise listens on every interface.
    rm -f -- "$folder/meeting"
    machines+=(--rdzv_backend c10d --rdzv_conf store_type=file)
    alone=("PET_RDZV_ENDPOINT=$folder/meeting" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
  fi
  run env "UNSLOTH_DDP_EXIT_CODE_FILE=$code_file" "${alone[@]}" \
    accelerate-launch --config_file "$accelerate_config" "${machines[@]}" "$@"
}

# Print the address of this node on its way to the master, which any node may have to tell the others.
own_address() {
  ((NODE_RANK)) || { echo "$MASTER_ADDR" && return; }
  local address
  address=$(getent ahosts "$MASTER_ADDR" | awk '{print $1; exit}')
  ip -o route get "$address" 2>/dev/null | grep -oP '(?<= src )\S+'
}

# Launch with any number of nodes from min_nodes to NNODES. accelerate launches one machine; torchrun reads the range and
# the place of the meeting, which node 0 serves, from these variables. With torch's shared store a node that returns waits
# for an address that the others have told already.
launch_elastic() {
  local own=()
  [[ -z $(own_address) ]] || own=("PET_LOCAL_ADDR=$(own_address)")
  run env "UNSLOTH_DDP_EXIT_CODE_FILE=$code_file" "UNSLOTH_DDP_NODES=$min_nodes:$NNODES" \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "${own[@]}" \
    "PET_NNODES=$min_nodes:$NNODES" "PET_RDZV_ENDPOINT=$MASTER_ADDR:$MASTER_PORT" PET_RDZV_ID=unsloth_ddp \
    accelerate-launch --config_file "$accelerate_config" --num_machines 1 --num_processes "$GPUS_PER_NODE" \
    --main_process_port 0 --max_restarts "$max_restarts" --rdzv_backend c10d \
    --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=$START_TIMEOUT,read_timeout=$START_TIMEOUT" "$@"
}

# Check nodes, network and settings on all nodes together; `code` is not 0 if a node has a problem.
# Once before any launcher, which names nodes that do not arrive (launchers wait for them in silence), and once with
# every process of the run.
check_job() {
  code=0
  ((preflight)) || return 0
  if ((min_nodes)); then
    # Each node by itself: the others may be training already. Ranks compare versions, options and rows when they start.
    NNODES=1 NODE_RANK=0 launch 0 -m unsloth_ddp.preflight --timeout "$START_TIMEOUT" "${train_arguments[@]}"
  elif ((NNODES > 1)); then
    say "node $NODE_RANK: checking the nodes; waiting up to $START_TIMEOUT s for all $NNODES at $MASTER_ADDR:$MASTER_PORT"
    run python -m unsloth_ddp.preflight --timeout "$START_TIMEOUT" "${train_arguments[@]}" \
      >"$folder/preflight.txt" 2>&1
    ((code == 0)) || cat "$folder/preflight.txt" >&2
  fi
  # What ranks say comes first on standard error; the launcher's report of their exit codes would hide the table.
  ((code || min_nodes)) || launch "$((MASTER_PORT + 1))" -m unsloth_ddp.preflight --timeout "$START_TIMEOUT" "${train_arguments[@]}" \
    2> >(sed -u '/^E[0-9]\{4\} .* failed (exitcode: /,$d' >&2)
  ((code == 0)) || read_exit_code
  ((code == 0)) || [[ -n $stop ]] || say "node $NODE_RANK: the preflight failed, so nothing was trained; fix what it names," \
    "or start with --no_preflight"
}

train() {
  local since=$SECONDS watcher=""
  in_vain=0
  rm -f "$folder/began"
  if ((NNODES > 1)); then
    # Its sleep outlives it, and who reads the output of this script would wait for that.
    note_the_beginning </dev/null >/dev/null 2>&1 &
    watcher=$!
  fi
  if ((min_nodes)); then
    launch_elastic "$kit/train_ddp.py" "${train_arguments[@]}"
  else
    launch "$MASTER_PORT" "$kit/train_ddp.py" "${train_arguments[@]}" "${restart_arguments[@]}"
  fi
  [[ -z $watcher ]] || kill "$watcher" 2>/dev/null
  if ((code)) && [[ -z $stop && ! -e $code_file && -n $watcher && ! -e $folder/began ]] && ((SECONDS - since >= START_TIMEOUT)); then
    in_vain=1
    say "node $NODE_RANK: not every node arrived at $MASTER_ADDR:$MASTER_PORT within $START_TIMEOUT s. Start node.sh on" \
      "all $NNODES nodes, with the same NNODES, MASTER_ADDR and MASTER_PORT and another NODE_RANK on each, and open that" \
      "port in the firewall; START_TIMEOUT makes them wait longer, and the preflight names who is missing"
  fi
  if ((code)); then
    end_strays
    read_exit_code
  fi
}

# Processes of this node's job, by the variable that only they carry, as /proc/PID/environ.
job_processes() { grep -lszxF -- "UNSLOTH_DDP_EXIT_CODE_FILE=$code_file" /proc/[0-9]*/environ; }

# Create a marker file once ranks run: launchers start none before every node has arrived.
note_the_beginning() {
  local processes
  while [[ -d $folder ]]; do
    mapfile -t processes < <(job_processes)
    if ((${#processes[@]})) && grep -qsz '^LOCAL_RANK=' "${processes[@]}"; then
      touch "$folder/began"
      return
    fi
    sleep 2
  done
}

# Launchers replace every exit code with 1; ranks write theirs to a file.
read_exit_code() {
  local noted=""
  [[ -s $code_file ]] && read -r noted <"$code_file"
  rm -f "$code_file"
  if [[ $noted =~ ^[0-9]{1,3}$ ]] && ((10#$noted > 0)); then
    code=$((10#$noted))
    # Asked to stop before the first step, ranks end as they are: nothing is lost.
    [[ $stop != USR1 || $code != 1 ]] || code=75
  elif [[ $stop == USR1 ]] || { [[ -n $stop ]] && (($(saved_step))); }; then
    # Also between two starts, of which an earlier one saved a checkpoint.
    code=75
  elif [[ -n $stop ]]; then
    code=$((128 + $(kill -l "$stop")))
  fi
}

# Print the step of the newest checkpoint that a start of this job has saved, 0 without one.
saved_step() {
  local step=""
  [[ -s $code_file.step ]] && read -r step <"$code_file.step"
  [[ $step =~ ^[0-9]{1,18}$ ]] && echo "$((10#$step))" || echo 0
}

# Print why the ranks of this node ended last, as they told it.
cause() {
  local why=""
  [[ -s $code_file.why ]] && read -r why <"$code_file.why"
  echo "${why:-they died without a word}"
}

# Check whether the options or the --config name the run.
is_named() {
  local word
  for word in "${train_options[@]}"; do
    [[ $word != --run[-_]name ]] || return 0
  done
  [[ -n $config ]] && grep -Es '^run_name *:' "$config" | grep -Eiqv '^run_name *: *(null|none|~)? *(#.*)?$'
}

# Check whether the run's folder holds the result of these settings; 2: they hold a mistake, named in settings.txt.
has_result() {
  timeout 60 python - "${train_arguments[@]}" "${restart_arguments[@]}" >/dev/null 2>"$folder/settings.txt" <<'PYTHON'
import sys
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.run.folder import is_finished
from unsloth_ddp.utils.errors import UserError
try:
    settings = parse_settings(sys.argv[1:], "")
except UserError as error:
    print(f"train_ddp.py: error: {error}", file=sys.stderr)
    sys.exit(2)
sys.exit(not is_finished(settings))
PYTHON
}

# Check whether the master's launcher waits for nodes: in the store of a job that has begun, nodes have told their ranks.
master_waits() {
  timeout 30 python - "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null <<'PYTHON'
import datetime, sys
from torch.distributed import TCPStore
limit = datetime.timedelta(seconds=5)
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False, timeout=limit)
sys.exit(store.num_keys() > 1)
PYTHON
}

# Start together: a launcher that came while the master's old one still listened would join a job that is ending. A master
# that was started again while this node's job ended waits already.
wait_for_the_others() {
  ((NNODES > 1)) || return 0
  # A meeting of torchrun's is joined at any time.
  if ((NODE_RANK == 0 || min_nodes)); then
    sleep 10
    return
  fi
  local since=$SECONDS
  while ((SECONDS - since < START_TIMEOUT)) && [[ -z $stop ]]; do
    # shellcheck disable=SC2016
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null || return 0
    ! master_waits || return 0
    sleep 1
  done
}

main() {
  read_options "$@"
  check_options
  check_nodes
  check_gpus

  [[ -z ${RUN_NAME:-} ]] || is_named || train_options+=(--run_name "$RUN_NAME")
  train_arguments=()
  [[ -z $config ]] || train_arguments+=(--config "$config")
  [[ -z $model ]] || train_arguments+=(--model "$model")
  ((${#datasets[@]} == 0)) || train_arguments+=(--dataset "${datasets[@]}")
  [[ -z $method ]] || train_arguments+=(--method "$method")
  train_arguments+=("${train_options[@]}")

  trap 'pass_on TERM' TERM HUP
  trap 'pass_on INT' INT
  trap 'pass_on USR1' USR1
  in_environment ||
    refuse "the kit's environment cannot be had on this node; install uv (https://docs.astral.sh/uv/) and run uv sync --locked in $kit."
  choose_interface

  folder=$(mktemp -d "${TMPDIR:-/tmp}/unsloth_ddp_node.XXXXXX") || refuse "no temporary folder can be made; see to TMPDIR."
  code_file=$folder/exit_code
  trap 'rm -rf -- "$folder"' EXIT

  export NNODES NODE_RANK MASTER_PORT
  # On the CPU it counts processes, and is no claim about GPUs.
  # Processes see GPUs of the node; accelerate does not tell them that its config asks for the CPU.
  if ((cpu)); then export -n GPUS_PER_NODE && export ACCELERATE_USE_CPU=True; else export GPUS_PER_NODE; fi
  # torch's launcher forwards the signals named here, and waits this long for ranks to save before it kills them.
  export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

  # Additional options of train_ddp.py: every restart continues in the folder of the first start, which rank 0 names.
  restart_arguments=()
  if ((max_restarts && NODE_RANK == 0)) && ! is_named; then
    restart_arguments=(--run_name "run-$(date +%Y%m%d-%H%M%S)")
  fi
  local restarts=0 begun=0 furthest=0
  while :; do
    code=0 trained=0
    # A node that was lost at the end of the job would wait for others that have ended, and others would wait for one
    # that ends before its ranks have met theirs.
    if ((max_restarts)) && [[ -z $stop ]]; then
      has_result
      case $? in
        0)
          say "node $NODE_RANK: the run's folder holds the result of these settings, so nothing is left to do here"
          break
          ;;
        2)
          code=2
          tail -n 1 "$folder/settings.txt" >&2
          break
          ;;
      esac
    fi
    [[ -n $stop ]] || check_job
    ((code == 0)) && [[ -z $stop ]] && trained=1 && train
    # A stop that came before the training began.
    ((trained)) || [[ -z $stop ]] || read_exit_code
    # Its ranks have seen the result written, or it waited for the others in vain.
    if ((trained && code && code != 2)) && { [[ -e $code_file.done ]] || { ((in_vain)) && has_result; }; }; then
      say "node $NODE_RANK: the result was written before, so nothing is left to do here"
      code=0
    fi
    # A start that saved a later step than all before it has made progress.
    if ((code)) && (($(saved_step) > furthest)); then
      restarts=0 furthest=$(saved_step)
    elif ((code && min_nodes)); then
      # The launcher has used up its own restarts.
      restarts=$max_restarts
    fi
    # Do not restart after an error in the settings or a requested stop.
    if ((code == 0 || code == 2 || code == 75 || restarts >= max_restarts)) || [[ -n $stop ]]; then break; fi
    restarts=$((restarts + 1))
    # Keep what the first start wrote.
    ((begun)) || restart_arguments+=(--no_overwrite)
    begun=1
    say "node $NODE_RANK: ended with code $code; start $restarts of at most $max_restarts again, from the last complete checkpoint"
    wait_for_the_others
  done
  case $code in
    0) ;;
    75) say "node $NODE_RANK: stopped on request (exit code 75); the same command goes on from the checkpoint" ;;
    *)
      say "node $NODE_RANK of $NNODES ($(hostname)): ended with exit code $code"
      # Of an elastic job only this node may have ended, whose ranks print nothing.
      ((code != 2 || min_nodes == 0 || trained == 0)) || say "node $NODE_RANK: $(cause)"
      ((begun == 0 || code == 2)) || [[ -n $stop ]] ||
        say "node $NODE_RANK: no start after the checkpoint of step $furthest got further, so the cause is not one that passes" \
          "(--max_restarts $max_restarts): $(cause)"
      ;;
  esac
  exit "$code"
}

main "$@"
