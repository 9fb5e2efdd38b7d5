"""The catalogue of everything the server can refuse, each with its code and reason.

Raised anywhere below the API, turned into a google.rpc.Status (or a `Problem` inside a
batch answer) at its edge and nowhere else. The first line of a docstring says when an
error is raised; `reason` is a value of the proto's ErrorReason without its prefix.
"""

from enum import IntEnum
from typing import ClassVar

MESSAGE_BYTES_MAX = 1024


class Code(IntEnum):
    """The google.rpc.Code numbers in use."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class FencepostError(Exception):
    """Something refused, with all that a caller needs to react."""

    code: ClassVar[Code]
    reason: ClassVar[str]
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_ms: int | None = None,
        resource: str = "",
        **metadata: str,
    ) -> None:
        """`field` is the path of the offending request field, `resource` a resource name.

        `retry_after_ms` becomes RetryInfo; every variable part of `message` belongs into
        `metadata`.
        """
        super().__init__(message)
        self.message = cut_text(message, MESSAGE_BYTES_MAX)
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.resource = resource
        self.metadata = {key: cut_text(value, 256) for key, value in metadata.items()}


class InvalidField(FencepostError):
    """A field is missing or malformed."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_FIELD"


class InvalidSchedule(FencepostError):
    """A cron expression, time zone, DST rule or interval is wrong or can never fire."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_SCHEDULE"


class PayloadTooLarge(FencepostError):
    """A payload, result or batch is over a limit of ours."""

    code, reason = Code.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE"


class TooManyFires(FencepostError):
    """A backfill's range holds more fires than max_runs."""

    code, reason = Code.INVALID_ARGUMENT, "TOO_MANY_FIRES"


class RequestIdReused(FencepostError):
    """The request_id came before with another body."""

    code, reason = Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED"


class InvalidPageToken(FencepostError):
    """The page token is foreign, altered or of another query."""

    code, reason = Code.INVALID_ARGUMENT, "INVALID_PAGE_TOKEN"


class FilterNotSupported(FencepostError):
    """The filter names an unknown field or has a shape no index serves."""

    code, reason = Code.INVALID_ARGUMENT, "FILTER_NOT_SUPPORTED"


class ProtocolViolation(FencepostError):
    """A session rule was broken."""

    code, reason = Code.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"


class UnknownAttempt(FencepostError):
    """The attempt was never handed out."""

    code, reason = Code.INVALID_ARGUMENT, "UNKNOWN_ATTEMPT"


class TenantNotFound(FencepostError):
    """No such tenant for this caller."""

    code, reason = Code.NOT_FOUND, "TENANT_NOT_FOUND"


class JobNotFound(FencepostError):
    """No such job for this caller."""

    code, reason = Code.NOT_FOUND, "JOB_NOT_FOUND"


class RunNotFound(FencepostError):
    """No such run for this caller."""

    code, reason = Code.NOT_FOUND, "RUN_NOT_FOUND"


class QueueNotFound(FencepostError):
    """No such queue for this caller."""

    code, reason = Code.NOT_FOUND, "QUEUE_NOT_FOUND"


class CalendarNotFound(FencepostError):
    """No such calendar for this caller."""

    code, reason = Code.NOT_FOUND, "CALENDAR_NOT_FOUND"


class WorkerNotFound(FencepostError):
    """No such worker for this caller."""

    code, reason = Code.NOT_FOUND, "WORKER_NOT_FOUND"


class OperationNotFound(FencepostError):
    """No such operation for this caller."""

    code, reason = Code.NOT_FOUND, "OPERATION_NOT_FOUND"


class JobAlreadyExists(FencepostError):
    """The job's name is taken."""

    code, reason = Code.ALREADY_EXISTS, "JOB_ALREADY_EXISTS"


class TenantAlreadyExists(FencepostError):
    """The tenant's name is taken."""

    code, reason = Code.ALREADY_EXISTS, "TENANT_ALREADY_EXISTS"


class QueueAlreadyExists(FencepostError):
    """The queue's name is taken."""

    code, reason = Code.ALREADY_EXISTS, "QUEUE_ALREADY_EXISTS"


class CalendarAlreadyExists(FencepostError):
    """The calendar's name is taken."""

    code, reason = Code.ALREADY_EXISTS, "CALENDAR_ALREADY_EXISTS"


class UniqueKeyHeld(FencepostError):
    """A run holds the unique key, and on_conflict is REJECT."""

    code, reason = Code.ALREADY_EXISTS, "UNIQUE_KEY_HELD"


class EtagMismatch(FencepostError):
    """The resource has changed since it was read."""

    code, reason = Code.ABORTED, "ETAG_MISMATCH"


class StaleAttempt(FencepostError):
    """A newer attempt exists."""

    code, reason = Code.FAILED_PRECONDITION, "STALE_ATTEMPT"


class RunTerminal(FencepostError):
    """The run ended some other way."""

    code, reason = Code.FAILED_PRECONDITION, "RUN_TERMINAL"


class RunNotDead(FencepostError):
    """Only a dead letter can be replayed or discarded."""

    code, reason = Code.FAILED_PRECONDITION, "RUN_NOT_DEAD"


class RunDiscarded(FencepostError):
    """The dead letter was discarded, so it cannot be replayed."""

    code, reason = Code.FAILED_PRECONDITION, "RUN_DISCARDED"


class VersionNotKept(FencepostError):
    """The job's version that a run was made with is not kept any more."""

    code, reason = Code.FAILED_PRECONDITION, "VERSION_NOT_KEPT"


class JobFinished(FencepostError):
    """The job will not fire again, so it cannot be paused or resumed."""

    code, reason = Code.FAILED_PRECONDITION, "JOB_FINISHED"


class NoSchedule(FencepostError):
    """The job has no schedule, so it has no fires to backfill."""

    code, reason = Code.FAILED_PRECONDITION, "NO_SCHEDULE"


class CalendarInUse(FencepostError):
    """Jobs still name the calendar."""

    code, reason = Code.FAILED_PRECONDITION, "CALENDAR_IN_USE"


class UnsupportedProtocol(FencepostError):
    """The revision ranges do not meet."""

    code, reason = Code.FAILED_PRECONDITION, "UNSUPPORTED_PROTOCOL"


class ServerOverloaded(FencepostError):
    """The server sheds load."""

    code, reason = Code.RESOURCE_EXHAUSTED, "SERVER_OVERLOADED"
    retryable = True


class QuotaExceeded(FencepostError):
    """A quota of the server or the tenant is used up, such as watchers of runs."""

    code, reason = Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"
    retryable = True


class StorageUnavailable(FencepostError):
    """The database is away."""

    code, reason = Code.UNAVAILABLE, "STORAGE_UNAVAILABLE"
    retryable = True

    def __init__(self, message: str = "the database is away; try again") -> None:
        super().__init__(message, retry_after_ms=1000)


class ServerDraining(FencepostError):
    """The server process is leaving."""

    code, reason = Code.UNAVAILABLE, "SERVER_DRAINING"
    retryable = True


class SessionExpired(FencepostError):
    """The worker was silent for too long."""

    code, reason = Code.UNAVAILABLE, "SESSION_EXPIRED"
    retryable = True


class NotImplementedYet(FencepostError):
    """The method or field belongs to the contract, and this version does not serve it."""

    code, reason = Code.UNIMPLEMENTED, "UNSPECIFIED"


class InternalError(FencepostError):
    """A bug of the server; the log has the details under the same request id."""

    code, reason = Code.INTERNAL, "INTERNAL"


def cut_text(text: str, bytes_max: int) -> str:
    """`text`, cut so that its UTF-8 form has at most `bytes_max` bytes."""
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= bytes_max else raw[: bytes_max - 3].decode("utf-8", "ignore") + "…"
