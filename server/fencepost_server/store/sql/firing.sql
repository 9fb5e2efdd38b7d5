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
-- thought, or a next fire that nobody has computed yet, is only reported. A key that is taken
-- fails the whole: a conflict clause would cost every fire a second record in the log.
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
    -- Neighbours in the indexes are written one after the other.
    ORDER BY j.job_id
), judged AS MATERIALIZED (
    SELECT d.tid, d.job_id, d.next_run_at, d.fire_count, d.tenant_id, d.queue_id, d.kind_id,
           d.version, d.schedule_id, d.priority, d.lease_s, d.cancel_grace_s, d.attempt_timeout_s,
           d.max_in_flight, d.concurrency_key, d.queue_timeout_s, d.total_timeout_s,
           d.after_completion OR d.overlap IN ('queue_one', 'queue_all', 'cancel_previous')
               AS serial,
           a.awaits_end, m.is_unknown, m.is_late,
           CASE WHEN a.is_followed AND a.has_fires_left THEN m.following_at END AS following_run_at,
           fencepost.jittered(d.job_id, d.next_run_at, d.jitter_s,
                              CASE WHEN a.is_followed THEN m.following_at END) AS ready_at,
           NOT m.is_unknown
               AND NOT d.has_calendars
               AND (NOT m.is_late
                    OR (d.misfire <> 'skip'
                        AND (m.following_at IS NULL OR m.following_at > @now)
                        AND (d.misfire_window_s IS NULL
                             OR d.next_run_at > @now - d.misfire_window_s * interval '1 second')))
               -- A scalar subquery on purpose: as EXISTS it is planned as one hash of the queue.
               AND (d.overlap = 'allow'
                    OR (SELECT true FROM fencepost.run_queue AS q
                        WHERE q.job_id = d.job_id AND q.scheduled_at <= @now LIMIT 1) IS NOT TRUE)
               AS is_ready
    FROM due AS d
    -- The limit keeps it a probe for each row: joined, all that is remembered is read for each.
    LEFT JOIN LATERAL (
        SELECT f.schedule_id, f.next_at
        FROM fencepost.schedule_fires AS f
        WHERE f.schedule_id = d.schedule_id AND f.scheduled_at = d.next_run_at
          AND f.tzdata = @tzdata
        LIMIT 1
    ) AS f ON true
    CROSS JOIN LATERAL (
        SELECT d.schedule_id IS NOT NULL AND f.schedule_id IS NULL AS is_unknown,
               d.next_run_at < @now - d.misfire_after_s * interval '1 second' AS is_late,
               CASE WHEN d.every_s IS NULL THEN f.next_at
                    -- The end of the run decides.
                    WHEN d.after_completion THEN NULL
                    ELSE d.next_run_at + d.every_s * interval '1 second' END AS following_at
    ) AS m
    CROSS JOIN LATERAL (
        SELECT m.following_at < coalesce(d.end_at, 'infinity') AS is_followed,
               d.fire_count + 1 < coalesce(d.max_fires, 9223372036854775807) AS has_fires_left,
               d.after_completion AND d.fire_count + 1 < coalesce(d.max_fires, 9223372036854775807)
                   AS awaits_end
    ) AS a
), fired AS (
    UPDATE fencepost.job_schedules AS s
    SET last_scheduled_at = r.next_run_at,
        next_run_at = r.following_run_at,
        awaits_end = r.awaits_end,
        fire_count = r.fire_count + 1
    FROM judged AS r
    WHERE r.is_ready AND s.ctid = r.tid AND s.job_id = r.job_id
    RETURNING r.job_id, r.next_run_at, r.tenant_id, r.queue_id, r.kind_id, r.version, r.priority,
              r.lease_s, r.cancel_grace_s, r.attempt_timeout_s, r.max_in_flight,
              r.concurrency_key, r.queue_timeout_s, r.total_timeout_s, r.serial, r.is_late,
              r.ready_at
), made AS (
    INSERT INTO fencepost.run_queue
        (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id, version,
         state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s, serial,
         max_in_flight, concurrency_key, queue_timeout_s, wait_until, total_until, parked)
    SELECT job_id, next_run_at, free_at, @now, tenant_id, queue_id, kind_id, version, 'queued',
           CASE WHEN is_late THEN 'catch_up'::fencepost.run_origin ELSE 'schedule' END,
           priority, lease_s, cancel_grace_s, attempt_timeout_s, serial,
           max_in_flight, concurrency_key, queue_timeout_s,
           free_at + queue_timeout_s * interval '1 second',
           free_at + total_timeout_s * interval '1 second', parks
    FROM fired AS r
    CROSS JOIN LATERAL (SELECT r.next_run_at < @parked_before AND r.ready_at <= @now AS parks) AS p
    CROSS JOIN LATERAL (
        SELECT CASE WHEN parks THEN @parked_until ELSE greatest(ready_at, @now) END AS free_at
    ) AS a
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(next_run_at) FROM fired
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
       j.unknown_schedules, j.unknown_instants, j.thoughtful,
       n.upcoming_schedules, n.upcoming_instants
FROM (
    SELECT coalesce(array_agg(schedule_id) FILTER (WHERE is_unknown), '{}') AS unknown_schedules,
           coalesce(array_agg(next_run_at) FILTER (WHERE is_unknown), '{}') AS unknown_instants,
           coalesce(array_agg(job_id ORDER BY job_id) FILTER (WHERE NOT is_unknown), '{}')
               AS thoughtful
    FROM judged WHERE NOT is_ready
) AS j
-- What comes next within the hour, so that its own next can be computed in time.
CROSS JOIN (
    SELECT coalesce(array_agg(schedule_id), '{}') AS upcoming_schedules,
           coalesce(array_agg(following_run_at), '{}') AS upcoming_instants
    FROM (SELECT DISTINCT schedule_id, following_run_at
          FROM judged
          WHERE is_ready AND schedule_id IS NOT NULL
            AND following_run_at <= @now + interval '1 hour') AS x
) AS n;

-- name: taken_keys
-- Due jobs whose run of that very fire is live already, and that fire_due therefore refuses.
SELECT j.job_id
FROM unnest(@partitions::smallint[]) AS p (partition_id)
CROSS JOIN LATERAL (
    SELECT s.job_id, s.next_run_at
    FROM fencepost.job_schedules AS s
    WHERE s.partition_id = p.partition_id
      AND s.next_run_at IS NOT NULL AND NOT s.paused
      AND s.next_run_at > @after AND s.next_run_at <= @now
      AND (s.schedule_id IS NULL OR s.schedule_id <> ALL (@withheld::int[]))
    ORDER BY s.next_run_at
    LIMIT @batch_max
) AS j
WHERE (SELECT true FROM fencepost.run_queue AS q
       WHERE q.job_id = j.job_id AND q.scheduled_at = j.next_run_at)
ORDER BY j.job_id;

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
