"""The server of the bare pipeline, a process of its own: see `pipeline`.

Usage: python -m benchmarks.pipeline_server DSN
"""

import asyncio
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import grpc.aio
import uvloop
from fencepost.v1 import run_pb2, run_service_pb2, worker_pb2

CLAIM_MAX = 1000
COMPLETE_MAX = 1000
BATCH = 128
_CLAIMERS = 1
_COMPLETERS = 2
_IDLE_S = 0.02
WORK = "/fencepost.v1.RunService/Work"
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.http2.max_pings_without_data", 0))

_CLAIM = """
WITH taken AS MATERIALIZED (
    SELECT ctid AS tid FROM pipe_queue
    WHERE queue_id = 1 AND kind_id = 1 AND priority = 0 AND state = 0
      AND available_at > $1 AND available_at <= now()
    ORDER BY available_at LIMIT $2 FOR UPDATE SKIP LOCKED
)
UPDATE pipe_queue AS q
SET state = 1, attempt = attempt + 1, claimed_at = now(), worker_id = $3,
    lease_until = now() + interval '30 seconds'
FROM taken AS t WHERE q.ctid = t.tid
RETURNING q.job_id::text, (extract(epoch FROM q.scheduled_at) * 1000000)::bigint AS at, q.attempt,
          q.available_at
"""
# Keys travel as the text of arrays: to build one and let Postgres read it costs least.
_COMPLETE = """
WITH ends AS MATERIALIZED (
    SELECT q.ctid AS tid
    FROM unnest($1::text::uuid[], $2::text::bigint[], $3::text::int[]) AS e (job_id, at, attempt)
    JOIN pipe_queue AS q
      ON q.job_id = e.job_id
     AND q.scheduled_at = timestamptz 'epoch' + e.at * interval '1 microsecond'
    WHERE q.attempt = e.attempt AND q.state = 1
    ORDER BY q.job_id, q.scheduled_at FOR UPDATE OF q SKIP LOCKED
), gone AS (
    DELETE FROM pipe_queue AS q USING ends AS e WHERE q.ctid = e.tid RETURNING q.*
)
INSERT INTO pipe_history (job_id, scheduled_at, available_at, created_at, claimed_at, ended_at,
                          tenant_id, queue_id, kind_id, version, attempt, state, priority,
                          worker_id, payload)
SELECT job_id, scheduled_at, available_at, created_at, claimed_at, now(), tenant_id, queue_id,
       kind_id, version, attempt, 2, priority, worker_id, payload
FROM gone
"""
_SETTINGS = {
    "jit": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
}


class _Stream:
    """One session: what it may still be sent, and what waits to be written to it."""

    def __init__(self) -> None:
        self.worker_id = uuid.uuid4()
        self.credit_limit = 0
        self.sent = 0
        self.batches = 0
        self.waiting: deque[run_service_pb2.WorkResponse] = deque()
        self.ready = asyncio.Event()

    @property
    def room(self) -> int:
        return self.credit_limit - self.sent

    def say(self, message: run_service_pb2.WorkResponse) -> None:
        self.waiting.append(message)
        self.ready.set()

    async def write_to(self, context: Any) -> None:
        while True:
            while self.waiting:
                await context.write(self.waiting.popleft())
            self.ready.clear()
            await self.ready.wait()


class _Pipeline:
    """Claims for all streams, and stores the completions of all streams together."""

    def __init__(self, claims: asyncpg.Pool, completions: asyncpg.Pool) -> None:
        self._claims, self._completions = claims, completions
        self._streams: deque[_Stream] = deque()
        self._hungry = asyncio.Event()
        self._ends: deque[tuple[_Stream, worker_pb2.Completions]] = deque()
        self._ended = asyncio.Event()
        self._template = worker_pb2.Assignment(
            queue="tenants/default/queues/default", kind="noop", job="tenants/default/jobs/noop"
        )
        self._template.lease_ttl.seconds = self._template.lease_remaining.seconds = 30
        self._template.attempt_timeout.seconds = 3600
        self._template.max_failures = 5

    async def work(
        self, requests: AsyncIterator[run_service_pb2.WorkRequest], context: Any
    ) -> None:
        """One session."""
        stream = _Stream()
        writer = asyncio.create_task(stream.write_to(context))
        self._streams.append(stream)
        try:
            async for request in requests:
                if request.credit_limit:
                    stream.credit_limit = request.credit_limit
                    self._hungry.set()
                match request.WhichOneof("event"):
                    case "completions":
                        self._ends.append((stream, request.completions))
                        self._ended.set()
                    case "hello":
                        stream.say(_welcome())
                    case "heartbeat":
                        ack = worker_pb2.HeartbeatAck(seq=request.heartbeat.seq)
                        stream.say(run_service_pb2.WorkResponse(heartbeat_ack=ack))
                    case "drain":
                        stream.credit_limit = 0
                        drain = worker_pb2.DrainAck(last_batch_seq=stream.batches)
                        stream.say(run_service_pb2.WorkResponse(drain_ack=drain))
                    case "goodbye":
                        break
        finally:
            self._streams.remove(stream)
            writer.cancel()

    async def claim(self) -> None:
        """Hands out runs as long as somebody has credit; the streams take turns."""
        connection = await self._claims.acquire()
        statement = await connection.prepare(_CLAIM)
        after = await connection.fetchval("SELECT '-infinity'::timestamptz")
        while True:
            shares = self._shares()
            if not shares:
                self._hungry.clear()
                await self._hungry.wait()
                continue
            worker = shares[0][0].worker_id
            rows = await statement.fetch(after, sum(share for _, share in shares), worker)
            if not rows:
                await asyncio.sleep(_IDLE_S)
                continue
            after = max(row["available_at"] for row in rows)
            self._deal(rows, shares)

    def _shares(self) -> list[tuple[_Stream, int]]:
        """Who gets how many of the next runs: whole messages, to one stream after the other."""
        shares: list[tuple[_Stream, int]] = []
        left = CLAIM_MAX
        for _ in range(len(self._streams)):
            stream = self._streams[0]
            self._streams.rotate(-1)
            share = min(stream.room, left)
            if share > 0:
                shares.append((stream, share))
                left -= share
            if not left:
                break
        return shares

    def _deal(self, rows: list[Any], shares: list[tuple[_Stream, int]]) -> None:
        first = 0
        for stream, share in shares:
            for start in range(first, min(first + share, len(rows)), BATCH):
                part = rows[start : min(start + BATCH, first + share)]
                message = run_service_pb2.WorkResponse()
                stream.batches += 1
                stream.sent += len(part)
                message.runs.batch_seq = stream.batches
                add = message.runs.runs.add
                for job_id, at, attempt, _ in part:
                    assignment = add()
                    assignment.CopyFrom(self._template)
                    run = assignment.run
                    run.job_id = job_id
                    run.scheduled_at.seconds = at // 1_000_000
                    run.scheduled_at.nanos = at % 1_000_000 * 1000
                    assignment.attempt = attempt
                stream.say(message)
            first += share

    async def complete(self) -> None:
        """Stores what has been reported, up to 1,000 in a statement, then tells the verdicts."""
        connection = await self._completions.acquire()
        statement = await connection.prepare(_COMPLETE)
        while True:
            if not self._ends:
                self._ended.clear()
                await self._ended.wait()
                continue
            taken: list[tuple[_Stream, worker_pb2.Completions]] = []
            number = 0
            while self._ends and (
                not taken or number + len(self._ends[0][1].completions) <= COMPLETE_MAX
            ):
                taken.append(self._ends.popleft())
                number += len(taken[-1][1].completions)
            jobs, ats, attempts = [], [], []
            for _, message in taken:
                for completion in message.completions:
                    run = completion.run
                    at = run.scheduled_at
                    jobs.append(run.job_id)
                    ats.append(at.seconds * 1_000_000 + at.nanos // 1000)
                    attempts.append(completion.attempt)
            await statement.fetch(
                f"{{{','.join(jobs)}}}",
                f"{{{','.join(map(str, ats))}}}",
                f"{{{','.join(map(str, attempts))}}}",
            )
            stored = int((statement.get_statusmsg() or "0").split()[-1])
            if stored != number:
                raise RuntimeError(f"{number} completions, {stored} stored")
            for stream, message in taken:
                stream.say(_verdicts(message))


def _verdicts(message: worker_pb2.Completions) -> run_service_pb2.WorkResponse:
    response = run_service_pb2.WorkResponse()
    add = response.verdicts.verdicts.add
    for completion in message.completions:
        verdict = add()
        verdict.run.CopyFrom(completion.run)
        verdict.attempt = completion.attempt
        verdict.verdict = worker_pb2.VERDICT_APPLIED
        verdict.run_state = run_pb2.RUN_STATE_SUCCEEDED
    return response


def _welcome() -> run_service_pb2.WorkResponse:
    welcome = worker_pb2.Welcome(session_id="pipeline", server_id="pipeline", revision=1)
    welcome.heartbeat_interval.seconds = 10
    welcome.heartbeat_ack_timeout.seconds = 8
    return run_service_pb2.WorkResponse(welcome=welcome)


async def serve(dsn: str) -> None:
    """The server's process; prints its address."""
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=_CLAIMERS, server_settings=_SETTINGS) as a,
        asyncpg.create_pool(dsn, min_size=1, max_size=_COMPLETERS, server_settings=_SETTINGS) as b,
    ):
        pipeline = _Pipeline(a, b)
        server = grpc.aio.server(options=_OPTIONS)
        service, method = WORK.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(
            pipeline.work,
            request_deserializer=run_service_pb2.WorkRequest.FromString,
            response_serializer=run_service_pb2.WorkResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        async with asyncio.TaskGroup() as group:
            for _ in range(_CLAIMERS):
                group.create_task(pipeline.claim())
            for _ in range(_COMPLETERS):
                group.create_task(pipeline.complete())


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
