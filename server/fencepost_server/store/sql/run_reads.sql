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
       k.name AS kind_name, v.spec, t.default_retry_policy, CASE WHEN @full THEN v.payload END AS job_payload,
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
           q.cancel_requested, q.worker_id, q.concurrency_key, q.unique_key,
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
           d.origin, d.priority, false, false, d.worker_id, d.concurrency_key, d.unique_key,
           CASE WHEN @full THEN d.payload END, CASE WHEN @full THEN d.result END, d.progress,
           d.last_failure, d.labels, d.timings, d.skip_reason, d.dead_reason, d.cancel_cause,
           d.cancel_reason, d.trace_context
    FROM fencepost.dead_letters AS d
    WHERE d.job_id = w.job_id AND d.scheduled_at = w.scheduled_at
    UNION ALL
    SELECT h.available_at, h.created_at, h.first_claimed_at, h.claimed_at, NULL, h.ended_at,
           h.discarded_at, h.tenant_id, h.queue_id, h.kind_id, h.version, h.attempt,
           h.failure_count, h.lost_lease_count, h.snooze_count, h.replay_count, h.state,
           h.origin, h.priority, false, false, h.worker_id, h.concurrency_key, h.unique_key,
           CASE WHEN @full THEN h.payload END, CASE WHEN @full THEN h.result END, h.progress,
           h.last_failure, h.labels, h.timings, h.skip_reason, h.dead_reason, h.cancel_cause,
           h.cancel_reason, h.trace_context
    FROM fencepost.job_runs AS h
    WHERE h.job_id = w.job_id AND h.scheduled_at = w.scheduled_at
    UNION ALL
    SELECT s.available_at, s.created_at, s.first_claimed_at, s.claimed_at, NULL, s.ended_at,
           s.discarded_at, s.tenant_id, s.queue_id, s.kind_id, s.version, s.attempt,
           s.failure_count, s.lost_lease_count, s.snooze_count, s.replay_count, s.state,
           s.origin, s.priority, false, false, s.worker_id, s.concurrency_key, s.unique_key,
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
-- Recorded attempts of a run, newest first: of its days, and what was kept beyond them. Nothing
-- ended before the run was made, which prunes day tables. One may be in both places for a
-- moment, while its day goes.
SELECT a.attempt, a.outcome, a.late, a.worker_id, a.claimed_at, a.ended_at, a.failure, a.timings
FROM fencepost.run_attempts AS a
WHERE a.job_id = @job_id AND a.scheduled_at = @scheduled_at AND a.ended_at >= @since
  AND a.attempt < @before
UNION
SELECT k.attempt, k.outcome, k.late, k.worker_id, k.claimed_at, k.ended_at, k.failure, k.timings
FROM fencepost.run_attempts_kept AS k
WHERE k.job_id = @job_id AND k.scheduled_at = @scheduled_at AND k.attempt < @before
ORDER BY attempt DESC, ended_at DESC
LIMIT @page_max;
