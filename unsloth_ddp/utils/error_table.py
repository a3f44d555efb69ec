"""List the errors that users meet from the libraries below, with cause and fix. The first match wins."""

from typing import NamedTuple


class KnownError(NamedTuple):
    """Describe one error: name, regular expression of its message, cause, and the fix printed after "what helps:"."""

    name: str
    pattern: str
    cause: str
    fix: str


KNOWN_ERRORS = (
    # ---- memory ----
    KnownError(
        "GPU out of memory",
        r"CUDA out of memory|OutOfMemoryError(?!: out of resource)|CUDA (driver )?error: out of "
        r"memory|CUBLAS_STATUS_ALLOC_FAILED|"
        r"CUDNN_STATUS_(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED|"
        r"HIP out of memory|Triton Error \[CUDA\]: out of memory|No or negligible GPU memory",
        "A step needs more memory than the GPU has left.",
        "leave --per_device_train_batch_size and --gradient_checkpointing at auto, or lower the first (with "
        "--global_batch_size set, the result stays the same) and set the other to unsloth; lower --max_length, take "
        "--method qlora, or shard with zero3 or fsdp2; nvidia-smi shows whether another process holds memory.",
    ),
    KnownError(
        "host out of memory",
        r"DefaultCPUAllocator: (can't|not enough) |Cannot allocate memory|\bMemoryError\b",
        "The machine's main memory is used up.",
        "start fewer processes, or use nodes with more memory; lower --dataset_num_proc; every process loads the "
        "whole model.",
    ),
    KnownError(
        "shared memory",
        r"shared memory segment|/dev/shm|insufficient shared memory|unable to open shared memory object|"
        r"posix_fallocate failed|Bus error",
        "Shared memory (/dev/shm) is too small: containers have 64 MB by default.",
        "start the container with --shm-size=16g or --ipc=host; NCCL_SHM_DISABLE=1 avoids shared memory, but is "
        "slower.",
    ),
    # ---- devices ----
    KnownError(
        "token id out of range",
        r"device-side assert|indexSelect.*Assertion|index out of range in self",
        "An index was out of range on the device, nearly always a token id beyond the model's embedding.",
        "use the tokenizer that belongs to the model, or a copy with added tokens (docs/rows.md, New tokens); "
        "CUDA_LAUNCH_BLOCKING=1 shows the real line, and --use_cpu with a few rows gives a readable error.",
    ),
    KnownError(
        "no kernel for this GPU",
        r"no kernel image is available|is not compatible with the current PyTorch installation|"
        r"unsupported gpu architecture|PTX was compiled with an unsupported toolchain",
        "This build of PyTorch (or of an extension) has no code for this GPU.",
        "install the PyTorch build for this GPU's compute capability (a newer CUDA build for new GPUs, an older "
        "PyTorch for old ones), and rebuild extensions such as flash-attn against it.",
    ),
    KnownError(
        "driver too old",
        r"driver on your system is too old|CUDA driver version is insufficient|Error 803|"
        r"forward compatibility was attempted",
        "The NVIDIA driver is older than the CUDA version that PyTorch was built for.",
        "update the driver on every node, or install PyTorch for this driver: uv venv --clear, uv pip install "
        "--torch-backend=auto -e ., and begin commands with uv run --no-sync.",
    ),
    KnownError(
        "no GPU found",
        r"Cuda is not available",
        "PyTorch finds no GPU: the machine has none, a container hides it, or the driver is too old for this PyTorch.",
        'run uv run python -c "import torch; torch.cuda.init()", which prints the reason; for an old driver uv venv '
        "--clear, "
        "uv pip install --torch-backend=auto -e ., and begin commands with uv run --no-sync; without a GPU take "
        "accelerate_configs/cpu.yaml.",
    ),
    KnownError(
        "GPU failed",
        r"uncorrectable ECC|CUDA error: unspecified launch failure|GPU is lost|fallen off the bus|Xid|"
        r"CUDA error: an illegal memory access",
        "The GPU or a kernel on it failed; if it is always the same GPU, the hardware is faulty.",
        "look for Xid lines in dmesg on the named host, reset that GPU or exclude it (CUDA_VISIBLE_DEVICES); "
        "--attn_implementation sdpa rules out a faulty attention kernel.",
    ),
    # ---- DDP ----
    KnownError(
        "gradient seen twice",
        r"mark a variable ready only once|marked as ready twice|has already been reduced\.\s+Gradient computed twice",
        "DDP or ZeRO-2 saw a weight's gradient twice: reentrant checkpointing, or weights shared between passes.",
        "use --gradient_checkpointing torch (non-reentrant) or none, and leave ddp_find_unused_parameters off.",
    ),
    KnownError(
        "unused parameters",
        r"Expected to have finished reduction in the prior iteration|parameters that were not used in producing loss",
        "Some trainable weights were not used for the loss on a rank (mixture of experts, vision towers, trained "
        "heads).",
        "give --ddp_find_unused_parameters, or leave those weights out of --lora_target_modules.",
    ),
    KnownError(
        "ranks hold different parameters",
        r"appears not to match (sizes|strides) of the same param|DDP expects same model across all ranks|"
        r"inconsistent (number of params|tensor shapes)|Detected mismatch between collectives",
        "The ranks do not run the same model, settings or code.",
        "check that every node has the same model files, settings, packages and kit version (the preflight compares "
        "them).",
    ),
    # ---- NCCL, gloo, rendezvous ----
    KnownError(
        "NVLink multicast",
        r"NVLink SHARP \(NVLS\)|NVLS.{0,40}[Mm]ulticast",
        "NCCL could not use NVLink multicast (NVLS): the host's Fabric Manager or NVSwitches are misconfigured, or the "
        "container has no access to them.",
        "set NCCL_NVLS_ENABLE=0, which uses NVLink without multicast; have Fabric Manager restarted on that host.",
    ),
    KnownError(
        "wrong GPU",
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|CUDA-capable device\(s\) is/are "
        r"busy|"
        r"Duplicate GPU detected",
        "A process uses a GPU that is not visible to it, that another one uses, or that is in exclusive mode.",
        "start one process per GPU through accelerate or torchrun; check CUDA_VISIBLE_DEVICES and nvidia-smi "
        "(containers need --gpus all).",
    ),
    KnownError(
        "NCCL GPU error",
        r"ncclUnhandledCudaError|unhandled cuda error",
        "A CUDA call inside NCCL failed: no memory is left, the driver is old, or the GPUs cannot reach each other.",
        "check memory and driver with nvidia-smi; try NCCL_P2P_DISABLE=1 (virtual machines with IOMMU) or "
        "NCCL_SHM_DISABLE=1; NCCL_DEBUG=INFO prints the failed call.",
    ),
    KnownError(
        "connection between ranks",
        r"no socket interface found|Call to bind failed|Bootstrap : no|No route to host|Network is unreachable|"
        r"unhandled system error|nccl(System|Remote|Internal)Error|remote process exited or there was a network error|"
        r"[Gg]loo.{0,200}(Connection (closed|reset|refused)|connectFullMesh|Broken pipe)|Connection (closed|reset) by "
        r"peer",
        "A connection between ranks failed: the network interface does not reach the other nodes, or another rank has "
        "ended.",
        "find the rank that ended first; if none did, set NCCL_SOCKET_IFNAME (GPU) or GLOO_SOCKET_IFNAME (CPU) to the "
        "interface that reaches the other nodes, open the ports between the nodes, and try NCCL_IB_DISABLE=1 where "
        "InfiniBand is not set up; NCCL_DEBUG=INFO prints which address fails.",
    ),
    KnownError(
        "NCCL invalid usage",
        r"ncclInvalidUsage",
        "NCCL was called in a way it does not allow, usually with ranks in different collectives.",
        "start one process per GPU through accelerate or torchrun, with the same settings on every node.",
    ),
    KnownError(
        "collective timeout",
        r"Watchdog caught collective operation timeout|collective operation timeout|ProcessGroupNCCL.{0,40}heartbeat|"
        r"Timed out waiting \d+ms for (recv|send) operation|Some NCCL operations have failed or timed out",
        "A rank waited for the others longer than --ddp_timeout: one is stuck, much slower, or runs different code.",
        "find the rank that differs in logs/rank_N.log; raise --ddp_timeout if a rank is only slow; "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with TORCH_NCCL_DUMP_ON_TIMEOUT=1 records the calls.",
    ),
    KnownError(
        "port in use",
        r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address",
        "Another job on this machine uses the rendezvous port.",
        "choose another port (--main_process_port, --master_port or MASTER_PORT), or stop processes left over from an "
        "earlier run.",
    ),
    KnownError(
        "name not resolved",
        r"Name or service not known|Temporary failure in name resolution|nodename nor servname|gaierror|"
        r"getaddrinfo|unable to resolve hostname|address of the hostname",
        "A host name cannot be resolved: the master, this machine, or a server.",
        "give MASTER_ADDR as an IP address; add every node to /etc/hosts (not as 127.0.1.1), or set "
        "GLOO_SOCKET_IFNAME; check DNS if the host is on the internet.",
    ),
    KnownError(
        "rendezvous",
        r"client socket has timed out|RendezvousTimeout|RendezvousConnectionError|clients joined|"
        r"Timed out after \d+ seconds waiting for clients|failed to connect to .{0,60}(store|rendezvous)|"
        r"DistNetworkError|DistStoreError|wait timeout after \d+ms",
        "Not every node reached the rendezvous address (MASTER_ADDR and MASTER_PORT).",
        "start every node with the same MASTER_ADDR, MASTER_PORT and NNODES, and a different NODE_RANK from 0 upward; "
        "open the port in the master's firewall; MASTER_ADDR must be the address of the node with NODE_RANK 0.",
    ),
    # ---- sharding ----
    KnownError(
        "weights not gathered",
        r"'weight' must be 2-D",
        "A layer was called outside the model that ZeRO-3 or FSDP wraps, so its weights were not gathered.",
        "use zero2, which keeps whole weights on every GPU; a layer called by the model's own code needs a fix there.",
    ),
    KnownError(
        "CUDA toolkit missing",
        r"CUDA_HOME does not exist|CUDA_HOME environment variable is not set|MissingCUDAException|nvcc.{0,20}not found",
        "A package compiles for CUDA (DeepSpeed at import) and finds no CUDA toolkit.",
        "install the CUDA toolkit and set CUDA_HOME to its folder; DS_BUILD_OPS=0 stops DeepSpeed from building at "
        "install time.",
    ),
    # ---- packages and compilers ----
    KnownError(
        "fp16 weights with a gradient scaler",
        r"Attempting to unscale FP16 gradients",
        "The trained weights are fp16, and the gradient scaler of fp16 training takes fp32 gradients only.",
        "use --precision bf16 where the GPU has it; otherwise keep the trained weights in fp32 (--full_weights fp32).",
    ),
    KnownError(
        "libcuda.so not found",
        r"libcuda\.so cannot found|cannot find -lcuda",
        "Triton finds no libcuda.so: the driver's library is missing, or only exists as libcuda.so.1.",
        "check ldconfig -p for libcuda, and start containers with --gpus all; set TRITON_LIBCUDA_PATH to a folder with "
        "a link libcuda.so to libcuda.so.1.",
    ),
    KnownError(
        "recompiled too often",
        r"FailOnRecompileLimitHit|recompile_limit reached",
        "torch.compile compiled one function too often, once for every new shape or setting.",
        "run uv sync --locked for the tested versions; UNSLOTH_COMPILE_DISABLE=1 runs without compilation, slower.",
    ),
    KnownError(
        "no C compiler or Python headers",
        r"Python\.h: No such file|Failed to find C compiler|CalledProcessError.{0,80}(gcc|clang|/cc)|"
        r"InvalidCxxCompiler|No working C\+\+ compiler",
        "Triton compiles small C files when training starts, and finds no C compiler or no Python headers.",
        "install gcc and the headers of this Python (python3-dev), on every node; the Pythons that uv installs "
        "include their headers.",
    ),
    KnownError(
        "compile cache",
        r"(FileNotFoundError|JSONDecodeError|No module named|PermissionError|Stale file handle|ImportError).{0,300}"
        r"(\.triton/cache|torchinductor_|unsloth_compiled_cache|triton_cache)|No module named .Unsloth\w+Trainer",
        "Several ranks or jobs wrote into one cache of compiled code at the same time.",
        "start again, set TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to a folder on each node's own disk, and use "
        "--clear_compiled_cache.",
    ),
    KnownError(
        "Triton kernel too large",
        r"OutOfResources|out of resource: ",
        "A compiled kernel needs more on-chip memory than this GPU has.",
        "set TORCH_COMPILE_DISABLE=1 or UNSLOTH_COMPILE_DISABLE=1 to run without compilation, or update Triton and "
        "Unsloth.",
    ),
    KnownError(
        "flash-attn",
        r"flash_attn.{0,120}(undefined symbol|not installed|No module named)|flash_attn_2_cuda|"
        r"No module named .flash_attn|FlashAttention.{0,40}(toggled|cannot be used|only support)",
        "flash-attn is missing, or was built for another PyTorch.",
        "use --attn_implementation sdpa, or install the flash-attn wheel for exactly this PyTorch, CUDA and Python.",
    ),
    KnownError(
        "bitsandbytes",
        r"bitsandbytes.{0,200}(not installed|No module|not found|compiled without|PackageNotFound)|"
        r"No module named .bitsandbytes|CUDA Setup failed|libbitsandbytes|requires the latest version of bitsandbytes",
        "bitsandbytes (4-bit weights, 8-bit optimizers) is missing, or finds no CUDA library of the version it was "
        "built for.",
        "run uv sync; python -m bitsandbytes prints what is missing; BNB_CUDA_VERSION selects another build; --method "
        "lora with --optim adamw_torch_fused does not need it.",
    ),
    KnownError(
        "packages do not fit together",
        r"undefined symbol|cannot import name .{1,80} from .(trl|transformers|peft|accelerate|unsloth|unsloth_zoo|"
        r"torch|datasets|huggingface_hub)\b",
        "Two installed packages have incompatible versions.",
        "run uv sync --locked on every node to restore the tested versions.",
    ),
    # ---- model, data, Hub, disk ----
    KnownError(
        "gated or private repository",
        r"gated repo|GatedRepoError|awaiting a review|401 Client Error|403 Client Error|Invalid user token|"
        r"RepositoryNotFoundError|is not a valid model identifier listed on",
        "The Hub requires an account with access to this repository, or the name is wrong.",
        "accept the licence on the model's page and log in (uv run hf auth login, or HF_TOKEN), on every node; check "
        "the name.",
    ),
    KnownError(
        "no network",
        r"OfflineModeIsEnabled|outgoing traffic has been disabled|LocalEntryNotFoundError|"
        r"couldn't connect to .{0,20}huggingface\.co|huggingface\.co.{0,200}(Max retries|timed out|unreachable)",
        "The Hub cannot be reached, and the file is not in the cache.",
        "download it once where there is a network (uv run hf download NAME) and copy ~/.cache/huggingface, or give a "
        "folder as --model; HF_HUB_OFFLINE=0 tries the network again.",
    ),
    KnownError(
        "too many requests",
        r"429 Client Error|Too Many Requests|rate limit",
        "The Hub limits the number of requests, for instance when many ranks ask at once.",
        "wait, log in (HF_TOKEN raises the limit), and download the files before the run.",
    ),
    KnownError(
        "damaged weights",
        r"SafetensorError|Error while deserializing header|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|"
        r"PytorchStreamReader failed|invalid load key",
        "A weight file is incomplete or not a weight file: the download broke off, or the file is a Git LFS pointer.",
        "delete that file and download it again (uv run hf download NAME --force-download); with git, run git lfs "
        "pull.",
    ),
    KnownError(
        "model and weights differ",
        r"size mismatch for|Error\(s\) in loading state_dict",
        "The weights or the adapter belong to another model, or the vocabulary was resized.",
        "use the base model that the adapter was trained on (adapter_config.json names it).",
    ),
    KnownError(
        "chat template",
        r"chat_template is not set|does not have a chat template|jinja2?\.exceptions|"
        r"Conversation roles must alternate|TemplateError",
        "The tokenizer has no chat template, or its template refuses these rows.",
        "give --chat_template chatml, or a Jinja file that suits the model; the template of an instruct model often "
        "refuses a system message, or two turns of the same role in a row.",
    ),
    KnownError(
        "disk full",
        r"No space left on device|ENOSPC|Disk quota exceeded|not enough disk space|Not enough free disk space",
        "A disk or a quota is full.",
        "free space or choose another --output_dir, lower --save_total_limit, and point HF_HOME and TMPDIR at a "
        "larger disk.",
    ),
    KnownError(
        "too many open files",
        r"Too many open files|received 0 items of ancdata",
        "The process has reached its limit of open files.",
        "run ulimit -n 65536 before the launcher (in the job file), and use fewer data loader workers.",
    ),
    KnownError(
        "data loader worker",
        r"DataLoader worker .{0,60}(exited unexpectedly|killed by signal)",
        "A process that loads data was killed, usually because memory or shared memory ran out.",
        "use fewer workers (trainer_args dataloader_num_workers; --dataset_num_proc with --streaming), more memory, "
        "--shm-size for containers.",
    ),
    KnownError(
        "remote code",
        r"contains custom code|(requires|pass|execute).{0,120}trust_remote_code",
        "The model repository contains Python code, which is not run by default.",
        "read that code, then give --trust_remote_code; a newer Transformers may support the model without it.",
    ),
    KnownError(
        "unknown architecture",
        r"does not recognize this architecture|KeyError: .{0,3}(qwen|llama|gemma|mistral|phi)",
        "This release of Transformers does not know the model.",
        "run without Unsloth and with a newer Transformers: uv run --with 'transformers>5.17' python -m "
        "accelerate.commands.launch ... train_ddp.py ... --backend transformers.",
    ),
)
