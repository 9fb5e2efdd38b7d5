"""ExplainRun against real states: each hold with its facts, as a person would find them."""

from collections.abc import Sequence
from typing import Any

from fencepost.v1 import (
    admin_pb2,
    admin_service_pb2,
    failure_pb2,
    job_pb2,
    run_pb2,
    run_service_pb2,
    schedule_pb2,
    worker_pb2,
)
from fencepost_server.domain.names import format_run
from fencepost_server.domain.run import RunKey
from google.protobuf.duration_pb2 import Duration

from tests.integration.definition_server import refusal
from tests.integration.running_server import QUEUE, RunningServer, running, success, until

TENANT = "tenants/default"


def run_name(key: RunKey, job: str = "mail") -> str:
    return format_run("default", job, key.scheduled_at)


async def holds(server: RunningServer, name: str) -> dict[str, run_pb2.Hold]:
    """The holds of a run by code, which come in the order that is promised."""
    answer = await server.runs.ExplainRun(run_service_pb2.ExplainRunRequest(name=name))
    assert answer.evaluated_at.seconds > 0
    found: Sequence[run_pb2.Hold] = answer.holds
    assert all(0 < len(hold.message.encode()) <= 256 for hold in found)
    known = [hold.HasField("clears_in") for hold in found]
    assert known == sorted(known), "what may last for ever comes first"
    left = [hold.clears_in.ToTimedelta() for hold in found if hold.HasField("clears_in")]
    assert left == sorted(left, reverse=True)
    codes = [run_pb2.HoldCode.Name(hold.code).removeprefix("HOLD_CODE_") for hold in found]
    assert len(set(codes)) == len(codes)
    return dict(zip(codes, found, strict=True))


async def claim(server: RunningServer, **values: Any) -> worker_pb2.Assignment:
    """One run, as a worker that polls takes it."""
    request = run_service_pb2.ClaimRunsRequest(
        subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], max_runs=1
    )
    request.MergeFrom(run_service_pb2.ClaimRunsRequest(**values))
    run: worker_pb2.Assignment
    (run,) = (await server.runs.ClaimRuns(request)).runs
    return run


async def complete(server: RunningServer, run: worker_pb2.Assignment, **outcome: Any) -> None:
    completion = worker_pb2.Completion(run=run.run, attempt=run.attempt, **outcome)
    await server.runs.CompleteRun(run_service_pb2.CompleteRunRequest(completion=completion))


async def limit_queue(server: RunningServer, **values: Any) -> None:
    """Settings of the default queue."""
    await server.admin.UpdateQueue(
        admin_service_pb2.UpdateQueueRequest(queue=admin_pb2.Queue(name=QUEUE, **values))
    )


async def until_told(server: RunningServer, session: Any) -> None:
    """Until the table of workers knows what the session has said of itself."""
    await session.beat()
    await server.until(
        "SELECT count(*) FROM fencepost.workers WHERE worker_id = $1::uuid AND state = 'ready'",
        session.worker_id,
        want=1,
    )


async def test_runs_whose_time_is_to_come(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [later] = await server.enqueue(delay=Duration(seconds=600))
        not_due = (await holds(server, run_name(later)))["NOT_DUE"]
        assert 500 < not_due.clears_in.seconds <= 600

        async def put_back(**outcome: Any) -> dict[str, run_pb2.Hold]:
            [key] = await server.enqueue()
            run = await claim(server)
            await complete(server, run, **outcome)
            return await holds(server, run_name(key))

        failure = failure_pb2.Failure(
            code="SMTP",
            retry=failure_pb2.RETRY_DIRECTIVE_AFTER_DELAY,
            retry_delay=Duration(seconds=300),
        )
        backoff = (await put_back(failure=failure))["BACKOFF"]
        assert backoff.message.startswith("attempt 1 failed")
        assert 200 < backoff.clears_in.seconds <= 300
        snooze = worker_pb2.Snooze(delay=Duration(seconds=300))
        assert "SNOOZED" in await put_back(snooze=snooze)

        [key] = await server.enqueue()
        run = await claim(server)
        await server.runs.ReleaseRuns(
            run_service_pb2.ReleaseRunsRequest(
                releases=[
                    worker_pb2.Release(
                        run=run.run, attempt=run.attempt, delay=Duration(seconds=300)
                    )
                ]
            )
        )
        released = (await holds(server, run_name(key)))["RELEASED"]
        assert released.message.startswith("attempt 1 was given back")


async def test_a_lost_lease_is_a_backoff_while_its_attempt_is_open(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        await claim(server)
        await server.query(
            "UPDATE fencepost.run_queue SET lease_until = now() - interval '1 minute'"
        )
        # The reaper pauses after the time in which the template of this database had no server.
        await server.query("UPDATE fencepost.shard_state SET no_reap_until = now()")
        await server.until("SELECT state::text FROM fencepost.run_queue", want="retrying")
        # Its wait is two seconds at most; the row is put where a longer one would have it.
        await server.query(
            "UPDATE fencepost.run_queue SET available_at = now() + interval '1 minute'"
        )
        backoff = (await holds(server, run_name(key)))["BACKOFF"]
        assert backoff.message.startswith("the lease of attempt 1 ran out")


async def test_a_blocked_run_names_the_earlier_one(database_url: str) -> None:
    async with running(database_url) as server:
        schedule = schedule_pb2.Schedule(
            cron=schedule_pb2.CronSpec(expressions=["* * * * * *"]),
            overlap_policy=schedule_pb2.OVERLAP_POLICY_QUEUE_ALL,
        )
        await server.make_job("tick", schedule=schedule)
        await server.until("SELECT count(*) > 0 FROM fencepost.run_queue WHERE state = 'blocked'")
        rows = await server.query(
            "SELECT (extract(epoch FROM scheduled_at) * 1000000)::bigint AS at, state::text "
            "FROM fencepost.run_queue ORDER BY scheduled_at LIMIT 2"
        )
        assert [row["state"] for row in rows] == ["queued", "blocked"]
        found = await holds(server, format_run("default", "tick", rows[1]["at"]))
        assert found["EARLIER_RUN"].subject == format_run("default", "tick", rows[0]["at"])
        # A person is told at once that nobody would take it afterwards either.
        assert set(found) == {"EARLIER_RUN", "NO_WORKER"}


async def test_a_paused_queue(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        await limit_queue(server, paused=True, pause_reason="the provider is away")
        found = await holds(server, run_name(key))
        assert found["QUEUE_PAUSED"].subject == QUEUE
        assert "the provider is away" in found["QUEUE_PAUSED"].message
        assert set(found) == {"QUEUE_PAUSED", "NO_WORKER"}


async def test_limits_name_who_holds_the_places(database_url: str) -> None:
    async with running(database_url) as server:
        await server.admin.UpdateTenant(
            admin_service_pb2.UpdateTenantRequest(
                tenant=admin_pb2.Tenant(name=TENANT, max_in_flight=2)
            )
        )
        await limit_queue(server, max_in_flight=2, max_in_flight_per_key=1)
        limits = job_pb2.RunLimits(max_in_flight=2, concurrency_key="disk")
        await server.make_job("mail")
        await server.make_job("copy", limits=limits)
        [one] = await server.enqueue(job="copy")
        await claim(server)
        [waiting] = await server.enqueue(job="copy")
        found = await holds(server, run_name(waiting, "copy"))
        key = found["KEY_LIMIT"]
        assert (key.used, key.limit, key.subject) == (1, 1, QUEUE)
        assert list(key.holders) == [run_name(one, "copy")]
        assert not {"TENANT_LIMIT", "QUEUE_LIMIT", "JOB_LIMIT"} & set(found), "they have room"
        await limit_queue(server, max_in_flight_per_key=2)
        second = await claim(server)
        [third] = await server.enqueue(job="copy")
        found = await holds(server, run_name(third, "copy"))
        for code, subject in {
            "TENANT_LIMIT": TENANT,
            "QUEUE_LIMIT": QUEUE,
            "JOB_LIMIT": f"{TENANT}/jobs/copy",
            "KEY_LIMIT": QUEUE,
        }.items():
            hold = found[code]
            assert (hold.used, hold.limit, hold.subject) == (2, 2, subject)
            assert set(hold.holders) == {run_name(one, "copy"), run_name(waiting, "copy")}
        # A run of another job has neither its key nor its cap.
        [other] = await server.enqueue()
        assert {"TENANT_LIMIT", "QUEUE_LIMIT"} <= set(await holds(server, run_name(other)))
        assert not {"JOB_LIMIT", "KEY_LIMIT"} & set(await holds(server, run_name(other)))
        await complete(server, second, success=worker_pb2.Success())
        assert not {"TENANT_LIMIT", "QUEUE_LIMIT"} & set(await holds(server, run_name(other)))


async def test_a_rate_that_is_used_up_tells_when_the_next_token_comes(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await limit_queue(server, rate_limit=0.01)
        first, second = await server.enqueue(2)
        await claim(server)
        rate = (await holds(server, run_name(second)))["RATE_LIMIT"]
        assert (rate.subject, 50 < rate.clears_in.seconds <= 100) == (QUEUE, True)
        assert not await holds(server, run_name(first)), "it runs"


async def test_nobody_listens_then_none_for_the_kind_then_the_next_claim(
    database_url: str,
) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        assert set(await holds(server, run_name(key))) == {"NO_WORKER"}
        other = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["sms.send"])
        async with server.session(subscriptions=[other], credit=5) as session:
            await until_told(server, session)
            found = await holds(server, run_name(key))
            assert set(found) == {"NO_HANDLER"}
            assert found["NO_HANDLER"].message.endswith("none for kind mail.send")
        # Who polls takes it with its next call; nobody else is in the way.
        await server.runs.ClaimRuns(
            run_service_pb2.ClaimRunsRequest(
                subscriptions=[worker_pb2.QueueSubscription(queue=QUEUE)], max_runs=1
            )
        )
        [next_one] = await server.enqueue()
        await server.until("SELECT count(*) FROM fencepost.workers WHERE state = 'polling'", want=1)
        assert set(await holds(server, run_name(next_one))) == {"NEXT_CLAIM"}


async def test_full_workers_and_the_runs_that_come_first(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.make_job("urgent", target=job_pb2.Target(kind="mail.send", priority=9))
        await server.make_job("sms", target=job_pb2.Target(kind="sms.send"))
        mail_only = worker_pb2.QueueSubscription(queue=QUEUE, kinds=["mail.send"])
        async with server.session(subscriptions=[mail_only], slots=2, credit=2) as session:
            await server.enqueue(2)
            held_runs = await session.runs(2)
            keys = await server.enqueue(3)
            await server.enqueue(2, job="urgent")
            # Nobody takes these, so they take nothing from anybody.
            await server.enqueue(5, job="sms")
            held = [worker_pb2.HeldRun(run=each.run, attempt=each.attempt) for each in held_runs]

            async def is_full() -> bool:
                await session.beat(held)
                hold = (await holds(server, run_name(keys[2]))).get("WORKERS_FULL")
                # What it said of itself is written a moment later than it was said.
                return hold is not None and hold.used == 2

            await until(is_full, what="the worker's slots are taken")
            found = await holds(server, run_name(keys[2]))
            full, behind = found["WORKERS_FULL"], found["BEHIND_OTHERS"]
            assert (full.used, full.limit, full.subject) == (2, 2, QUEUE)
            assert (behind.runs_ahead, behind.subject) == (4, QUEUE)
            assert set(await holds(server, run_name(keys[0]))) == {"WORKERS_FULL", "BEHIND_OTHERS"}
            await session.complete(*map(success, held_runs))


async def test_a_run_that_does_not_wait_has_no_holds(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        [key] = await server.enqueue()
        run = await claim(server)
        assert await holds(server, run_name(key)) == {}
        await complete(server, run, success=worker_pb2.Success())
        answer = await server.runs.ExplainRun(run_service_pb2.ExplainRunRequest(name=run_name(key)))
        assert list(answer.holds) == []
        assert answer.run.state == run_pb2.RUN_STATE_SUCCEEDED
        assert not answer.run.HasField("payload")


async def test_runs_that_do_not_exist_and_names_that_are_none(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()

        def explain(name: str) -> Any:
            return server.runs.ExplainRun(run_service_pb2.ExplainRunRequest(name=name))

        missing = await refusal(explain(f"{TENANT}/jobs/mail/runs/2026-01-01T00:00:00Z"))
        assert (missing.code.name, missing.reason) == ("NOT_FOUND", "RUN_NOT_FOUND")
        foreign = await refusal(explain("tenants/none/jobs/mail/runs/2026-01-01T00:00:00Z"))
        assert foreign.code.name == "NOT_FOUND"
        bad = await refusal(explain("mail"))
        assert (bad.reason, bad.fields) == ("INVALID_FIELD", ["name"])


async def test_runs_that_wait_for_their_place_after_an_outage(database_url: str) -> None:
    # The newest gets the first place, and the next one is given out a quarter of an hour later.
    async with running(database_url, catch_up_rate_per_tenant=0.001) as server:
        await server.make_job()
        oldest, older, newest = await server.enqueue(3, delay=Duration(seconds=600))
        await server.query(
            "UPDATE fencepost.run_queue SET parked = true, available_at = now() + interval '7 days'"
        )
        await server.until("SELECT count(*) FROM fencepost.run_queue WHERE parked", want=2)
        assert "NOT_DUE" not in await holds(server, run_name(newest))
        for key, place in ((older, "it is the next one"), (oldest, "1 newer one comes first")):
            hold = (await holds(server, run_name(key)))["NOT_DUE"]
            assert hold.message.endswith(f"released at a rate, and {place}")
            assert not hold.HasField("clears_in")
        # Nor is a worker that asks for it by name told to come back in a week.
        run = await server.runs.GetRun(run_service_pb2.GetRunRequest(name=run_name(oldest)))
        refused = await server.runs.LeaseRun(run_service_pb2.LeaseRunRequest(run=run.run.key))
        assert refused.refusal == run_service_pb2.LEASE_REFUSAL_NOT_DUE
        assert not refused.HasField("retry_after")
