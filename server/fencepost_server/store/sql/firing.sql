-- name: next_due
-- The earliest due instant of each partition that has one, later than @after. Schedules whose
-- zone another server knows newer data of are withheld.
SELECT p.partition_id, n.next_run_at
FROM unnest(@partitions::smallint[]) AS p (partition_id)
CROSS JOIN LATERAL (
    SELECT s.next_run_at
    FROM fencepost.job_schedules AS s
    WHERE s.partition_id = p.partition_id
      AND s.next_run_at IS NOT NULL AND NOT s.paused
      AND s.next_run_at > @after
      AND (s.schedule_id IS NULL OR s.schedule_id <> ALL (@withheld::int[]))
    ORDER BY s.next_run_at
    LIMIT 1
) AS n;

-- name: fire_due
-- Moves: T1 make ( -> queued).
-- Locks what is due, advances it and inserts its runs, all in one statement. A row is
-- advanced only where its locked version is the one this snapshot saw (ctid): a second
-- owner with an older snapshot locks the new version and must change nothing. What needs
-- thought, or a next fire that nobody has computed yet, is only reported.
WITH due AS MATERIALIZED (
    SELECT j.*
    FROM unnest(@partitions::smallint[]) AS p (partition_id)
    CROSS JOIN LATERAL (
        SELECT s.ctid AS tid, s.job_id, s.next_run_at, s.end_at, s.fire_count, s.max_fires,
               s.tenant_id, s.queue_id, s.kind_id, s.version, s.schedule_id, s.every_s,
               s.after_completion, s.jitter_s, s.has_calendars, s.misfire_after_s,
               s.misfire_window_s, s.max_in_flight, s.misfire, s.overlap,
               s.partition_id, s.priority, s.lease_s, s.cancel_grace_s, s.attempt_timeout_s,
               s.queue_timeout_s, s.total_timeout_s, s.concurrency_key
        FROM fencepost.job_schedules AS s
        WHERE s.partition_id = p.partition_id
          AND s.next_run_at IS NOT NULL AND NOT s.paused
          AND s.next_run_at > @after AND s.next_run_at <= @now
          AND (s.schedule_id IS NULL OR s.schedule_id <> ALL (@withheld::int[]))
        ORDER BY s.next_run_at
        LIMIT @batch_max
        FOR UPDATE SKIP LOCKED
    ) AS j
    WHERE fencepost.clock_agrees(@now)
), timed AS (
    SELECT d.*,
           d.schedule_id IS NOT NULL AND f.schedule_id IS NULL AS is_unknown,
           CASE WHEN d.every_s IS NULL THEN f.next_at
                -- The end of the run decides.
                WHEN d.after_completion THEN NULL
                ELSE d.next_run_at + d.every_s * interval '1 second' END AS following_at,
           d.next_run_at < @now - d.misfire_after_s * interval '1 second' AS is_late,
           -- A scalar subquery on purpose: as EXISTS it is planned as one hash of the queue.
           d.overlap <> 'allow'
               AND (SELECT true FROM fencepost.run_queue AS q
                    WHERE q.job_id = d.job_id AND q.scheduled_at <= @now LIMIT 1) IS TRUE
               AS is_overlapping
    FROM due AS d
    LEFT JOIN fencepost.schedule_fires AS f
           ON f.schedule_id = d.schedule_id AND f.scheduled_at = d.next_run_at
          AND f.tzdata = @tzdata
), judged AS (
    SELECT t.*,
           CASE WHEN t.following_at < coalesce(t.end_at, 'infinity')
                 AND t.fire_count + 1 < coalesce(t.max_fires, 9223372036854775807)
                THEN t.following_at END AS following_run_at,
           t.after_completion AND t.fire_count + 1 < coalesce(t.max_fires, 9223372036854775807)
               AS awaits_end,
           NOT t.is_unknown
               AND NOT t.has_calendars
               AND NOT t.is_overlapping
               AND (NOT t.is_late
                    OR (t.misfire <> 'skip'
                        AND (t.following_at IS NULL OR t.following_at > @now)
                        AND (t.misfire_window_s IS NULL
                             OR t.next_run_at > @now - t.misfire_window_s * interval '1 second')))
               AS is_ready
    FROM timed AS t
), fired AS (
    UPDATE fencepost.job_schedules AS s
    SET last_scheduled_at = r.next_run_at,
        next_run_at = r.following_run_at,
        awaits_end = r.awaits_end,
        fire_count = r.fire_count + 1
    FROM judged AS r
    WHERE r.is_ready AND s.ctid = r.tid AND s.job_id = r.job_id
    RETURNING r.*
), released AS (
    SELECT f.*,
           fencepost.jittered(f.job_id, f.next_run_at, f.jitter_s,
                              CASE WHEN f.following_at < coalesce(f.end_at, 'infinity')
                                   THEN f.following_at END) AS ready_at
    FROM fired AS f
), made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version,
         state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, serial,
         max_in_flight, concurrency_key, queue_timeout_s, wait_until, total_until, parked)
    SELECT job_id, next_run_at, free_at, @now, tenant_id, queue_id, kind_id, version, 'queued',
           CASE WHEN is_late THEN 'catch_up'::fencepost.run_origin ELSE 'schedule' END,
           priority, lease_s, cancel_grace_s, attempt_timeout_s,
           overlap IN ('queue_one', 'queue_all', 'cancel_previous') OR after_completion,
           max_in_flight, concurrency_key, queue_timeout_s,
           free_at + queue_timeout_s * interval '1 second',
           free_at + total_timeout_s * interval '1 second', parks
    FROM released AS r
    CROSS JOIN LATERAL (SELECT r.next_run_at < @parked_before AND r.ready_at <= @now AS parks) AS p
    CROSS JOIN LATERAL (
        SELECT CASE WHEN parks THEN @parked_until ELSE greatest(ready_at, @now) END AS free_at
    ) AS a
    -- A key that is taken was fired already; one such job must not hold up the batch.
    ON CONFLICT (job_id, scheduled_at) DO NOTHING
    RETURNING job_id, scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM made
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT (SELECT count(*) FROM due) AS locked,
       (SELECT count(*) FROM fired) AS fired,
       (SELECT coalesce(array_agg(partition_id), '{}')
        FROM (SELECT partition_id FROM due GROUP BY partition_id HAVING count(*) >= @batch_max) AS x)
           AS full_partitions,
       (SELECT coalesce(array_agg(ARRAY[queue_id, kind_id, priority::int]), '{}')
        FROM (SELECT DISTINCT queue_id, kind_id, priority FROM fired) AS x) AS lanes,
       (SELECT coalesce(array_agg(schedule_id), '{}')
        FROM (SELECT DISTINCT schedule_id, next_run_at FROM judged WHERE is_unknown
              ORDER BY 1, 2) AS x) AS unknown_schedules,
       (SELECT coalesce(array_agg(next_run_at), '{}')
        FROM (SELECT DISTINCT schedule_id, next_run_at FROM judged WHERE is_unknown
              ORDER BY 1, 2) AS x) AS unknown_instants,
       (SELECT coalesce(array_agg(job_id ORDER BY job_id), '{}') FROM judged
        WHERE NOT is_unknown AND NOT is_ready) AS thoughtful;

-- name: schedule_rules
-- The rules of interned schedules.
SELECT schedule_id, rule FROM fencepost.schedules WHERE schedule_id = ANY (@schedule_ids::int[]);

-- name: remember_fires
-- Adds computed next fires to the memo; another owner may have been first.
INSERT INTO fencepost.schedule_fires (schedule_id, scheduled_at, next_at, tzdata)
SELECT m.*, @tzdata
FROM unnest(@schedule_ids::int[], @scheduled_ats::timestamptz[], @next_ats::timestamptz[]) AS m
ON CONFLICT DO NOTHING;

-- name: forget_fires
-- Drops memo entries that no due row can need any more; a late row computes its own again.
DELETE FROM fencepost.schedule_fires WHERE scheduled_at < @before;
