"""Errors that users meet from the libraries below, with their cause and what to do: one table, first match wins.

The original error is always printed too; this stands under it. Only the lines of a traceback that carry messages are
searched, so that a file name or a line of source in a stack never matches.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import dataclass

from unsloth_ddp.utils.redaction import hide


@dataclass(frozen=True)
class Row:
    """An error by its text (a regular expression), what is behind it, and what to do."""

    name: str
    pattern: str
    cause: str
    fix: str


NETWORK = (
    "set NCCL_SOCKET_IFNAME (GPU) or GLOO_SOCKET_IFNAME (CPU) to the interface that reaches the other nodes, open the "
    "ports between the nodes, and try NCCL_IB_DISABLE=1 where InfiniBand is not set up; NCCL_DEBUG=INFO says which "
    "address fails"
)

ROWS = (
    # ---- memory ----
    Row(
        "GPU out of memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|"
        r"CUDNN_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED|"
        r"HIP out of memory|Triton Error \[CUDA\]: out of memory|No or negligible GPU memory",
        "A step needs more memory than the GPU has left.",
        "leave --per_device_train_batch_size and --gradient_checkpointing at auto, or lower the first (with "
        "--global_batch_size set, the result stays the same) and set the other to unsloth; lower --max_length, take "
        "--method qlora, or shard with zero3 or fsdp2; nvidia-smi shows whether another process holds memory.",
    ),
    Row(
        "host out of memory",
        r"DefaultCPUAllocator: (can't|not enough) |Cannot allocate memory|\bMemoryError\b",
        "The machine's main memory is used up.",
        "start fewer processes, or use nodes with more memory; lower --dataset_num_proc; every process loads the model once.",
    ),
    Row(
        "shared memory",
        r"shared memory segment|/dev/shm|insufficient shared memory|unable to open shared memory object|"
        r"posix_fallocate failed|Bus error",
        "Shared memory (/dev/shm) is too small: containers give 64 MB unless told otherwise.",
        "start the container with --shm-size=16g or --ipc=host; NCCL_SHM_DISABLE=1 gets by without, slower.",
    ),
    # ---- devices ----
    Row(
        "token id out of range",
        r"device-side assert|indexSelect.*Assertion|index out of range in self",
        "An index was out of range on the device, nearly always a token id beyond the model's embedding.",
        "use the tokenizer that belongs to the model (added tokens need resized embeddings); CUDA_LAUNCH_BLOCKING=1 "
        "shows the real line, and --use_cpu with a few rows gives a readable error.",
    ),
    Row(
        "no kernel for this GPU",
        r"no kernel image is available|is not compatible with the current PyTorch installation|"
        r"unsupported gpu architecture|PTX was compiled with an unsupported toolchain",
        "This build of PyTorch (or of an extension) has no code for this GPU.",
        "install the PyTorch build for this GPU's compute capability (a newer CUDA build for new GPUs, an older "
        "PyTorch for old ones), and rebuild extensions such as flash-attn against it.",
    ),
    Row(
        "driver too old",
        r"driver on your system is too old|CUDA driver version is insufficient|Error 803|"
        r"forward compatibility was attempted",
        "The NVIDIA driver is older than the CUDA version that PyTorch was built for.",
        "update the driver on every node, or install PyTorch built for the CUDA version that nvidia-smi shows.",
    ),
    Row(
        "GPU failed",
        r"uncorrectable ECC|CUDA error: unspecified launch failure|GPU is lost|fallen off the bus|Xid|"
        r"CUDA error: an illegal memory access",
        "The GPU or a kernel on it failed; if it is always the same GPU, it is the hardware.",
        "look for Xid lines in dmesg on the named host, reset or leave out that GPU (CUDA_VISIBLE_DEVICES); with "
        "--attn_implementation sdpa a faulty attention kernel is ruled out.",
    ),
    Row(
        "GPU not visible",
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device",
        "The process asks for a GPU that it cannot see.",
        "start at most as many processes as CUDA_VISIBLE_DEVICES lists; check nvidia-smi, and --gpus all for containers.",
    ),
    Row(
        "GPU used exclusively",
        r"CUDA-capable device\(s\) is/are busy|Duplicate GPU detected",
        "Two processes were put on one GPU, or it is in exclusive mode and taken.",
        "start one process a GPU through accelerate or torchrun, which set LOCAL_RANK; check CUDA_VISIBLE_DEVICES.",
    ),
    Row(
        "tensors on two devices",
        r"Expected all tensors to be on the same device|should be on the same device|"
        r"module must have its parameters and buffers on device",
        "Parts of the model or batch lie on different devices, as with device_map auto or balanced.",
        "with several processes each needs the whole model on its own GPU: device_map={'': local_rank}.",
    ),
    Row(
        "quantized model on another GPU",
        r"loaded in 8-bit or 4-bit precision on a different device|"
        r"loaded in 8-bit or 4-bit precision with CPU or disk offload|dispatched on the CPU or the disk",
        "A quantized model was not loaded on the GPU of its process, or did not fit and was offloaded.",
        "load with device_map={'': local_rank}; if it does not fit, use a smaller model, or fsdp2 with --method qlora.",
    ),
    Row(
        "device_map with a launcher",
        r"(can't|cannot) train a model that has been loaded with .?device_map=.?.?auto|"
        r"device_map=['\"]auto['\"].{0,80}distributed mode|prepare a model with device_map",
        "The setting device_map='auto' spreads one model over all GPUs, which contradicts one process a GPU.",
        "use device_map={'': local_rank}, or start a single process.",
    ),
    # ---- DDP ----
    Row(
        "marked ready twice",
        r"mark a variable ready only once|marked as ready twice",
        "DDP saw a weight's gradient twice: reentrant checkpointing, or weights shared between passes.",
        "use --gradient_checkpointing torch (non-reentrant) or none, and leave ddp_find_unused_parameters off.",
    ),
    Row(
        "unused parameters",
        r"Expected to have finished reduction in the prior iteration|parameters that were not used in producing loss",
        "Some trainable weights took no part in the loss on a rank (mixture of experts, vision towers, trained heads).",
        "--ddp_find_unused_parameters, or leave those weights out of --lora_target_modules.",
    ),
    Row(
        "ranks hold different parameters",
        r"appears not to match (sizes|strides) of the same param|DDP expects same model across all ranks|"
        r"inconsistent (number of params|tensor shapes)|Detected mismatch between collectives",
        "The ranks do not run the same model, settings or code.",
        "check that every node has the same model files, settings, packages and kit version (the preflight compares them).",
    ),
    Row(
        "DataParallel",
        r"(?<!Distributed)(?<!Sharded)DataParallel|module 'torch\.nn\.parallel' .* replicas",
        "One process saw several GPUs, so the model was wrapped in DataParallel, which neither TRL nor Unsloth supports.",
        "use accelerate_configs/single_gpu.yaml or ddp.yaml, or show one GPU (CUDA_VISIBLE_DEVICES=0).",
    ),
    Row(
        "no backend for CPU tensors",
        r"No backend type associated with device type cpu",
        "A CPU tensor was sent through a process group that has only NCCL.",
        "start through train_ddp.py, whose control group uses gloo; UNSLOTH_DISABLE_TRAINER_PATCHING=1 mends older Unsloth.",
    ),
    # ---- NCCL, gloo, rendezvous ----
    Row(
        "NCCL interface",
        r"no socket interface found|Call to bind failed|Bootstrap : no|No route to host|Network is unreachable",
        "The interface or address chosen for the other nodes leads nowhere.",
        NETWORK + ".",
    ),
    Row(
        "NCCL invalid usage",
        r"ncclInvalidUsage",
        "NCCL was called in a way it does not allow, mostly two ranks on one GPU or ranks in different calls.",
        "start one process a GPU through accelerate or torchrun, with the same settings on every node.",
    ),
    Row(
        "NCCL GPU error",
        r"ncclUnhandledCudaError|unhandled cuda error",
        "A CUDA call inside NCCL failed: no memory left, an old driver, or GPUs that cannot reach each other.",
        "see nvidia-smi for memory and driver; NCCL_P2P_DISABLE=1 (virtual machines with IOMMU) or NCCL_SHM_DISABLE=1; "
        "NCCL_DEBUG=INFO names the call.",
    ),
    Row(
        "NCCL network error",
        r"unhandled system error|ncclSystemError|ncclRemoteError|remote process exited or there was a network error|"
        r"ncclInternalError",
        "A connection of NCCL failed, or the process at its other end is gone.",
        "look for the rank that ended first; otherwise " + NETWORK + ".",
    ),
    Row(
        "collective timeout",
        r"Watchdog caught collective operation timeout|collective operation timeout|ProcessGroupNCCL.{0,40}heartbeat|"
        r"Timed out waiting \d+ms for (recv|send) operation|Some NCCL operations have failed or timed out",
        "A rank waited for the others longer than --ddp_timeout: one is stuck, much slower, or took another path.",
        "look into logs/rank_N.log for the rank that did something else; raise --ddp_timeout if one is merely slow; "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 records the calls.",
    ),
    Row(
        "port in use",
        r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address",
        "Another job on this machine uses the rendezvous port.",
        "choose another port (--main_process_port, --master_port or MASTER_PORT), or end what an earlier run left behind.",
    ),
    Row(
        "name not resolved",
        r"Name or service not known|Temporary failure in name resolution|nodename nor servname|gaierror|"
        r"getaddrinfo|unable to resolve hostname|address of the hostname",
        "A host name does not resolve: of the master, of this machine, or of a server.",
        "give MASTER_ADDR as an IP address; put every node into /etc/hosts (not as 127.0.1.1), or set "
        "GLOO_SOCKET_IFNAME; check DNS if it is a server on the internet.",
    ),
    Row(
        "rendezvous",
        r"client socket has timed out|RendezvousTimeout|RendezvousConnectionError|clients joined|"
        r"Timed out after \d+ seconds waiting for clients|failed to connect to .{0,60}(store|rendezvous)|"
        r"DistNetworkError|DistStoreError|wait timeout after \d+ms",
        "Not every node arrived at the meeting point (MASTER_ADDR and MASTER_PORT).",
        "start every node with the same MASTER_ADDR, MASTER_PORT and NNODES, and NODE_RANKs from 0 without repeats; "
        "open the port in the master's firewall; MASTER_ADDR has to be the address of the node with NODE_RANK 0.",
    ),
    Row(
        "gloo connection",
        r"[Gg]loo.{0,200}(Connection (closed|reset|refused)|connectFullMesh|Broken pipe)|Connection (closed|reset) by peer",
        "Another rank closed the connection, because it ended or its network failed.",
        "look for the rank that ended first; across nodes set GLOO_SOCKET_IFNAME to the interface they share.",
    ),
    # ---- sharding ----
    Row(
        "DeepSpeed missing",
        r"DeepSpeed is not (installed|available)|No module named .deepspeed",
        "The accelerate config asks for DeepSpeed, which is an extra.",
        "uv sync --extra deepspeed, on every node.",
    ),
    Row(
        "CUDA toolkit missing",
        r"CUDA_HOME does not exist|CUDA_HOME environment variable is not set|MissingCUDAException|nvcc.{0,20}not found",
        "A package wants to compile for CUDA and finds no toolkit (DeepSpeed does at import).",
        "install the CUDA toolkit and set CUDA_HOME to it; DS_BUILD_OPS=0 keeps DeepSpeed from building ahead of time.",
    ),
    Row(
        "ZeRO-3 with device_map",
        r"Zero-?3 is not compatible with",
        "ZeRO-3 places the weights itself, so the model may not be loaded with a device_map.",
        "leave device_map out with zero3, or use zero2 or fsdp2.",
    ),
    Row(
        "FSDP mixed types",
        r"Must flatten tensors with uniform dtype|FSDP expects uniform original parameter dtype",
        "FSDP shards weights of one type together, and the adapter's differ from the model's.",
        "use accelerate_configs/fsdp2.yaml (FSDP2 shards each weight alone).",
    ),
    # ---- packages and compilers ----
    Row(
        "no C compiler or Python headers",
        r"Python\.h: No such file|Failed to find C compiler|CalledProcessError.{0,80}(gcc|clang|/cc)|"
        r"InvalidCxxCompiler|No working C\+\+ compiler",
        "Triton compiles small C files when training starts, and finds no compiler or no Python headers.",
        "install gcc and the headers of this Python (python3-dev), on every node; uv's own Pythons bring their headers.",
    ),
    Row(
        "compile cache",
        r"(FileNotFoundError|JSONDecodeError|No module named|PermissionError|Stale file handle|ImportError).{0,300}"
        r"(\.triton/cache|torchinductor_|unsloth_compiled_cache|triton_cache)|No module named .Unsloth\w+Trainer",
        "Several ranks or jobs wrote into one cache of compiled code at the same time.",
        "start again; set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to a folder on each node's own disk, and use "
        "--clear_compiled_cache.",
    ),
    Row(
        "Triton kernel too large",
        r"OutOfResources|out of resource: shared memory",
        "A compiled kernel needs more on-chip memory than this GPU has.",
        "TORCH_COMPILE_DISABLE=1 or UNSLOTH_COMPILE_DISABLE=1 runs it uncompiled; update Triton and Unsloth.",
    ),
    Row(
        "flash-attn",
        r"flash_attn.{0,120}(undefined symbol|not installed|No module named)|flash_attn_2_cuda|"
        r"No module named .flash_attn|FlashAttention.{0,40}(toggled|cannot be used|only support)",
        "flash-attn is missing, or was built for another PyTorch.",
        "--attn_implementation sdpa, or install the flash-attn wheel for this very PyTorch, CUDA and Python.",
    ),
    Row(
        "bitsandbytes",
        r"bitsandbytes.{0,200}(not installed|No module|not found|compiled without|PackageNotFound)|"
        r"No module named .bitsandbytes|CUDA Setup failed|libbitsandbytes|requires the latest version of bitsandbytes",
        "bitsandbytes (4-bit weights, 8-bit optimizers) is missing, or finds no CUDA library that it was built for.",
        "uv sync; python -m bitsandbytes says what it misses; BNB_CUDA_VERSION chooses another build; --method lora and "
        "--optim adamw_torch_fused do without.",
    ),
    Row(
        "Unsloth without accelerator",
        r"Unsloth (cannot find any torch accelerator|currently only works on)|Unsloth: .{0,40}need a GPU",
        "Unsloth finds no GPU that it supports.",
        "check nvidia-smi and that PyTorch is a CUDA build; --backend transformers trains on a CPU.",
    ),
    Row(
        "Unsloth too old for several GPUs",
        r"does not (work on|support) multi GPU|Unsloth currently does not",
        "This release of Unsloth refuses several GPUs.",
        "uv sync --locked installs the release that this kit is tested with.",
    ),
    Row(
        "packages do not fit together",
        r"undefined symbol|cannot import name .{1,80} from .(trl|transformers|peft|accelerate|unsloth|unsloth_zoo|"
        r"torch|datasets|huggingface_hub)\b",
        "Two installed packages were not made for each other.",
        "uv sync --locked brings back the tested versions, on every node.",
    ),
    # ---- model, data, Hub, disk ----
    Row(
        "gated or private repository",
        r"gated repo|GatedRepoError|awaiting a review|401 Client Error|403 Client Error|Invalid user token|"
        r"RepositoryNotFoundError",
        "The Hub wants an account that may read this repository, or the name is wrong.",
        "accept the licence on the model's page and log in (hf auth login, or HF_TOKEN), on every node; check the name.",
    ),
    Row(
        "no network",
        r"OfflineModeIsEnabled|outgoing traffic has been disabled|LocalEntryNotFoundError|"
        r"couldn't connect to .{0,20}huggingface\.co|huggingface\.co.{0,200}(Max retries|timed out|unreachable)",
        "The Hub cannot be reached, and what is asked for is not in the cache.",
        "download it once where there is a network (hf download NAME) and copy ~/.cache/huggingface, or give a folder as "
        "--model; HF_HUB_OFFLINE=0 tries the network again.",
    ),
    Row(
        "too many requests",
        r"429 Client Error|Too Many Requests|rate limit",
        "The Hub answers no more requests for a while, as when many ranks ask at once.",
        "wait, log in (HF_TOKEN raises the limit), and download once before the run.",
    ),
    Row(
        "damaged weights",
        r"SafetensorError|Error while deserializing header|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|"
        r"PytorchStreamReader failed|invalid load key",
        "A weight file is incomplete or no weight file: a broken download, or a Git LFS pointer of 130 bytes.",
        "delete that file and download it again (hf download NAME --force-download); with git, run git lfs pull.",
    ),
    Row(
        "model and weights differ",
        r"size mismatch for|Error\(s\) in loading state_dict",
        "The weights or the adapter belong to another model, or the vocabulary was resized.",
        "use the base model that the adapter was trained on (adapter_config.json names it).",
    ),
    Row(
        "chat template",
        r"chat_template is not set|does not have a chat template|jinja2?\.exceptions|"
        r"Conversation roles must alternate|TemplateError",
        "The tokenizer has no chat template, or its template refuses these rows.",
        "--chat_template chatml, or a Jinja file that suits the model; an instruct model's own template often refuses a "
        "system message or two turns of one role in a row.",
    ),
    Row(
        "disk full",
        r"No space left on device|ENOSPC|Disk quota exceeded|not enough disk space|Not enough free disk space",
        "A disk or a quota is full.",
        "free space or choose another --output_dir, lower --save_total_limit, and point HF_HOME and TMPDIR at a larger disk.",
    ),
    Row(
        "too many open files",
        r"Too many open files|received 0 items of ancdata",
        "The process may not open more files.",
        "ulimit -n 65536 before the launcher (in the job file), and fewer data loader workers.",
    ),
    Row(
        "data loader worker",
        r"DataLoader worker .{0,60}(exited unexpectedly|killed by signal)",
        "A process that loads data was killed, mostly for want of memory or shared memory.",
        "fewer workers (trainer_args dataloader_num_workers; --dataset_num_proc with --streaming), more memory, --shm-size for containers.",
    ),
    Row(
        "remote code",
        r"contains custom code|(requires|pass|execute).{0,120}trust_remote_code",
        "The model comes with Python code of its own, which is not run unasked.",
        "read that code, then give --trust_remote_code; a newer Transformers may know the model without it.",
    ),
    Row(
        "unknown architecture",
        r"does not recognize this architecture|KeyError: .{0,3}(qwen|llama|gemma|mistral|phi)",
        "This Transformers is older than the model.",
        "update Transformers (and Unsloth with it), or choose another model.",
    ),
)

_COMPILED = [(re.compile(row.pattern), row) for row in ROWS]


def find(text: str) -> Row | None:
    """The first row whose error this is; `text` is a message or a whole traceback."""
    said = messages(text)
    return next((row for pattern, row in _COMPILED if pattern.search(said)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory ran out, whichever library says so."""
    row = find(f"{type(error).__name__}: {error}")
    return row is not None and row.name == "GPU out of memory"


def messages(text: str) -> str:
    """What is said in a traceback, in one line, without its frames."""
    lines = text.splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = [line for line in lines if line and not line.startswith((" ", "\t", "Traceback"))]
    return " ".join(" ".join(lines).split())


def explain(text: str) -> str:
    """Two lines to stand under an error, or nothing where it is not known."""
    row = find(text)
    return "" if row is None else f"  cause: {row.cause}\n  what helps: {row.fix}\n"


def report(error: Exception, *, explained: bool = True) -> None:
    """Print the traceback of an error as Python would, and under it what is known of it."""
    text = hide("".join(traceback.format_exception(error)))
    print(text + (explain(text) if explained else ""), end="", file=sys.stderr, flush=True)
