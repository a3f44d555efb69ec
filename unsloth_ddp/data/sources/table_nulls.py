"""Remove the nulls that a table fills in, and keep nulls that the row's tools require. Pure functions.

A table gives all objects of a column the same fields and fills missing ones with null. Tool calls and schemas would be
trained with arguments and properties that nobody wrote. The table does not record whether a null was written, so the
schema of the called tool decides: a null in a required argument stays.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from unsloth_ddp.data.sources.messages import ARGUMENT_KEYS

TOOL_COLUMNS = ("tools", "functions")


def without_filled_nulls(columns: Any) -> Any:
    """Remove the nulls inside the columns of a table's row, except:

    - items of a list,
    - arguments of a tool call that the tool's schema, in the same row, requires,
    - "default" of a property that may be null and is not required.
    """
    if not isinstance(columns, dict):
        return columns
    schemas = _schemas_of(columns)
    return {name: _schema(value) if name in TOOL_COLUMNS else _value(value, schemas) for name, value in columns.items()}


def is_of_table(columns: Any) -> bool:
    """Return whether a row is of a table: a tool has a property that is null, or all messages have the same keys.

    No schema has such a property. A table gives the key of calls to every message, and null where there are none.
    """
    if not isinstance(columns, dict):
        return False
    schemas = _schemas_of(columns).values()
    return any(None in _object(schema.get("properties")).values() for schema in schemas) or any(
        _have_keys_of_table(value) for value in columns.values() if isinstance(value, list)
    )


def _have_keys_of_table(messages: list[Any]) -> bool:
    keys = [message.keys() if isinstance(message, dict) else None for message in messages]
    if len(keys) < 2 or keys[0] is None or any(other != keys[0] for other in keys):
        return False
    calls = [message.get("tool_calls") for message in messages]
    return "tool_calls" in keys[0] and any(calls) and None in calls


def _schemas_of(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the parameters of each tool in a row, by the tool's name."""
    schemas = {}
    for column in TOOL_COLUMNS:
        for tool in _list(columns.get(column)):
            function = _object(_object(tool).get("function")) or _object(tool)
            if isinstance(function.get("name"), str):
                schemas[function["name"]] = _object(function.get("parameters"))
    return schemas


def _value(value: Any, schemas: Mapping[str, Any]) -> Any:
    """Return a value of a message without nulls, except in arguments that a tool requires."""
    if isinstance(value, list):
        return [_value(item, schemas) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    called = schemas.get(name) if isinstance(name, str) else None
    return {
        key: _arguments(item, called or {}) if isinstance(name, str) and key in ARGUMENT_KEYS else _value(item, schemas)
        for key, item in value.items()
        if item is not None
    }


def _arguments(value: Any, schema: Any) -> Any:
    """Return an argument without the nulls that its schema does not require."""
    schema = _object(schema)
    if isinstance(value, list):
        return [_arguments(item, schema.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    properties, required = _object(schema.get("properties")), _list(schema.get("required"))
    return {
        name: _arguments(item, properties.get(name))
        for name, item in value.items()
        if item is not None or name in required
    }


def _schema(value: Any, *, keeps: Collection[str] = ()) -> Any:
    """Return a part of a tool's description without nulls, except in the keys `keeps`."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    required = _list(value.get("required"))
    schema = {}
    for key, item in value.items():
        if key == "properties" and isinstance(item, dict):
            schema[key] = {
                name: _schema(
                    schema_of_property,
                    keeps=("default",) if name not in required and _may_be_null(schema_of_property) else (),
                )
                for name, schema_of_property in item.items()
                if schema_of_property is not None
            }
        elif item is not None or key in keeps:
            schema[key] = _schema(item)
    return schema


def _may_be_null(schema: Any) -> bool:
    choices = [schema, *(_list(_object(schema).get("anyOf"))), *(_list(_object(schema).get("oneOf")))]
    types = [_object(choice).get("type") for choice in choices]
    return any(kind == "null" or (isinstance(kind, list) and "null" in kind) for kind in types)


def _list(value: Any) -> list[Any]:
    value = _parsed(value)
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    value = _parsed(value)
    return value if isinstance(value, dict) else {}


def _parsed(value: Any) -> Any:
    """Return the value of JSON text, None if it is invalid; the row reader refuses invalid text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
