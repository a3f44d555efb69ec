"""Rules for models, tokenizers, GPUs, saving, publishing, generating and showing. Standard library only."""

import signal
from typing import Any

from events import RECORDER
from fake_training import local_rank, plain, world_size
from patches import make
from stubs import RULES, VALUES, Forgiving, Stub, Text

SAVES = """save save_pretrained save_pretrained_merged save_pretrained_gguf save_pretrained_torchao save_lora
save_model save_state save_to_disk save_adapter save_weights save_file to_csv to_json to_parquet to_excel to_pickle
savez savez_compressed savetxt savefig imwrite imsave write_bytes write_text export"""
PUSHES = """push_to_hub push_to_hub_merged push_to_hub_gguf push_to_hub_lora push_to_hub_torchao upload_file
upload_folder upload_large_folder create_repo create_commit create_branch"""
GENERATES = "generate fast_generate generate_batch infer transcribe chat stream_generate batch_generate"
PREPARES = """get_peft_model get_chat_template train_on_responses_only add_new_tokens add_tokens add_special_tokens
resize_token_embeddings for_inference for_training PatchDPOTrainer PatchFastRL add_callback enable_input_require_grads
prepare_model_for_kbit_training requires_grad_ gradient_checkpointing_enable load_adapter set_adapter quantize_"""
SHOWS = "IPython.display.display matplotlib.pyplot.show plotly.io.show sglang.utils.print_highlight"
DOWNLOADS = "huggingface_hub.snapshot_download huggingface_hub.hf_hub_download gdown.download wget.download"
SERVICES = "wandb.init wandb.log wandb.login huggingface_hub.login huggingface_hub.notebook_login comet_ml.init"
SERVERS = "unsloth.launch_openenv unsloth.dataprep.SyntheticDataKit.from_pretrained"
REQUESTS = "get post put delete patch request head"


def record(kind: str, answer: Any = None) -> Any:
    """A rule that records an event under the last part of the name."""

    def run(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = stub._name.rsplit(".", 1)[-1]
        if kind == "save":
            for path in [a for a in args if isinstance(a, str)][:1]:
                make(path)
        RECORDER.add(kind, name, text=", ".join(str(a)[:60] for a in args if isinstance(a, str))[:120])
        return Stub(f"{stub._name}()") if answer is None else answer

    return run


def note_read(args: tuple[Any, ...], kwargs: dict[str, Any], how: str) -> None:
    """Record that something is loaded by name or path."""
    given = [*args, *(kwargs[name] for name in ("model_name", "pretrained_model_name_or_path") if name in kwargs)]
    if given and isinstance(given[0], str):
        RECORDER.add("read", how, text=str(given[0]))


def reading(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A reader of saved weights."""
    note_read(args, kwargs, stub._name.rsplit(".", 1)[-1])
    return Stub(f"{stub._name}()")


def load(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """from_pretrained of a model, a tokenizer or a configuration."""
    owner = stub._name.split(".")[-2]
    note_read(args, kwargs, f"{owner}.from_pretrained")
    weights = owner.startswith("Fast") or (("Model" in owner or "For" in owner) and "Tokenizer" not in owner)
    if weights:
        asked = kwargs.get("device_map", "absent")
        device_map = {str(k): plain(v) for k, v in asked.items()} if isinstance(asked, dict) else plain(asked)
        RECORDER.add("load", owner, device_map=device_map, given=plain({"name": args, **kwargs}))
    made = Stub(f"{stub._name}()")
    if weights:
        names = ("model_name", "pretrained_model_name_or_path")
        name = args[0] if args else next((kwargs[key] for key in names if key in kwargs), None)
        made.__dict__["_origin"] = f"{owner} of {plain(name)}"
    return made


def chat_template(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """apply_chat_template: text, or token ids."""
    if kwargs.get("return_tensors") or kwargs.get("return_dict"):
        return Stub(f"{stub._name}()")
    messages: Any = args[0] if args else kwargs.get("conversation", kwargs.get("messages"))
    tokenize = kwargs.get("tokenize", True)
    several = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
    if tokenize:
        return [[1, 2, 3] for _ in messages] if several else [1, 2, 3]
    if several:
        return [Text(flatten(one), "text") for one in messages]
    return Text(flatten(messages), "text")


def flatten(messages: Any) -> str:
    """The contents of a list of messages as one string."""
    if not isinstance(messages, list | tuple):
        return "1"
    parts = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        parts.append(content if isinstance(content, str) else "1")
    return "\n".join(str(p) for p in parts) or "1"


def piped(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A transformers pipeline: calling what it returns generates."""
    return Stub("pipeline.generate")


def prepared(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that changes a model, a tokenizer or a trainer before training, and returns its argument."""
    name = stub._name.rsplit(".", 1)[-1]
    first = args[0] if args else next((kwargs[n] for n in ("model", "tokenizer", "trainer") if n in kwargs), None)
    rest = {"args": args[1:], **{k: v for k, v in kwargs.items() if k not in ("model", "tokenizer", "trainer")}}
    RECORDER.add("prepare", name, given=plain(rest))
    return Stub(f"{stub._name}()") if first is None else first


def threaded(value: Any) -> Any:
    return lambda stub, args, kwargs: value() if callable(value) else value


def memmap(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """numpy.memmap: a file where it is opened for writing."""
    if "w" in kwargs.get("mode", "r"):
        RECORDER.add("write", "memmap")
        make(args[0] if args else kwargs.get("filename"))
    return Stub("memmap")


class TimeLimit:
    """unsloth.execute_with_time_limit: the program expects TimeoutError from a strategy that never ends."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def expire(*ignored: Any) -> None:
            raise TimeoutError("Timed out")

        before = signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            return self.function(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


DONE_ASKED: set[str] = set()


def done() -> bool:
    """An environment's `.done`: False the first time a line asks, then True, so that its loop runs once."""
    line = RECORDER.where()
    asked = line in DONE_ASKED
    DONE_ASKED.symmetric_difference_update({line})
    return asked


def device_set(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    RECORDER.add("device", "set_device", index=plain(args[0] if args else kwargs.get("device")))


def decorated(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.compile and its like: the function itself, or a decorator."""
    if args and callable(args[0]):
        return args[0]
    return lambda function: function


def install() -> None:
    """Register the names."""
    for kind, names in (("save", SAVES), ("push", PUSHES), ("generate", GENERATES)):
        for name in names.split():
            RULES[f"*.{name}"] = record(kind)
    for kind, names in (("display", SHOWS), ("download", DOWNLOADS), ("service", SERVICES), ("server", SERVERS)):
        for name in names.split():
            RULES[name] = record(kind)
    for name in REQUESTS.split():
        RULES[f"requests.{name}"] = RULES[f"httpx.{name}"] = record("request")
    for name in ("soundfile.write", "scipy.io.wavfile.write", "torchaudio.save", "json.dump"):
        RULES[name] = record("save")
    for name in ("numpy.savez", "numpy.save", "torch.save"):
        RULES[name] = record("save")
    RULES["*.from_pretrained"] = load
    for name in ("safetensors.safe_open", "safetensors.torch.load_file", "torch.load", "*.load_lora"):
        RULES[name] = reading
    RULES["numpy.memmap"] = memmap
    RULES["*.dim"] = lambda stub, args, kwargs: 1
    RULES["unsloth.execute_with_time_limit"] = lambda stub, args, kwargs: TimeLimit
    RULES["*.apply_chat_template"] = chat_template
    RULES["*.decode"] = lambda stub, args, kwargs: Text("1", "decoded")
    RULES["*.batch_decode"] = lambda stub, args, kwargs: Forgiving([Text("1", "decoded"), Text("1", "decoded")])
    RULES["transformers.pipeline"] = piped
    RULES["torch.compile"] = RULES["functools.lru_cache"] = decorated
    for name in PREPARES.split():
        RULES[f"*.{name}"] = prepared
    for name in ("is_bf16_supported", "is_bfloat16_supported"):
        RULES[f"unsloth.{name}"] = RULES[f"torch.cuda.{name}"] = lambda stub, args, kwargs: True
    cuda: dict[str, Any] = {
        "is_available": True,
        "device_count": world_size,
        "current_device": local_rank,
        "get_device_capability": (8, 0),
        "get_device_name": "Stub GPU",
        "max_memory_reserved": 2**30,
        "memory_reserved": 2**30,
        "memory_allocated": 2**30,
        "max_memory_allocated": 2**30,
        "mem_get_info": (2**36, 2**37),
        "is_initialized": True,
    }
    for name, value in cuda.items():
        RULES[f"torch.cuda.{name}"] = threaded(value)
    RULES["torch.cuda.set_device"] = device_set
    VALUES.update(
        {
            "*.total_memory": 2**37,
            "*.eos_token": "</s>",
            "*.bos_token": "<s>",
            "*.pad_token": "<pad>",
            "*.unk_token": "<unk>",
            "*.eos_token_id": 2,
            "*.bos_token_id": 1,
            "*.pad_token_id": 0,
            "*.vocab_size": 100,
            "*.status_code": 200,
            "*.ok": True,
            "*.shape": (2, 2),
            "*.ndim": 2,
            "torch.version.cuda": "12.8",
            "torch.version.hip": None,
            "numpy.pi": 3.14,
            "numpy.inf": float("inf"),
            "*.done": done,
        }
    )
