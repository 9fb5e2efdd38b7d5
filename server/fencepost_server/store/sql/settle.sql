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
       count(*) FILTER (WHERE q.state = 'blocked' AND q.origin <> 'backfill') AS waiting
FROM fencepost.run_queue AS q
WHERE q.job_id = ANY (@job_ids::uuid[]) AND q.scheduled_at <= @now
GROUP BY q.job_id;

-- name: insert_fires
-- Moves: T1 T2 make ( -> queued, blocked).
-- Runs of fires that needed thought. A key that is taken was fired already.
-- The governor paces late ones that do not wait for another run, the newest first.
WITH fires AS MATERIALIZED (
    SELECT f.*, t.tenant_id, f.origin = 'catch_up' AS is_late,
           (@catch_up_rate::double precision > 0 AND f.state = 'queued'
            AND f.scheduled_at < @now::timestamptz - @paced_after_s * interval '1 second') AS is_paced
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @states::text[],
                @origins::text[], @serials::boolean[],
                @following_ats::timestamptz[])
             AS f (job_id, scheduled_at, state, origin, serial, following_at)
    JOIN fencepost.job_schedules AS t ON t.job_id = f.job_id
), behind AS MATERIALIZED (
    SELECT f.*,
           row_number() OVER (PARTITION BY f.tenant_id, f.is_late
                              ORDER BY f.scheduled_at DESC, f.job_id) - 1 AS place,
           CASE WHEN row_number() OVER (PARTITION BY f.tenant_id ORDER BY f.is_late) = 1
                THEN fencepost.take_places(
                    f.tenant_id,
                    count(*) FILTER (WHERE NOT f.is_late) OVER (PARTITION BY f.tenant_id),
                    count(*) FILTER (WHERE f.is_late) OVER (PARTITION BY f.tenant_id),
                    @catch_up_rate::double precision, @now) END AS given
    FROM fires AS f WHERE f.is_paced
), placed AS (
    SELECT f.*, NULL::bigint AS place, NULL::timestamptz[] AS given,
           NULL::timestamptz AS placed_at
    FROM fires AS f WHERE NOT f.is_paced
    UNION ALL
    SELECT b.*, (max(b.given) OVER (PARTITION BY b.tenant_id))
                    [CASE WHEN b.is_late THEN 2 ELSE 1 END]
                + b.place / @catch_up_rate * interval '1 second'
    FROM behind AS b
)
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, serial, max_in_flight,
     concurrency_key, queue_timeout_s, wait_until, total_until)
SELECT f.job_id, f.scheduled_at, a.free_at, @now, s.tenant_id, s.queue_id, s.kind_id, s.version, f.state::fencepost.run_state,
       f.origin::fencepost.run_origin,
       s.priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, f.serial, s.max_in_flight,
       s.concurrency_key, s.queue_timeout_s,
       a.free_at + s.queue_timeout_s * interval '1 second',
       a.free_at + s.total_timeout_s * interval '1 second'
FROM placed AS f
JOIN fencepost.job_schedules AS s ON s.job_id = f.job_id
CROSS JOIN LATERAL (
    SELECT greatest(fencepost.jittered(f.job_id, f.scheduled_at, s.jitter_s, f.following_at),
                    @now, f.placed_at) AS free_at
) AS a
ORDER BY f.job_id, f.scheduled_at
ON CONFLICT (job_id, scheduled_at) DO NOTHING
RETURNING job_id, scheduled_at, queue_id, kind_id, priority;

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
       q.attempt_open, q.serial, q.worker_id, q.claimed_at
FROM fencepost.run_queue AS q
WHERE q.job_id = ANY (@job_ids::uuid[]) AND q.scheduled_at <= @until
  AND (@with_enqueued OR q.origin <> 'enqueue')
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE;

-- name: run_to_cancel
-- One live run, locked.
SELECT q.job_id, q.scheduled_at, q.attempt, q.state, q.failure_count, q.lost_lease_count,
       q.attempt_open, q.serial, q.worker_id, q.claimed_at
FROM fencepost.run_queue AS q
WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at
FOR UPDATE;

-- name: request_cancel
-- Moves: T6 heartbeat (running -> running).
-- Asks running attempts to stop; after the grace the reaper ends them. Asked before: the
-- earlier deadline stands unless the new one is sooner.
UPDATE fencepost.run_queue AS q
SET cancel_requested = true,
    cancel_cause = coalesce(q.cancel_cause, @cause::text::fencepost.cancel_cause),
    cancel_reason = coalesce(q.cancel_reason, @reason),
    cancel_by = least(q.cancel_by,
                      @now::timestamptz + coalesce(@grace_s::int, q.cancel_grace_s) * interval '1 second')
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at AND q.state = 'running'
RETURNING q.job_id, q.scheduled_at;
