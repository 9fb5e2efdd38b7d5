-- The outbox of an application: a row is a run that the application wants, written in the same
-- transaction as its own data. `fencepost relay` makes the run and deletes the row.
CREATE TABLE IF NOT EXISTS fencepost_outbox (
    -- Names the run to the server, so that a row that is sent twice makes one run.
    id              uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    -- NULL: the tenant that the relay was started with.
    tenant          text,
    job             text        NOT NULL CHECK (job <> ''),
    -- NULL: the job's payload. Kept byte for byte, at most 256 KiB.
    payload         json        CHECK (octet_length(payload::text) <= 262144),
    -- {"team": "web"}; NULL: the job's labels only.
    labels          jsonb       CHECK (jsonb_typeof(labels) = 'object'),
    -- NULL: now.
    run_at          timestamptz CHECK (isfinite(run_at)),
    -- 0 to 9. NULL: the job's.
    priority        smallint    CHECK (priority BETWEEN 0 AND 9),
    concurrency_key text        CHECK (octet_length(concurrency_key) <= 128),
    -- A business key: while a run of the job holds it, no second one is made. NULL: the row's id.
    unique_key      text        CHECK (octet_length(unique_key) BETWEEN 1 AND 256),
    -- How long unique_key stays taken after the run's end. NULL: 24 hours.
    unique_keep_for interval    CHECK (unique_keep_for BETWEEN '0' AND '30 days'),
    -- W3C trace context of the request that wrote the row.
    traceparent     text,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The rest is the relay's.
    next_try_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    tries           integer     NOT NULL DEFAULT 0,
    -- Set: the server will never take this row, and `failure` says why.
    failed_at       timestamptz,
    failure         text
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

CREATE INDEX IF NOT EXISTS fencepost_outbox_due
    ON fencepost_outbox (next_try_at, id) WHERE failed_at IS NULL;
