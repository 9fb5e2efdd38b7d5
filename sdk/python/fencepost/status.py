"""Reads google.rpc.Status from a call's trailers without the googleapis packages.

The four messages needed are described by hand in a descriptor pool of our own, so they
never collide with another package that registers the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message
from google.protobuf.message_factory import GetMessageClass

TRAILER = "grpc-status-details-bin"

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_INT32 = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One field the server refused, and why."""

    field: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDetails:
    """What the server said beside code and message."""

    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    field_violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    """Seconds, from RetryInfo. None: the server did not ask for a retry."""


def read_details(trailers: Iterable[tuple[str, str | bytes]] | None) -> StatusDetails:
    """The details in a call's trailing metadata; empty ones when there are none to read."""
    for name, value in trailers or ():
        if name == TRAILER and isinstance(value, bytes):
            status: Any = _Status()
            try:
                status.ParseFromString(value)
                return _read(status.details)
            except message.DecodeError:
                return StatusDetails()
    return StatusDetails()


def _read(details: Sequence[Any]) -> StatusDetails:
    reason, metadata, violations, retry_after = "", {}, [], None
    for packed in details:
        name = packed.type_url.rpartition("/")[2]
        if name == "google.rpc.ErrorInfo":
            info: Any = _ErrorInfo()
            info.ParseFromString(packed.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif name == "google.rpc.BadRequest":
            request: Any = _BadRequest()
            request.ParseFromString(packed.value)
            violations += [
                FieldViolation(field=v.field, description=v.description)
                for v in request.field_violations
            ]
        elif name == "google.rpc.RetryInfo":
            info = _RetryInfo()
            info.ParseFromString(packed.value)
            retry_after = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return StatusDetails(
        reason=reason,
        metadata=metadata,
        field_violations=tuple(violations),
        retry_after=retry_after,
    )


def encode_status(code: int, text: str, details: StatusDetails) -> bytes:
    """The trailer's bytes for these details: what a server, or a fake one, sends."""
    status: Any = _Status(code=code, message=text)
    info: Any = _ErrorInfo(reason=details.reason, domain="fencepost.dev")
    info.metadata.update(details.metadata)
    packed = [("google.rpc.ErrorInfo", info)]
    if details.field_violations:
        request: Any = _BadRequest()
        for violation in details.field_violations:
            request.field_violations.add(field=violation.field, description=violation.description)
        packed.append(("google.rpc.BadRequest", request))
    if details.retry_after is not None:
        retry: Any = _RetryInfo()
        retry.retry_delay.seconds = int(details.retry_after)
        retry.retry_delay.nanos = int(details.retry_after % 1 * 1e9)
        packed.append(("google.rpc.RetryInfo", retry))
    for name, detail in packed:
        status.details.add(type_url=f"type.googleapis.com/{name}", value=detail.SerializeToString())
    encoded: bytes = status.SerializeToString()
    return encoded


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="fencepost/rpc_status.proto",
        package="google.rpc",
        syntax="proto3",
        dependency=["google/protobuf/any.proto", "google/protobuf/duration.proto"],
    )
    status = file.message_type.add(name="Status")
    _add_field(status, "code", 1, _INT32)
    _add_field(status, "message", 2, _STRING)
    _add_field(status, "details", 3, _MESSAGE, ".google.protobuf.Any", repeated=True)
    info = file.message_type.add(name="ErrorInfo")
    _add_field(info, "reason", 1, _STRING)
    _add_field(info, "domain", 2, _STRING)
    _add_field(info, "metadata", 3, _MESSAGE, ".google.rpc.ErrorInfo.MetadataEntry", repeated=True)
    entry = info.nested_type.add(name="MetadataEntry")
    entry.options.map_entry = True
    _add_field(entry, "key", 1, _STRING)
    _add_field(entry, "value", 2, _STRING)
    request = file.message_type.add(name="BadRequest")
    violation = request.nested_type.add(name="FieldViolation")
    _add_field(violation, "field", 1, _STRING)
    _add_field(violation, "description", 2, _STRING)
    violations = ".google.rpc.BadRequest.FieldViolation"
    _add_field(request, "field_violations", 1, _MESSAGE, violations, repeated=True)
    retry = file.message_type.add(name="RetryInfo")
    _add_field(retry, "retry_delay", 1, _MESSAGE, ".google.protobuf.Duration")
    return file


def _add_field(
    owner: descriptor_pb2.DescriptorProto,
    name: str,
    number: int,
    kind: descriptor_pb2.FieldDescriptorProto.Type.ValueType,
    type_name: str = "",
    *,
    repeated: bool = False,
) -> None:
    label = descriptor_pb2.FieldDescriptorProto
    owner.field.add(
        name=name,
        number=number,
        type=kind,
        type_name=type_name or None,
        label=label.LABEL_REPEATED if repeated else label.LABEL_OPTIONAL,
    )


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_describe().SerializeToString())
_Status = GetMessageClass(_pool.FindMessageTypeByName("google.rpc.Status"))
_ErrorInfo = GetMessageClass(_pool.FindMessageTypeByName("google.rpc.ErrorInfo"))
_BadRequest = GetMessageClass(_pool.FindMessageTypeByName("google.rpc.BadRequest"))
_RetryInfo = GetMessageClass(_pool.FindMessageTypeByName("google.rpc.RetryInfo"))
