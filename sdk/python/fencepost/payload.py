"""Python values to payloads and back: JSON for most, bytes as they are, models by duck typing."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

from fencepost.v1 import payload_pb2

Payload = payload_pb2.Payload

_BYTES = "application/octet-stream"
_SCALARS: dict[type, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
}


class PayloadError(ValueError):
    """A value cannot become a payload, or a payload not the value asked for."""


def encode_payload(value: object) -> Payload | None:
    """A payload for `value`; None for None.

    Bytes become `data`, a Payload stays as it is, objects with `model_dump_json` are asked
    for their JSON, all else (dataclasses too) is written as JSON. PayloadError if it cannot.
    """
    if value is None:
        return None
    if isinstance(value, Payload):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Payload(data=bytes(value), content_type=_BYTES)
    dump = getattr(value, "model_dump_json", None)
    if dump is not None and not isinstance(value, type):
        return Payload(json=dump())
    return Payload(json=_to_json(value))


def decode_payload(payload: Payload | None, wanted: Any = Any) -> Any:
    """The value in `payload` as the type `wanted`.

    Any: what JSON says, bytes for `data`, None without a body. PayloadError if it does not fit.
    """
    if wanted is Payload:
        return payload if payload is not None else Payload()
    body = payload.WhichOneof("body") if payload is not None else None
    if payload is None or body is None:
        return None if _is_open(wanted) else _convert(None, wanted, "payload")
    if payload.encoding:
        raise PayloadError(
            f"payload.encoding is {payload.encoding!r}, which this handler does not read;"
            " annotate its input with fencepost.Payload to get the bytes as they are"
        )
    if body == "data":
        if wanted is bytes or _is_open(wanted):
            return payload.data
        text: str | bytes = payload.data
    else:
        text = payload.json
        if wanted is bytes:
            return payload.json.encode()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PayloadError(f"payload is not JSON: {error}") from error
    return value if _is_open(wanted) else _convert(value, wanted, "payload")


def _is_open(wanted: Any) -> bool:
    return wanted is Any or wanted is object or wanted is None


def _to_json(value: object) -> str:
    try:
        text = _write_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"{type(value).__name__} cannot be written as JSON: {error}") from error
    # A lone surrogate is legal in a Python string, not in UTF-8; escaped it is legal in both.
    return text if _is_utf8(text) else json.dumps(value, default=_simpler, allow_nan=False)


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _simpler(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    dump = getattr(value, "model_dump_json", None)
    if dump is not None:
        return json.loads(dump())
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return list(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# Made once: json.dumps would make one for each value.
_write_json = json.JSONEncoder(
    default=_simpler, ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode


def _convert(value: Any, wanted: Any, path: str) -> Any:
    if _is_open(wanted):
        return value
    origin = get_origin(wanted)
    if origin in (Union, types.UnionType):
        return _convert_union(value, wanted, path)
    if origin is Literal:
        if value in get_args(wanted):
            return value
        raise PayloadError(f"{path} must be one of {get_args(wanted)}, got {value!r}")
    if origin is list or wanted is list:
        return _convert_list(value, get_args(wanted), path)
    if origin is dict or wanted is dict:
        return _convert_dict(value, get_args(wanted), path)
    if isinstance(wanted, type):
        return _convert_class(value, wanted, path)
    raise PayloadError(f"{path}: no way to read JSON as {wanted!r}")


def _convert_union(value: Any, wanted: Any, path: str) -> Any:
    reasons = []
    for choice in get_args(wanted):
        if choice is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return _convert(value, choice, path)
        except PayloadError as error:
            reasons.append(str(error))
    raise PayloadError("; ".join(reasons) or f"{path} must be null, got {value!r}")


def _convert_list(value: Any, arguments: tuple[Any, ...], path: str) -> list[Any]:
    if not isinstance(value, list):
        raise PayloadError(f"{path} must be a list, got {value!r:.80}")
    inner = arguments[0] if arguments else Any
    return [_convert(one, inner, f"{path}[{n}]") for n, one in enumerate(value)]


def _convert_dict(value: Any, arguments: tuple[Any, ...], path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PayloadError(f"{path} must be an object, got {value!r:.80}")
    inner = arguments[1] if arguments else Any
    return {key: _convert(one, inner, f"{path}.{key}") for key, one in value.items()}


def _convert_class(value: Any, wanted: type, path: str) -> Any:
    validate = getattr(wanted, "model_validate", None)
    if validate is not None:
        try:
            return validate(value)
        except ValueError as error:
            raise PayloadError(f"{path}: {error}") from error
    if dataclasses.is_dataclass(wanted):
        return _convert_dataclass(value, wanted, path)
    if wanted in _SCALARS:
        fits = isinstance(value, _SCALARS[wanted])
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise PayloadError(f"{path} must be {wanted.__name__}, got {value!r:.80}")
        return wanted(value)
    if issubclass(wanted, enum.Enum):
        try:
            return wanted(value)
        except ValueError as error:
            raise PayloadError(f"{path}: {error}") from error
    raise PayloadError(f"{path}: no way to read JSON as {wanted.__name__}")


def _convert_dataclass(value: Any, wanted: type, path: str) -> Any:
    if not isinstance(value, dict):
        raise PayloadError(f"{path} must be an object, got {value!r:.80}")
    hints = typing.get_type_hints(wanted)
    known: dict[str, Any] = {}
    for field in dataclasses.fields(wanted):
        if field.name in value and field.init:
            inner = hints.get(field.name, Any)
            known[field.name] = _convert(value[field.name], inner, f"{path}.{field.name}")
    # Unknown names are ignored: a producer may be one deploy ahead.
    try:
        return wanted(**known)
    except (TypeError, ValueError) as error:
        raise PayloadError(f"{path}: {error}") from error
