"""What workers say in a session: heartbeats, completions, releases, and their answers."""

import uuid

import asyncpg
import grpc
import pytest
from fencepost.v1 import failure_pb2, run_pb2, worker_pb2
from fencepost_server.api.session import Session
from fencepost_server.engine.lifecycle import Lifecycle
from fencepost_server.errors import InternalError, StorageUnavailable
from google.protobuf.duration_pb2 import Duration

from tests.integration.running_server import (
    held,
    key_of,
    keys_of,
    running,
    success,
    until,
)

_STATES = "SELECT state::text, attempt FROM fencepost.run_queue ORDER BY scheduled_at"


def bad_entry() -> worker_pb2.HeldRun:
    run = run_pb2.RunKey(job_id="no id")
    return worker_pb2.HeldRun(run=run, attempt=1)


async def test_a_heartbeat_renews_and_names_what_is_lost(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(3)
        async with server.session(credit=3) as session:
            kept, stolen, ended = await session.runs(3)
            await server.query(
                "UPDATE fencepost.run_queue SET lease_until = fencepost.clock() + interval '5 s'"
            )
            await session.complete(success(ended))
            await server.query(
                "UPDATE fencepost.run_queue SET attempt = 2 WHERE scheduled_at = "
                "(SELECT max(scheduled_at) FROM fencepost.run_queue)"
            )
            progress = worker_pb2.HeldRun().progress
            progress.percent = 40
            entry = held(kept)
            entry.progress.CopyFrom(progress)
            ack = await session.beat([entry, held(stolen), held(ended), bad_entry()])
            assert not ack.not_renewed
            lost = {
                (each.run.job_id, key_of(each.run).scheduled_at): each.lease_lost
                for each in ack.notices
                if each.run.HasField("scheduled_at")
            }
            assert len(ack.notices) == 3
            superseded = lost[stolen.run.job_id, key_of(stolen.run).scheduled_at]
            assert superseded.reason == worker_pb2.LEASE_LOST_REASON_SUPERSEDED
            assert superseded.current_attempt == 2
            closed = lost[ended.run.job_id, key_of(ended.run).scheduled_at]
            assert closed.reason == worker_pb2.LEASE_LOST_REASON_ATTEMPT_CLOSED
            (row,) = await server.query(
                "SELECT lease_until - fencepost.clock(), progress FROM fencepost.run_queue "
                "WHERE attempt = 1"
            )
            assert row[0].total_seconds() > 20
            # The answer came after the commit, so the progress is there.
            stored = type(progress).FromString(row[1])
            assert stored.percent == 40
            # Notices are repeated as long as they apply, and nothing of this ended the stream.
            again = await session.beat([held(stolen)])
            assert len(again.notices) == 1


async def test_progress_that_is_refused_costs_no_lease(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=1) as session:
            (run,) = await session.runs(1)
            entry = held(run)
            entry.progress.percent = 4000
            ack = await session.beat([entry])
            assert not ack.notices
            assert not ack.not_renewed


async def test_every_entry_gets_its_verdict(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(4)
        async with server.session(credit=4) as session:
            runs = await session.runs(4)
            oversized = success(runs[0], '"' + "x" * 262_144 + '"')
            empty = worker_pb2.Completion(run=runs[1].run, attempt=1)
            fine = success(runs[2], '"ok"')
            too_high = success(runs[3])
            too_high.attempt = 7
            unknown = success(runs[3])
            unknown.run.job_id = str(uuid.uuid4())
            fine_grained = success(runs[3])
            fine_grained.run.scheduled_at.nanos += 1
            sent = [oversized, empty, fine, fine, too_high, unknown, fine_grained]
            verdicts = await session.complete(*sent)
            found = sorted(
                (worker_pb2.Verdict.Name(each.verdict).removeprefix("VERDICT_"), each.reason)
                for each in verdicts
            )
            assert found == [
                ("ALREADY_APPLIED", ""),
                ("APPLIED", ""),
                ("INVALID", "INVALID_FIELD"),
                ("INVALID", "INVALID_FIELD"),
                ("INVALID", "PAYLOAD_TOO_LARGE"),
                ("INVALID", "UNKNOWN_ATTEMPT"),
                ("NOT_FOUND", ""),
            ]
            assert all(each.message for each in verdicts if each.reason)
            # What was refused is still held; another body for it is taken.
            failure = failure_pb2.Failure(code="RESULT_TOO_LARGE", message="no\x00!")
            (verdict,) = await session.complete(
                worker_pb2.Completion(run=runs[0].run, attempt=1, failure=failure)
            )
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED
            assert verdict.run_state == run_pb2.RUN_STATE_RETRYING
            (verdict,) = await session.complete(success(runs[0]))
            assert verdict.verdict == worker_pb2.VERDICT_ALREADY_APPLIED
            await server.query("UPDATE fencepost.run_queue SET attempt = 3")
            (verdict,) = await session.complete(success(runs[3]))
            assert verdict.verdict == worker_pb2.VERDICT_STALE_ATTEMPT
            assert verdict.current_attempt == 3


async def test_released_runs_are_free_at_once(database_url: str) -> None:
    async with running(database_url) as server:
        await server.make_job()
        keys = await server.enqueue(3)
        async with server.session(credit=3) as session:
            runs = await session.runs(3)
            await session.say(drain=worker_pb2.WorkerDrain())
            await session.hear("drain_ack")
            releases = [worker_pb2.Release(run=run.run, attempt=1) for run in runs]
            releases[1].reason = worker_pb2.RELEASE_REASON_UNSUPPORTED_KIND
            releases[2].delay.CopyFrom(Duration(seconds=-1))
            await session.say(releases=worker_pb2.Releases(releases=releases))
            verdicts = await session.verdicts(3)
            assert sorted(each.verdict for each in verdicts) == [
                worker_pb2.VERDICT_APPLIED,
                worker_pb2.VERDICT_APPLIED,
                worker_pb2.VERDICT_INVALID,
            ]
            async with server.session(credit=3) as other:
                (again,) = await other.runs(1)
                assert (key_of(again.run), again.attempt) == (keys[0], 2)
                await other.beat()
                assert other.kept("runs") == 0
            rows = await server.query(
                "SELECT available_at - fencepost.clock() > interval '3 s' AS waits, "
                "failure_count + lost_lease_count AS budget "
                "FROM fencepost.run_queue ORDER BY scheduled_at"
            )
            assert [row["budget"] for row in rows] == [0, 0, 0]
            assert rows[1]["waits"]


async def test_what_cannot_be_stored_is_put_off(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database_url) as server:
        await server.make_job()
        await server.enqueue(1)
        async with server.session(credit=1) as session:
            (run,) = await session.runs(1)
            blocker = await asyncpg.connect(server.dsn)
            try:
                lock = blocker.transaction()
                await lock.start()
                await blocker.fetch("SELECT 1 FROM fencepost.run_queue FOR UPDATE")
                (verdict,) = await session.complete(success(run))
                assert verdict.verdict == worker_pb2.VERDICT_RETRY
                assert 0 <= verdict.retry_after.seconds <= 30
                await lock.rollback()
            finally:
                await blocker.close()
            for error in (StorageUnavailable(), InternalError("a bug")):

                async def fail(*_: object, error: Exception = error) -> None:
                    raise error

                with monkeypatch.context() as patch:
                    patch.setattr(Lifecycle, "heartbeat", fail)
                    patch.setattr(Lifecycle, "report", fail)
                    ack = await session.beat([held(run), bad_entry()])
                    assert [key_of(each) for each in ack.not_renewed] == keys_of([run])
                    assert len(ack.notices) == 1
                    (verdict,) = await session.complete(success(run))
                    assert verdict.verdict == worker_pb2.VERDICT_RETRY
            (verdict,) = await session.complete(success(run))
            assert verdict.verdict == worker_pb2.VERDICT_APPLIED


async def test_a_bug_in_one_session_is_told_and_leaves_the_others(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(database_url) as server, server.session() as healthy:
        async with server.session() as session:
            with monkeypatch.context() as patch:
                patch.setattr(Session, "take_counters", lambda *_: 1 / 0)
                await session.say(credit_limit=1)
                refusal = await session.refused()
                assert refusal.code is grpc.StatusCode.INTERNAL
        await healthy.beat()

        async def connected() -> bool:
            rows = await server.query(
                "SELECT count(*) FROM fencepost.workers WHERE state = 'ready'"
            )
            return bool(rows[0][0] == 1)

        await until(connected, what="one worker is ready")
