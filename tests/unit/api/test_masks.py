"""Update masks: which fields of a stored resource a request replaces."""

import pytest
from fencepost.v1 import job_pb2
from fencepost_server.api.masks import merged
from fencepost_server.api.wire_job import DEFINITION_FIELDS
from fencepost_server.errors import InvalidField
from google.protobuf.field_mask_pb2 import FieldMask


def stored() -> job_pb2.Job:
    job = job_pb2.Job(
        display_name="old",
        description="kept",
        labels={"a": "1", "b": "2"},
        target=job_pb2.Target(kind="k", priority=3),
        limits=job_pb2.RunLimits(max_in_flight=3, concurrency_key="c"),
    )
    job.schedule.cron.expressions.append("@daily")
    job.payload.json = "{}"
    return job


def change(wanted: job_pb2.Job, *paths: str) -> job_pb2.Job:
    return merged(
        stored(),
        wanted,
        FieldMask(paths=paths),
        changeable=DEFINITION_FIELDS,
        elsewhere={"paused": "PauseJob"},
    )


def test_without_a_mask_the_fields_that_are_set_are_replaced() -> None:
    result = change(job_pb2.Job(display_name="new", name="n", paused=True, job_id="x"))
    wanted = stored()
    wanted.display_name = "new"
    assert result == wanted


def test_a_star_replaces_everything_that_can_change() -> None:
    result = change(job_pb2.Job(name="n", target=job_pb2.Target(kind="z"), paused=True), "*")
    assert result == job_pb2.Job(target=job_pb2.Target(kind="z"))


def test_nested_paths_leave_their_neighbours() -> None:
    wanted = job_pb2.Job(limits=job_pb2.RunLimits(max_in_flight=9, concurrency_key="z"))
    wanted.schedule.cron.time_zone = "Europe/Paris"
    result = change(wanted, "limits.max_in_flight", "schedule.cron.time_zone")
    assert (result.limits.max_in_flight, result.limits.concurrency_key) == (9, "c")
    assert result.schedule.cron.time_zone == "Europe/Paris"
    assert list(result.schedule.cron.expressions) == ["@daily"]


def test_a_masked_field_that_is_not_set_is_cleared() -> None:
    result = change(job_pb2.Job(), "schedule", "labels", "limits.concurrency_key")
    assert not result.HasField("schedule")
    assert not result.labels
    assert (result.limits.max_in_flight, result.limits.concurrency_key) == (3, "")


def test_maps_and_lists_are_replaced_whole() -> None:
    wanted = job_pb2.Job(labels={"c": "3"})
    wanted.schedule.cron.expressions.append("@hourly")
    result = change(wanted, "labels", "schedule.cron.expressions")
    assert dict(result.labels) == {"c": "3"}
    assert list(result.schedule.cron.expressions) == ["@hourly"]


def test_another_kind_of_body_takes_the_place_of_the_old() -> None:
    wanted = job_pb2.Job()
    wanted.payload.data = b"x"
    assert change(wanted, "payload.data").payload.WhichOneof("body") == "data"


def test_output_only_paths_are_ignored() -> None:
    result = change(job_pb2.Job(job_id="x", display_name="new"), "job_id", "etag", "display_name")
    assert (result.job_id, result.display_name) == ("", "new")


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        (("nope",), "got 'nope', want a path of Job"),
        (("labels.a",), "got 'labels.a'"),
        (("target.kind.x",), "got 'target.kind.x'"),
        (("",), "got ''"),
        (("paused",), "PauseJob"),
        (("display_name", "*"), "either * alone"),
        (("display_name",) * 101, "at most 100 paths"),
    ],
)
def test_paths_that_make_no_sense_are_refused(paths: tuple[str, ...], part: str) -> None:
    with pytest.raises(InvalidField) as caught:
        change(job_pb2.Job(), *paths)
    assert part in caught.value.message
    assert caught.value.field.startswith("update_mask")
