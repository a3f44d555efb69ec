"""Why the CPU is used where a GPU was expected: the sentence, and who is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import DEMO_MODEL
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import missing_gpu, runtime
from unsloth_ddp.distributed.missing_gpu import check_cpu_is_meant, explain_missing_gpu
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.utils.errors import UserError

NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from x"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading"
)
NO_FABRIC = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 802: system not yet initialized"
)
FOUND = "CUDA_VISIBLE_DEVICES is {}, but torch finds no GPU"


@pytest.mark.parametrize(
    ("visible", "driver", "torch_cuda", "reason", "sentence"),
    [
        ("0", False, "13.0", NO_DRIVER, FOUND.format("0") + " (Found no NVIDIA driver on your system), so the CPU is "
         "used; check nvidia-smi (a container needs --gpus all)."),
        ("GPU-8f2a,1", False, "13.0", "", FOUND.format("GPU-8f2a,1") + ", so"),
        ("7", True, "13.0", "No CUDA GPUs are available", FOUND.format("7") + " (No CUDA GPUs are available), so"),
        ("0", True, None, "", "CUDA_VISIBLE_DEVICES is 0, but this torch is built without CUDA, so the CPU is used; "
         "install the kit's own with uv sync."),
        (None, True, None, "", "This machine has an NVIDIA driver, but this torch is built without CUDA, so"),
        (None, True, "13.0", TOO_OLD, "This machine has an NVIDIA driver, but torch finds no GPU (The NVIDIA driver "
         "on your system is too old (found version 12020)), so the CPU is used; update the driver to one for CUDA "
         "13.0, or install torch for this driver: "),
        (None, True, "13.0", NO_FABRIC, "This machine has an NVIDIA driver, but torch finds no GPU (Error 802: system "
         "not yet initialized), so"),
    ],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_explained(visible, driver, torch_cuda, reason, sentence):
    found = explain_missing_gpu(visible, driver, torch_cuda, reason)
    assert found is not None and found.warning.startswith(sentence) and not found.hidden


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "NoDevFiles"])
def test_gpus_that_are_hidden_are_hidden_on_purpose(visible):
    found = explain_missing_gpu(visible, True, "13.0", "No CUDA GPUs are available")
    assert found is not None and found.hidden
    assert found.warning == (
        f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides this machine's GPUs, so the CPU is used; unset it to use "
        "them."
    )


@pytest.mark.parametrize("visible", [None, "", "-1"])
def test_nothing_is_said_on_a_machine_without_gpus(visible):
    assert explain_missing_gpu(visible, False, "13.0", NO_DRIVER) is None
    assert explain_missing_gpu(visible, False, None, "") is None


def test_the_demo_goes_on_and_any_other_model_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    check_cpu_is_meant(Settings(model=str(DEMO_MODEL)))
    assert capsys.readouterr().out.startswith("CUDA_VISIBLE_DEVICES is 0, but torch finds no GPU, so the CPU is used;")
    with pytest.raises(
        UserError, match=r"is 0, but torch finds no GPU; check .*, or give --use_cpu to train on the CPU"
    ):
        check_cpu_is_meant(Settings(model="Qwen/Qwen3-8B"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(missing_gpu, "has_nvidia", lambda: True)
    check_cpu_is_meant(Settings(model="Qwen/Qwen3-8B"))
    assert "hides this machine's GPUs, so the CPU is used" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [{"use_cpu": True}, {}])
def test_a_run_that_asks_for_the_cpu_is_told_nothing(asked, monkeypatch, capsys):
    for name in ("_start_processes", "_stop_processes"):
        monkeypatch.setattr(f"unsloth_ddp.distributed.runtime.{name}", lambda *given: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings = Settings(model="Qwen/Qwen3-8B", **asked)
    if asked:
        with runtime.started(settings, Ranks()) as found:
            assert found.device_type == "cpu"
        assert runtime.single_process(settings).device_type == "cpu"
        assert capsys.readouterr() == ("", "")
        return
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES is 0"), runtime.started(settings, Ranks()):
        pass
    # A conversation with a trained model goes on, and its answers are all that standard output gets.
    assert runtime.single_process(settings).device_type == "cpu"
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("so the CPU is used") == 1


def test_a_machine_with_a_driver_and_a_torch_for_the_cpu_is_told_so(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(missing_gpu, "has_nvidia", lambda: True)
    monkeypatch.setattr("torch.version", SimpleNamespace(cuda=None, hip=None))
    found = missing_gpu.find_missing_gpu()
    assert found is not None and "is built without CUDA" in found.cause
    monkeypatch.setattr(missing_gpu, "has_nvidia", lambda: False)
    assert missing_gpu.find_missing_gpu() is None


def test_a_torch_for_rocm_is_not_told_to_install_one_for_cuda(monkeypatch):
    monkeypatch.setattr("torch.version", SimpleNamespace(cuda=None, hip="7.0"))
    assert missing_gpu.find_missing_gpu({"CUDA_VISIBLE_DEVICES": "0"}) is None
