"""Hostile requests to every method of the contract: refused by name, and nothing changes."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from fencepost.v1 import (
    admin_service_pb2,
    job_service_pb2,
    run_service_pb2,
    worker_pb2,
)
from google.protobuf import message_factory
from google.rpc import error_details_pb2, status_pb2

from tests.integration.hostile import variants
from tests.integration.hostile_requests import JOB, TENANT, requests
from tests.integration.running_server import (
    RunningServer,
    held,
    hello,
    running,
    success,
)

_SERVICES = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"],
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
_METHODS = {
    f"{service.name}.{method.name}": method for service in _SERVICES for method in service.methods
}
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
}
# What no field that is read may hold.
_NEVER = {"NUL", "NUL in a key", "NUL in a value", "64 characters", "an empty key", "-1 s", "-1 ns",
          "two signs", "2^62 s", "-2^62 s", "2e9 ns", "999", "10,000 entries"}  # fmt: skip
# Output-only fields are ignored (protocol N10). Bodies of payloads may hold anything. Text that
# workers tell is repaired, and reasons and phases of theirs that are unknown are read as none.
_TAKEN = (
    "job.name", "job.job_id", "job.etag", "job.version", "job.state", "job.next_run_at",
    "job.fire_count", "sdk.", "completions[].failure", "completions[].snooze.reason",
    "completions[].cancelled", "job.last_scheduled_at", "job.created_at", "job.updated_at",
    "job.trace_context", "job.pause_reason", "payload.json", "checkpoint.json", "result.json",
    "progress.message", "runs[].phase", "releases[].reason", "queue.stats", "queue.created_at",
    "queue.updated_at", "queue.name", "tenant.name", "tenant.etag", "queue.etag",
    "tenant.created_at", "tenant.updated_at", "calendar.name", "calendar.etag",
    "calendar.created_at", "calendar.updated_at",
)  # fmt: skip
# The default of `wait` would only wait, and without `validate_only` a valid request is written.
_SKIPPED = {("wait", "missing"), ("wait", "nothing in it"), ("validate_only", "missing")}
_TABLES = (
    "tenants", "queues", "kinds", "schedules", "jobs", "job_versions", "job_schedules",
    "fire_skips", "run_queue", "job_runs", "dead_letters", "run_attempts", "requests",
)  # fmt: skip


# Methods of the contract that a later version serves: whatever comes, they say so.
_UNSERVED = {
    "AdminService.DrainWorker",
    "AdminService.CreateApiKey",
    "AdminService.ListApiKeys",
    "AdminService.RevokeApiKey",
}


_WRITERS = (
    "JobService.BatchCreateJobs",
    "RunService.EnqueueRun",
    "RunService.BatchEnqueueRuns",
    "AdminService.CreateTenant",
    "AdminService.CreateQueue",
    "AdminService.CreateCalendar",
)


async def state_of(server: RunningServer, *, interned: bool = True) -> str:
    """A fingerprint of everything that a call may change.

    Without `interned` words and rules that a request brought up do not count: checking a valid
    one leaves them behind.
    """
    parts = [
        f"SELECT '{name}', md5(string_agg(t::text, ',' ORDER BY t::text)) "  # noqa: S608
        f"FROM fencepost.{name} AS t"
        for name in _TABLES
        if interned or name not in ("kinds", "schedules")
    ]
    rows = await server.query(" UNION ALL ".join(parts))
    return str([tuple(row) for row in rows])


def refusal_of(error: grpc.aio.AioRpcError) -> tuple[str, str, dict[str, str]]:
    """Reason, field and metadata of a refusal."""
    raw = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    assert len(raw) <= 4096
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(raw).details:
        detail.Unpack(info)
        detail.Unpack(bad)
    fields = [violation.field for violation in bad.field_violations]
    return info.reason, fields[0] if fields else "", dict(info.metadata)


def entry_refused(response: Any) -> bool:
    """Whether a batch's answer refuses its one entry as bad input."""
    for outcome in getattr(response, "outcomes", ()):
        if outcome.WhichOneof("outcome") == "problem":
            assert outcome.problem.code in (3, 5, 6, 12), outcome
            return True
    for verdict in getattr(response, "verdicts", ()):
        if verdict.verdict == worker_pb2.VERDICT_INVALID:
            assert verdict.message, verdict
            return True
    return False


async def call(
    server: RunningServer, method: Any, raw: bytes
) -> tuple[Any, grpc.aio.AioRpcError | None]:
    """The parsed answer to a request that may be none, or the refusal."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = message_factory.GetMessageClass(method.output_type).FromString
    try:
        if method.server_streaming:
            stream = server.channel.unary_stream(path, response_deserializer=read)(raw, timeout=9)
            # Its first message comes at once, and the last one never.
            first = await stream.read()
            stream.cancel()
            return first, None
        return await server.channel.unary_unary(path, response_deserializer=read)(
            raw, timeout=9
        ), None
    except grpc.aio.AioRpcError as error:
        return None, error


async def check_variant(server: RunningServer, name: str, path: str, what: str, raw: bytes) -> bool:
    """One hostile call; whether it was refused."""
    where = f"{name}: {what} in {path}"
    must = what in _NEVER and not any(each in path for each in _TAKEN)
    answer, error = await call(server, _METHODS[name], raw)
    if error is not None:
        assert error.code() in _REFUSALS, f"{where}: {error}"
        reason, field, metadata = refusal_of(error)
        assert error.details(), where
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            assert reason not in ("", "UNSPECIFIED"), where
            assert field, f"{where}: names no field: {error.details()}"
            assert metadata or reason != "INVALID_FIELD", where
        if name in _UNSERVED and what != "a lone surrogate":
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, where
        return True
    assert name not in _UNSERVED, where
    assert what != "a lone surrogate", where
    assert not must or entry_refused(answer), f"{where} was taken"
    return False


async def test_no_request_is_a_bug(database_url: str) -> None:
    given = requests()
    assert given.keys() | _UNSERVED | {"RunService.Work"} == _METHODS.keys()
    refused = taken = 0
    problems: list[str] = []
    async with running(database_url, roles="api") as server:
        await server.make_job()
        before = await state_of(server, interned=False)
        for name, method in _METHODS.items():
            if name == "RunService.Work":
                continue
            base = given.get(name) or message_factory.GetMessageClass(method.input_type)()
            for path, what, raw in variants(base):
                if (path, what) in _SKIPPED:
                    continue
                try:
                    was_refused = await check_variant(server, name, path, what, raw)
                except AssertionError as problem:
                    problems.append(str(problem).partition("\n")[0])
                    continue
                refused += was_refused
                taken += not was_refused
            after = await state_of(server, interned=False)
            if name not in _WRITERS:
                assert after == before, f"{name} changed something"
            before = after
    assert not problems, "\n".join(problems)
    assert refused > 1500
    assert taken > 100


async def test_refused_writes_change_nothing(database_url: str) -> None:
    given = requests()
    async with running(database_url, roles="api") as server:
        await server.make_job()
        before = await state_of(server)
        for name in _WRITERS:
            for path, what, raw in variants(given[name]):
                must = what in _NEVER and not any(each in path for each in _TAKEN)
                if (must or what == "a lone surrogate") and await check_variant(
                    server, name, path, what, raw
                ):
                    after = await state_of(server)
                    assert after == before, f"{name}: {what} in {path} changed something"


async def test_page_tokens_of_other_lists_are_refused(database_url: str) -> None:
    jobs, runs = job_service_pb2, run_service_pb2
    async with running(database_url, roles="api") as server:
        for name in ("mail", "post"):
            await server.make_job(name)
            await server.enqueue(2, job=name)
        first = await server.jobs.ListJobs(jobs.ListJobsRequest(parent=TENANT, page_size=1))
        page = await server.runs.ListRuns(runs.ListRunsRequest(parent=TENANT, page_size=1))
        assert first.next_page_token
        assert page.next_page_token
        token, other = first.next_page_token, page.next_page_token
        admin = admin_service_pb2
        calls = [
            server.jobs.ListJobs(jobs.ListJobsRequest(parent=TENANT, page_token=other)),
            server.jobs.ListJobs(
                jobs.ListJobsRequest(parent=TENANT, filter="state:PAUSED", page_token=token)
            ),
            server.jobs.ListJobs(jobs.ListJobsRequest(parent=TENANT, page_token=f"{token[:-2]}AA")),
            server.jobs.ListJobs(jobs.ListJobsRequest(parent=TENANT, page_token="x" * 10_000)),
            server.runs.ListRuns(runs.ListRunsRequest(parent=TENANT, page_token=token)),
            server.runs.ListRuns(runs.ListRunsRequest(parent=JOB, page_token=other)),
            server.admin.ListQueues(admin.ListQueuesRequest(parent=TENANT, page_token=token)),
            server.admin.ListTenants(admin.ListTenantsRequest(page_token=other)),
            server.admin.ListWorkers(admin.ListWorkersRequest(parent=TENANT, page_token=other)),
        ]
        for place, each in enumerate(calls):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await each
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, place
            reason, field, _ = refusal_of(refused.value)
            assert (reason, field) == ("INVALID_PAGE_TOKEN", "page_token"), place


async def test_hostile_messages_in_a_session(database_url: str) -> None:
    """Whatever an entry holds, the stream goes on; what is no message ends it as bad input."""
    async with running(database_url, roles="api") as server:
        await server.make_job()
        (key,) = await server.enqueue(1)
        async with server.session(credit=1) as session:
            (run,) = await session.runs(1)
            entry = held(run, phase=worker_pb2.HELD_PHASE_HANDLING)
            events: dict[str, Any] = {
                "heartbeat": worker_pb2.Heartbeat(seq=1, runs=[entry]),
                "completions": worker_pb2.Completions(completions=[success(run)]),
                "releases": worker_pb2.Releases(
                    releases=[worker_pb2.Release(run=run.run, attempt=1)]
                ),
            }
            for event, message in events.items():
                for path, what, raw in variants(message):
                    if what == "a lone surrogate" or raw == message.SerializeToString():
                        continue
                    changed = type(message).FromString(raw)
                    if event != "heartbeat":
                        # Nothing here may end the run that the test goes on with.
                        for each in (
                            changed.completions if event == "completions" else (changed.releases)
                        ):
                            each.attempt = each.attempt if each.attempt < 1 else 99
                    await session.say(**{event: changed})
                    assert path
            await session.say(heartbeat=worker_pb2.Heartbeat(seq=77, runs=[held(run)]))
            while (ack := await session.hear("heartbeat_ack")).seq != 77:
                pass
            assert not ack.notices
            (row,) = await server.query("SELECT state::text FROM fencepost.run_queue")
            assert row["state"] == "running"
        for raw in (b"\xff\xff\xff", hello("@@@").SerializeToString()):
            stream = server.channel.stream_stream("/fencepost.v1.RunService/Work")()
            frame = raw if raw[0] == 0xFF else b"\x1a" + bytes([len(raw)]) + raw
            await stream.write(frame.replace(b"@@@", b"\xed\xa0\x80"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.wait_for(stream.read(), 10)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refusal_of(refused.value)[:2] == ("INVALID_FIELD", "request")
        assert key.job_id
