-- name: lock_schedules
-- Scheduling state and newest definition of jobs, locked in key order.
SELECT s.job_id, s.next_run_at, s.last_scheduled_at, s.end_at, s.fire_count, s.max_fires,
       s.awaits_end, s.has_calendars, s.tenant_id, s.queue_id, s.kind_id, s.version,
       s.max_in_flight, s.overlap, s.priority,
       s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, s.paused, s.concurrency_key,
       s.partition_id, j.name, t.name AS tenant_name, v.spec
FROM fencepost.job_schedules AS s
JOIN fencepost.jobs AS j ON j.job_id = s.job_id
JOIN fencepost.tenants AS t ON t.tenant_id = s.tenant_id
JOIN fencepost.job_versions AS v ON v.job_id = s.job_id AND v.version = s.version
WHERE s.job_id = ANY (@job_ids::uuid[])
ORDER BY s.job_id
FOR UPDATE OF s;

-- name: lock_free_schedules
-- As lock_schedules, leaving out what another transaction holds: for the owner's own pace.
SELECT s.job_id, s.next_run_at, s.last_scheduled_at, s.end_at, s.fire_count, s.max_fires,
       s.awaits_end, s.has_calendars, s.tenant_id, s.queue_id, s.kind_id, s.version,
       s.max_in_flight, s.overlap, s.priority,
       s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, s.paused, s.concurrency_key,
       s.partition_id, j.name, t.name AS tenant_name, v.spec
FROM fencepost.job_schedules AS s
JOIN fencepost.jobs AS j ON j.job_id = s.job_id
JOIN fencepost.tenants AS t ON t.tenant_id = s.tenant_id
JOIN fencepost.job_versions AS v ON v.job_id = s.job_id AND v.version = s.version
WHERE s.job_id = ANY (@job_ids::uuid[])
ORDER BY s.job_id
FOR UPDATE OF s SKIP LOCKED;

-- name: count_live_runs
-- Due live runs of locked jobs, read in a statement after the lock.
SELECT q.job_id,
       count(*) FILTER (WHERE q.state <> 'blocked') AS unblocked,
       count(*) FILTER (WHERE q.state <> 'blocked' AND q.origin <> 'backfill') AS regular,
       count(*) FILTER (WHERE q.state = 'blocked' AND q.origin <> 'backfill') AS waiting,
       count(*) FILTER (WHERE q.parked AND q.attempt = 0) AS parked
FROM fencepost.run_queue AS q
WHERE q.job_id = ANY (@job_ids::uuid[]) AND q.scheduled_at <= @now
GROUP BY q.job_id;

-- name: free_parked_runs
-- The newest parked run of each of these locked jobs gets the place of a fire that gave way to
-- it; the times that count from available_at move along. One that is locked is being released
-- or ended.
WITH newest AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at
    FROM unnest(@job_ids::uuid[]) AS j (job_id)
    CROSS JOIN LATERAL (
        SELECT x.job_id, x.scheduled_at
        FROM fencepost.run_queue AS x
        WHERE x.job_id = j.job_id AND x.scheduled_at <= @now AND x.parked AND x.attempt = 0
        ORDER BY x.scheduled_at DESC
        LIMIT 1
        FOR UPDATE SKIP LOCKED
    ) AS q
)
UPDATE fencepost.run_queue AS q
SET parked = false,
    available_at = @now,
    wait_until = q.wait_until + (@now - q.available_at),
    total_until = q.total_until + (@now - q.available_at)
FROM newest AS n
WHERE q.job_id = n.job_id AND q.scheduled_at = n.scheduled_at AND q.parked AND q.attempt = 0
RETURNING q.queue_id, q.kind_id, q.priority;

-- name: insert_fires
-- Moves: T1 T2 make ( -> queued, blocked).
-- Runs of fires that needed thought. A key that is taken was fired already.
-- What fell due in an outage is parked, unless it waits for another run.
WITH made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
         origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, serial, max_in_flight,
         concurrency_key, queue_timeout_s, wait_until, total_until, parked)
    SELECT f.job_id, f.scheduled_at, a.free_at, @now, s.tenant_id, s.queue_id, s.kind_id, s.version, f.state::fencepost.run_state,
           f.origin::fencepost.run_origin,
           s.priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, f.serial, s.max_in_flight,
           s.concurrency_key, s.queue_timeout_s,
           a.free_at + s.queue_timeout_s * interval '1 second',
           a.free_at + s.total_timeout_s * interval '1 second', p.parks
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @states::text[], @origins::text[],
                @serials::boolean[], @following_ats::timestamptz[])
             AS f (job_id, scheduled_at, state, origin, serial, following_at)
    JOIN fencepost.job_schedules AS s ON s.job_id = f.job_id
    CROSS JOIN LATERAL (
        SELECT fencepost.jittered(f.job_id, f.scheduled_at, s.jitter_s, f.following_at) AS ready_at
    ) AS j
    CROSS JOIN LATERAL (
        SELECT f.scheduled_at < @parked_before AND f.state = 'queued' AND j.ready_at <= @now AS parks
    ) AS p
    CROSS JOIN LATERAL (
        SELECT CASE WHEN p.parks THEN @parked_until ELSE greatest(j.ready_at, @now) END AS free_at
    ) AS a
    ORDER BY f.job_id, f.scheduled_at
    ON CONFLICT (job_id, scheduled_at) DO NOTHING
    RETURNING job_id, scheduled_at, queue_id, kind_id, priority
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM made
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, queue_id, kind_id, priority FROM made;

-- name: advance_schedules
-- Moves locked jobs past what was decided.
UPDATE fencepost.job_schedules AS s
SET last_scheduled_at = a.last_scheduled_at,
    next_run_at = a.next_run_at,
    awaits_end = a.awaits_end,
    fire_count = s.fire_count + a.fires
FROM unnest(@job_ids::uuid[], @last_scheduled_ats::timestamptz[], @next_run_ats::timestamptz[],
            @awaits_ends::boolean[], @fires::bigint[])
         AS a (job_id, last_scheduled_at, next_run_at, awaits_end, fires)
WHERE s.job_id = a.job_id;

-- name: extend_skips
-- A stretch that goes on: the newest fire decided before was skipped for the same reason.
UPDATE fencepost.fire_skips AS k
SET last_at = e.last_at, decided_at = @now
FROM unnest(@job_ids::uuid[], @reasons::text[], @follow_ats::timestamptz[],
            @last_ats::timestamptz[], @versions::int[]) AS e (job_id, reason, follow_at, last_at, version)
WHERE k.job_id = e.job_id AND k.reason = e.reason::fencepost.skip_reason
  AND k.last_at = e.follow_at AND k.version = e.version AND k.stand_in_at IS NULL
RETURNING k.job_id;

-- name: insert_skips
-- Stretches of fires that made no run.
INSERT INTO fencepost.fire_skips (job_id, first_at, last_at, reason, stand_in_at, version, decided_at)
SELECT s.job_id, s.first_at, s.last_at, s.reason::fencepost.skip_reason, s.stand_in_at, s.version,
       @now
FROM unnest(@job_ids::uuid[], @first_ats::timestamptz[], @last_ats::timestamptz[],
            @reasons::text[], @stand_in_ats::timestamptz[], @versions::int[])
         AS s (job_id, first_at, last_at, reason, stand_in_at, version)
ON CONFLICT (job_id, first_at, reason) DO NOTHING;

-- name: runs_to_cancel
-- Live runs of jobs that a cancel reaches, locked in key order; fires only, or all.
SELECT q.job_id, q.scheduled_at, q.attempt, q.state, q.failure_count, q.lost_lease_count,
       q.attempt_open, q.worker_id, q.claimed_at, q.cancel_grace_s, q.cancel_cause, q.cancel_reason
FROM fencepost.run_queue AS q
WHERE q.job_id = ANY (@job_ids::uuid[]) AND q.scheduled_at <= @until
  AND (@with_enqueued OR q.origin <> 'enqueue')
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE;

-- name: run_to_cancel
-- One live run, locked.
SELECT q.job_id, q.scheduled_at, q.attempt, q.state, q.failure_count, q.lost_lease_count,
       q.attempt_open, q.worker_id, q.claimed_at, q.cancel_grace_s, q.cancel_cause, q.cancel_reason
FROM fencepost.run_queue AS q
WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at
FOR UPDATE;

-- name: request_cancel
-- Moves: T6 heartbeat (running -> running).
-- Asks running attempts to stop; after the grace the reaper ends them. Asked before: the
-- earlier deadline stands unless the new one is sooner.
WITH asked AS (
    UPDATE fencepost.run_queue AS q
    SET cancel_requested = true,
        cancel_cause = coalesce(q.cancel_cause, @cause::text::fencepost.cancel_cause),
        cancel_reason = coalesce(q.cancel_reason, @reason),
        cancel_by = least(q.cancel_by,
                          @now::timestamptz + coalesce(@grace::bigint * interval '1 microsecond',
                                                       q.cancel_grace_s * interval '1 second'))
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
    WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at AND q.state = 'running'
    RETURNING q.job_id, q.scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM asked
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at FROM asked;
