"""Triggers that write down every change of a run, in the transaction that makes it."""

import asyncpg

# Heartbeats change none of these, so they leave no trace.
_TOLD = ("state", "attempt", "attempt_open", "cancel_requested", "available_at", "version")

_INSTALL = """
CREATE SCHEMA IF NOT EXISTS checker;
CREATE TABLE checker.changes (
    seq              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid              text NOT NULL DEFAULT pg_current_xact_id()::text,
    at               timestamptz NOT NULL DEFAULT fencepost.clock(),
    place            text NOT NULL,
    operation        text NOT NULL,
    job_id           uuid NOT NULL,
    scheduled_at     timestamptz NOT NULL,
    available_at     timestamptz NOT NULL,
    state            text NOT NULL,
    attempt          int NOT NULL,
    attempt_open     boolean NOT NULL,
    cancel_requested boolean NOT NULL,
    origin           text NOT NULL,
    tenant_id        int NOT NULL,
    queue_id         int NOT NULL,
    kind_id          int NOT NULL,
    priority         int NOT NULL,
    failure_count    int NOT NULL,
    lost_lease_count int NOT NULL,
    replay_count     int NOT NULL,
    worker_id        uuid,
    concurrency_key  text,
    dead_reason      text
);
CREATE FUNCTION checker.note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    r jsonb := to_jsonb(CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END);
BEGIN
    INSERT INTO checker.changes
        (place, operation, job_id, scheduled_at, available_at, state, attempt, attempt_open,
         cancel_requested, origin, tenant_id, queue_id, kind_id, priority, failure_count,
         lost_lease_count, replay_count, worker_id, concurrency_key, dead_reason)
    VALUES (TG_ARGV[0], lower(TG_OP), (r ->> 'job_id')::uuid, (r ->> 'scheduled_at')::timestamptz,
            (r ->> 'available_at')::timestamptz, r ->> 'state', (r ->> 'attempt')::int,
            coalesce((r ->> 'attempt_open')::boolean, false),
            coalesce((r ->> 'cancel_requested')::boolean, false), r ->> 'origin',
            (r ->> 'tenant_id')::int, (r ->> 'queue_id')::int, (r ->> 'kind_id')::int,
            (r ->> 'priority')::int, (r ->> 'failure_count')::int,
            (r ->> 'lost_lease_count')::int, (r ->> 'replay_count')::int,
            (r ->> 'worker_id')::uuid, r ->> 'concurrency_key', r ->> 'dead_reason');
    RETURN NULL;
END $$;
"""


async def record(database_url: str) -> None:
    """From now on every change of a run in this database is in `checker.changes`."""
    changed = " OR ".join(f"OLD.{name} IS DISTINCT FROM NEW.{name}" for name in _TOLD)
    connection = await asyncpg.connect(database_url)
    try:
        async with connection.transaction():
            await connection.execute(_INSTALL)
            for place in ("run_queue", "job_runs", "job_runs_stray", "dead_letters"):
                await connection.execute(
                    f"CREATE TRIGGER checker_rows AFTER INSERT OR DELETE ON fencepost.{place} "
                    f"FOR EACH ROW EXECUTE FUNCTION checker.note('{place}')"
                )
            await connection.execute(
                "CREATE TRIGGER checker_updates AFTER UPDATE ON fencepost.run_queue "
                f"FOR EACH ROW WHEN ({changed}) EXECUTE FUNCTION checker.note('run_queue')"
            )
    finally:
        await connection.close()
