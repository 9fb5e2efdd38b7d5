"""The ledger between messages and the engine."""

from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar, cast

from fencepost.v1 import job_service_pb2, schedule_pb2

from fencepost_server.api import validate
from fencepost_server.api.wire_time import to_timestamp
from fencepost_server.clock import DAY, Duration, Instant
from fencepost_server.domain.fire import Fire, FireDisposition
from fencepost_server.domain.names import format_run
from fencepost_server.domain.schedule import SkipReason
from fencepost_server.engine.ledger import FireQuery
from fencepost_server.errors import cut_text

LOOK_DEFAULT: Duration = 7 * DAY
DETAIL_BYTES_MAX = 256
CHOICES_MAX = 16

_Choice = TypeVar("_Choice", bound=IntEnum)


def read_fire_query(request: job_service_pb2.ListFiresRequest, *, now: Instant) -> FireQuery:
    """The range and filters of a request. Raises InvalidField.

    A fire that is due right `now` belongs to a range that ends by default.
    """
    until = now + 1
    if request.HasField("until"):
        until = validate.instant(request.until, field="until", round_up=True)
    since = until - LOOK_DEFAULT
    if request.HasField("since"):
        since = validate.instant(request.since, field="since", round_up=True)
    if since >= until:
        raise validate.refused(
            "since",
            request.since.ToJsonString(),
            "an instant before `until`, which is now if absent",
        )
    return FireQuery(
        since=since,
        until=until,
        dispositions=_choices(request.dispositions, FireDisposition, "dispositions"),
        reasons=_choices(request.skip_reasons, SkipReason, "skip_reasons"),
    )


def write_fire(fire: Fire, *, tenant: str, job: str) -> schedule_pb2.Fire:
    """The message; `job` is the part of run names that means the job."""
    message = schedule_pb2.Fire(
        scheduled_at=to_timestamp(fire.first),
        local_time=fire.local_time,
        disposition=cast("schedule_pb2.FireDisposition.ValueType", int(fire.disposition)),
        skip_reason=cast("schedule_pb2.SkipReason.ValueType", int(fire.reason or 0)),
        run_name="" if fire.run_at is None else format_run(tenant, job, fire.run_at),
        job_version=fire.version,
        detail=cut_text(fire.detail, DETAIL_BYTES_MAX),
        count=fire.count,
    )
    if fire.decided_at is not None:
        message.decided_at.CopyFrom(to_timestamp(fire.decided_at))
    if fire.count > 1:
        message.last_scheduled_at.CopyFrom(to_timestamp(fire.last))
    return message


def _choices(values: Iterable[int], of: type[_Choice], field: str) -> frozenset[_Choice]:
    found: set[_Choice] = set()
    for index, value in enumerate(values):
        if index == CHOICES_MAX:
            raise validate.refused(field, f"more than {CHOICES_MAX}", f"at most {CHOICES_MAX}")
        path = f"{field}[{index}]"
        chosen = validate.choice(value, of, field=path)
        if chosen is None:
            raise validate.refused(path, value, f"one of {', '.join(each.name for each in of)}")
        found.add(chosen)
    return frozenset(found)
