-- name: insert_operation
-- A change to many runs that any server carries on from here.
INSERT INTO fencepost.operations
    (operation_id, tenant_id, action, filter, reason, creator, rate, next_step_at, matched,
     created_at, job_id, version, since_at, until_at, allows_overlap, query, max_runs,
     stop_when_failing, use_newest_version)
VALUES (@operation_id::uuid, @tenant_id, @action::text::fencepost.operation_action, @filter,
        @reason, @creator, @rate, @now, @matched, @now, @job_id::uuid, @version, @since_at,
        @until_at, @allows_overlap, @query::jsonb, @max_runs, @stop_when_failing,
        @use_newest_version);

-- name: read_operation
-- One operation of a tenant, with what its runs have become. The runs of a backfill are those
-- of the job made while it was at work; of a replay what was counted, and what has ended since.
SELECT o.*, coalesce(r.ended, 0) AS changed_ended, coalesce(r.dead, 0) AS changed_dead
FROM fencepost.operations AS o
LEFT JOIN LATERAL (
    SELECT greatest(o.changed - (
               SELECT count(*) FROM fencepost.run_queue AS q
               WHERE q.job_id = o.job_id AND q.scheduled_at >= o.since_at
                 AND q.scheduled_at < o.until_at AND q.origin = 'backfill'
                 AND q.created_at >= o.started_at
                 AND q.created_at <= coalesce(o.ended_at, 'infinity')), 0) AS ended,
           (SELECT count(*) FROM fencepost.dead_letters AS d
            WHERE d.job_id = o.job_id AND d.scheduled_at >= o.since_at
              AND d.scheduled_at < o.until_at AND d.origin = 'backfill'
              AND d.created_at >= o.started_at
              AND d.created_at <= coalesce(o.ended_at, 'infinity')) AS dead
    WHERE o.action = 'backfill'
    UNION ALL
    SELECT o.ended_runs + count(*), o.dead_runs + count(*) FILTER (WHERE e.is_dead)
    FROM fencepost.ended_replays(o.operation_id) AS e
    WHERE o.action = 'replay'
    HAVING o.action = 'replay'
) AS r ON o.changed > 0
WHERE o.tenant_id = @tenant_id AND o.operation_id = @operation_id::uuid;

-- name: list_operations
-- Ids of one page, newest first; no states or no actions: all of them.
SELECT o.operation_id
FROM fencepost.operations AS o
WHERE o.tenant_id = @tenant_id
  AND (@before::uuid IS NULL OR o.operation_id < @before)
  AND (@states::text[] IS NULL OR o.state = ANY (@states::text[]::fencepost.operation_state[]))
  AND (@actions::text[] IS NULL OR o.action = ANY (@actions::text[]::fencepost.operation_action[]))
ORDER BY o.operation_id DESC
LIMIT @page_max;

-- name: stop_operation
-- Ends one that still goes on; waits for the step that is being taken.
UPDATE fencepost.operations AS o
SET state = 'stopped', stop_cause = 'requested', ended_at = @now
WHERE o.tenant_id = @tenant_id AND o.operation_id = @operation_id::uuid AND o.state = 'running';

-- name: lease_operation
-- One backfill that is due for its next step, locked until the step commits. Backfills of
-- one job take turns, the oldest first, so that each run is known to be of one of them.
SELECT o.operation_id, o.tenant_id, o.job_id, o.version, o.since_at, o.until_at, o.position_at,
       o.rate, o.next_step_at, o.allows_overlap, o.problems, o.created_at,
       t.name AS tenant_name, j.name AS job_name, j.created_at AS job_created_at, v.spec
FROM fencepost.operations AS o
JOIN fencepost.tenants AS t ON t.tenant_id = o.tenant_id
LEFT JOIN fencepost.jobs AS j ON j.job_id = o.job_id
LEFT JOIN fencepost.job_versions AS v ON v.job_id = o.job_id AND v.version = o.version
WHERE o.state = 'running' AND o.action = 'backfill' AND o.next_step_at <= @now
  AND fencepost.clock_agrees(@now)
  AND NOT EXISTS (SELECT FROM fencepost.operations AS e
                  WHERE e.job_id = o.job_id AND e.state = 'running' AND e.action = 'backfill'
                    AND e.operation_id < o.operation_id)
ORDER BY o.next_step_at
LIMIT 1
FOR UPDATE OF o SKIP LOCKED;

-- name: lease_bulk_operation
-- One cancel, replay or discard of many that is due for its next step, locked until the step
-- commits.
SELECT o.operation_id, o.tenant_id, o.action, o.job_id, o.query, o.position_at, o.position_id,
       o.rate, o.next_step_at, o.max_runs, o.changed, o.failed, o.stop_when_failing,
       o.use_newest_version, o.reason, o.problems, o.created_at, o.follow_at, o.ended_runs,
       o.dead_runs,
       j.deleted_at IS NOT NULL AS job_is_deleted
FROM fencepost.operations AS o
LEFT JOIN fencepost.jobs AS j ON j.job_id = o.job_id
WHERE o.state = 'running' AND o.action <> 'backfill' AND o.next_step_at <= @now
  AND fencepost.clock_agrees(@now)
ORDER BY o.next_step_at
LIMIT 1
FOR UPDATE OF o SKIP LOCKED;

-- name: advance_bulk_operation
-- Stores how far a step came, in the step's own transaction. At the end what was counted as a
-- match and is none any more has moved on meanwhile; above @counted_max nothing was counted.
UPDATE fencepost.operations AS o
SET position_at = coalesce(@position_at, o.position_at),
    position_id = coalesce(@position_id::uuid, o.position_id),
    next_step_at = @next_step_at,
    started_at = coalesce(o.started_at, @now),
    changed = o.changed + @changed,
    unchanged = o.unchanged + @unchanged + n.moved_on,
    failed = o.failed + @failed,
    matched = greatest(n.seen + n.moved_on,
                       CASE WHEN NOT @is_walked THEN o.matched ELSE 0 END),
    problems = @problems::jsonb,
    state = @state::text::fencepost.operation_state,
    stop_cause = @stop_cause::text::fencepost.stop_cause,
    ended_at = CASE WHEN @state::text <> 'running' THEN @now::timestamptz END,
    follow_at = CASE WHEN @follows THEN coalesce(o.follow_at, @now::timestamptz + interval '1 second')
                     ELSE o.follow_at END
FROM (
    SELECT x.operation_id, x.seen,
           CASE WHEN @is_walked AND x.matched < @counted_max
                THEN greatest(x.matched - x.seen, 0) ELSE 0 END AS moved_on
    FROM (
        SELECT p.operation_id, p.matched,
               p.changed + p.unchanged + p.failed + @changed + @unchanged + @failed AS seen
        FROM fencepost.operations AS p WHERE p.operation_id = @operation_id::uuid
    ) AS x
) AS n
WHERE o.operation_id = n.operation_id;

-- name: remember_replays
-- What an operation has replayed, until it has ended.
INSERT INTO fencepost.operation_runs (operation_id, job_id, scheduled_at, replay_count)
SELECT @operation_id::uuid, k.job_id, k.scheduled_at, k.replay_count
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @replay_counts::int[])
         AS k (job_id, scheduled_at, replay_count)
ON CONFLICT DO NOTHING;

-- name: lease_followed_operation
-- One operation whose replays are to be looked at, locked until the count is stored.
SELECT o.operation_id
FROM fencepost.operations AS o
WHERE o.follow_at <= @now AND fencepost.clock_agrees(@now)
ORDER BY o.follow_at
LIMIT 1
FOR UPDATE SKIP LOCKED;

-- name: count_ended_replays
-- Counts the replays of a locked operation that have ended, and forgets them. The more are left,
-- the later the next look.
WITH ended AS MATERIALIZED (
    SELECT e.job_id, e.scheduled_at, e.is_dead
    FROM fencepost.ended_replays(@operation_id::uuid) AS e
    LIMIT @runs_max
), counted AS (
    DELETE FROM fencepost.operation_runs AS r
    USING ended AS e
    WHERE r.operation_id = @operation_id::uuid
      AND r.job_id = e.job_id AND r.scheduled_at = e.scheduled_at
), sums AS MATERIALIZED (
    SELECT (SELECT count(*) FROM ended) AS ended,
           (SELECT count(*) FROM ended WHERE is_dead) AS dead,
           (SELECT count(*) FROM fencepost.operation_runs AS r
            WHERE r.operation_id = @operation_id::uuid) AS before
)
UPDATE fencepost.operations AS o
SET ended_runs = o.ended_runs + s.ended,
    dead_runs = o.dead_runs + s.dead,
    follow_at = CASE WHEN s.before > s.ended
                     THEN @now::timestamptz
                          + greatest((s.before - s.ended) / 5000.0, 1) * interval '1 second' END
FROM sums AS s
WHERE o.operation_id = @operation_id::uuid
RETURNING o.ended_runs, o.dead_runs, s.ended AS counted;

-- name: lock_runs_to_cancel
-- Live runs by key, locked in key order; those that were asked to stop before are left out.
SELECT q.job_id, q.scheduled_at, q.attempt, q.state, q.failure_count, q.lost_lease_count,
       q.attempt_open, q.serial, q.worker_id, q.claimed_at, q.cancel_grace_s, q.cancel_cause,
       q.cancel_reason
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
JOIN fencepost.run_queue AS q ON q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at
WHERE NOT q.cancel_requested AND q.state = ANY (@states::text[]::fencepost.run_state[])
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE OF q;

-- name: postpone_operation
-- A step that failed is tried again later; others go on.
UPDATE fencepost.operations AS o SET next_step_at = @next_step_at
WHERE o.operation_id = @operation_id::uuid AND o.state = 'running';

-- name: advance_operation
-- Stores how far a step came, in the step's own transaction.
UPDATE fencepost.operations AS o
SET position_at = coalesce(@position_at, o.position_at),
    next_step_at = @next_step_at,
    started_at = coalesce(o.started_at, @now),
    changed = o.changed + @changed,
    unchanged = o.unchanged + @unchanged,
    failed = o.failed + @failed,
    matched = CASE WHEN @state::text = 'running' THEN o.matched
                   WHEN @state::text = 'done'
                   THEN o.changed + @changed + o.unchanged + @unchanged + o.failed + @failed
                   ELSE greatest(o.matched, o.changed + @changed + o.unchanged + @unchanged
                                            + o.failed + @failed) END,
    problems = @problems::jsonb,
    state = @state::text::fencepost.operation_state,
    stop_cause = @stop_cause::text::fencepost.stop_cause,
    ended_at = CASE WHEN @state::text <> 'running' THEN @now END
WHERE o.operation_id = @operation_id::uuid;

-- name: backfill_bounds
-- What is older has no history that is sure to be whole.
SELECT f.retention_floor FROM fencepost.shard_state AS f;

-- name: lock_job_to_backfill
-- The job's scheduling state, locked as every path that makes runs of a job locks it.
SELECT s.next_run_at, s.last_scheduled_at, s.paused, s.queue_id, s.kind_id, s.priority,
       (SELECT f.retention_floor FROM fencepost.shard_state AS f) AS retention_floor
FROM fencepost.job_schedules AS s WHERE s.job_id = @job_id::uuid FOR UPDATE;

-- name: job_is_deleted
-- Read in a statement after the lock.
SELECT j.deleted_at IS NOT NULL AS is_deleted
FROM fencepost.jobs AS j WHERE j.job_id = @job_id::uuid;

-- name: count_runs_to_backfill
-- Live due runs of a locked job, read in a statement after the lock.
SELECT count(*) FILTER (WHERE q.state <> 'blocked') AS unblocked,
       count(*) FILTER (WHERE q.state = 'blocked') AS blocked
FROM fencepost.run_queue AS q
WHERE q.job_id = @job_id::uuid AND q.scheduled_at <= @now;

-- name: find_run_keys
-- Which of these fires have a run, wherever it is, since when, and which of those ended
-- unclaimed. One snapshot: a run is in exactly one place. Bounded in time, so that day tables
-- are pruned.
SELECT r.scheduled_at, r.created_at, r.is_expired
FROM (
    SELECT q.scheduled_at, q.created_at, false AS is_expired FROM fencepost.run_queue AS q
    WHERE q.job_id = @job_id::uuid AND q.scheduled_at BETWEEN @first_at AND @last_at
    UNION ALL
    SELECT d.scheduled_at, d.created_at, false FROM fencepost.dead_letters AS d
    WHERE d.job_id = @job_id::uuid AND d.scheduled_at BETWEEN @first_at AND @last_at
    UNION ALL
    SELECT h.scheduled_at, h.created_at, h.state = 'skipped' FROM fencepost.job_runs AS h
    WHERE h.job_id = @job_id::uuid AND h.scheduled_at BETWEEN @first_at AND @last_at
    UNION ALL
    SELECT s.scheduled_at, s.created_at, s.state = 'skipped' FROM fencepost.job_runs_stray AS s
    WHERE s.job_id = @job_id::uuid AND s.scheduled_at BETWEEN @first_at AND @last_at
) AS r
WHERE r.scheduled_at = ANY (@scheduled_ats::timestamptz[]);

-- name: forget_expired_runs
-- Moves: T20 backfill (skipped -> queued, blocked).
-- Takes runs that ended unclaimed out of history; the same transaction makes them again.
WITH kept AS (
    DELETE FROM fencepost.job_runs AS h
    WHERE h.job_id = @job_id::uuid AND h.scheduled_at BETWEEN @first_at AND @last_at
      AND h.scheduled_at = ANY (@scheduled_ats::timestamptz[]) AND h.state = 'skipped'
    RETURNING h.job_id, h.scheduled_at
), strayed AS (
    DELETE FROM fencepost.job_runs_stray AS s
    WHERE s.job_id = @job_id::uuid AND s.scheduled_at = ANY (@scheduled_ats::timestamptz[])
      AND s.state = 'skipped'
    RETURNING s.job_id, s.scheduled_at
), gone AS (
    TABLE kept UNION ALL TABLE strayed
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM gone
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at FROM gone;

-- name: insert_backfilled
-- Moves: T1 T2 make ( -> queued, blocked).
-- Runs of past fires of one locked job, with its newest definition; those after the first
-- @queued_max wait.
WITH made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
         origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, serial, max_in_flight,
         concurrency_key, queue_timeout_s, wait_until, total_until)
    SELECT s.job_id, f.scheduled_at, @now, @now, s.tenant_id, s.queue_id, s.kind_id, s.version,
           CASE WHEN f.place <= @queued_max::int THEN 'queued'::fencepost.run_state ELSE 'blocked' END,
           'backfill', s.priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, true,
           s.max_in_flight, s.concurrency_key, s.queue_timeout_s,
           @now::timestamptz + s.queue_timeout_s * interval '1 second',
           @now::timestamptz + s.total_timeout_s * interval '1 second'
    FROM unnest(@scheduled_ats::timestamptz[]) WITH ORDINALITY AS f (scheduled_at, place)
    CROSS JOIN fencepost.job_schedules AS s
    WHERE s.job_id = @job_id::uuid
    ORDER BY f.place
    ON CONFLICT (job_id, scheduled_at) DO NOTHING
    RETURNING job_id, scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM made
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT scheduled_at FROM made;

-- name: raise_last_scheduled
-- What outlives history: no fire up to here is made by anything but a backfill.
UPDATE fencepost.job_schedules AS s
SET last_scheduled_at = greatest(s.last_scheduled_at, @scheduled_at)
WHERE s.job_id = @job_id::uuid
  AND (s.next_run_at IS NULL OR @scheduled_at < s.next_run_at);
