"""EnqueueRun and BatchEnqueueRuns over a real socket and a real database."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from fencepost.v1 import job_pb2, job_service_pb2, run_pb2, run_service_pb2
from fencepost_server.clock import DAY, SECOND, to_datetime
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from tests.integration.definition_server import read_refusal, refusal
from tests.integration.run_server import RunServer, json_payload, serving

TENANT = "tenants/default"


def stamp(at: int) -> Timestamp:
    return Timestamp(seconds=at // SECOND, nanos=at % SECOND * 1000)


def micros(at: Timestamp) -> int:
    return at.seconds * SECOND + at.nanos // 1000


def entry(job: str, **values: Any) -> run_service_pb2.EnqueueRunRequest:
    return run_service_pb2.EnqueueRunRequest(job=f"{TENANT}/jobs/{job}", **values)


def _kept(seconds: int) -> run_pb2.UniqueKey:
    return run_pb2.UniqueKey(key="k", keep_for=Duration(seconds=seconds))


async def batch(
    server: RunServer, entries: list[run_service_pb2.EnqueueRunRequest]
) -> run_service_pb2.BatchEnqueueRunsResponse:
    response: run_service_pb2.BatchEnqueueRunsResponse = await server.runs.BatchEnqueueRuns(
        run_service_pb2.BatchEnqueueRunsRequest(parent=TENANT, requests=entries)
    )
    return response


async def test_one_run_is_made_and_read_back(database_url: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job(
            "mail", labels={"team": "web", "env": "test"}, payload=json_payload('{"a":1}')
        )
        before = server.now()
        run = await server.enqueue(
            "mail", payload=json_payload('{"b":2}'), labels={"env": "prod"}, priority=7
        )
        assert run.key.job_id == job.job_id
        assert run.state == run_pb2.RUN_STATE_QUEUED
        assert run.origin == run_pb2.RUN_ORIGIN_ENQUEUE
        at = micros(run.key.scheduled_at)
        assert before <= at <= server.now() + 1
        assert at % SECOND != 0
        assert dict(run.labels) == {"team": "web", "env": "prod"}
        assert not run.HasField("payload")
        found = await server.get(run)
        assert found.payload.json == '{"b":2}'
        assert found.priority == 7
        assert found.retry_policy.max_failures == 5
        assert found.limits.lease_ttl == Duration(seconds=30)
        assert found.trace_context.traceparent.startswith("00-")
        found.ClearField("payload")
        found.ClearField("retry_policy")
        found.ClearField("limits")
        assert found == run


async def test_defaults_are_the_jobs_and_an_empty_key_is_none(database_url: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job(
            "mail",
            target=job_pb2.Target(kind="mail.send", priority=3),
            limits=job_pb2.RunLimits(concurrency_key="customer"),
            payload=json_payload("1"),
            labels={"team": "web"},
        )
        own = await server.get(await server.enqueue(job.job_id))
        assert own.name.startswith(f"{TENANT}/jobs/mail/runs/")
        assert (own.priority, own.concurrency_key, own.payload.json) == (3, "customer", "1")
        assert dict(own.labels) == {"team": "web"}
        assert (await server.enqueue("mail", concurrency_key="")).concurrency_key == ""


async def test_due_instants(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        whole = (server.now() // SECOND + 3600) * SECOND
        sharp = await server.enqueue("mail", run_at=stamp(whole))
        assert micros(sharp.key.scheduled_at) == whole + 1
        assert micros(sharp.available_at) == whole
        again = await server.enqueue("mail", run_at=stamp(whole))
        assert micros(again.key.scheduled_at) == whole + 2
        finer = stamp(whole + 500)
        finer.nanos += 999
        assert micros((await server.enqueue("mail", run_at=finer)).key.scheduled_at) == whole + 500
        past = await server.enqueue("mail", run_at=stamp(server.now() - DAY))
        assert abs(micros(past.key.scheduled_at) - server.now()) < 10 * SECOND
        later = await server.enqueue("mail", delay=Duration(seconds=90))
        assert micros(later.available_at) > server.now() + 80 * SECOND


async def test_refusals_name_the_field(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail", labels={f"job{n}": "x" for n in range(20)})
        cases: list[tuple[str, dict[str, Any]]] = [
            ("run_at", {"run_at": stamp(server.now() + 367 * DAY)}),
            ("delay", {"delay": Duration(seconds=-1)}),
            ("delay", {"delay": Duration(seconds=367 * 86400)}),
            ("priority", {"priority": 10}),
            ("labels", {"labels": {f"run{n}": "x" for n in range(13)}}),
            ("concurrency_key", {"concurrency_key": "x" * 129}),
            ("unique_key.key", {"unique_key": run_pb2.UniqueKey()}),
            ("unique_key.key", {"unique_key": run_pb2.UniqueKey(key="x" * 257)}),
            ("unique_key.key", {"unique_key": run_pb2.UniqueKey(key="a\0b")}),
            ("unique_key.keep_for", {"unique_key": _kept(30 * 86400 + 1)}),
            ("unique_key.keep_for", {"unique_key": _kept(-1)}),
            ("unique_key.on_conflict", {"unique_key": run_pb2.UniqueKey(key="k", on_conflict=9)}),  # type: ignore[arg-type]
            ("request_id", {"request_id": "x" * 37}),
        ]
        for field, values in cases:
            refused = await refusal(server.enqueue("mail", **values))
            assert refused.reason == "INVALID_FIELD", field
            assert refused.fields == [field]
        missing = await refusal(server.enqueue("nowhere"))
        assert missing.reason == "JOB_NOT_FOUND"
        large = await refusal(server.enqueue("mail", payload=json_payload("x" * 262145)))
        assert large.reason == "PAYLOAD_TOO_LARGE"


async def test_a_request_id_makes_one_run(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        first = await server.enqueue("mail", request_id="one", priority=1)
        assert await server.enqueue("mail", request_id="one", priority=1) == first
        reused = await refusal(server.enqueue("mail", request_id="one", priority=2))
        assert reused.reason == "REQUEST_ID_REUSED"
        answers = await asyncio.gather(
            *(server.enqueue("mail", request_id="two") for _ in range(10))
        )
        assert all(answer == answers[0] for answer in answers)
        assert len(await server.query("SELECT 1 FROM fencepost.run_queue")) == 2
        await refusal(server.enqueue("nowhere", request_id="three"))
        assert (await server.enqueue("mail", request_id="three")).name


async def test_paused_jobs_take_runs_and_deleted_ones_do_not(database_url: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job("mail", paused=True)
        assert (await server.enqueue("mail")).state == run_pb2.RUN_STATE_QUEUED
        await server.jobs.DeleteJob(job_service_pb2.DeleteJobRequest(name=f"{TENANT}/jobs/mail"))
        for name in ("mail", job.job_id):
            assert (await refusal(server.enqueue(name))).reason == "JOB_NOT_FOUND"


async def test_a_batch_has_one_outcome_each(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        await server.make_job("sms")
        await server.query(
            "INSERT INTO fencepost.tenants (name, created_at, updated_at) "
            "VALUES ('acme', now(), now()) RETURNING 1"
        )
        at = stamp((server.now() // SECOND + 100) * SECOND)
        response = await batch(
            server,
            [
                entry("mail", run_at=at),
                entry("nowhere"),
                entry("mail", run_at=at),
                entry("sms", run_at=at),
                run_service_pb2.EnqueueRunRequest(job="tenants/acme/jobs/mail"),
                entry("mail", priority=99),
                entry("mail", request_id="same"),
                entry("mail", request_id="same"),
                entry("mail", request_id="same", priority=1),
            ],
        )
        outcomes = list(response.outcomes)
        kinds = [outcome.WhichOneof("outcome") for outcome in outcomes]
        assert kinds == [
            "response",
            "problem",
            "response",
            "response",
            "problem",
            "problem",
            "response",
            "response",
            "problem",
        ]
        keys = [micros(outcomes[i].response.run.key.scheduled_at) for i in (0, 2, 3)]
        base = micros(at)
        assert keys == [base + 1, base + 2, base + 1]
        assert [outcomes[i].problem.reason for i in (1, 4, 5, 8)] == [
            "JOB_NOT_FOUND",
            "INVALID_FIELD",
            "INVALID_FIELD",
            "REQUEST_ID_REUSED",
        ]
        assert outcomes[6] == outcomes[7]
        empty = await refusal(batch(server, []))
        assert empty.fields == ["requests"]


async def test_a_thousand_runs_are_one_quick_transaction(database_url: str) -> None:
    async with serving(database_url) as server:
        for name in ("mail", "sms", "push"):
            await server.make_job(name)
        jobs = ["mail", "sms", "push"]
        took = []
        for turn in range(4):
            entries = [
                entry(jobs[n % 3], payload=json_payload(f'{{"n":{n}}}'), request_id=f"{turn}-{n}")
                for n in range(1000)
            ]
            started = time.perf_counter()
            response = await batch(server, entries)
            took.append(time.perf_counter() - started)
            assert all(outcome.HasField("response") for outcome in response.outcomes)
        assert len(await server.query("SELECT 1 FROM fencepost.run_queue")) == 4000
        # Far above what it takes on an idle machine (0.15 s), far below one by one.
        assert min(took) < 1.5, f"1,000 runs took {took} s"


async def test_many_callers_at_one_instant_get_different_keys(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        await server.make_job("sms")
        at = stamp((server.now() // SECOND + 100) * SECOND)
        alone, together = await asyncio.gather(
            asyncio.gather(*(server.enqueue("mail", run_at=at) for _ in range(20))),
            asyncio.gather(
                *(batch(server, [entry(job, run_at=at)] * 20) for job in ["mail", "sms"] * 3)
            ),
        )
        keys = [(run.key.job_id, micros(run.key.scheduled_at)) for run in alone]
        for response in together:
            keys += [
                (each.response.run.key.job_id, micros(each.response.run.key.scheduled_at))
                for each in response.outcomes
            ]
        assert len(keys) == len(set(keys)) == 140
        assert all(at_ % SECOND != 0 for _, at_ in keys)


@pytest.mark.parametrize("table", ["job_runs", "job_runs_stray", "dead_letters"])
async def test_the_key_of_an_ended_run_is_never_used_again(database_url: str, table: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job("mail")
        due = (server.now() // SECOND + 100) * SECOND
        for offset in (1, 2):
            await server.query(
                f"""INSERT INTO fencepost.{table}
                (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id,
                 kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
                 replay_count, state, origin, priority, dead_reason)
                SELECT s.job_id, $2, now(), now(), now(), s.tenant_id, s.queue_id, s.kind_id, 1, 1,
                       1, 0, 0, 0, 'dead', 'enqueue', 0, 'max_failures'
                FROM fencepost.job_schedules s WHERE s.job_id = $1 RETURNING 1""",  # noqa: S608 - a table of the list above
                job.job_id,
                to_datetime(due + offset),
            )
        run = await server.enqueue("mail", run_at=stamp(due))
        assert micros(run.key.scheduled_at) == due + 3
        both = await batch(server, [entry("mail", run_at=stamp(due))] * 2)
        assert [micros(o.response.run.key.scheduled_at) - due for o in both.outcomes] == [4, 5]
        assert len(await server.query("SELECT 1 FROM fencepost.run_queue")) == 3


async def test_the_callers_trace_is_kept_as_a_link(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        response = await server.runs.EnqueueRun(
            entry("mail"), metadata=[("traceparent", parent), ("baggage", "a=b")]
        )
        rows = await server.query("SELECT trace_context FROM fencepost.run_queue")
        assert parent in rows[0]["trace_context"]
        assert response.run.trace_context.baggage == "a=b"
        assert parent not in response.run.trace_context.traceparent


async def test_an_unknown_tenant_is_refused(database_url: str) -> None:
    async with serving(database_url) as server:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await server.runs.EnqueueRun(
                run_service_pb2.EnqueueRunRequest(job="tenants/nobody/jobs/mail")
            )
        assert read_refusal(error.value).reason == "TENANT_NOT_FOUND"
