-- name: renew_plain_leases
-- The common case of renew_leases and nothing else: attempts that run, without progress. Rows go
-- in the order they are given, key order, so that no lock of their own comes before the update;
-- a row that another transaction holds for long fails the statement, and the caller takes
-- renew_leases. What runs is open. `places`, from 1, are told only if some were left, `cancelled`
-- are those of attempts that are asked to stop. Keys are looked up as in outcomes.sql.
WITH renewed AS (
    UPDATE fencepost.run_queue AS q
    SET lease_until = @now + q.lease_s * interval '1 second', undelivered = false
    FROM (
        SELECT k.attempt, k.place, x.tid
        FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[])
                 WITH ORDINALITY AS k (job_id, scheduled_at, attempt, place)
        CROSS JOIN LATERAL (
            SELECT r.ctid AS tid FROM fencepost.run_queue AS r
            WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at
            OFFSET 0
        ) AS x
    ) AS h
    WHERE q.ctid = h.tid AND q.attempt = h.attempt AND q.state = 'running'
      AND (SELECT fencepost.clock_agrees(@now))
      AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
    RETURNING h.place, q.cancel_requested
)
SELECT CASE WHEN count(*) < cardinality(@attempts::int[]) THEN array_agg(place) END AS places,
       array_agg(place) FILTER (WHERE cancel_requested) AS cancelled,
       count(*) AS renewed
FROM renewed;

-- name: renew_leases
-- Moves: T6, T10 heartbeat (running, retrying -> running).
-- Renews what is held under its open attempt; an attempt whose lease had run out, and which
-- nobody claimed since, is revived. What another transaction has locked is left for the
-- next tick.
WITH held AS MATERIALIZED (
    SELECT x.tid, k.progress, x.was_lost
    FROM (SELECT * FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                               @progresses::bytea[])
                            AS k (job_id, scheduled_at, attempt, progress)
          ORDER BY job_id, scheduled_at) AS k
    CROSS JOIN LATERAL (
        SELECT r.ctid AS tid, r.state = 'retrying' AS was_lost
        FROM fencepost.run_queue AS r
        WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at AND r.attempt = k.attempt
          AND coalesce(r.attempt_open, false) AND r.state IN ('running', 'retrying')
          AND fencepost.clock_agrees(@now)
        FOR UPDATE SKIP LOCKED
    ) AS x
), renewed AS (
    UPDATE fencepost.run_queue AS q
    SET state = 'running',
        lease_until = @now + q.lease_s * interval '1 second',
        lost_lease_count = q.lost_lease_count - h.was_lost::int,
        undelivered = false,
        progress = coalesce(h.progress, q.progress)
    FROM held AS h
    WHERE q.ctid = h.tid
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
    SELECT x.tid
    FROM (SELECT * FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[])
                            AS k (job_id, scheduled_at, attempt)
          ORDER BY job_id, scheduled_at) AS k
    CROSS JOIN LATERAL (
        SELECT r.ctid AS tid
        FROM fencepost.run_queue AS r
        WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at AND r.attempt = k.attempt
          AND r.state = 'running'
        FOR UPDATE SKIP LOCKED
    ) AS x
)
UPDATE fencepost.run_queue AS q
SET lease_until = least(q.lease_until, @until), undelivered = true
FROM held AS h
WHERE q.ctid = h.tid;

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

-- name: read_by_pages
-- For find_overdue_attempts, until its transaction ends: the index of open attempts says which
-- pages to read, and each is read once. Row by row this costs three times as much.
SELECT set_config('enable_bitmapscan', 'on', true), set_config('enable_indexscan', 'off', true);

-- name: find_overdue_attempts
-- Running attempts whose lease ran out, that are past attempt_timeout, grace and one heartbeat
-- (their worker did not end them), or whose cancel grace is over; the longest overdue first. The
-- first row comes also when nothing is overdue: it says when something will be. Nothing is found
-- while the reaper has to pause, also while nobody has said for @gap_s that heartbeats can be
-- stored, because that is not recorded yet. What was found has to be locked and judged again.
SELECT job_id, scheduled_at, due_at
FROM (
    SELECT f.job_id, f.scheduled_at, f.due_at, row_number() OVER (ORDER BY f.due_at) AS place
    FROM (
        SELECT q.job_id, q.scheduled_at,
               least(q.lease_until,
                     q.claimed_at + (q.attempt_timeout_s + q.cancel_grace_s + @heartbeat_s)
                                    * interval '1 second',
                     CASE WHEN q.cancel_requested THEN q.cancel_by END) AS due_at
        FROM fencepost.run_queue AS q
        WHERE q.attempt_open AND q.state = 'running'
          AND (SELECT fencepost.clock_agrees(@now))
          AND NOT EXISTS (SELECT FROM fencepost.shard_state
                          WHERE no_reap_until > @now
                             OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second')
        ORDER BY due_at
        LIMIT @runs_max
    ) AS f
) AS p
WHERE p.place = 1 OR p.due_at <= @now;

-- name: find_attempts_out_of_time
-- Running attempts whose run is over total_timeout, by an index of that instant. Pauses as above:
-- a worker may have been unable to say that it has ended them. What runs is open.
SELECT q.job_id, q.scheduled_at
FROM fencepost.run_queue AS q
WHERE q.total_until IS NOT NULL AND q.total_until <= @now AND q.state = 'running'
  AND (SELECT fencepost.clock_agrees(@now))
  AND NOT EXISTS (SELECT FROM fencepost.shard_state
                  WHERE no_reap_until > @now
                     OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second')
ORDER BY q.total_until
LIMIT @runs_max;

-- name: lock_overdue_attempts
-- Those of the found attempts that are lost or overdue by now, locked in key order, unless the
-- reaper has to pause. Keys are looked up as in outcomes.sql.
SELECT x.*
FROM (SELECT * FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[])
                        AS k (job_id, scheduled_at)
      ORDER BY job_id, scheduled_at) AS k
CROSS JOIN LATERAL (
    SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.state, q.version, q.queue_id,
           q.kind_id, q.priority, q.failure_count, q.lost_lease_count, q.snooze_count,
           q.cancel_requested, q.cancel_cause, q.cancel_reason, q.worker_id, q.claimed_at,
           q.serial, q.lease_s, q.undelivered, q.total_until,
           (q.lease_until < @now) IS TRUE AS is_lost
    FROM fencepost.run_queue AS q
    WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at AND q.state = 'running'
      AND (q.lease_until < @now
           OR q.claimed_at < @now::timestamptz
               - (q.attempt_timeout_s + q.cancel_grace_s + @heartbeat_s) * interval '1 second'
           OR (q.cancel_requested AND q.cancel_by < @now)
           OR q.total_until <= @now)
      AND (SELECT fencepost.clock_agrees(@now))
      AND NOT EXISTS (SELECT FROM fencepost.shard_state
                      WHERE no_reap_until > @now
                         OR heartbeats_at < @now::timestamptz - @gap_s * interval '1 second')
    FOR UPDATE SKIP LOCKED
) AS x;

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
SELECT x.*
FROM (SELECT o.job_id, o.scheduled_at FROM out_of_time AS o
      ORDER BY o.job_id, o.scheduled_at) AS k
CROSS JOIN LATERAL (
    SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.failure_count,
           q.lost_lease_count, q.worker_id, q.claimed_at, q.serial,
           q.last_failure IS NOT NULL AS has_failed,
           (q.state <> 'blocked' AND q.wait_until <= least(@now, q.total_until)) IS TRUE
               AS waited_out
    FROM fencepost.run_queue AS q
    WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at
      AND q.state IN ('queued', 'blocked', 'retrying')
      AND ((q.state <> 'blocked' AND q.wait_until <= @now) OR q.total_until <= @now)
    FOR UPDATE SKIP LOCKED
) AS x;
