-- The outbox in an application's own database, as outbox_table.sql makes it. Nothing here touches
-- the schema of the server, and the search path of the connection finds the table.

-- name: bound_outbox_transaction
-- Rows stay locked while the server is asked; a relay that freezes must not keep them for ever.
-- Set for this transaction only, because a pooler may share the connection.
SELECT
    set_config('idle_in_transaction_session_timeout', '60000', true),
    set_config('statement_timeout', '30000', true);

-- name: take_outbox
-- The rows that are due, oldest first, locked until the transaction ends. Rows that another relay
-- holds are left to it. Fewer than asked for if their payloads are large.
WITH due AS MATERIALIZED (
    SELECT o.*
    FROM fencepost_outbox AS o
    WHERE o.failed_at IS NULL AND o.next_try_at <= clock_timestamp()
    ORDER BY o.next_try_at, o.id
    LIMIT @rows_max
    FOR UPDATE SKIP LOCKED
), sized AS (
    SELECT
        d.*,
        sum(coalesce(octet_length(d.payload::text), 0) + coalesce(octet_length(d.labels::text), 0))
            OVER (ORDER BY d.next_try_at, d.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
            AS bytes_before
    FROM due AS d
)
SELECT
    s.id::text AS id,
    s.tenant,
    s.job,
    s.payload::text AS payload,
    s.labels::text AS labels,
    -- The server says best that this is no instant.
    CASE
        WHEN NOT isfinite(s.run_at) THEN 9000000000000000
        ELSE (extract(epoch FROM s.run_at) * 1000000)::bigint
    END AS run_at,
    s.priority::integer AS priority,
    s.concurrency_key,
    s.unique_key,
    (extract(epoch FROM s.unique_keep_for) * 1000000)::bigint AS unique_keep_for,
    s.traceparent
FROM sized AS s
WHERE coalesce(s.bytes_before, 0) < @bytes_max
ORDER BY s.next_try_at, s.id;

-- name: delete_outbox
-- Their runs are there.
DELETE FROM fencepost_outbox WHERE id = ANY(@ids::text[]::uuid[]);

-- name: fail_outbox
-- The server will never take them; they wait for a person.
UPDATE fencepost_outbox AS o
SET failed_at = clock_timestamp(), tries = o.tries + 1, failure = f.failure
FROM unnest(@ids::text[]::uuid[], @failures::text[]) AS f (id, failure)
WHERE o.id = f.id;

-- name: put_off_outbox
-- The server does not take them now: behind the others, each time for longer, up to a minute.
UPDATE fencepost_outbox AS o
SET
    next_try_at = clock_timestamp()
        + least(power(2, least(o.tries, 6)), 60) * (0.5 + random() / 2) * interval '1 second',
    tries = o.tries + 1,
    failure = f.failure
FROM unnest(@ids::text[]::uuid[], @failures::text[]) AS f (id, failure)
WHERE o.id = f.id;
