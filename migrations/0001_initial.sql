-- The whole of Fencepost's first schema. Words are those of docs/glossary.md; where a run
-- lives and why is told in docs/adr/0003-one-place-per-run.md.

CREATE SCHEMA IF NOT EXISTS fencepost;

-- The one clock that leases, fires and backoff run on. Tests replace this function.
CREATE FUNCTION fencepost.clock() RETURNS timestamptz
    LANGUAGE sql VOLATILE AS 'SELECT clock_timestamp()';

-- True when the caller's idea of now may be trusted; hot statements do nothing otherwise.
CREATE FUNCTION fencepost.clock_agrees(caller_now timestamptz) RETURNS boolean
    LANGUAGE sql VOLATILE AS
$$ SELECT caller_now BETWEEN fencepost.clock() - interval '1 second' AND fencepost.clock() + interval '1 second' $$;

CREATE TYPE fencepost.run_state AS ENUM
    ('queued', 'blocked', 'running', 'retrying', 'succeeded', 'dead', 'cancelled', 'skipped');
CREATE TYPE fencepost.run_origin AS ENUM ('schedule', 'catch_up', 'backfill', 'enqueue');
CREATE TYPE fencepost.dead_reason AS ENUM
    ('max_failures', 'max_lost_leases', 'not_retryable', 'queue_timeout', 'total_timeout');
CREATE TYPE fencepost.cancel_cause AS ENUM ('requested', 'overlap', 'replaced', 'job_deleted');
CREATE TYPE fencepost.skip_reason AS ENUM
    ('misfire', 'overlap', 'paused', 'excluded', 'dst_gap', 'dst_fold', 'expired', 'quota');
CREATE TYPE fencepost.attempt_outcome AS ENUM
    ('succeeded', 'failed', 'snoozed', 'cancelled', 'lease_expired', 'released', 'undelivered', 'timed_out');
CREATE TYPE fencepost.misfire_action AS ENUM ('run_once', 'skip', 'catch_up');
CREATE TYPE fencepost.overlap_policy AS ENUM
    ('skip', 'queue_one', 'queue_all', 'allow', 'cancel_previous');

-- Names, interned ---------------------------------------------------------------------

CREATE TABLE fencepost.tenants (
    tenant_id     int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text NOT NULL UNIQUE,
    display_name  text NOT NULL DEFAULT '',
    labels        jsonb NOT NULL DEFAULT '{}',
    max_in_flight int CHECK (max_in_flight > 0),
    weight        int NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000),
    revision      int NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL
);

CREATE TABLE fencepost.queues (
    queue_id              int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES fencepost.tenants,
    name                  text NOT NULL,
    labels                jsonb NOT NULL DEFAULT '{}',
    paused                boolean NOT NULL DEFAULT false,
    pause_reason          text NOT NULL DEFAULT '',
    max_in_flight         int CHECK (max_in_flight > 0),
    max_in_flight_per_key int CHECK (max_in_flight_per_key > 0),
    -- Whether any job that sends runs here has a cap of its own; never reset, it only
    -- picks the claim that counts over the one that does not.
    has_capped_jobs       boolean NOT NULL DEFAULT false,
    revision              int NOT NULL DEFAULT 1,
    created_at            timestamptz NOT NULL,
    updated_at            timestamptz NOT NULL,
    UNIQUE (tenant_id, name)
);

CREATE TABLE fencepost.kinds (
    kind_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name    text NOT NULL UNIQUE
);

-- Cron rules, interned: many jobs share few of them (H is resolved before). The hash
-- stands for the text because sixteen expressions outgrow an index entry.
CREATE TABLE fencepost.schedules (
    schedule_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rule_hash   bytea NOT NULL UNIQUE,
    rule        jsonb NOT NULL
);

-- The memo of next fires, once per distinct (schedule, instant). Unlogged: after a crash
-- it is computed again. next_at is NULL when the rule never fires after scheduled_at.
CREATE UNLOGGED TABLE fencepost.schedule_fires (
    schedule_id  int NOT NULL,
    scheduled_at timestamptz NOT NULL,
    next_at      timestamptz,
    PRIMARY KEY (schedule_id, scheduled_at)
);

-- Jobs ----------------------------------------------------------------------------------

CREATE TABLE fencepost.jobs (
    job_id        uuid PRIMARY KEY,
    tenant_id     int NOT NULL REFERENCES fencepost.tenants,
    name          text NOT NULL,
    version       int NOT NULL,
    -- Rises with every change, also of what is not part of a version; the etag.
    revision      int NOT NULL DEFAULT 1,
    pause_reason  text NOT NULL DEFAULT '',
    trace_context jsonb,
    created_at    timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL,
    deleted_at    timestamptz
);
CREATE UNIQUE INDEX jobs_name ON fencepost.jobs (tenant_id, name) WHERE deleted_at IS NULL;
-- job_id rises with creation (UUIDv7), so this is also "newest first".
CREATE INDEX jobs_list ON fencepost.jobs (tenant_id, job_id) WHERE deleted_at IS NULL;

CREATE TABLE fencepost.job_versions (
    job_id     uuid NOT NULL,
    version    int NOT NULL,
    spec       jsonb NOT NULL,
    payload    bytea,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (job_id, version)
);

-- The scheduling state of every job, rewritten at each fire and therefore narrow. Its row
-- lock is what every path that makes runs by schedule takes first. A job without a
-- schedule, finished or deleted has no next_run_at.
CREATE TABLE fencepost.job_schedules (
    job_id            uuid PRIMARY KEY,
    next_run_at       timestamptz,
    last_scheduled_at timestamptz,
    end_at            timestamptz,
    fire_count        bigint NOT NULL DEFAULT 0,
    max_fires         bigint,
    tenant_id         int NOT NULL,
    queue_id          int NOT NULL,
    kind_id           int NOT NULL,
    version           int NOT NULL,
    schedule_id       int,
    every_s           int,
    misfire_after_s   int NOT NULL DEFAULT 60,
    misfire_window_s  int,
    max_in_flight     int,
    misfire           fencepost.misfire_action NOT NULL DEFAULT 'run_once',
    overlap           fencepost.overlap_policy NOT NULL DEFAULT 'skip',
    partition_id      smallint NOT NULL,
    priority          smallint NOT NULL DEFAULT 0,
    lease_s           smallint NOT NULL DEFAULT 30,
    cancel_grace_s    smallint NOT NULL DEFAULT 30,
    attempt_timeout_s int NOT NULL DEFAULT 3600,
    paused            boolean NOT NULL DEFAULT false,
    concurrency_key   text,
    CHECK (next_run_at > last_scheduled_at)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX job_schedules_due ON fencepost.job_schedules (partition_id, next_run_at)
    WHERE next_run_at IS NOT NULL AND NOT paused;

-- Fires that made no run; neighbours with one reason are one row.
CREATE TABLE fencepost.fire_skips (
    job_id      uuid NOT NULL,
    first_at    timestamptz NOT NULL,
    last_at     timestamptz NOT NULL,
    reason      fencepost.skip_reason NOT NULL,
    -- The run that stands in for misfires under run_once.
    stand_in_at timestamptz,
    version     int NOT NULL,
    decided_at  timestamptz NOT NULL,
    PRIMARY KEY (job_id, first_at, reason),
    CHECK (first_at <= last_at)
);
CREATE INDEX fire_skips_age ON fencepost.fire_skips (last_at);

-- Live runs -----------------------------------------------------------------------------

CREATE TABLE fencepost.run_queue (
    job_id           uuid NOT NULL,
    scheduled_at     timestamptz NOT NULL,
    available_at     timestamptz NOT NULL,
    created_at       timestamptz NOT NULL,
    first_claimed_at timestamptz,
    claimed_at       timestamptz,
    lease_until      timestamptz,
    tenant_id        int NOT NULL,
    queue_id         int NOT NULL,
    kind_id          int NOT NULL,
    version          int NOT NULL,
    attempt          int NOT NULL DEFAULT 0,
    failure_count    int NOT NULL DEFAULT 0,
    lost_lease_count int NOT NULL DEFAULT 0,
    snooze_count     int NOT NULL DEFAULT 0,
    replay_count     int NOT NULL DEFAULT 0,
    state            fencepost.run_state NOT NULL,
    origin           fencepost.run_origin NOT NULL,
    priority         smallint NOT NULL,
    lease_s          smallint NOT NULL,
    cancel_grace_s   smallint NOT NULL,
    attempt_timeout_s int NOT NULL,
    -- The newest attempt may still report.
    attempt_open     boolean NOT NULL DEFAULT false,
    cancel_requested boolean NOT NULL DEFAULT false,
    -- Written to a stream that broke before a receipt: losing this lease costs no budget.
    undelivered      boolean NOT NULL DEFAULT false,
    -- Made under a policy that lets runs wait for each other: its end may free another.
    serial           boolean NOT NULL DEFAULT false,
    worker_id        uuid,
    max_in_flight    int,
    concurrency_key  text,
    payload          bytea,
    labels           jsonb,
    progress         bytea,
    last_failure     bytea,
    failure_code     text,
    cancel_cause     fencepost.cancel_cause,
    cancel_reason    text,
    cancel_by        timestamptz,
    trace_context    jsonb,
    PRIMARY KEY (job_id, scheduled_at),
    CHECK (state IN ('queued', 'blocked', 'running', 'retrying')),
    CHECK (attempt >= 0 AND (state <> 'running' OR (attempt_open AND attempt > 0)))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2);
-- A lane is (queue, kind, priority); within it the oldest comes first.
CREATE INDEX run_queue_ready ON fencepost.run_queue (queue_id, kind_id, priority, available_at)
    WHERE state IN ('queued', 'retrying');
CREATE INDEX run_queue_open ON fencepost.run_queue (queue_id, job_id) WHERE attempt_open;
CREATE INDEX run_queue_blocked ON fencepost.run_queue (job_id, scheduled_at) WHERE state = 'blocked';

-- Ended runs ------------------------------------------------------------------------------

CREATE TABLE fencepost.job_runs (
    job_id           uuid NOT NULL,
    scheduled_at     timestamptz NOT NULL,
    available_at     timestamptz NOT NULL,
    created_at       timestamptz NOT NULL,
    first_claimed_at timestamptz,
    claimed_at       timestamptz,
    ended_at         timestamptz NOT NULL,
    tenant_id        int NOT NULL,
    queue_id         int NOT NULL,
    kind_id          int NOT NULL,
    version          int NOT NULL,
    attempt          int NOT NULL,
    failure_count    int NOT NULL,
    lost_lease_count int NOT NULL,
    snooze_count     int NOT NULL,
    replay_count     int NOT NULL,
    state            fencepost.run_state NOT NULL,
    origin           fencepost.run_origin NOT NULL,
    priority         smallint NOT NULL,
    worker_id        uuid,
    concurrency_key  text,
    payload          bytea,
    labels           jsonb,
    progress         bytea,
    result           bytea,
    last_failure     bytea,
    failure_code     text,
    timings          bytea,
    skip_reason      fencepost.skip_reason,
    dead_reason      fencepost.dead_reason,
    cancel_cause     fencepost.cancel_cause,
    cancel_reason    text,
    -- The server ended the run without a word from the worker.
    forced           boolean NOT NULL DEFAULT false,
    discarded_at     timestamptz,
    discard_reason   text,
    trace_context    jsonb,
    PRIMARY KEY (job_id, scheduled_at),
    CHECK (state IN ('succeeded', 'dead', 'cancelled', 'skipped')),
    CHECK (state <> 'skipped' OR attempt = 0)
) PARTITION BY RANGE (scheduled_at);
CREATE INDEX job_runs_list ON fencepost.job_runs (tenant_id, scheduled_at);

-- Ends whose day has no table.
CREATE TABLE fencepost.job_runs_stray (
    LIKE fencepost.job_runs INCLUDING CONSTRAINTS INCLUDING DEFAULTS,
    PRIMARY KEY (job_id, scheduled_at)
);
CREATE INDEX job_runs_stray_list ON fencepost.job_runs_stray (tenant_id, scheduled_at);
CREATE INDEX job_runs_stray_age ON fencepost.job_runs_stray (ended_at);

CREATE TABLE fencepost.dead_letters (
    LIKE fencepost.job_runs INCLUDING CONSTRAINTS INCLUDING DEFAULTS,
    PRIMARY KEY (job_id, scheduled_at),
    CHECK (state = 'dead' AND attempt >= 1 AND dead_reason IS NOT NULL)
);
CREATE INDEX dead_letters_list ON fencepost.dead_letters (tenant_id, scheduled_at);

-- Attempts that did not simply succeed at the first try, by the day they ended.
CREATE TABLE fencepost.run_attempts (
    job_id       uuid NOT NULL,
    scheduled_at timestamptz NOT NULL,
    attempt      int NOT NULL,
    outcome      fencepost.attempt_outcome NOT NULL,
    late         boolean NOT NULL DEFAULT false,
    worker_id    uuid,
    claimed_at   timestamptz,
    ended_at     timestamptz NOT NULL,
    failure      bytea,
    timings      bytea,
    PRIMARY KEY (job_id, scheduled_at, attempt, ended_at)
) PARTITION BY RANGE (ended_at);

-- Who works, who asked, what the shard remembers ----------------------------------------------

CREATE TABLE fencepost.workers (
    worker_id         uuid PRIMARY KEY,
    display_name      text NOT NULL DEFAULT '',
    state             text NOT NULL CHECK (state IN ('ready', 'draining', 'disconnected', 'polling')),
    sdk               bytea,
    subscriptions     bytea,
    tenant_ids        int[] NOT NULL,
    labels            jsonb NOT NULL DEFAULT '{}',
    slots             int NOT NULL DEFAULT 0,
    held_runs         int NOT NULL DEFAULT 0,
    free_credits      bigint NOT NULL DEFAULT 0,
    session_id        text NOT NULL DEFAULT '',
    server_id         text NOT NULL DEFAULT '',
    first_seen_at     timestamptz NOT NULL,
    last_heartbeat_at timestamptz NOT NULL
);
CREATE INDEX workers_seen ON fencepost.workers (last_heartbeat_at);

-- First answers of calls that carried a request_id, until they are forgotten.
CREATE TABLE fencepost.requests (
    tenant_id  int NOT NULL,
    method     text NOT NULL,
    request_id text NOT NULL,
    body_hash  bytea NOT NULL,
    response   bytea NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, method, request_id)
);
CREATE INDEX requests_expiry ON fencepost.requests (expires_at);

-- What a ClaimRuns or LeaseRun call with a request_id handed out, for a lease.
CREATE TABLE fencepost.claim_requests (
    request_id    text PRIMARY KEY,
    worker_id     uuid NOT NULL,
    body_hash     bytea NOT NULL,
    job_ids       uuid[] NOT NULL DEFAULT '{}',
    scheduled_ats timestamptz[] NOT NULL DEFAULT '{}',
    attempts      int[] NOT NULL DEFAULT '{}',
    expires_at    timestamptz NOT NULL
);
CREATE INDEX claim_requests_expiry ON fencepost.claim_requests (expires_at);

-- One row per database: what reapers and retention must agree on.
CREATE TABLE fencepost.shard_state (
    only_row        boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- When heartbeats were last known to be storable, and until when no lease may expire.
    heartbeats_at   timestamptz NOT NULL,
    no_reap_until   timestamptz NOT NULL,
    -- No run is made for an instant before it: its history may be gone.
    retention_floor timestamptz NOT NULL,
    -- The days that have history tables; ends of other days are strays.
    history_from    timestamptz NOT NULL DEFAULT 'epoch',
    history_until   timestamptz NOT NULL DEFAULT 'epoch',
    tzdata_version  text NOT NULL DEFAULT '',
    -- Signs page tokens, so that they cannot be made up.
    page_token_key  bytea NOT NULL
);
INSERT INTO fencepost.shard_state (heartbeats_at, no_reap_until, retention_floor, page_token_key)
VALUES (fencepost.clock(), fencepost.clock(), fencepost.clock() - interval '30 days',
        decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

INSERT INTO fencepost.tenants (name, created_at, updated_at)
VALUES ('default', fencepost.clock(), fencepost.clock());
INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
SELECT tenant_id, 'default', created_at, created_at FROM fencepost.tenants WHERE name = 'default';

-- Caps -----------------------------------------------------------------------------------------
-- No counter is stored, so none drifts: a claim takes an advisory lock for each scope in
-- ascending order, counts open attempts in the NEXT statement (one statement would count with a
-- snapshot older than its lock), and claims what is left. All in functions, so that a frozen
-- client holds no lock.

CREATE FUNCTION fencepost.lock_caps(the_queue int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    the_tenant int;
BEGIN
    SELECT t.tenant_id INTO the_tenant
    FROM fencepost.queues q JOIN fencepost.tenants t USING (tenant_id)
    WHERE q.queue_id = the_queue;
    -- The tenant's lock covers all scopes inside it; claims under caps are rare and short.
    PERFORM pg_advisory_xact_lock(61, the_tenant);
END $$;

CREATE FUNCTION fencepost.cap_room(the_queue int, the_job uuid, job_cap int, the_key text)
RETURNS int LANGUAGE sql STABLE AS $$
    WITH scope AS (
        SELECT q.queue_id, q.max_in_flight AS queue_cap, q.max_in_flight_per_key AS key_cap,
               t.max_in_flight AS tenant_cap,
               ARRAY(SELECT s.queue_id FROM fencepost.queues s WHERE s.tenant_id = t.tenant_id) AS siblings
        FROM fencepost.queues q JOIN fencepost.tenants t USING (tenant_id)
        WHERE q.queue_id = the_queue
    )
    SELECT least(
        CASE WHEN tenant_cap IS NOT NULL THEN tenant_cap - (
            SELECT count(*)::int FROM fencepost.run_queue r
            WHERE r.attempt_open AND r.queue_id = ANY (siblings)) END,
        CASE WHEN queue_cap IS NOT NULL THEN queue_cap - (
            SELECT count(*)::int FROM fencepost.run_queue r
            WHERE r.attempt_open AND r.queue_id = the_queue) END,
        CASE WHEN job_cap IS NOT NULL THEN job_cap - (
            SELECT count(*)::int FROM fencepost.run_queue r
            WHERE r.attempt_open AND r.queue_id = ANY (siblings) AND r.job_id = the_job) END,
        CASE WHEN key_cap IS NOT NULL AND the_key IS NOT NULL THEN key_cap - (
            SELECT count(*)::int FROM fencepost.run_queue r
            WHERE r.attempt_open AND r.queue_id = the_queue AND r.concurrency_key = the_key) END)
    FROM scope
$$;

CREATE FUNCTION fencepost.claim_capped_runs(
    the_queue int, the_kinds int[], the_priorities smallint[], the_workers uuid[], runs_max int,
    ageing_s int, the_now timestamptz)
RETURNS TABLE (place bigint, job_id uuid, scheduled_at timestamptz, attempt int, kind_id int,
               version int, lease_s smallint, failure_count int, payload bytea, labels jsonb,
               progress bytea, last_failure bytea, serial boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    room int;
    key_cap int;
    siblings int[];
    full_jobs uuid[];
    full_keys text[];
BEGIN
    IF NOT fencepost.clock_agrees(the_now) THEN
        RETURN;
    END IF;
    PERFORM fencepost.lock_caps(the_queue);
    -- From here on each statement has a snapshot newer than the lock.
    IF (SELECT q.paused FROM fencepost.queues q WHERE q.queue_id = the_queue) THEN
        RETURN;
    END IF;
    room := least(runs_max, fencepost.cap_room(the_queue, NULL, NULL, NULL));
    SELECT q.max_in_flight_per_key,
           ARRAY(SELECT s.queue_id FROM fencepost.queues s WHERE s.tenant_id = q.tenant_id)
    INTO key_cap, siblings
    FROM fencepost.queues q WHERE q.queue_id = the_queue;
    SELECT array_agg(x.job_id) INTO full_jobs FROM (
        SELECT r.job_id FROM fencepost.run_queue r
        WHERE r.attempt_open AND r.queue_id = ANY (siblings) AND r.max_in_flight IS NOT NULL
        GROUP BY r.job_id HAVING count(*) >= min(r.max_in_flight)) x;
    SELECT array_agg(x.concurrency_key) INTO full_keys FROM (
        SELECT r.concurrency_key FROM fencepost.run_queue r
        WHERE r.attempt_open AND r.queue_id = the_queue AND r.concurrency_key IS NOT NULL
        GROUP BY r.concurrency_key HAVING count(*) >= key_cap) x;
    RETURN QUERY
    WITH found AS MATERIALIZED (
        SELECT f.*
        FROM (
            SELECT r.*, r.available_at - l.priority * ageing_s * interval '1 second' AS rank_at
            FROM unnest(the_kinds, the_priorities) AS l (kind_id, priority)
            CROSS JOIN LATERAL (
                SELECT q.ctid AS tid, q.job_id, q.available_at, q.max_in_flight, q.concurrency_key,
                       q.attempt AS lost_attempt, q.attempt_open AS was_open,
                       q.worker_id AS lost_worker_id, q.claimed_at AS lost_claimed_at
                FROM fencepost.run_queue q
                WHERE q.queue_id = the_queue AND q.kind_id = l.kind_id
                  AND q.priority = l.priority AND q.state IN ('queued', 'retrying')
                  AND q.available_at <= the_now
                  -- An open attempt has its place already; claiming it again takes no more.
                  AND (q.attempt_open OR (q.job_id <> ALL (coalesce(full_jobs, '{}'))
                       AND (q.concurrency_key IS NULL
                            OR q.concurrency_key <> ALL (coalesce(full_keys, '{}')))))
                ORDER BY q.available_at
                LIMIT runs_max * 4
                FOR UPDATE SKIP LOCKED
            ) r
        ) f
    ), counted AS (
        SELECT f.*,
               count(*) FILTER (WHERE NOT f.was_open)
                   OVER (PARTITION BY f.job_id ORDER BY f.rank_at, f.tid) AS of_job,
               count(*) FILTER (WHERE NOT f.was_open)
                   OVER (PARTITION BY f.concurrency_key ORDER BY f.rank_at, f.tid) AS of_key
        FROM found f
    ), fitting AS (
        SELECT c.*, count(*) FILTER (WHERE NOT c.was_open) OVER (ORDER BY c.rank_at, c.tid) AS of_all
        FROM counted c
        WHERE c.was_open
           OR ((c.max_in_flight IS NULL OR c.of_job + (
                   SELECT count(*) FROM fencepost.run_queue r
                   WHERE r.attempt_open AND r.queue_id = ANY (siblings) AND r.job_id = c.job_id)
                   <= c.max_in_flight)
               AND (key_cap IS NULL OR c.concurrency_key IS NULL OR c.of_key + (
                   SELECT count(*) FROM fencepost.run_queue r
                   WHERE r.attempt_open AND r.queue_id = the_queue
                     AND r.concurrency_key = c.concurrency_key) <= key_cap))
    ), candidates AS MATERIALIZED (
        SELECT p.* FROM (
            SELECT t.*, row_number() OVER (ORDER BY t.rank_at, t.tid) AS place
            FROM fitting t WHERE t.was_open OR t.of_all <= room) p
        WHERE p.place <= runs_max
    ), claimed AS (
        UPDATE fencepost.run_queue q
        SET state = 'running',
            attempt = q.attempt + 1,
            attempt_open = true,
            lease_until = the_now + q.lease_s * interval '1 second',
            claimed_at = the_now,
            first_claimed_at = coalesce(q.first_claimed_at, the_now),
            undelivered = false,
            worker_id = the_workers[c.place]
        FROM candidates c
        WHERE q.ctid = c.tid AND q.job_id = c.job_id
        RETURNING c.place, c.was_open, c.lost_attempt, c.lost_worker_id, c.lost_claimed_at,
                  q.job_id, q.scheduled_at, q.attempt, q.kind_id, q.version, q.lease_s,
                  q.failure_count, q.payload, q.labels, q.progress, q.last_failure, q.serial
    ), closed AS (
        INSERT INTO fencepost.run_attempts
            (job_id, scheduled_at, attempt, outcome, worker_id, claimed_at, ended_at)
        SELECT c.job_id, c.scheduled_at, c.lost_attempt, 'lease_expired', c.lost_worker_id,
               c.lost_claimed_at, the_now
        FROM claimed c WHERE c.was_open
    )
    SELECT c.place, c.job_id, c.scheduled_at, c.attempt, c.kind_id, c.version, c.lease_s,
           c.failure_count, c.payload, c.labels, c.progress, c.last_failure, c.serial
    FROM claimed c;
END $$;
