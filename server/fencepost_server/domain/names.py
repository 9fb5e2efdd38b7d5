"""Resource names and run keys: how they are written, and the only place that reads them.

Every parser takes the path of the request field it reads, so that a refusal names it.
"""

import re
from dataclasses import dataclass
from datetime import datetime

from fencepost_server.clock import Instant, format_instant, from_datetime
from fencepost_server.errors import InvalidField, cut_text

_TENANT = re.compile(r"[a-z][a-z0-9-]{0,62}")
_LAST_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?Z", re.ASCII)

TENANT_RULE = "1 to 63 of [a-z0-9-], beginning with a letter"
LAST_PART_RULE = "1 to 63 of [a-z0-9._-], beginning with a letter or digit"
JOB_RULE = f"{LAST_PART_RULE}, not shaped like a UUID"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueName:
    """`tenants/{tenant}/queues/{queue_name}`."""

    tenant: str
    queue_name: str

    def __str__(self) -> str:
        return format_queue(self.tenant, self.queue_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalendarName:
    """`tenants/{tenant}/calendars/{calendar_name}`."""

    tenant: str
    calendar_name: str

    def __str__(self) -> str:
        return format_calendar(self.tenant, self.calendar_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobName:
    """`tenants/{tenant}/jobs/{job}`; `job` is the job's name or its id."""

    tenant: str
    job: str

    @property
    def is_id(self) -> bool:
        """Whether `job` is a job_id and not a name."""
        return is_uuid(self.job)

    def __str__(self) -> str:
        return format_job(self.tenant, self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationName:
    """`tenants/{tenant}/operations/{operation_id}`."""

    tenant: str
    operation_id: str

    def __str__(self) -> str:
        return format_operation(self.tenant, self.operation_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """`tenants/{tenant}/jobs/{job}/runs/{scheduled_at}`; `job` is a name or an id."""

    tenant: str
    job: str
    scheduled_at: Instant

    @property
    def is_id(self) -> bool:
        """Whether `job` is a job_id and not a name."""
        return is_uuid(self.job)

    def __str__(self) -> str:
        return format_run(self.tenant, self.job, self.scheduled_at)


def format_tenant(tenant: str) -> str:
    """`tenants/{tenant}`."""
    return f"tenants/{tenant}"


def format_queue(tenant: str, queue_name: str) -> str:
    """`tenants/{tenant}/queues/{queue_name}`."""
    return f"tenants/{tenant}/queues/{queue_name}"


def format_calendar(tenant: str, calendar_name: str) -> str:
    """`tenants/{tenant}/calendars/{calendar_name}`."""
    return f"tenants/{tenant}/calendars/{calendar_name}"


def format_job(tenant: str, job: str) -> str:
    """`tenants/{tenant}/jobs/{job}`, with the job's name, or its id if it is deleted."""
    return f"tenants/{tenant}/jobs/{job}"


def format_run(tenant: str, job: str, scheduled_at: Instant) -> str:
    """`tenants/{tenant}/jobs/{job}/runs/{scheduled_at}`."""
    return f"tenants/{tenant}/jobs/{job}/runs/{format_instant(scheduled_at)}"


def format_operation(tenant: str, operation_id: str) -> str:
    """`tenants/{tenant}/operations/{operation_id}`."""
    return f"tenants/{tenant}/operations/{operation_id}"


def format_worker(worker_id: str) -> str:
    """`workers/{worker_id}`."""
    return f"workers/{worker_id}"


def format_run_key(job_id: str, scheduled_at: Instant) -> str:
    """`{job_id}/{scheduled_at}`: the idempotency key of a run."""
    return f"{job_id}/{format_instant(scheduled_at)}"


def parse_run_key(text: str, *, field: str) -> tuple[str, Instant]:
    """The reverse of `format_run_key`. Raises InvalidField."""
    job_id, slash, instant = text.partition("/")
    if not slash or not is_uuid(job_id):
        raise _refused(field, text, "{job_id}/{scheduled_at}, the id as lower-case UUID text")
    return job_id, parse_instant(instant, field=field)


def parse_tenant(name: str, *, field: str) -> str:
    """The tenant of `tenants/{tenant}`. Raises InvalidField."""
    return _parts(name, "tenants/{tenant}", field)[0]


def parse_queue(name: str, *, field: str) -> QueueName:
    """Raises InvalidField."""
    tenant, queue_name = _parts(name, "tenants/{tenant}/queues/{queue_name}", field)
    return QueueName(tenant=tenant, queue_name=queue_name)


def parse_calendar(name: str, *, field: str) -> CalendarName:
    """Raises InvalidField."""
    tenant, calendar_name = _parts(name, "tenants/{tenant}/calendars/{calendar_name}", field)
    return CalendarName(tenant=tenant, calendar_name=calendar_name)


def parse_job(name: str, *, field: str) -> JobName:
    """Raises InvalidField."""
    tenant, job = _parts(name, "tenants/{tenant}/jobs/{job}", field)
    return JobName(tenant=tenant, job=job)


def parse_operation(name: str, *, field: str) -> OperationName:
    """Raises InvalidField."""
    pattern = "tenants/{tenant}/operations/{operation_id}"
    tenant, operation_id = _parts(name, pattern, field)
    if not is_uuid(operation_id):
        raise _refused(field, name, f"{pattern}, the id as lower-case UUID text")
    return OperationName(tenant=tenant, operation_id=operation_id)


def parse_run(name: str, *, field: str) -> RunName:
    """Raises InvalidField, also for an instant that is not in its text form."""
    tenant, job, instant = _parts(name, "tenants/{tenant}/jobs/{job}/runs/{scheduled_at}", field)
    return RunName(tenant=tenant, job=job, scheduled_at=parse_instant(instant, field=field))


def parse_worker(name: str, *, field: str) -> str:
    """The id of `workers/{worker_id}`. Raises InvalidField."""
    worker_id = name.removeprefix("workers/")
    if worker_id == name or not is_uuid(worker_id):
        raise _refused(field, name, "workers/{worker_id}, the id as lower-case UUID text")
    return worker_id


def parse_instant(text: str, *, field: str) -> Instant:
    """The instant of a run key's text form. Raises InvalidField for any other spelling."""
    if _INSTANT.fullmatch(text):
        try:
            at = from_datetime(datetime.fromisoformat(text))
        except ValueError:
            pass  # Such as a 13th month: refused below.
        else:
            if format_instant(at) == text:
                return at
    raise _refused(
        field,
        text,
        "an instant as 2026-12-01T09:00:00Z, with exactly six digits of a fraction if it has one",
    )


def check_tenant_name(name: str, *, field: str) -> str:
    """`name`, if it may be the last part of a tenant's name. Raises InvalidField."""
    if _TENANT.fullmatch(name) is None:
        raise _refused(field, name, TENANT_RULE)
    return name


def check_queue_name(name: str, *, field: str) -> str:
    """`name`, if it may be the last part of a queue's name. Raises InvalidField."""
    if _LAST_PART.fullmatch(name) is None:
        raise _refused(field, name, LAST_PART_RULE)
    return name


def check_calendar_name(name: str, *, field: str) -> str:
    """`name`, if it may be the last part of a calendar's name. Raises InvalidField."""
    if _LAST_PART.fullmatch(name) is None:
        raise _refused(field, name, LAST_PART_RULE)
    return name


def check_job_name(name: str, *, field: str) -> str:
    """`name`, if it may be the last part of a job's name. Raises InvalidField."""
    if _LAST_PART.fullmatch(name) is None or is_uuid(name):
        raise _refused(field, name, JOB_RULE)
    return name


def is_uuid(text: str) -> bool:
    """Whether `text` has the shape of an id: lower-case UUID text of 36 characters."""
    return _UUID.fullmatch(text) is not None


_CHECKS = {
    "{tenant}": (_TENANT, TENANT_RULE),
    "{queue_name}": (_LAST_PART, LAST_PART_RULE),
    "{calendar_name}": (_LAST_PART, LAST_PART_RULE),
    "{job}": (_LAST_PART, LAST_PART_RULE),
}


def _parts(name: str, pattern: str, field: str) -> list[str]:
    """The variable parts of `name` after `pattern`; the first wrong one is refused."""
    found = name.split("/")
    wanted = pattern.split("/")
    if not name:
        raise InvalidField(f"{field}: required, as {pattern}", field=field, allowed=pattern)
    if len(found) != len(wanted):
        raise _refused(field, name, pattern)
    variable: list[str] = []
    for text, part in zip(found, wanted, strict=True):
        if not part.startswith("{"):
            if text != part:
                raise _refused(field, name, pattern)
            continue
        regex, rule = _CHECKS.get(part, (None, ""))
        if regex is not None and regex.fullmatch(text) is None:
            raise _refused(field, name, f"{pattern}, with {part} of {rule}")
        variable.append(text)
    return variable


def _refused(field: str, value: str, allowed: str) -> InvalidField:
    shown = cut_text(value, 100)
    return InvalidField(
        f"{field}: got {shown!r}, want {allowed}", field=field, value=shown, allowed=allowed
    )
