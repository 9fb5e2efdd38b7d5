"""Typed errors of calls: one class per status code, each with the server's machine reason.

A reason this SDK has never heard of still gets the class of its code.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from fencepost.status import FieldViolation, StatusDetails, read_details
from fencepost.v1 import failure_pb2


class FencepostError(Exception):
    """A call was refused or did not get through."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str = "",
        *,
        details: StatusDetails | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message or (self.__doc__ or "").strip())
        details = details or StatusDetails()
        self.message = message
        self.reason: str = details.reason
        """A name of ErrorReason without prefix; empty when the server gave none."""
        self.metadata: Mapping[str, str] = details.metadata
        """Every variable part of the message."""
        self.field_violations: tuple[FieldViolation, ...] = details.field_violations
        self.retry_after: float | None = details.retry_after
        """Seconds the server asks to wait. None: it did not ask."""
        self.retryable = retryable
        """Inside a batch: the same entry may succeed later."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{self.reason}: {text}" if self.reason else text


class Cancelled(FencepostError):
    """The call was cancelled."""

    code = grpc.StatusCode.CANCELLED


class Unknown(FencepostError):
    """The call failed in a way nobody named."""


class InvalidArgument(FencepostError):
    """A field is missing, malformed or over a limit; see `field_violations`."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(FencepostError):
    """No answer within the call's deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(FencepostError):
    """No such job, run, queue or other resource for this caller."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(FencepostError):
    """The name is taken, or a run holds the unique key."""

    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(FencepostError):
    """The credential does not allow this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(FencepostError):
    """A limit is reached; `retry_after` says whether waiting helps."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(FencepostError):
    """The resource is not in a state that allows this."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(FencepostError):
    """The resource has changed since it was read (ETAG_MISMATCH)."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(FencepostError):
    """A value is outside what exists."""

    code = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(FencepostError):
    """The server does not offer this method."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(FencepostError):
    """A bug of the server."""

    code = grpc.StatusCode.INTERNAL


class Unavailable(FencepostError):
    """The server, or its database, cannot be reached right now."""

    code = grpc.StatusCode.UNAVAILABLE


class DataLoss(FencepostError):
    """Data was lost or damaged on the way."""

    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(FencepostError):
    """The credential is missing, unknown, expired or revoked."""

    code = grpc.StatusCode.UNAUTHENTICATED


_BY_CODE: dict[grpc.StatusCode, type[FencepostError]] = {
    cls.code: cls for cls in FencepostError.__subclasses__()
}
_BY_NUMBER: dict[int, type[FencepostError]] = {code.value[0]: cls for code, cls in _BY_CODE.items()}


def error_of_call(
    code: grpc.StatusCode | None,
    message: str | None,
    trailers: object = None,
) -> FencepostError:
    """The typed error of a call that ended with this status."""
    pairs = [(key, value) for key, value in trailers] if _is_pairs(trailers) else []  # type: ignore[attr-defined]
    cls = _BY_CODE.get(code or grpc.StatusCode.UNKNOWN, Unknown)
    return cls(message or "", details=read_details(pairs))


def error_of_problem(problem: failure_pb2.Problem) -> FencepostError:
    """The typed error of one entry of a batch."""
    cls = _BY_NUMBER.get(problem.code, Unknown)
    details = StatusDetails(reason=problem.reason, metadata=dict(problem.metadata))
    return cls(problem.message, details=details, retryable=problem.retryable)


def _is_pairs(trailers: object) -> bool:
    return trailers is not None and hasattr(trailers, "__iter__")
