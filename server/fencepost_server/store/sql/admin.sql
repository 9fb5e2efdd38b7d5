-- name: insert_tenant
-- A tenant and its queue "default". No row: the name is taken.
WITH made AS (
    INSERT INTO fencepost.tenants
        (name, display_name, labels, max_in_flight, weight, default_retry_policy, created_at,
         updated_at)
    VALUES (@name, @display_name, @labels::jsonb, @max_in_flight, @weight,
            @default_retry_policy::jsonb, @now, @now)
    ON CONFLICT (name) DO NOTHING
    RETURNING *
), first_queue AS (
    INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
    SELECT tenant_id, 'default', @now, @now FROM made
)
SELECT * FROM made;

-- name: read_tenant
SELECT * FROM fencepost.tenants WHERE name = @name;

-- name: lock_tenant
SELECT * FROM fencepost.tenants WHERE name = @name FOR UPDATE;

-- name: list_tenants
SELECT * FROM fencepost.tenants
WHERE @after::text IS NULL OR name > @after
ORDER BY name LIMIT @page_max;

-- name: update_tenant
UPDATE fencepost.tenants
SET display_name = @display_name, labels = @labels::jsonb, max_in_flight = @max_in_flight,
    weight = @weight, default_retry_policy = @default_retry_policy::jsonb,
    revision = revision + 1, updated_at = @now
WHERE name = @name
RETURNING *;

-- name: insert_queue
-- No row: the name is taken.
INSERT INTO fencepost.queues
    (tenant_id, name, labels, paused, pause_reason, max_in_flight, max_in_flight_per_key,
     rate_limit, created_at, updated_at)
VALUES (@tenant_id, @name, @labels::jsonb, @paused, @pause_reason, @max_in_flight,
        @max_in_flight_per_key, @rate_limit, @now, @now)
ON CONFLICT (tenant_id, name) DO NOTHING
RETURNING *;

-- name: read_queue
SELECT * FROM fencepost.queues WHERE tenant_id = @tenant_id AND name = @name;

-- name: lock_queue
SELECT * FROM fencepost.queues WHERE tenant_id = @tenant_id AND name = @name FOR UPDATE;

-- name: list_queues
SELECT * FROM fencepost.queues
WHERE tenant_id = @tenant_id AND (@after::text IS NULL OR name > @after)
ORDER BY name LIMIT @page_max;

-- name: hold_claims
-- Before limits of a queue change: claims that count wait for the commit, and the tokens that
-- the old rate has given so far are written down.
SELECT fencepost.lock_caps(@queue_id), fencepost.take_tokens(@queue_id, 0);

-- name: queue_stats
-- What queues hold, each number counted up to a bound: live runs lane by lane, so that only what
-- is counted is read.
WITH RECURSIVE lanes AS (
    SELECT u.queue_id, f.kind_id, f.priority, f.available_at
    FROM unnest(@queue_ids::int[]) AS u (queue_id)
    CROSS JOIN LATERAL (
        SELECT q.kind_id, q.priority, q.available_at
        FROM fencepost.run_queue AS q
        WHERE q.state IN ('queued', 'retrying') AND q.queue_id = u.queue_id
        ORDER BY q.kind_id, q.priority, q.available_at
        LIMIT 1
    ) AS f
    UNION ALL
    SELECT l.queue_id, n.kind_id, n.priority, n.available_at
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT q.kind_id, q.priority, q.available_at
        FROM fencepost.run_queue AS q
        WHERE q.state IN ('queued', 'retrying') AND q.queue_id = l.queue_id
          AND (q.kind_id, q.priority) > (l.kind_id, l.priority)
        ORDER BY q.kind_id, q.priority, q.available_at
        LIMIT 1
    ) AS n
), bounds AS (
    SELECT queue_id, greatest(1, @count_max / count(*)) AS lane_max FROM lanes GROUP BY queue_id
), waiting AS (
    SELECT l.queue_id, sum(r.n)::bigint AS ready, sum(d.delayed)::bigint AS delayed,
           sum(d.retrying)::bigint AS retrying, min(l.available_at) AS oldest_at
    FROM lanes AS l
    JOIN bounds AS b ON b.queue_id = l.queue_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM (
            SELECT FROM fencepost.run_queue AS q
            WHERE q.state IN ('queued', 'retrying') AND q.queue_id = l.queue_id
              AND q.kind_id = l.kind_id AND q.priority = l.priority AND q.available_at <= @now
            LIMIT b.lane_max) AS c
    ) AS r
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE c.state = 'queued') AS delayed,
               count(*) FILTER (WHERE c.state = 'retrying') AS retrying
        FROM (
            SELECT q.state FROM fencepost.run_queue AS q
            WHERE q.state IN ('queued', 'retrying') AND q.queue_id = l.queue_id
              AND q.kind_id = l.kind_id AND q.priority = l.priority AND q.available_at > @now
            LIMIT b.lane_max) AS c
    ) AS d
    GROUP BY l.queue_id
)
SELECT u.queue_id, coalesce(w.ready, 0) AS ready, coalesce(w.delayed, 0) AS delayed,
       coalesce(w.retrying, 0) AS retrying, w.oldest_at,
       (SELECT count(*) FROM (
            SELECT FROM fencepost.run_queue AS q
            WHERE q.queue_id = u.queue_id AND q.state = 'blocked' LIMIT @count_max) AS c) AS blocked,
       (SELECT count(*) FROM (
            SELECT FROM fencepost.run_queue AS q
            WHERE q.queue_id = u.queue_id AND q.attempt_open AND q.state = 'running'
            LIMIT @count_max) AS c) AS running,
       (SELECT count(*) FROM (
            SELECT FROM fencepost.dead_letters AS d
            WHERE d.queue_id = u.queue_id AND d.discarded_at IS NULL LIMIT @count_max) AS c) AS dead
FROM unnest(@queue_ids::int[]) AS u (queue_id)
LEFT JOIN waiting AS w ON w.queue_id = u.queue_id;

-- name: update_queue
UPDATE fencepost.queues
SET labels = @labels::jsonb, paused = @paused, pause_reason = @pause_reason,
    max_in_flight = @max_in_flight, max_in_flight_per_key = @max_in_flight_per_key,
    rate_limit = @rate_limit, revision = revision + 1, updated_at = @now
WHERE tenant_id = @tenant_id AND name = @name
RETURNING *;

-- name: read_worker
SELECT * FROM fencepost.workers WHERE worker_id = @worker_id::uuid;

-- name: list_workers
-- Newest heartbeat first; those silent for longer than an hour are left out.
SELECT * FROM fencepost.workers
WHERE last_heartbeat_at > @since
  AND (@tenant_id::int IS NULL OR @tenant_id = ANY (tenant_ids))
  AND (@before_at::timestamptz IS NULL
       OR (last_heartbeat_at, worker_id) < (@before_at, @before_id::uuid))
ORDER BY last_heartbeat_at DESC, worker_id DESC
LIMIT @page_max;
