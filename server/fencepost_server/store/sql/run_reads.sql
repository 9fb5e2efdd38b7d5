-- name: find_job_of_run_by_name
-- The job that a run's name means while the job exists.
SELECT j.job_id FROM fencepost.jobs AS j
WHERE j.tenant_id = @tenant_id AND j.name = @name AND j.deleted_at IS NULL;

-- name: find_job_of_run_by_id
-- As find_job_of_run_by_name; the id is good also after the job's deletion.
SELECT j.job_id FROM fencepost.jobs AS j WHERE j.tenant_id = @tenant_id AND j.job_id = @job_id;

-- name: live_state
-- The state of a run that has not ended.
SELECT q.state FROM fencepost.run_queue AS q
WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at;

-- name: read_runs
-- Runs by key, wherever they are now, with what their names and definitions say.
SELECT w.place, w.job_id, w.scheduled_at, r.*, j.name AS job_name,
       j.deleted_at IS NOT NULL AS job_is_deleted, t.name AS tenant_name, u.name AS queue_name,
       k.name AS kind_name, v.spec, CASE WHEN @full THEN v.payload END AS job_payload,
       CASE WHEN r.state = 'blocked' THEN (
           SELECT b.scheduled_at FROM fencepost.run_queue AS b
           WHERE b.job_id = w.job_id
             AND (b.state <> 'blocked' OR b.scheduled_at < w.scheduled_at)
           ORDER BY b.state = 'blocked', b.scheduled_at LIMIT 1) END AS blocked_by
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[])
         WITH ORDINALITY AS w (job_id, scheduled_at, place)
CROSS JOIN LATERAL (
    SELECT q.available_at, q.created_at, q.first_claimed_at, q.claimed_at, q.lease_until,
           NULL::timestamptz AS ended_at, NULL::timestamptz AS discarded_at, q.tenant_id,
           q.queue_id, q.kind_id, q.version, q.attempt, q.failure_count, q.lost_lease_count,
           q.snooze_count, q.replay_count, q.state, q.origin, q.priority, q.attempt_open,
           q.cancel_requested, q.worker_id, q.concurrency_key,
           CASE WHEN @full THEN q.payload END AS payload, NULL::bytea AS result, q.progress,
           q.last_failure, q.labels, NULL::bytea AS timings,
           NULL::fencepost.skip_reason AS skip_reason,
           NULL::fencepost.dead_reason AS dead_reason, q.cancel_cause, q.cancel_reason,
           q.trace_context
    FROM fencepost.run_queue AS q
    WHERE q.job_id = w.job_id AND q.scheduled_at = w.scheduled_at
    UNION ALL
    SELECT d.available_at, d.created_at, d.first_claimed_at, d.claimed_at, NULL, d.ended_at,
           d.discarded_at, d.tenant_id, d.queue_id, d.kind_id, d.version, d.attempt,
           d.failure_count, d.lost_lease_count, d.snooze_count, d.replay_count, d.state,
           d.origin, d.priority, false, false, d.worker_id, d.concurrency_key,
           CASE WHEN @full THEN d.payload END, CASE WHEN @full THEN d.result END, d.progress,
           d.last_failure, d.labels, d.timings, d.skip_reason, d.dead_reason, d.cancel_cause,
           d.cancel_reason, d.trace_context
    FROM fencepost.dead_letters AS d
    WHERE d.job_id = w.job_id AND d.scheduled_at = w.scheduled_at
    UNION ALL
    SELECT h.available_at, h.created_at, h.first_claimed_at, h.claimed_at, NULL, h.ended_at,
           h.discarded_at, h.tenant_id, h.queue_id, h.kind_id, h.version, h.attempt,
           h.failure_count, h.lost_lease_count, h.snooze_count, h.replay_count, h.state,
           h.origin, h.priority, false, false, h.worker_id, h.concurrency_key,
           CASE WHEN @full THEN h.payload END, CASE WHEN @full THEN h.result END, h.progress,
           h.last_failure, h.labels, h.timings, h.skip_reason, h.dead_reason, h.cancel_cause,
           h.cancel_reason, h.trace_context
    FROM fencepost.job_runs AS h
    WHERE h.job_id = w.job_id AND h.scheduled_at = w.scheduled_at
    UNION ALL
    SELECT s.available_at, s.created_at, s.first_claimed_at, s.claimed_at, NULL, s.ended_at,
           s.discarded_at, s.tenant_id, s.queue_id, s.kind_id, s.version, s.attempt,
           s.failure_count, s.lost_lease_count, s.snooze_count, s.replay_count, s.state,
           s.origin, s.priority, false, false, s.worker_id, s.concurrency_key,
           CASE WHEN @full THEN s.payload END, CASE WHEN @full THEN s.result END, s.progress,
           s.last_failure, s.labels, s.timings, s.skip_reason, s.dead_reason, s.cancel_cause,
           s.cancel_reason, s.trace_context
    FROM fencepost.job_runs_stray AS s
    WHERE s.job_id = w.job_id AND s.scheduled_at = w.scheduled_at
) AS r
JOIN fencepost.jobs AS j ON j.job_id = w.job_id
JOIN fencepost.tenants AS t ON t.tenant_id = r.tenant_id
JOIN fencepost.queues AS u ON u.queue_id = r.queue_id
JOIN fencepost.kinds AS k ON k.kind_id = r.kind_id
LEFT JOIN fencepost.job_versions AS v ON v.job_id = w.job_id AND v.version = r.version
ORDER BY w.place;

-- name: list_attempts
-- Recorded attempts of a run, newest first. Nothing ended before the run was made, which
-- prunes day tables.
SELECT a.attempt, a.outcome, a.late, a.worker_id, a.claimed_at, a.ended_at, a.failure, a.timings
FROM fencepost.run_attempts AS a
WHERE a.job_id = @job_id AND a.scheduled_at = @scheduled_at AND a.ended_at >= @since
  AND a.attempt < @before
ORDER BY a.attempt DESC, a.ended_at DESC
LIMIT @page_max;

-- name: page_of_tenant
-- Keys of one page of a tenant's runs, newest first, over every place a run can be in: one
-- snapshot, so a run that moves is seen once. Each place is read in the order of keys, at most
-- @scan_max rows; what lies beyond the nearest end of such a scan belongs to the next page.
WITH live AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at, q.version, q.state, q.origin, q.queue_id, q.kind_id,
           q.worker_id, q.created_at, NULL::timestamptz AS ended_at, q.failure_code, q.labels,
           NULL::fencepost.skip_reason AS skip_reason,
           NULL::fencepost.dead_reason AS dead_reason, q.cancel_cause
    FROM fencepost.run_queue AS q
    WHERE q.tenant_id = @tenant_id
      AND q.state = ANY (@states::text[]::fencepost.run_state[])
      AND q.scheduled_at >= @from_at AND q.scheduled_at <= @before_at
      AND (q.scheduled_at, q.job_id) < (@before_at, @before_id::uuid)
    ORDER BY q.scheduled_at DESC, q.job_id DESC
    LIMIT @scan_max
), dead AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at, d.version, d.state, d.origin, d.queue_id, d.kind_id,
           d.worker_id, d.created_at, d.ended_at, d.failure_code, d.labels, d.skip_reason,
           d.dead_reason, d.cancel_cause
    FROM fencepost.dead_letters AS d
    WHERE d.tenant_id = @tenant_id
      AND d.state = ANY (@states::text[]::fencepost.run_state[])
      AND d.scheduled_at >= @from_at AND d.scheduled_at <= @before_at
      AND (d.scheduled_at, d.job_id) < (@before_at, @before_id::uuid)
    ORDER BY d.scheduled_at DESC, d.job_id DESC
    LIMIT @scan_max
), history AS MATERIALIZED (
    SELECT h.job_id, h.scheduled_at, h.version, h.state, h.origin, h.queue_id, h.kind_id,
           h.worker_id, h.created_at, h.ended_at, h.failure_code, h.labels, h.skip_reason,
           h.dead_reason, h.cancel_cause
    FROM fencepost.job_runs AS h
    WHERE @with_history
      AND h.tenant_id = @tenant_id
      AND h.scheduled_at >= @history_from AND h.scheduled_at <= @before_at
      AND (h.scheduled_at, h.job_id) < (@before_at, @before_id::uuid)
    ORDER BY h.scheduled_at DESC, h.job_id DESC
    LIMIT @scan_max
), stray AS MATERIALIZED (
    SELECT s.job_id, s.scheduled_at, s.version, s.state, s.origin, s.queue_id, s.kind_id,
           s.worker_id, s.created_at, s.ended_at, s.failure_code, s.labels, s.skip_reason,
           s.dead_reason, s.cancel_cause
    FROM fencepost.job_runs_stray AS s
    WHERE @with_history
      AND s.tenant_id = @tenant_id
      AND s.scheduled_at >= @history_from AND s.scheduled_at <= @before_at
      AND (s.scheduled_at, s.job_id) < (@before_at, @before_id::uuid)
    ORDER BY s.scheduled_at DESC, s.job_id DESC
    LIMIT @scan_max
), scan_ends AS (
    (SELECT scheduled_at, job_id FROM live ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM dead ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM history ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM stray ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
), frontier AS MATERIALIZED (
    SELECT scheduled_at, job_id FROM scan_ends ORDER BY 1 DESC, 2 DESC LIMIT 1
), described AS (
    SELECT r.*, j.name AS job_name, u.name AS queue_name, k.name AS kind_name,
           coalesce(r.labels, v.spec -> 'labels') AS all_labels
    FROM (TABLE live UNION ALL TABLE dead UNION ALL TABLE history UNION ALL TABLE stray) AS r
    LEFT JOIN fencepost.jobs AS j ON j.job_id = r.job_id
    LEFT JOIN fencepost.queues AS u ON u.queue_id = r.queue_id
    LEFT JOIN fencepost.kinds AS k ON k.kind_id = r.kind_id
    LEFT JOIN fencepost.job_versions AS v ON v.job_id = r.job_id AND v.version = r.version
    WHERE r.state = ANY (@states::text[]::fencepost.run_state[])
), fitting AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at
    FROM described AS d
    WHERE (@created_from::timestamptz IS NULL OR d.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR d.created_at < @created_before)
      AND (@ended_from::timestamptz IS NULL OR d.ended_at >= @ended_from)
      AND (@ended_before::timestamptz IS NULL OR d.ended_at < @ended_before)
      AND ((SELECT count(*) FROM frontier) = 0
           OR (d.scheduled_at, d.job_id) >= (
               SELECT f.scheduled_at, f.job_id FROM frontier AS f))
      AND NOT EXISTS (
          SELECT FROM unnest(@conditions::jsonb[]) AS c (wanted)
          CROSS JOIN LATERAL (
              SELECT CASE c.wanted ->> 'field'
                  WHEN 'job' THEN d.job_name
                  WHEN 'job_id' THEN d.job_id::text
                  WHEN 'origin' THEN d.origin::text
                  WHEN 'queue' THEN d.queue_name
                  WHEN 'kind' THEN d.kind_name
                  WHEN 'worker' THEN d.worker_id::text
                  WHEN 'last_failure.code' THEN d.failure_code
                  WHEN 'skip_reason' THEN d.skip_reason::text
                  WHEN 'dead_reason' THEN d.dead_reason::text
                  WHEN 'cancel_cause' THEN d.cancel_cause::text
                  WHEN 'labels' THEN d.all_labels ->> (c.wanted ->> 'key')
              END AS value
          ) AS found
          WHERE (c.wanted -> 'negated')::boolean = coalesce(
              CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
                   ELSE jsonb_exists(c.wanted -> 'values', found.value)
                       OR EXISTS (
                           SELECT FROM jsonb_array_elements_text(c.wanted -> 'prefixes') AS p (prefix)
                           WHERE starts_with(found.value, p.prefix)
                       ) END,
              false)
      )
    ORDER BY d.scheduled_at DESC, d.job_id DESC
    LIMIT @page_max
)
SELECT ARRAY(SELECT job_id FROM fitting ORDER BY scheduled_at DESC, job_id DESC) AS job_ids,
       ARRAY(SELECT scheduled_at FROM fitting ORDER BY scheduled_at DESC, job_id DESC)
           AS scheduled_ats,
       (SELECT scheduled_at FROM frontier) AS frontier_at,
       (SELECT job_id FROM frontier) AS frontier_id;

-- name: page_of_job
-- As page_of_tenant, for one job; a statement of its own because it needs other indexes.
WITH live AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at, q.version, q.state, q.origin, q.queue_id, q.kind_id,
           q.worker_id, q.created_at, NULL::timestamptz AS ended_at, q.failure_code, q.labels,
           NULL::fencepost.skip_reason AS skip_reason,
           NULL::fencepost.dead_reason AS dead_reason, q.cancel_cause
    FROM fencepost.run_queue AS q
    WHERE q.job_id = @job_id::uuid
      AND q.state = ANY (@states::text[]::fencepost.run_state[])
      AND q.scheduled_at >= @from_at AND q.scheduled_at <= @before_at
      AND (q.scheduled_at, q.job_id) < (@before_at, @before_id::uuid)
    ORDER BY q.scheduled_at DESC, q.job_id DESC
    LIMIT @scan_max
), dead AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at, d.version, d.state, d.origin, d.queue_id, d.kind_id,
           d.worker_id, d.created_at, d.ended_at, d.failure_code, d.labels, d.skip_reason,
           d.dead_reason, d.cancel_cause
    FROM fencepost.dead_letters AS d
    WHERE d.job_id = @job_id::uuid
      AND d.state = ANY (@states::text[]::fencepost.run_state[])
      AND d.scheduled_at >= @from_at AND d.scheduled_at <= @before_at
      AND (d.scheduled_at, d.job_id) < (@before_at, @before_id::uuid)
    ORDER BY d.scheduled_at DESC, d.job_id DESC
    LIMIT @scan_max
), history AS MATERIALIZED (
    SELECT h.job_id, h.scheduled_at, h.version, h.state, h.origin, h.queue_id, h.kind_id,
           h.worker_id, h.created_at, h.ended_at, h.failure_code, h.labels, h.skip_reason,
           h.dead_reason, h.cancel_cause
    FROM fencepost.job_runs AS h
    WHERE @with_history
      AND h.job_id = @job_id::uuid
      AND h.scheduled_at >= @history_from AND h.scheduled_at <= @before_at
      AND (h.scheduled_at, h.job_id) < (@before_at, @before_id::uuid)
    ORDER BY h.scheduled_at DESC, h.job_id DESC
    LIMIT @scan_max
), stray AS MATERIALIZED (
    SELECT s.job_id, s.scheduled_at, s.version, s.state, s.origin, s.queue_id, s.kind_id,
           s.worker_id, s.created_at, s.ended_at, s.failure_code, s.labels, s.skip_reason,
           s.dead_reason, s.cancel_cause
    FROM fencepost.job_runs_stray AS s
    WHERE @with_history
      AND s.job_id = @job_id::uuid
      AND s.scheduled_at >= @history_from AND s.scheduled_at <= @before_at
      AND (s.scheduled_at, s.job_id) < (@before_at, @before_id::uuid)
    ORDER BY s.scheduled_at DESC, s.job_id DESC
    LIMIT @scan_max
), scan_ends AS (
    (SELECT scheduled_at, job_id FROM live ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM dead ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM history ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
    UNION ALL
    (SELECT scheduled_at, job_id FROM stray ORDER BY 1 DESC, 2 DESC OFFSET @scan_max - 1 LIMIT 1)
), frontier AS MATERIALIZED (
    SELECT scheduled_at, job_id FROM scan_ends ORDER BY 1 DESC, 2 DESC LIMIT 1
), described AS (
    SELECT r.*, j.name AS job_name, u.name AS queue_name, k.name AS kind_name,
           coalesce(r.labels, v.spec -> 'labels') AS all_labels
    FROM (TABLE live UNION ALL TABLE dead UNION ALL TABLE history UNION ALL TABLE stray) AS r
    LEFT JOIN fencepost.jobs AS j ON j.job_id = r.job_id
    LEFT JOIN fencepost.queues AS u ON u.queue_id = r.queue_id
    LEFT JOIN fencepost.kinds AS k ON k.kind_id = r.kind_id
    LEFT JOIN fencepost.job_versions AS v ON v.job_id = r.job_id AND v.version = r.version
    WHERE r.state = ANY (@states::text[]::fencepost.run_state[])
), fitting AS MATERIALIZED (
    SELECT d.job_id, d.scheduled_at
    FROM described AS d
    WHERE (@created_from::timestamptz IS NULL OR d.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR d.created_at < @created_before)
      AND (@ended_from::timestamptz IS NULL OR d.ended_at >= @ended_from)
      AND (@ended_before::timestamptz IS NULL OR d.ended_at < @ended_before)
      AND ((SELECT count(*) FROM frontier) = 0
           OR (d.scheduled_at, d.job_id) >= (
               SELECT f.scheduled_at, f.job_id FROM frontier AS f))
      AND NOT EXISTS (
          SELECT FROM unnest(@conditions::jsonb[]) AS c (wanted)
          CROSS JOIN LATERAL (
              SELECT CASE c.wanted ->> 'field'
                  WHEN 'job' THEN d.job_name
                  WHEN 'job_id' THEN d.job_id::text
                  WHEN 'origin' THEN d.origin::text
                  WHEN 'queue' THEN d.queue_name
                  WHEN 'kind' THEN d.kind_name
                  WHEN 'worker' THEN d.worker_id::text
                  WHEN 'last_failure.code' THEN d.failure_code
                  WHEN 'skip_reason' THEN d.skip_reason::text
                  WHEN 'dead_reason' THEN d.dead_reason::text
                  WHEN 'cancel_cause' THEN d.cancel_cause::text
                  WHEN 'labels' THEN d.all_labels ->> (c.wanted ->> 'key')
              END AS value
          ) AS found
          WHERE (c.wanted -> 'negated')::boolean = coalesce(
              CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
                   ELSE jsonb_exists(c.wanted -> 'values', found.value)
                       OR EXISTS (
                           SELECT FROM jsonb_array_elements_text(c.wanted -> 'prefixes') AS p (prefix)
                           WHERE starts_with(found.value, p.prefix)
                       ) END,
              false)
      )
    ORDER BY d.scheduled_at DESC, d.job_id DESC
    LIMIT @page_max
)
SELECT ARRAY(SELECT job_id FROM fitting ORDER BY scheduled_at DESC, job_id DESC) AS job_ids,
       ARRAY(SELECT scheduled_at FROM fitting ORDER BY scheduled_at DESC, job_id DESC)
           AS scheduled_ats,
       (SELECT scheduled_at FROM frontier) AS frontier_at,
       (SELECT job_id FROM frontier) AS frontier_id;
