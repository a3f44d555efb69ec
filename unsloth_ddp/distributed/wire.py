"""Exchange values between ranks as JSON, so that nothing that arrives over the network is unpickled.

torch's all_gather_object and its relatives unpickle what they receive, and unpickling runs code of the sender's choice.
Here a value is made of None, booleans, numbers, strings, bytes, paths, lists, tuples, dictionaries, numeric NumPy
arrays and dataclasses that are marked with `sendable`; anything else is refused on both sides.
"""

import base64
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_Class = TypeVar("_Class", bound=type)

NUMERIC_KINDS = "biuf"

_sendable: dict[str, type] = {}


def sendable(cls: _Class) -> _Class:
    """Allow instances of a dataclass to be sent between ranks, field by field."""
    _sendable[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return cls


def encode(value: Any) -> bytes:
    """Return `value` as JSON text.

    Raises:
        TypeError: the value holds an object that ranks do not exchange.
    """
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given.

    Raises:
        ValueError: the data was not written by `encode`.
    """
    try:
        return _from_json(json.loads(data))
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a message from another rank cannot be read ({type(error).__name__}: {error})") from None


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": _to_text(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _sendable:
        fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"record": name, "fields": fields}
    return _numpy_to_json(value)


def _numpy_to_json(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic) and value.dtype.kind in NUMERIC_KINDS:
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMERIC_KINDS:
        return {"array": _to_text(value.tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(
        f"{type(value).__module__}.{type(value).__qualname__} is not exchanged between ranks; mark it sendable"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    if "dict" in value:
        return {_from_json(key): _from_json(item) for key, item in value["dict"]}
    if "bytes" in value:
        return _to_bytes(value["bytes"])
    if "path" in value:
        return Path(value["path"])
    if "array" in value:
        return _array(value)
    return _sendable[value["record"]](**{name: _from_json(item) for name, item in value["fields"].items()})


def _array(value: dict[str, Any]) -> Any:
    import numpy as np

    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind not in NUMERIC_KINDS:
        raise ValueError(f"a message from another rank holds an array of {dtype}")
    # A copy can be written to, as the array that was sent.
    return np.frombuffer(_to_bytes(value["array"]), dtype).reshape(value["shape"]).copy()


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def all_gather(value: T, group: Any) -> list[T]:
    """Return `value` of every rank of a CPU process group, in rank order, on every rank."""
    import torch
    import torch.distributed as dist

    payload = encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    counts = [int(size) for size in sizes]
    received = [torch.empty(max(counts), dtype=torch.uint8) for _ in counts]
    dist.all_gather(received, _tensor(payload, max(counts)), group=group)
    return [decode(part[:count].numpy().tobytes()) for part, count in zip(received, counts, strict=True)]


def scatter(values: Sequence[T] | None, group: Any) -> T:
    """Return this rank's item of the values that rank 0 of a CPU process group gives, one a rank; others give None."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    payloads = [encode(value) for value in values] if values is not None else []
    sizes = torch.tensor([len(p) for p in payloads]) if payloads else torch.zeros(world_size, dtype=torch.int64)
    dist.broadcast(sizes, group_src=0, group=group)
    longest = int(sizes.max())
    received = torch.empty(longest, dtype=torch.uint8)
    dist.scatter(received, [_tensor(p, longest) for p in payloads] or None, group_src=0, group=group)
    return decode(received[: int(sizes[rank])].numpy().tobytes())


def _tensor(payload: bytes, size: int) -> Any:
    """Return a message as a tensor of this size, filled up with zeros."""
    import torch

    return torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
