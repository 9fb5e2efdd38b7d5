-- name: read_waiting_run
-- A run that waits, with the limits over it and how its newest attempt ended.
SELECT q.state, q.tenant_id, q.queue_id, q.priority, q.available_at, q.attempt, q.attempt_open,
       q.concurrency_key, q.max_in_flight AS job_cap, u.paused, u.pause_reason,
       q.parked, u.max_in_flight AS queue_cap, u.max_in_flight_per_key AS key_cap,
       t.max_in_flight AS tenant_cap, u.rate_limit,
       -- What a claim would find in the bucket now, a whole token for each run.
       fencepost.tokens_at(u.queue_id, fencepost.clock()) AS tokens,
       (SELECT a.outcome FROM fencepost.run_attempts AS a
        WHERE a.job_id = q.job_id AND a.scheduled_at = q.scheduled_at AND a.attempt = q.attempt
          AND a.ended_at >= coalesce(q.claimed_at, q.created_at)
        ORDER BY a.ended_at DESC LIMIT 1) AS last_outcome
FROM fencepost.run_queue AS q
JOIN fencepost.queues AS u ON u.queue_id = q.queue_id
JOIN fencepost.tenants AS t ON t.tenant_id = q.tenant_id
WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at
  AND q.state IN ('queued', 'blocked', 'retrying');

-- name: count_parked_ahead
-- Parked runs of a tenant that are released before one, counted up to @runs_max.
SELECT count(*) AS ahead
FROM (
    SELECT FROM fencepost.run_queue AS q
    WHERE q.tenant_id = @tenant_id AND q.parked
      -- The index ends here; what follows is not looked at.
      AND q.scheduled_at >= @scheduled_at
      AND (q.scheduled_at > @scheduled_at OR q.job_id < @job_id)
    ORDER BY q.scheduled_at DESC, q.job_id
    LIMIT @runs_max
) AS x;

-- name: places_taken
-- The open attempts of each scope of a run and the ten that have held their places longest.
-- Without a tenant's or a job's cap only the run's own queue is looked at.
WITH open AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at, q.queue_id, q.concurrency_key, q.claimed_at
    FROM fencepost.run_queue AS q
    WHERE q.attempt_open
      AND q.queue_id = ANY (ARRAY(SELECT u.queue_id FROM fencepost.queues AS u
                                  WHERE CASE WHEN @all_queues THEN u.tenant_id = @tenant_id
                                             ELSE u.queue_id = @queue_id END))
), scoped AS (
    SELECT 'tenant' AS scope, o.* FROM open AS o
    UNION ALL
    SELECT 'queue', o.* FROM open AS o WHERE o.queue_id = @queue_id
    UNION ALL
    SELECT 'job', o.* FROM open AS o WHERE o.job_id = @job_id::uuid
    UNION ALL
    SELECT 'key', o.* FROM open AS o
    WHERE o.queue_id = @queue_id AND o.concurrency_key = @concurrency_key::text
), placed AS (
    SELECT s.*, row_number() OVER (PARTITION BY s.scope ORDER BY s.claimed_at, s.job_id) AS place,
           count(*) OVER (PARTITION BY s.scope) AS used
    FROM scoped AS s
)
SELECT p.scope, p.used, p.scheduled_at,
       CASE WHEN j.deleted_at IS NULL THEN j.name ELSE j.job_id::text END AS job
FROM placed AS p
JOIN fencepost.jobs AS j ON j.job_id = p.job_id
WHERE p.place <= 10
ORDER BY p.scope, p.place;

-- name: count_runs_ahead
-- Claimable runs of a queue that a claim takes before one, of some kinds (no kinds: of all):
-- by lanes, so that no more than @runs_max rows are looked at.
WITH RECURSIVE lanes AS (
    (SELECT q.kind_id, q.priority
     FROM fencepost.run_queue AS q
     WHERE q.state IN ('queued', 'retrying') AND q.queue_id = @queue_id
     ORDER BY q.queue_id, q.kind_id, q.priority
     LIMIT 1)
    UNION ALL
    SELECT n.kind_id, n.priority
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT q.kind_id, q.priority
        FROM fencepost.run_queue AS q
        WHERE q.state IN ('queued', 'retrying') AND q.queue_id = @queue_id
          AND (q.queue_id, q.kind_id, q.priority) > (@queue_id, l.kind_id, l.priority)
        ORDER BY q.queue_id, q.kind_id, q.priority
        LIMIT 1
    ) AS n
), taken AS MATERIALIZED (
    SELECT l.kind_id, l.priority,
           @available_at::timestamptz
               + (l.priority - @priority::int) * @ageing_s * interval '1 second' AS bound
    FROM (SELECT * FROM lanes LIMIT @lanes_max) AS l
    WHERE @kinds::text[] IS NULL
       OR l.kind_id IN (SELECT k.kind_id FROM fencepost.kinds AS k WHERE k.name = ANY (@kinds))
)
SELECT count(*) AS ahead
FROM (
    SELECT
    FROM taken AS l
    CROSS JOIN LATERAL (
        SELECT FROM fencepost.run_queue AS q
        WHERE q.queue_id = @queue_id AND q.kind_id = l.kind_id AND q.priority = l.priority
          AND q.state IN ('queued', 'retrying')
          AND q.available_at <= least(@now, l.bound)
          AND (q.available_at < l.bound OR q.scheduled_at < @scheduled_at)
        ORDER BY q.available_at
        LIMIT @runs_max
    ) AS r
    LIMIT @runs_max
) AS x;

-- name: listening_workers
-- Workers that take runs of a tenant and were heard of lately, the newest first.
SELECT w.state, w.subscriptions, w.slots, w.held_runs, w.free_credits
FROM fencepost.workers AS w
WHERE w.last_heartbeat_at > @since AND w.state IN ('ready', 'polling')
  AND @tenant_id = ANY (w.tenant_ids)
ORDER BY w.last_heartbeat_at DESC
LIMIT @workers_max;
