"""Errors that users meet, as the libraries word them, each with its cause; and errors that must not be explained."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import REPO
from unsloth_ddp.utils.error_table import KNOWN_ERRORS
from unsloth_ddp.utils.known_errors import explain, find_known_error, messages

KNOWN = [
    ("GPU out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.06 GiB is free."),
    ("GPU out of memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("GPU out of memory", "RuntimeError: CUDA driver error: out of memory"),
    ("GPU out of memory", "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("host out of "
        "memory", "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 65536000000 bytes. Error code 12 (Cannot allocate memory)"),
    ("host out of memory", "MemoryError"),
    ("shared memory", "RuntimeError: unable to open shared memory object </torch_2_8> in read-write mode: No space "
        "left on device (28)"),
    ("shared memory", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system "
        "error\nLast error:\nError while creating shared memory segment /dev/shm/nccl-7ijPvu (size 9637888), error: "
        "No space left on device (28)"),
    ("shared memory", "RuntimeError: DataLoader worker (pid 81) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory."),
    ("token id out of "
        "range", "torch.AcceleratorError: CUDA error: device-side assert triggered\nCUDA kernel errors might be "
            "asynchronously reported"),
    ("token id out of range", "IndexError: index out of range in self"),
    ("no kernel for this GPU", "RuntimeError: CUDA error: no kernel image is available for execution on the device"),
    ("no GPU found", "  File \"accelerate/commands/launch.py\", line 1\nValueError: Cuda is not available."),
    ("driver too old", "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver"),
    ("driver too old", "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported "
        "display driver / cuda driver combination"),
    ("GPU failed", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("wrong GPU", "torch.AcceleratorError: CUDA error: invalid device ordinal"),
    ("wrong GPU", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU "
        "detected : rank 1 and rank 0 both on CUDA device 1000"),
    ("gradient seen "
        "twice", "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the "
            "following reasons: 1) Use of a module parameter outside the `forward` function. Parameter at index 127 "
            "with name base_model.model.lm_head has been marked as ready twice."),
    ("unused parameters", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a "
        "new one. This error indicates that your module has parameters that were not used in producing loss. You can "
        "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`torch.nn.parallel.DistributedDataParallel`"),
    ("ranks hold different "
        "parameters", "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 128 params, while rank 1 "
            "has inconsistent 64 params."),
    ("NVLink multicast", "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function "
        "failed.\nLast error:\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 "
        "'the operation cannot be performed in the present state'."),
    ("gradient seen "
        "twice", "AssertionError: The parameter 447 has already been reduced.             Gradient computed twice for "
            "this partition.             Multiple gradient reductions are currently not supported"),
    ("weights not gathered", "RuntimeError: 'weight' must be 2-D"),
    ("fp16 weights with a gradient scaler", "ValueError: Attempting to unscale FP16 gradients."),
    ("libcuda.so not found", "AssertionError: libcuda.so cannot found!\nPossible files are located at "
            "['/lib/x86_64-linux-gnu/libcuda.so.1'].Please create a symlink of libcuda.so to any of the file."),
    ("libcuda.so not found", "../x86_64-conda-linux-gnu/bin/ld: cannot find -lcuda: No such file or directory"),
    ("recompiled too "
        "often", "torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached with fullgraph=True. Excessive "
            "recompilations can degrade performance due to the compilation overhead of each recompilation."),
    ("gated or private "
        "repository", "OSError: nobody/none is not a local folder and is not a valid model identifier listed on "
            "'https://huggingface.co/models'"),
    ("connection between "
        "ranks", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nBootstrap : no "
            "socket interface found"),
    ("connection between ranks", "torch.distributed.DistBackendError: NCCL error in: "
            "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.18.6\nncclSystemError: System call (e.g. socket, malloc) or "
            "external library call failed or device error.\nLast error:\nsocketStartConnect: Connect to "
            "192.168.19.14<52822> failed : No route to host"),
    ("NCCL invalid "
        "usage", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, invalid usage (run "
            "with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid "
            "usage of NCCL library."),
    ("NCCL GPU error", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA "
        "function failed."),
    ("connection between "
        "ranks", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, remote process exited "
            "or there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a "
            "network error or a remote process exiting prematurely.\nLast error:\nNET/IB: Got completion from peer "
            "10.0.0.4<40432> with status=12"),
    ("connection between "
        "ranks", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2356, unhandled system "
            "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26\nncclSystemError: System call (e.g. "
            "socket, malloc) or external library call failed or device error.\nLast error:\nsocketPollConnect: "
            "connect to 10.38.10.112<21724> returned Connection refused, exceeded error retry count"),
    ("collective timeout", "[rank1]:[E121 10:01:02 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=79, OpType=ALLREDUCE, NumelIn=8388608, Timeout(ms)=1800000) ran for "
        "1800029 milliseconds before timing out."),
    ("collective timeout", "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed "
        "out waiting 1800000ms for recv operation to complete"),
    ("port in use", "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    ("name not resolved", "socket.gaierror: [Errno -2] Name or service not known"),
    ("name not resolved", "torch.distributed.DistNetworkError: The IPv6 network addresses of (node7, 6001) cannot be "
        "retrieved (gai error: -3 - Temporary failure in name resolution)."),
    ("rendezvous", "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying "
        "to connect to (10.0.0.9, 46229)."),
    ("rendezvous", "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients "
        "joined."),
    ("connection between "
        "ranks", "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
            "[127.0.0.1]:2761"),
    ("connection between ranks", "RuntimeError: Gloo connectFullMesh failed with "
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:145] no error"),
    ("CUDA toolkit "
        "missing", "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to "
            "compile CUDA op(s)"),
    ("no C compiler or Python "
        "headers", "/tmp/tmppap3l7o5/main.c:4:10: fatal error: Python.h: No such file or directory"),
    ("no C compiler or Python "
        "headers", "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set "
            "triton.knobs.build.impl."),
    ("compile cache", "FileNotFoundError: [Errno 2] No such file or directory: "
        "'/home/me/.triton/cache/ab12/__grp__kernel.json'"),
    ("compile cache", "ModuleNotFoundError: No module named 'UnslothSFTTrainer'"),
    ("Triton kernel too "
        "large", "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware "
            "limit: 101376. Reducing block sizes or `num_stages` may help."),
    ("Triton kernel too "
        "large", "RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: triton_red_fused_0 "
            "Required: 131072 Hardware limit:101376 Reducing block sizes or `num_stages` may help."),
    ("flash-attn", "ImportError: /venv/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: "
        "undefined symbol: _ZN3c104cuda9SetDeviceEi"),
    ("flash-attn", "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following "
        "error: the package flash_attn seems to be not installed."),
    ("bitsandbytes", "ImportError: Using `bitsandbytes` 4-bit quantization requires bitsandbytes: it is not "
        "installed, `pip install -U bitsandbytes>=0.46.1`"),
    ("bitsandbytes", "RuntimeError: CUDA Setup failed despite GPU being available. Please run the following command "
        "to get more information: python -m bitsandbytes"),
    ("packages do not fit "
        "together", "ImportError: cannot import name 'ConstantLengthDataset' from 'trl.trainer.utils' "
            "(/venv/trl/trainer/utils.py)"),
    ("gated or private "
        "repository", "huggingface_hub.errors.GatedRepoError: 403 Client Error. Cannot access gated repo for url "
            "https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json. Your request to access model "
            "meta-llama/Llama-3.1-8B is awaiting a review from the repo authors."),
    ("gated or private "
        "repository", "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. Repository Not Found for "
            "url: https://huggingface.co/api/models/me/none."),
    ("no network", "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder "
        "for the specified revision on the local disk and outgoing traffic has been disabled."),
    ("no network", "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
        "them in the cached files."),
    ("too many requests", "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
        "https://huggingface.co/api/models"),
    ("damaged weights", "safetensors_rust.SafetensorError: Error while deserializing header: header too large"),
    ("damaged weights", "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central "
        "directory"),
    ("model and weights "
        "differ", "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch for "
            "base_model.model.lm_head.weight"),
    ("chat template", "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set and "
        "no template argument was passed!"),
    ("chat template", "jinja2.exceptions.TemplateError: Conversation roles must alternate "
        "user/assistant/user/assistant/..."),
    ("disk full", "OSError: [Errno 28] No space left on device: '/scratch/checkpoint-500/model.safetensors'"),
    ("disk full", "OSError: [Errno 122] Disk quota exceeded"),
    ("too many open files", "OSError: [Errno 24] Too many open files: '/data/rows.arrow'"),
    ("data loader worker", "RuntimeError: DataLoader worker (pid(s) 5012) exited unexpectedly"),
    ("remote code", "ValueError: The repository a/b contains custom code which must be executed to correctly load the "
        "model. Please pass the argument `trust_remote_code=True`"),
    ("unknown architecture", "ValueError: The checkpoint you are trying to load has model type `qwen9` but "
        "Transformers does not recognize this architecture."),
]  # fmt: skip

UNRELATED = [
    "ZeroDivisionError: division by zero",
    "KeyError: 'messages'",
    "KeyError: 'model'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "IndexError: list index out of range",
    "FileNotFoundError: [Errno 2] No such file or directory: 'rows.jsonl'",
    "PermissionError: [Errno 13] Permission denied: '/data/out'",
    "ModuleNotFoundError: No module named 'numpy'",
    "ImportError: cannot import name 'helper' from 'my_script'",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "RuntimeError: The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 0",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)",
    "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "ValueError: learning rate must be positive",
    "AssertionError: the trainer changed the batch plan",
    "RecursionError: maximum recursion depth exceeded",
    "TimeoutError: timed out",
    "ConnectionError: tracking server answered 500",
    "KeyboardInterrupt",
    "OSError: [Errno 5] Input/output error",
    "rank 1 (node 0, host b, pid 77) died without an error message at step 12 (training): killed from outside (kill "
    "-9, or out of memory: see dmesg on that host) or crashed in native code.",
    "rank 1 (node 1, host b, pid 77) has not answered for 30 s, since step 12 (training): the process is frozen, or "
    "its host is down or cut off from the network (--watch_timeout sets the limit).",
]


@pytest.mark.parametrize(("name", "text"), KNOWN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(KNOWN)])
def test_a_known_error_is_explained(name, text):
    known = find_known_error(text)
    assert known is not None and known.name == name, known


def test_every_known_error_has_a_real_message():
    assert {known.name for known in KNOWN_ERRORS} == {name for name, _ in KNOWN}
    assert len(KNOWN_ERRORS) >= 25


@pytest.mark.parametrize("text", UNRELATED)
def test_an_unrelated_error_is_not_explained(text):
    assert explain(text) == "", find_known_error(text)


def test_only_messages_of_a_traceback_are_searched():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/venv/safetensors/torch.py", line 3, in load\n'
        "    raise OutOfMemoryError if NCCL else EADDRINUSE\n"
        "ValueError: no\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/app/x.py", line 1, in <module>\n'
        "KeyError: 'a'\n"
    )
    assert find_known_error(text) is None
    assert "ValueError: no" in messages(text) and "safetensors" not in messages(text)
    assert (
        find_known_error(text.replace("ValueError: no", "OSError: [Errno 28] No space left on device")).name
        == "disk full"
    )


def test_causes_and_fixes_are_sentences():
    for known in KNOWN_ERRORS:
        assert known.cause[0].isupper() or known.cause.startswith(("bitsandbytes", "flash-attn", "torch.compile")), (
            known
        )
        assert known.cause.endswith(".") and known.fix.endswith("."), known
        assert (known.cause + known.fix).isascii(), known
        re.compile(known.pattern)


def test_options_named_in_the_fixes_exist():
    import dataclasses

    from unsloth_ddp.config.options import Settings

    others = {
        "num_processes",
        "main_process_port",
        "master_port",
        "gpus",
        "ipc",
        "locked",
        "extra",
        "force",
        "clear",
        "torch",
        "with",
    }
    named = set(re.findall(r"--([a-z_]{3,})", " ".join(known.fix for known in KNOWN_ERRORS)))
    assert named - others <= {f.name for f in dataclasses.fields(Settings)} | {"shm"}


FAILING = """
import sys, train_ddp
def open_run(settings, ranks):
    raise OSError(28, "No space left on device", "/scratch/x")
train_ddp.open_run = open_run
sys.argv = ["train_ddp.py"]
train_ddp.main()
"""


def test_the_explanation_stands_under_the_original_error():
    done = subprocess.run([sys.executable, "-c", FAILING], cwd=REPO, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-3].startswith("OSError: [Errno 28]")
    assert lines[-2].startswith("  cause: A disk") and lines[-1].startswith("  what helps: free space")
