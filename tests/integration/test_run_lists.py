"""ListRuns over a real socket and database: pages, filters, how far back it looks."""

from typing import Any

import pytest
from fencepost.v1 import job_service_pb2, run_pb2, run_service_pb2
from fencepost_server.clock import SECOND, to_datetime

from tests.integration.definition_server import refusal
from tests.integration.run_calls import one_of_each
from tests.integration.run_server import WORKER, RunServer, serving

TENANT = "tenants/default"


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not end a page early."""
    monkeypatch.setattr("fencepost_server.engine.run_reads.LIST_TIME_MAX", 60 * SECOND)


async def listed(
    server: RunServer, parent: str = TENANT, *, page_size: int = 1000, **values: Any
) -> list[run_pb2.Run]:
    """Every page of a list."""
    runs: list[run_pb2.Run] = []
    token = ""
    for _ in range(100):
        response = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent=parent, page_size=page_size, page_token=token, **values
            )
        )
        runs += response.runs
        token = response.next_page_token
        if not token:
            return runs
    raise AssertionError("the list did not end")


async def names(server: RunServer, parent: str = TENANT, **values: Any) -> set[str]:
    return {run.name for run in await listed(server, parent, **values)}


async def test_a_list_shows_every_run_once_newest_first(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        for page_size in (1, 2, 1000):
            found = await listed(server, page_size=page_size)
            keys = [(run.key.scheduled_at.ToNanoseconds(), run.key.job_id) for run in found]
            assert keys == sorted(keys, reverse=True)
            assert {run.name for run in found} == {run.name for run in runs.values()}
            assert len(found) == len(runs)
        sms = {runs["queued"].name, runs["cancelled"].name}
        assert await names(server, f"{TENANT}/jobs/sms", page_size=1) == sms
        assert await names(server, f"{TENANT}/jobs/-") == {run.name for run in runs.values()}


async def test_a_run_that_moves_between_pages_is_seen_once(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        made = [await server.enqueue("mail") for _ in range(6)]
        seen: list[str] = []
        token = ""
        for _ in made:
            response = await server.runs.ListRuns(
                run_service_pb2.ListRunsRequest(parent=TENANT, page_size=1, page_token=token)
            )
            seen += [run.name for run in response.runs]
            token = response.next_page_token
            # The oldest waiting run ends: first those not seen yet, then those seen.
            (claimed,) = (await server.claim()).runs
            await server.complete(claimed)
        assert token == ""
        assert sorted(seen) == sorted(run.name for run in made)


async def test_filters(database_url: str) -> None:
    async with serving(database_url) as server:
        runs = await one_of_each(server)
        by_state = {state: run.name for state, run in runs.items()}
        mail = {by_state[s] for s in ("succeeded", "dead", "retrying", "running")}
        sms = {by_state["queued"], by_state["cancelled"]}
        cases: list[tuple[str, set[str]]] = [
            ("state=RUNNING", {by_state["running"]}),
            ("state:DEAD,RETRYING", {by_state["dead"], by_state["retrying"]}),
            ("state!=DEAD kind=mail.send", mail - {by_state["dead"]}),
            ("state=CANCELLED", {by_state["cancelled"]}),
            ("job=sms", sms),
            (f"job={runs['queued'].key.job_id}", sms),
            ("job!=sms", mail),
            ("job=ma*", mail),
            ("kind:sms*", sms),
            ("queue=default", mail | sms),
            ("queue=other", set()),
            (f"queue={TENANT}/queues/default state=SUCCEEDED", {by_state["succeeded"]}),
            (f"worker=workers/{WORKER}", mail),
            ("last_failure.code=BAD_ADDRESS", {by_state["dead"]}),
            ("origin=ENQUEUE", mail | sms),
            ("origin=SCHEDULE", set()),
            ("dead_reason=NOT_RETRYABLE", {by_state["dead"]}),
            ("cancel_cause:REQUESTED", {by_state["cancelled"]}),
            ("labels.state=running", {by_state["running"]}),
            ("labels.team=web", mail),
            ("labels:team", mail),
            ("labels.team!=web", sms),
            (
                "ended_at>2020-01-01T00:00:00Z",
                {by_state[s] for s in ("succeeded", "dead")} | {by_state["cancelled"]},
            ),
            ("created_at<2020-01-01T00:00:00Z", set()),
            ("scheduled_at>=2020-01-01T00:00:00Z state=SUCCEEDED", {by_state["succeeded"]}),
            ("scheduled_at<2020-01-01T00:00:00Z", set()),
            ("state=DEAD state=RUNNING", set()),
        ]
        for text, wanted in cases:
            assert await names(server, filter=text) == wanted, text
        assert await names(server, f"{TENANT}/jobs/mail", filter="state=DEAD,QUEUED") == {
            by_state["dead"]
        }
        text = "created_at=2020-01-01T00:00:00Z,2021-01-01T00:00:00Z"
        refused = await refusal(listed(server, filter=text))
        assert refused.reason == "FILTER_NOT_SUPPORTED"
        assert refused.metadata["filterField"] == "created_at"


async def test_sparse_lists_go_on_where_the_scan_ended(database_url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("fencepost_server.engine.run_reads.LIST_TIME_MAX", 0)
    async with serving(database_url) as server:
        await server.make_job("mail")
        made = [await server.enqueue("mail", labels={"n": str(n % 4)}) for n in range(16)]
        for _ in range(8):
            (claimed,) = (await server.claim()).runs
            await server.complete(claimed)
        wanted = {run.name for n, run in enumerate(made) if n % 4 == 0}
        found = await listed(server, filter="labels.n=0", page_size=2)
        assert len(found) == len(wanted)
        assert {run.name for run in found} == wanted


async def test_old_history_is_looked_at_when_the_filter_says_so(database_url: str) -> None:
    async with serving(database_url) as server:
        job = await server.make_job("mail")
        old = server.now() // SECOND * SECOND - 20 * 86400 * SECOND
        await server.query(
            """INSERT INTO fencepost.job_runs_stray
            (job_id, scheduled_at, available_at, created_at, ended_at, tenant_id, queue_id,
             kind_id, version, attempt, failure_count, lost_lease_count, snooze_count,
             replay_count, state, origin, priority)
            SELECT s.job_id, $2, $2, $2, $2, s.tenant_id, s.queue_id, s.kind_id, 1, 1, 0, 0, 0, 0,
                   'succeeded', 'schedule', 0
            FROM fencepost.job_schedules s WHERE s.job_id = $1 RETURNING 1""",
            job.job_id,
            to_datetime(old),
        )
        recent = await server.runs.ListRuns(run_service_pb2.ListRunsRequest(parent=TENANT))
        assert not recent.runs
        assert recent.searched_since.ToSeconds() < server.now() // SECOND - 6 * 86400
        everything = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(
                parent=TENANT, filter="scheduled_at>2020-01-01T00:00:00Z"
            )
        )
        assert len(everything.runs) == 1
        assert not everything.HasField("searched_since")
        live = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent=TENANT, filter="state=QUEUED,DEAD")
        )
        assert not live.HasField("searched_since")


async def test_page_tokens_belong_to_their_query(database_url: str) -> None:
    async with serving(database_url) as server:
        await server.make_job("mail")
        for _ in range(3):
            await server.enqueue("mail")
        first = await server.runs.ListRuns(
            run_service_pb2.ListRunsRequest(parent=TENANT, page_size=1)
        )
        refused = await refusal(
            server.runs.ListRuns(
                run_service_pb2.ListRunsRequest(
                    parent=TENANT, filter="state=QUEUED", page_token=first.next_page_token
                )
            )
        )
        assert refused.reason == "INVALID_PAGE_TOKEN"


async def test_a_job_that_is_not_there_is_no_empty_list(database_url: str) -> None:
    async with serving(database_url) as server:
        request = run_service_pb2.ListRunsRequest(parent=f"{TENANT}/jobs/none")
        refused = await refusal(server.runs.ListRuns(request))
        assert (refused.code.name, refused.reason) == ("NOT_FOUND", "JOB_NOT_FOUND")
        assert await names(server, filter="job:none") == set()


async def test_a_name_in_a_filter_means_deleted_jobs_if_none_has_it_now(database_url: str) -> None:
    async with serving(database_url) as server:
        old = await server.make_job("mail")
        await server.enqueue("mail")
        await server.jobs.DeleteJob(
            job_service_pb2.DeleteJobRequest(name=old.name, cancel_runs=True)
        )
        [kept] = await names(server, filter="job:mail")
        assert old.job_id in kept
        await server.make_job("mail")
        new = (await server.enqueue("mail")).name
        assert await names(server, filter="job:mail") == {new}
        assert await names(server, filter="job:mail*") == {new, kept}
