-- name: share_jobs
-- Holds off the deletion of these jobs, or waits for it; whether they are deleted is read in the
-- next statement.
SELECT j.job_id FROM fencepost.jobs AS j
WHERE j.job_id = ANY (@job_ids::uuid[])
ORDER BY j.job_id
FOR KEY SHARE;

-- name: lock_dead_letters
-- Dead letters by key, locked in key order, with what their jobs say now: the settings of the
-- newest version, and whether fires of the job wait for live runs.
SELECT d.job_id, d.scheduled_at, d.tenant_id, d.version, d.attempt, d.queue_id, d.kind_id,
       d.priority, d.concurrency_key, d.unique_key, d.ended_at, d.discarded_at,
       j.name AS job_name,
       t.name AS tenant_name, j.deleted_at IS NOT NULL AS job_is_deleted,
       s.version AS newest_version, s.queue_id AS newest_queue_id, s.kind_id AS newest_kind_id,
       s.priority AS newest_priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s,
       s.queue_timeout_s, s.total_timeout_s, s.max_in_flight,
       coalesce(s.overlap IN ('queue_one', 'queue_all', 'cancel_previous')
                OR s.after_completion, false) AS serial
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
JOIN fencepost.dead_letters AS d ON d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at
JOIN fencepost.jobs AS j ON j.job_id = d.job_id
JOIN fencepost.tenants AS t ON t.tenant_id = d.tenant_id
LEFT JOIN fencepost.job_schedules AS s ON s.job_id = d.job_id
ORDER BY d.job_id, d.scheduled_at
FOR UPDATE OF d;

-- name: newest_concurrency_keys
-- The concurrency keys of locked dead letters that go on with the newest version of their jobs,
-- made from what each run has. A key that is not what the recorded version makes of the run is
-- the run's own and stays, also when that version is gone.
SELECT d.job_id, d.scheduled_at,
       CASE WHEN v.job_id IS NULL OR d.concurrency_key IS DISTINCT FROM
                     nullif(fencepost.run_concurrency_key(
                         v.spec -> 'limits' ->> 'concurrency_key',
                         coalesce(d.labels, v.spec -> 'labels'), coalesce(d.payload, v.payload)), '')
            THEN d.concurrency_key
            WHEN s.concurrency_template IS NULL THEN s.concurrency_key
            ELSE nullif(fencepost.run_concurrency_key(
                     s.concurrency_template, coalesce(d.labels, n.spec -> 'labels'),
                     coalesce(@payload::bytea, d.payload, n.payload)), '') END AS concurrency_key
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
JOIN fencepost.dead_letters AS d ON d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at
JOIN fencepost.job_schedules AS s ON s.job_id = d.job_id
LEFT JOIN fencepost.job_versions AS v ON v.job_id = d.job_id AND v.version = d.version
LEFT JOIN fencepost.job_versions AS n ON n.job_id = d.job_id AND n.version = s.version;

-- name: retake_keys
-- Gives the business keys of locked dead letters back to them where nobody else holds them.
SELECT r.job_id, r.scheduled_at
FROM fencepost.retake_keys(@job_ids::uuid[], @scheduled_ats::timestamptz[], @now) AS r;

-- name: replay_runs
-- Moves: T18 replay (dead -> queued).
-- Puts locked dead letters back into the queue under their own keys, with a fresh budget. The
-- attempt stays until the claim raises it, and it is closed. A key that is live already is not
-- returned, and its dead letter stays.
WITH made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, tenant_id,
         queue_id, kind_id, version, attempt, snooze_count, replay_count, state, origin, priority,
         lease_s, cancel_grace_s, attempt_timeout_s, serial, worker_id, max_in_flight,
         concurrency_key, payload, labels, progress, last_failure, failure_code, trace_context,
         queue_timeout_s, wait_until, total_until, unique_key, forced_attempt)
    SELECT d.job_id, d.scheduled_at, @now, d.created_at, d.first_claimed_at, d.claimed_at,
           d.tenant_id, e.queue_id, e.kind_id, e.version, d.attempt, d.snooze_count,
           d.replay_count + 1, 'queued', d.origin, e.priority, e.lease_s, e.cancel_grace_s,
           e.attempt_timeout_s, e.serial, d.worker_id, e.max_in_flight, e.concurrency_key,
           coalesce(e.payload, d.payload), d.labels,
           -- A checkpoint of another input would mislead the next attempt.
           CASE WHEN e.payload IS NULL THEN d.progress END, d.last_failure, d.failure_code,
           d.trace_context, e.queue_timeout_s,
           @now::timestamptz + e.queue_timeout_s * interval '1 second',
           @now::timestamptz + e.total_timeout_s * interval '1 second', d.unique_key,
           CASE WHEN d.forced THEN d.attempt END
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                @versions::int[], @queue_ids::int[], @kind_ids::int[], @priorities::smallint[],
                @leases_s::smallint[], @graces_s::smallint[], @timeouts_s::int[],
                @queue_timeouts_s::int[], @total_timeouts_s::int[], @job_caps::int[],
                @concurrency_keys::text[], @serials::boolean[], @payloads::bytea[])
             AS e (job_id, scheduled_at, attempt, version, queue_id, kind_id, priority, lease_s,
                   cancel_grace_s, attempt_timeout_s, queue_timeout_s, total_timeout_s,
                   max_in_flight, concurrency_key, serial, payload)
    JOIN fencepost.dead_letters AS d ON d.job_id = e.job_id AND d.scheduled_at = e.scheduled_at
    WHERE d.attempt = e.attempt AND d.discarded_at IS NULL
    ORDER BY d.job_id, d.scheduled_at
    ON CONFLICT (job_id, scheduled_at) DO NOTHING
    RETURNING job_id, scheduled_at, queue_id, kind_id, priority, replay_count
), gone AS (
    DELETE FROM fencepost.dead_letters AS d
    USING made AS m
    WHERE d.job_id = m.job_id AND d.scheduled_at = m.scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM made
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, queue_id, kind_id, priority, replay_count FROM made;

-- name: discard_dead_letters
-- Gives dead letters up; those that were given up before are not returned.
WITH found AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
    JOIN fencepost.dead_letters AS d ON d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at
    WHERE d.discarded_at IS NULL AND d.ended_at <= @died_until
    ORDER BY d.job_id, d.scheduled_at
    FOR UPDATE OF d
), discarded AS (
    UPDATE fencepost.dead_letters AS d
    SET discarded_at = @now, discard_reason = @reason
    FROM found AS f
    WHERE d.job_id = f.job_id AND d.scheduled_at = f.scheduled_at
    RETURNING d.job_id, d.scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM discarded
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at FROM discarded;

-- name: match_dead_letters
-- What of the dead letters matches a filter, oldest first, after one key: how many, the first
-- and the last keys, and where the look ended if it did so early, after @scan_max rows.
WITH scanned AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at, d.version, d.origin, d.queue_id, d.kind_id, d.worker_id,
           d.failure_code, d.unique_key, d.labels, d.skip_reason, d.dead_reason, d.cancel_cause
    FROM fencepost.dead_letters AS d
    WHERE d.tenant_id = @tenant_id
      AND (@job_id::uuid IS NULL OR d.job_id = @job_id)
      AND d.scheduled_at >= greatest(@from_at::timestamptz, @after_at)
      AND (d.scheduled_at, d.job_id) > (@after_at, @after_id::uuid)
      AND d.scheduled_at < @before_at
      AND d.discarded_at IS NULL
      AND d.ended_at <= @matched_at
      AND (@created_from::timestamptz IS NULL OR d.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR d.created_at < @created_before)
      AND (@ended_from::timestamptz IS NULL OR d.ended_at >= @ended_from)
      AND (@ended_before::timestamptz IS NULL OR d.ended_at < @ended_before)
    ORDER BY d.scheduled_at, d.job_id
    LIMIT @scan_max
), fitting AS MATERIALIZED (
    SELECT r.job_id, r.scheduled_at
    FROM scanned AS r
    LEFT JOIN fencepost.jobs AS j ON j.job_id = r.job_id
    LEFT JOIN fencepost.queues AS u ON u.queue_id = r.queue_id
    LEFT JOIN fencepost.kinds AS k ON k.kind_id = r.kind_id
    LEFT JOIN fencepost.job_versions AS v ON v.job_id = r.job_id AND v.version = r.version
    WHERE cardinality(@conditions::jsonb[]) = 0
       OR fencepost.run_fits(
              @conditions::jsonb[], j.name, r.job_id, r.origin, u.name, k.name, r.worker_id,
              r.failure_code, r.unique_key, r.skip_reason, r.dead_reason, r.cancel_cause,
              coalesce(r.labels, v.spec -> 'labels'))
    ORDER BY r.scheduled_at, r.job_id
    LIMIT @matches_max
)
SELECT (SELECT count(*) FROM fitting) AS matched,
       ARRAY(SELECT job_id FROM fitting ORDER BY scheduled_at, job_id LIMIT @keys_max) AS job_ids,
       ARRAY(SELECT scheduled_at FROM fitting ORDER BY scheduled_at, job_id LIMIT @keys_max)
           AS scheduled_ats,
       (SELECT job_id FROM fitting ORDER BY scheduled_at DESC, job_id DESC LIMIT 1) AS last_id,
       (SELECT max(scheduled_at) FROM fitting) AS last_at,
       (SELECT job_id FROM scanned ORDER BY scheduled_at, job_id
        OFFSET @scan_max - 1 LIMIT 1) AS frontier_id,
       (SELECT scheduled_at FROM scanned ORDER BY scheduled_at, job_id
        OFFSET @scan_max - 1 LIMIT 1) AS frontier_at;

-- name: match_live_runs
-- As match_dead_letters, for live runs in some states.
WITH scanned AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at, q.version, q.origin, q.queue_id, q.kind_id, q.worker_id,
           q.failure_code, q.unique_key, q.labels, q.cancel_cause
    FROM fencepost.run_queue AS q
    WHERE q.tenant_id = @tenant_id
      AND (@job_id::uuid IS NULL OR q.job_id = @job_id)
      AND q.scheduled_at >= greatest(@from_at::timestamptz, @after_at)
      AND (q.scheduled_at, q.job_id) > (@after_at, @after_id::uuid)
      AND q.scheduled_at < @before_at
      AND q.state = ANY (@states::text[]::fencepost.run_state[])
      AND q.created_at <= @matched_at
      AND (@created_from::timestamptz IS NULL OR q.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR q.created_at < @created_before)
      -- What has not ended is within no bound of its end.
      AND @ended_from::timestamptz IS NULL AND @ended_before::timestamptz IS NULL
    ORDER BY q.scheduled_at, q.job_id
    LIMIT @scan_max
), fitting AS MATERIALIZED (
    SELECT r.job_id, r.scheduled_at
    FROM scanned AS r
    LEFT JOIN fencepost.jobs AS j ON j.job_id = r.job_id
    LEFT JOIN fencepost.queues AS u ON u.queue_id = r.queue_id
    LEFT JOIN fencepost.kinds AS k ON k.kind_id = r.kind_id
    LEFT JOIN fencepost.job_versions AS v ON v.job_id = r.job_id AND v.version = r.version
    WHERE cardinality(@conditions::jsonb[]) = 0
       OR fencepost.run_fits(
              @conditions::jsonb[], j.name, r.job_id, r.origin, u.name, k.name, r.worker_id,
              r.failure_code, r.unique_key, NULL, NULL, r.cancel_cause,
              coalesce(r.labels, v.spec -> 'labels'))
    ORDER BY r.scheduled_at, r.job_id
    LIMIT @matches_max
)
SELECT (SELECT count(*) FROM fitting) AS matched,
       ARRAY(SELECT job_id FROM fitting ORDER BY scheduled_at, job_id LIMIT @keys_max) AS job_ids,
       ARRAY(SELECT scheduled_at FROM fitting ORDER BY scheduled_at, job_id LIMIT @keys_max)
           AS scheduled_ats,
       (SELECT job_id FROM fitting ORDER BY scheduled_at DESC, job_id DESC LIMIT 1) AS last_id,
       (SELECT max(scheduled_at) FROM fitting) AS last_at,
       (SELECT job_id FROM scanned ORDER BY scheduled_at, job_id
        OFFSET @scan_max - 1 LIMIT 1) AS frontier_id,
       (SELECT scheduled_at FROM scanned ORDER BY scheduled_at, job_id
        OFFSET @scan_max - 1 LIMIT 1) AS frontier_at;

-- name: group_dead_letters
-- Dead letters that match a filter, at most @matches_max, the newest fires first, by how they
-- died; the group that died last comes first.
WITH fitting AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at, d.kind_id, d.failure_code, d.dead_reason, d.ended_at
    FROM fencepost.dead_letters AS d
    LEFT JOIN fencepost.jobs AS j ON j.job_id = d.job_id
    LEFT JOIN fencepost.queues AS u ON u.queue_id = d.queue_id
    LEFT JOIN fencepost.kinds AS k ON k.kind_id = d.kind_id
    LEFT JOIN fencepost.job_versions AS v ON v.job_id = d.job_id AND v.version = d.version
    WHERE d.tenant_id = @tenant_id
      AND (@job_id::uuid IS NULL OR d.job_id = @job_id)
      AND d.scheduled_at >= @from_at
      AND d.scheduled_at < @before_at
      AND d.discarded_at IS NULL
      AND (@created_from::timestamptz IS NULL OR d.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR d.created_at < @created_before)
      AND (@ended_from::timestamptz IS NULL OR d.ended_at >= @ended_from)
      AND (@ended_before::timestamptz IS NULL OR d.ended_at < @ended_before)
      AND (cardinality(@conditions::jsonb[]) = 0
           OR fencepost.run_fits(
                  @conditions::jsonb[], j.name, d.job_id, d.origin, u.name, k.name, d.worker_id,
                  d.failure_code, d.unique_key, d.skip_reason, d.dead_reason, d.cancel_cause,
                  coalesce(d.labels, v.spec -> 'labels')))
    ORDER BY d.scheduled_at DESC
    LIMIT @matches_max
), groups AS MATERIALIZED (
    SELECT f.job_id, f.kind_id, f.failure_code, f.dead_reason, count(*) AS dead,
           min(f.ended_at) AS oldest_at, max(f.ended_at) AS newest_at,
           (array_agg(f.scheduled_at ORDER BY f.ended_at DESC, f.scheduled_at DESC))[1] AS sample_at
    FROM fitting AS f
    GROUP BY f.job_id, f.kind_id, f.failure_code, f.dead_reason
)
SELECT g.*, j.name AS job_name, j.deleted_at IS NOT NULL AS job_is_deleted, k.name AS kind_name,
       (SELECT d.last_failure FROM fencepost.dead_letters AS d
        WHERE d.job_id = g.job_id AND d.scheduled_at = g.sample_at) AS last_failure,
       (SELECT count(*) FROM fitting) AS grouped,
       (SELECT count(*) FROM groups) AS total_groups
FROM groups AS g
JOIN fencepost.jobs AS j ON j.job_id = g.job_id
JOIN fencepost.kinds AS k ON k.kind_id = g.kind_id
ORDER BY g.newest_at DESC, g.job_id, g.kind_id, g.failure_code, g.dead_reason
LIMIT @groups_max;
