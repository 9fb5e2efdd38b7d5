-- Changes to many runs that go on without their caller, and the pace of caught-up runs.

CREATE TYPE fencepost.operation_action AS ENUM ('cancel', 'replay', 'discard', 'backfill');
CREATE TYPE fencepost.operation_state AS ENUM ('running', 'done', 'stopped');
CREATE TYPE fencepost.stop_cause AS ENUM ('requested', 'failing', 'refused');

CREATE TABLE fencepost.operations (
    operation_id      uuid PRIMARY KEY,
    tenant_id         int NOT NULL REFERENCES fencepost.tenants,
    action            fencepost.operation_action NOT NULL,
    state             fencepost.operation_state NOT NULL DEFAULT 'running',
    stop_cause        fencepost.stop_cause,
    filter            text NOT NULL,
    reason            text NOT NULL DEFAULT '',
    creator           text NOT NULL DEFAULT '',
    -- Runs per second, and when the next step may be taken: the pace outlives a restart.
    rate              double precision NOT NULL CHECK (rate > 0),
    next_step_at      timestamptz NOT NULL,
    stop_when_failing double precision NOT NULL DEFAULT 0,
    matched           bigint NOT NULL,
    changed           bigint NOT NULL DEFAULT 0,
    unchanged         bigint NOT NULL DEFAULT 0,
    failed            bigint NOT NULL DEFAULT 0,
    -- The first 20: objects with code, reason and message.
    problems          jsonb NOT NULL DEFAULT '[]',
    created_at        timestamptz NOT NULL,
    -- The first step; runs made from here to ended_at are this operation's.
    started_at        timestamptz,
    ended_at          timestamptz,
    -- Of a backfill: fires of this version of the job in [since_at, until_at), of which all up
    -- to position_at have been looked at.
    job_id            uuid,
    version           int,
    since_at          timestamptz,
    until_at          timestamptz,
    position_at       timestamptz,
    allows_overlap    boolean NOT NULL DEFAULT false,
    CHECK ((state = 'running') = (ended_at IS NULL)),
    CHECK ((state = 'stopped') = (stop_cause IS NOT NULL)),
    CHECK (action <> 'backfill' OR num_nulls(job_id, version, since_at, until_at) = 0)
);
-- operation_id rises with creation (UUIDv7), so this is also "newest first".
CREATE INDEX operations_list ON fencepost.operations (tenant_id, operation_id);
CREATE INDEX operations_due ON fencepost.operations (next_step_at) WHERE state = 'running';
CREATE INDEX operations_of_job ON fencepost.operations (job_id, operation_id)
    WHERE state = 'running';
CREATE INDEX operations_age ON fencepost.operations (ended_at) WHERE ended_at IS NOT NULL;

-- Until when the governor has given out the places of late and of missed fires, by tenant.
CREATE TABLE fencepost.catch_up_cursors (
    tenant_id      int PRIMARY KEY REFERENCES fencepost.tenants,
    late_free_at   timestamptz NOT NULL,
    missed_free_at timestamptz NOT NULL
) WITH (fillfactor = 50);

-- Gives out the next places of a tenant: from which instant on its late and its missed fires
-- may be claimed, so many of each, one every 1/rate seconds. Late ones never wait for missed
-- ones, so what is newest goes first also after a short outage in the wake of a long one.
CREATE FUNCTION fencepost.take_places(
    the_tenant int, lates bigint, misseds bigint, the_rate double precision, the_now timestamptz)
RETURNS timestamptz[] LANGUAGE sql VOLATILE AS $$
    INSERT INTO fencepost.catch_up_cursors AS c (tenant_id, late_free_at, missed_free_at)
    VALUES (the_tenant, the_now + lates / the_rate * interval '1 second',
            the_now + (lates + misseds) / the_rate * interval '1 second')
    ON CONFLICT (tenant_id) DO UPDATE
    SET late_free_at = greatest(c.late_free_at, the_now) + (excluded.late_free_at - the_now),
        missed_free_at =
            greatest(c.missed_free_at,
                     greatest(c.late_free_at, the_now) + (excluded.late_free_at - the_now))
            + (excluded.missed_free_at - excluded.late_free_at)
    RETURNING ARRAY[c.late_free_at - lates / the_rate * interval '1 second',
                    c.missed_free_at - misseds / the_rate * interval '1 second']
$$;
