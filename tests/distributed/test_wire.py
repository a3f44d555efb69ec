"""Test that values arrive unchanged between ranks, and that a message cannot run code."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unpickled import Touch
from unsloth_ddp.distributed import wire


@wire.sendable
@dataclass(frozen=True)
class Record:
    """A dataclass that ranks exchange."""

    name: str
    folder: Path
    sizes: dict[str, tuple[int, str]]


@dataclass
class Unmarked:
    """A dataclass that ranks do not exchange."""

    name: str


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(Path, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))),
    lambda items: st.lists(items) | st.lists(items).map(tuple) | st.dictionaries(st.text() | st.integers(), items),
)


def same(found: object, expected: object) -> bool:
    """Compare values and their types."""
    return type(found) is type(expected) and found == expected and repr(found) == repr(expected)


@given(plain)
def test_plain_values_arrive_as_they_were(value):
    assert same(wire.decode(wire.encode(value)), value)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=64))
def test_long_lists_of_integers_arrive_as_they_were(value):
    assert same(wire.decode(wire.encode(value)), value)


def test_a_long_list_that_is_not_all_integers_arrives_as_it_was():
    for odd in (0.5, "x", None, [1]):
        assert same(wire.decode(wire.encode([1] * 100 + [odd])), [1] * 100 + [odd])


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "float32", ">f8"])
def test_arrays_arrive_as_they_were_and_can_be_written(dtype):
    value = np.arange(12).astype(dtype).reshape(3, 4)
    found = wire.decode(wire.encode({"rows": [value, value[:, ::2]]}))["rows"]
    for array, expected in zip(found, [value, value[:, ::2]], strict=True):
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)
        array[0, 0] = 1


def test_numpy_scalars_become_numbers():
    assert wire.decode(wire.encode([np.int64(3), np.float32(0.5), np.bool_(True)])) == [3, 0.5, True]


def test_marked_dataclasses_arrive_with_their_types():
    value = Record("a", Path("/b/c"), {"x": (1, "d")})
    assert wire.decode(wire.encode([value])) == [value]


@pytest.mark.parametrize("value", [Unmarked("a"), object(), {1, 2}, np.array(["a"], dtype=object), lambda: 0])
def test_other_objects_are_refused_by_the_sender(value):
    with pytest.raises(TypeError, match="not exchanged between ranks"):
        wire.encode(value)


def hostile(path: Path) -> list[bytes]:
    """Messages of a stranger who became a rank."""
    unmarked = f"{Unmarked.__module__}.{Unmarked.__qualname__}"
    return [
        pickle.dumps(Touch(path)),
        b"",
        b"\xff\xfe",
        json.dumps({"record": "subprocess.Popen", "fields": {"args": ["touch", str(path)]}}).encode(),
        json.dumps({"record": unmarked, "fields": {"name": "a"}}).encode(),
        json.dumps({"record": f"{Record.__module__}.Record", "fields": {"unknown": 1}}).encode(),
        json.dumps({"array": "AAAA", "dtype": "O", "shape": [1]}).encode(),
        json.dumps({"array": "AAAA", "dtype": "int64", "shape": [9]}).encode(),
        json.dumps({"bytes": "not base64"}).encode(),
        json.dumps({"dict": [[[1], 2]]}).encode(),
        b"{}",
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_hostile_message_is_an_error_and_runs_nothing(tmp_path, number):
    path = tmp_path / "ran"
    with pytest.raises(ValueError):
        wire.decode(hostile(path)[number])
    assert not path.exists()
