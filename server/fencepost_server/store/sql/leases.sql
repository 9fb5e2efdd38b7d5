-- name: renew_leases
-- Moves: T6, T10 heartbeat (running, retrying -> running).
-- Renews what is held under its open attempt; an attempt whose lease had run out, and which
-- nobody claimed since, is revived. What another transaction has locked is left for the
-- next tick.
WITH held AS MATERIALIZED (
    SELECT q.ctid AS tid, h.progress, q.job_id, q.state = 'retrying' AS was_lost
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                @progresses::bytea[]) AS h (job_id, scheduled_at, attempt, progress)
    JOIN fencepost.run_queue AS q
      ON q.job_id = h.job_id AND q.scheduled_at = h.scheduled_at
    WHERE q.attempt = h.attempt AND q.attempt_open
      AND q.state IN ('running', 'retrying')
      AND fencepost.clock_agrees(@now)
    ORDER BY q.job_id, q.scheduled_at
    FOR UPDATE OF q SKIP LOCKED
), renewed AS (
    UPDATE fencepost.run_queue AS q
    SET state = 'running',
        lease_until = @now + q.lease_s * interval '1 second',
        lost_lease_count = q.lost_lease_count - h.was_lost::int,
        undelivered = false,
        progress = coalesce(h.progress, q.progress)
    FROM held AS h
    WHERE q.ctid = h.tid AND q.job_id = h.job_id
    RETURNING q.job_id, q.scheduled_at, q.attempt, q.cancel_requested, q.cancel_reason, q.cancel_by,
              h.was_lost
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM renewed
    WHERE was_lost AND (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, attempt, cancel_requested, cancel_reason, cancel_by FROM renewed;

-- name: cut_leases
-- Leases of runs that were written to a broken stream without a receipt: the worker has
-- until @until to say that it has them.
WITH held AS MATERIALIZED (
    SELECT q.ctid AS tid, q.job_id
    FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[])
             AS h (job_id, scheduled_at, attempt)
    JOIN fencepost.run_queue AS q
      ON q.job_id = h.job_id AND q.scheduled_at = h.scheduled_at
    WHERE q.attempt = h.attempt AND q.state = 'running'
    ORDER BY q.job_id, q.scheduled_at
    FOR UPDATE OF q SKIP LOCKED
)
UPDATE fencepost.run_queue AS q
SET lease_until = least(q.lease_until, @until), undelivered = true
FROM held AS h
WHERE q.ctid = h.tid AND q.job_id = h.job_id;

-- name: tick_heartbeats
-- Says that heartbeats can be stored. After a gap nobody may lose a lease for the length of
-- the longest live one: workers could not renew them meanwhile.
UPDATE fencepost.shard_state
SET heartbeats_at = greatest(heartbeats_at, @now),
    no_reap_until = CASE
        WHEN @now::timestamptz - heartbeats_at > @gap_s * interval '1 second' OR @was_away
        THEN greatest(no_reap_until, @now::timestamptz + coalesce(
            (SELECT max(q.lease_s) FROM fencepost.run_queue AS q WHERE q.attempt_open), 30)
            * interval '1 second')
        ELSE no_reap_until END
RETURNING no_reap_until;

-- name: lock_lost_leases
-- Running attempts whose lease ran out, the longest lost first, unless the reaper has to pause:
-- also while nobody has said for @gap_s that heartbeats can be stored, because that is not
-- recorded yet. Found first and locked in key order then: in one step the key's index would
-- be walked over all that waits.
WITH lost AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at
    FROM fencepost.run_queue AS q
    WHERE q.attempt_open AND q.state = 'running' AND q.lease_until < @now
      AND fencepost.clock_agrees(@now)
      AND NOT EXISTS (SELECT FROM fencepost.shard_state
                      WHERE no_reap_until > @now
                         OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second')
    ORDER BY q.lease_until
    LIMIT @runs_max
)
SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.state, q.version, q.queue_id,
       q.kind_id, q.priority, q.failure_count, q.lost_lease_count, q.snooze_count,
       q.cancel_requested, q.cancel_cause, q.cancel_reason, q.worker_id, q.claimed_at, q.serial,
       q.lease_s, q.undelivered, q.total_until
FROM lost AS l
JOIN fencepost.run_queue AS q ON q.job_id = l.job_id AND q.scheduled_at = l.scheduled_at
WHERE q.attempt_open AND q.state = 'running' AND q.lease_until < @now
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE OF q SKIP LOCKED;

-- name: lock_overrun_attempts
-- Running attempts past attempt_timeout, grace and one heartbeat: their worker did not end
-- them. Also those whose cancel grace is over, or whose run is over total_timeout. Pauses as
-- above: a worker may have been unable to say that it has ended them.
WITH overrun AS MATERIALIZED (
    SELECT q.job_id, q.scheduled_at, q.attempt
    FROM fencepost.run_queue AS q
    WHERE q.attempt_open AND q.state = 'running'
      AND (q.claimed_at < @now::timestamptz
               - (q.attempt_timeout_s + q.cancel_grace_s + @heartbeat_s) * interval '1 second'
           OR (q.cancel_requested AND q.cancel_by < @now)
           OR q.total_until <= @now)
      AND fencepost.clock_agrees(@now)
      AND NOT EXISTS (SELECT FROM fencepost.shard_state
                      WHERE no_reap_until > @now
                         OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second')
    ORDER BY q.claimed_at
    LIMIT @runs_max
)
SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.state, q.version, q.queue_id,
       q.kind_id, q.priority, q.failure_count, q.lost_lease_count, q.snooze_count,
       q.cancel_requested, q.cancel_cause, q.cancel_reason, q.worker_id, q.claimed_at, q.serial,
       q.lease_s, q.undelivered, q.total_until
FROM overrun AS o
JOIN fencepost.run_queue AS q ON q.job_id = o.job_id AND q.scheduled_at = o.scheduled_at
WHERE q.attempt = o.attempt AND q.attempt_open AND q.state = 'running'
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE OF q SKIP LOCKED;

-- name: lock_expired_runs
-- Waiting runs that are out of time: over queue_timeout since they became claimable (a blocked
-- one does not wait for a worker), or over total_timeout. `waited_out` says which came first.
-- A claim takes the row or this does. Only a lost attempt that is still open has to wait for
-- the end of the reaper's pause: its worker may have been unable to report.
WITH pause AS MATERIALIZED (
    SELECT count(*) > 0 AS is_on FROM fencepost.shard_state
    WHERE no_reap_until > @now
       OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second'
), out_of_time AS MATERIALIZED (
    (SELECT q.job_id, q.scheduled_at
     FROM fencepost.run_queue AS q
     WHERE q.wait_until IS NOT NULL AND q.wait_until <= @now
       AND q.state IN ('queued', 'retrying')
       AND NOT (q.attempt_open AND (SELECT is_on FROM pause))
       AND fencepost.clock_agrees(@now)
     ORDER BY q.wait_until
     LIMIT @runs_max)
    UNION
    (SELECT q.job_id, q.scheduled_at
     FROM fencepost.run_queue AS q
     WHERE q.total_until IS NOT NULL AND q.total_until <= @now
       AND q.state IN ('queued', 'blocked', 'retrying')
       AND NOT (q.attempt_open AND (SELECT is_on FROM pause))
       AND fencepost.clock_agrees(@now)
     ORDER BY q.total_until
     LIMIT @runs_max)
)
SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.failure_count, q.lost_lease_count,
       q.worker_id, q.claimed_at, q.serial, q.last_failure IS NOT NULL AS has_failed,
       (q.state <> 'blocked' AND q.wait_until <= least(@now, q.total_until)) IS TRUE AS waited_out
FROM out_of_time AS o
JOIN fencepost.run_queue AS q ON q.job_id = o.job_id AND q.scheduled_at = o.scheduled_at
WHERE q.state IN ('queued', 'blocked', 'retrying')
  AND ((q.state <> 'blocked' AND q.wait_until <= @now) OR q.total_until <= @now)
ORDER BY q.job_id, q.scheduled_at
FOR UPDATE OF q SKIP LOCKED;
