"""Reads the error of a call: its code, and the details that google.rpc.Status carries."""

from dataclasses import dataclass

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcStatus:
    """What a refused call said."""

    code: grpc.StatusCode
    message: str
    # Value of ErrorReason without its prefix. Empty: the error is not Fencepost's own.
    reason: str
    # Field path and what is wrong with it.
    fields: tuple[tuple[str, str], ...]
    # Resource name that the error is about. Empty: none.
    resource: str
    # Empty: not told.
    request_id: str

    @property
    def why(self) -> str:
        """The cause in one line, with the field where one is named."""
        named = [field for field, _ in self.fields if field and field not in self.message]
        return f"{', '.join(named)}: {self.message}" if named else self.message

    @property
    def in_words(self) -> str:
        """Code, reason and request id, for -v."""
        parts = [self.code.name, self.reason, self.request_id and f"request {self.request_id}"]
        return " · ".join(part for part in parts if part)


def read_status(error: grpc.RpcError) -> RpcStatus:
    """The status of a failed call; details that cannot be read are left out."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), "errors of calls carry their call"
    reason, resource, request_id = "", "", ""
    fields: list[tuple[str, str]] = []
    for detail in _details(error):
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        about = error_details_pb2.ResourceInfo()
        request = error_details_pb2.RequestInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            fields += [(v.field, v.description) for v in bad_request.field_violations]
        elif detail.Unpack(about):
            resource = about.resource_name
        elif detail.Unpack(request):
            request_id = request.request_id
    return RpcStatus(
        code=error.code(),
        message=error.details() or "",
        reason=reason,
        fields=tuple(fields),
        resource=resource,
        request_id=request_id,
    )


def _details(error: grpc.Call | grpc.aio.AioRpcError) -> list[Any]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return []
            return list(status.details)
    return []
