-- name: find_enqueue_targets
-- What a run of these jobs needs to know of its job, by id or by name; deleted ones are gone.
SELECT j.job_id, j.name, s.version, s.queue_id, s.kind_id, s.priority, s.lease_s,
       s.cancel_grace_s, s.attempt_timeout_s, s.max_in_flight, s.concurrency_key,
       u.name AS queue_name, k.name AS kind_name
FROM (
    SELECT j.job_id, j.name
    FROM unnest(@job_ids::uuid[]) AS w (job_id)
    JOIN fencepost.jobs AS j ON j.job_id = w.job_id
    WHERE j.tenant_id = @tenant_id AND j.deleted_at IS NULL
    UNION
    SELECT j.job_id, j.name
    FROM unnest(@names::text[]) AS w (name)
    JOIN fencepost.jobs AS j
      ON j.tenant_id = @tenant_id AND j.name = w.name AND j.deleted_at IS NULL
) AS j
JOIN fencepost.job_schedules AS s ON s.job_id = j.job_id
JOIN fencepost.queues AS u ON u.queue_id = s.queue_id
JOIN fencepost.kinds AS k ON k.kind_id = s.kind_id;

-- name: insert_enqueued
-- Moves: T1 make ( -> queued).
-- Inserts ad-hoc runs in key order; a key that is taken is not returned.
INSERT INTO fencepost.run_queue
    (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version, state,
     origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, max_in_flight, concurrency_key,
     payload, labels, trace_context)
SELECT e.job_id, e.scheduled_at, e.available_at, @now, @tenant_id, e.queue_id, e.kind_id,
       e.version, 'queued', 'enqueue', e.priority, e.lease_s, e.cancel_grace_s,
       e.attempt_timeout_s, e.max_in_flight, e.concurrency_key, e.payload, e.labels::jsonb,
       e.trace_context::jsonb
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @available_ats::timestamptz[],
            @queue_ids::int[], @kind_ids::int[], @versions::int[], @priorities::smallint[],
            @leases_s::smallint[], @graces_s::smallint[], @timeouts_s::int[],
            @job_caps::int[], @concurrency_keys::text[], @payloads::bytea[], @labels::text[],
            @trace_contexts::text[])
         AS e (job_id, scheduled_at, available_at, queue_id, kind_id, version, priority, lease_s,
               cancel_grace_s, attempt_timeout_s, max_in_flight, concurrency_key, payload, labels,
               trace_context)
ORDER BY e.job_id, e.scheduled_at
ON CONFLICT (job_id, scheduled_at) DO NOTHING
RETURNING job_id, scheduled_at;

-- name: keys_of_ended_runs
-- Which of these keys belong to runs that have ended. It must be a statement of its own,
-- after the insert: a completion that commits in between would be missed by the insert's
-- snapshot. Bounded in time so that day tables are pruned.
SELECT k.job_id, k.scheduled_at
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
WHERE (SELECT true FROM fencepost.job_runs AS h
       WHERE h.job_id = k.job_id AND h.scheduled_at = k.scheduled_at
         AND h.scheduled_at >= @first_at AND h.scheduled_at <= @last_at)
   OR (SELECT true FROM fencepost.job_runs_stray AS s
       WHERE s.job_id = k.job_id AND s.scheduled_at = k.scheduled_at)
   OR (SELECT true FROM fencepost.dead_letters AS d
       WHERE d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at);

-- name: withdraw_enqueued
-- Takes back runs that this transaction inserted under keys of ended runs.
DELETE FROM fencepost.run_queue AS q
USING unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at AND q.attempt = 0;

-- name: highest_keys
-- The highest key of each job within a second, live or ended, for runs that are pressed into
-- one instant.
SELECT k.job_id, k.from_at, greatest(
       (SELECT max(q.scheduled_at) FROM fencepost.run_queue AS q
        WHERE q.job_id = k.job_id AND q.scheduled_at >= k.from_at
          AND q.scheduled_at < k.from_at + interval '1 second'),
       (SELECT max(h.scheduled_at) FROM fencepost.job_runs AS h
        WHERE h.job_id = k.job_id AND h.scheduled_at >= k.from_at
          AND h.scheduled_at < k.from_at + interval '1 second'),
       (SELECT max(s.scheduled_at) FROM fencepost.job_runs_stray AS s
        WHERE s.job_id = k.job_id AND s.scheduled_at >= k.from_at
          AND s.scheduled_at < k.from_at + interval '1 second'),
       (SELECT max(d.scheduled_at) FROM fencepost.dead_letters AS d
        WHERE d.job_id = k.job_id AND d.scheduled_at >= k.from_at
          AND d.scheduled_at < k.from_at + interval '1 second')) AS highest_at
FROM unnest(@job_ids::uuid[], @from_ats::timestamptz[]) AS k (job_id, from_at);
