-- name: succeed_plain_runs
-- Moves: T7 succeed (running -> succeeded).
-- The common case of succeed_runs and nothing else: first attempts that run, on days that have
-- history. Rows go in the order they are given, key order, so that no lock of their own comes
-- before the deletion; a row that another transaction holds for long fails the statement, and
-- the caller takes succeed_runs. What runs is open. `places`, from 1, are told only if some were
-- left. Results or timings that nobody sent may be left out of their array's end.
-- Here and below keys are looked up in a subquery that no plan can turn round, and rows are
-- joined by ctid alone: Postgres takes a queue that was empty at its last vacuum for empty, and
-- would read all of it for each key.
WITH gone AS (
    DELETE FROM fencepost.run_queue AS q
    USING (
        SELECT k.*, x.tid
        FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @results::bytea[],
                    @timings::bytea[]) WITH ORDINALITY
                 AS k (job_id, scheduled_at, result, timings, place)
        CROSS JOIN LATERAL (
            SELECT r.ctid AS tid FROM fencepost.run_queue AS r
            WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at
            OFFSET 0
        ) AS x
    ) AS e
    WHERE q.ctid = e.tid AND q.attempt = 1 AND q.state = 'running'
      AND e.scheduled_at >= (SELECT history_from FROM fencepost.shard_state)
      AND e.scheduled_at < (SELECT history_until FROM fencepost.shard_state)
      AND (SELECT set_config('lock_timeout', '50ms', true)) IS NOT NULL
    RETURNING q.job_id, q.scheduled_at, q.available_at, q.created_at, q.first_claimed_at,
              q.claimed_at, q.tenant_id, q.queue_id, q.kind_id, q.version, q.failure_count,
              q.lost_lease_count, q.snooze_count, q.replay_count, q.origin, q.priority,
              q.worker_id, q.concurrency_key, q.payload, q.labels, q.progress, e.result,
              q.last_failure, q.failure_code, e.timings, q.cancel_cause, q.cancel_reason,
              q.trace_context, q.unique_key, q.serial, e.place
), kept AS (
    INSERT INTO fencepost.job_runs
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, result, last_failure, failure_code, timings, cancel_cause,
         cancel_reason, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, 1, failure_count, lost_lease_count,
           snooze_count, replay_count, 'succeeded', origin, priority, worker_id, concurrency_key,
           payload, labels, progress, result, last_failure, failure_code, timings, cancel_cause,
           cancel_reason, trace_context, unique_key
    FROM gone
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM gone
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT count(*) AS ended,
       CASE WHEN count(*) < cardinality(@job_ids::uuid[]) THEN array_agg(place) END AS places,
       array_agg(DISTINCT queue_id) AS queue_ids,
       array_agg(DISTINCT job_id) FILTER (WHERE serial) AS serial_job_ids
FROM gone;

-- name: succeed_runs
-- Moves: T7, T17 succeed (running, retrying -> succeeded).
-- Ends open attempts as succeeded: out of the queue and into history in one statement.
-- Returns what it ended; the rest was stale, ended, or locked by someone just now.
WITH ends AS MATERIALIZED (
    SELECT x.tid, k.result, k.timings, k.progress
    FROM (SELECT * FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                               @results::bytea[], @timings::bytea[], @progresses::bytea[])
                            AS k (job_id, scheduled_at, attempt, result, timings, progress)
          ORDER BY job_id, scheduled_at) AS k
    CROSS JOIN LATERAL (
        SELECT r.ctid AS tid FROM fencepost.run_queue AS r
        WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at AND r.attempt = k.attempt
          -- Not `attempt_open` alone: the index of open attempts would be walked by job.
          AND coalesce(r.attempt_open, false) AND r.state IN ('running', 'retrying')
        FOR UPDATE SKIP LOCKED
    ) AS x
), gone AS (
    DELETE FROM fencepost.run_queue AS q
    USING ends AS e
    WHERE q.ctid = e.tid
    RETURNING q.job_id, q.scheduled_at, q.available_at, q.created_at, q.first_claimed_at,
              q.claimed_at, q.tenant_id, q.queue_id, q.kind_id, q.version, q.attempt,
              q.failure_count,
              q.lost_lease_count - (q.state = 'retrying')::int AS lost_lease_count,
              q.snooze_count, q.replay_count, q.origin, q.priority, q.worker_id,
              q.concurrency_key, q.payload, q.labels, coalesce(e.progress, q.progress) AS progress,
              e.result, q.last_failure, q.failure_code, e.timings, q.cancel_cause,
              q.cancel_reason, q.trace_context, q.unique_key, q.serial,
              q.state = 'retrying' AS is_late
), kept AS (
    INSERT INTO fencepost.job_runs
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, result, last_failure, failure_code, timings, cancel_cause,
         cancel_reason, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
           snooze_count, replay_count, 'succeeded', origin, priority, worker_id, concurrency_key,
           payload, labels, progress, result, last_failure, failure_code, timings, cancel_cause,
           cancel_reason, trace_context, unique_key
    FROM gone
    WHERE scheduled_at >= (SELECT history_from FROM fencepost.shard_state)
      AND scheduled_at < (SELECT history_until FROM fencepost.shard_state)
), strayed AS (
    INSERT INTO fencepost.job_runs_stray
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, result, last_failure, failure_code, timings, cancel_cause,
         cancel_reason, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
           snooze_count, replay_count, 'succeeded', origin, priority, worker_id, concurrency_key,
           payload, labels, progress, result, last_failure, failure_code, timings, cancel_cause,
           cancel_reason, trace_context, unique_key
    FROM gone
    WHERE scheduled_at < (SELECT history_from FROM fencepost.shard_state)
       OR scheduled_at >= (SELECT history_until FROM fencepost.shard_state)
), tried AS (
    INSERT INTO fencepost.run_attempts
        (job_id, scheduled_at, attempt, outcome, late, worker_id, claimed_at, ended_at, timings)
    SELECT job_id, scheduled_at, attempt, 'succeeded', is_late, worker_id, claimed_at, @now, timings
    FROM gone
    WHERE attempt > 1 OR is_late
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM gone
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, attempt, serial, queue_id FROM gone;

-- name: lock_open_attempts
-- The runs whose newest attempt is one of these and still open, locked in key order.
SELECT q.job_id, q.scheduled_at, q.attempt, q.attempt_open, q.state, q.version, q.queue_id,
       q.kind_id, q.priority, q.failure_count, q.lost_lease_count, q.snooze_count,
       q.cancel_requested, q.cancel_cause, q.cancel_reason, q.worker_id, q.claimed_at, q.serial,
       q.lease_s, q.total_until
FROM (SELECT * FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[])
                        AS k (job_id, scheduled_at, attempt)
      ORDER BY job_id, scheduled_at) AS k
CROSS JOIN LATERAL (
    SELECT r.*
    FROM fencepost.run_queue AS r
    WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at AND r.attempt = k.attempt
      AND coalesce(r.attempt_open, false)
    FOR UPDATE SKIP LOCKED
) AS q;

-- name: put_back_runs
-- Moves: T8, T11, T17 put_back (running, retrying -> retrying, queued).
-- Moves: T9 lose_lease (running -> retrying).
-- Sends runs back to wait; their rows are locked by this transaction.
WITH waiting AS (
    UPDATE fencepost.run_queue AS q
    SET state = b.state::fencepost.run_state,
        available_at = b.available_at,
        wait_until = b.available_at + q.queue_timeout_s * interval '1 second',
        attempt_open = b.attempt_open,
        lease_until = NULL,
        failure_count = b.failure_count,
        lost_lease_count = b.lost_lease_count,
        snooze_count = b.snooze_count,
        last_failure = coalesce(b.failure, q.last_failure),
        failure_code = coalesce(b.failure_code, q.failure_code),
        progress = coalesce(b.progress, q.progress)
    FROM (
        SELECT k.*, x.tid
        FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                    @states::text[], @available_ats::timestamptz[], @opens::boolean[],
                    @failure_counts::int[], @lost_lease_counts::int[], @snooze_counts::int[],
                    @failures::bytea[], @failure_codes::text[], @progresses::bytea[])
                 AS k (job_id, scheduled_at, attempt, state, available_at, attempt_open,
                       failure_count, lost_lease_count, snooze_count, failure, failure_code,
                       progress)
        CROSS JOIN LATERAL (
            SELECT r.ctid AS tid FROM fencepost.run_queue AS r
            WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at
            OFFSET 0
        ) AS x
    ) AS b
    WHERE q.ctid = b.tid AND q.attempt = b.attempt
      AND coalesce(q.attempt_open, false) AND q.state IN ('running', 'retrying')
    RETURNING q.job_id, q.scheduled_at
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM waiting
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at FROM waiting;

-- name: end_runs
-- Moves: T12, T13, T17 bury (queued, running, retrying -> dead).
-- Moves: T14 expire (queued, blocked -> skipped).
-- Moves: T15, T16, T17 cancel (queued, blocked, running, retrying -> cancelled).
-- Ends runs in any way but success; their rows are locked by this transaction.
WITH gone AS (
    DELETE FROM fencepost.run_queue AS q
    USING (
        SELECT k.*, x.tid
        FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[],
                    @states::text[], @failure_counts::int[], @lost_lease_counts::int[],
                    @dead_reasons::text[], @cancel_causes::text[], @cancel_reasons::text[],
                    @skip_reasons::text[], @forced::boolean[], @failures::bytea[],
                    @failure_codes::text[], @progresses::bytea[])
                 AS k (job_id, scheduled_at, attempt, state, failure_count, lost_lease_count,
                       dead_reason, cancel_cause, cancel_reason, skip_reason, forced, failure,
                       failure_code, progress)
        CROSS JOIN LATERAL (
            SELECT r.ctid AS tid FROM fencepost.run_queue AS r
            WHERE r.job_id = k.job_id AND r.scheduled_at = k.scheduled_at
            OFFSET 0
        ) AS x
    ) AS e
    WHERE q.ctid = e.tid AND q.attempt = e.attempt
      AND q.state IN ('queued', 'blocked', 'running', 'retrying')
    RETURNING q.job_id, q.scheduled_at, q.available_at, q.created_at, q.first_claimed_at,
              q.claimed_at, q.tenant_id, q.queue_id, q.kind_id, q.version, q.attempt,
              e.failure_count, e.lost_lease_count, q.snooze_count, q.replay_count,
              e.state::fencepost.run_state AS state, q.origin, q.priority, q.worker_id,
              q.concurrency_key, q.payload, q.labels, coalesce(e.progress, q.progress) AS progress,
              coalesce(e.failure, q.last_failure) AS last_failure,
              coalesce(e.failure_code, q.failure_code) AS failure_code,
              e.dead_reason::fencepost.dead_reason AS dead_reason,
              e.cancel_cause::fencepost.cancel_cause AS cancel_cause, e.cancel_reason,
              e.skip_reason::fencepost.skip_reason AS skip_reason, e.forced, q.trace_context,
              q.unique_key, q.serial
), buried AS (
    INSERT INTO fencepost.dead_letters
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, last_failure, failure_code, dead_reason, cancel_cause, cancel_reason,
         forced, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
           snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key,
           payload, labels, progress, last_failure, failure_code, dead_reason, cancel_cause,
           cancel_reason, forced, trace_context, unique_key
    FROM gone
    WHERE state = 'dead'
), kept AS (
    INSERT INTO fencepost.job_runs
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, last_failure, failure_code, cancel_cause, cancel_reason, skip_reason,
         forced, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
           snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key,
           payload, labels, progress, last_failure, failure_code, cancel_cause, cancel_reason,
           skip_reason, forced, trace_context, unique_key
    FROM gone
    WHERE state <> 'dead'
      AND scheduled_at >= (SELECT history_from FROM fencepost.shard_state)
      AND scheduled_at < (SELECT history_until FROM fencepost.shard_state)
), strayed AS (
    INSERT INTO fencepost.job_runs_stray
        (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, ended_at,
         tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
         snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key, payload,
         labels, progress, last_failure, failure_code, cancel_cause, cancel_reason, skip_reason,
         forced, trace_context, unique_key)
    SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at, @now,
           tenant_id, queue_id, kind_id, version, attempt, failure_count, lost_lease_count,
           snooze_count, replay_count, state, origin, priority, worker_id, concurrency_key,
           payload, labels, progress, last_failure, failure_code, cancel_cause, cancel_reason,
           skip_reason, forced, trace_context, unique_key
    FROM gone
    WHERE state <> 'dead'
      AND (scheduled_at < (SELECT history_from FROM fencepost.shard_state)
           OR scheduled_at >= (SELECT history_until FROM fencepost.shard_state))
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM gone
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, serial FROM gone;

-- name: record_attempts
-- Attempts that did not simply succeed.
INSERT INTO fencepost.run_attempts
    (job_id, scheduled_at, attempt, outcome, late, worker_id, claimed_at, ended_at, failure,
     timings)
SELECT a.job_id, a.scheduled_at, a.attempt, a.outcome::fencepost.attempt_outcome, a.late,
       a.worker_id, a.claimed_at, @now, a.failure, a.timings
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[], @attempts::int[], @outcomes::text[],
            @lates::boolean[], @worker_ids::uuid[], @claimed_ats::timestamptz[],
            @failures::bytea[], @timings::bytea[])
         AS a (job_id, scheduled_at, attempt, outcome, late, worker_id, claimed_at, failure,
               timings);

-- name: inspect_runs
-- Where runs are now: what a refused write is judged by. No row: there is no such run.
SELECT k.job_id, k.scheduled_at, r.attempt, r.state, r.attempt_open, r.forced, r.cancel_requested,
       r.cancel_reason, r.cancel_by, r.failure_code
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at)
CROSS JOIN LATERAL (
    SELECT q.attempt, q.state, q.attempt_open,
           -- Replayed since: its last attempt may be one that the server had ended.
           coalesce(q.forced_attempt = q.attempt, false) AS forced, q.cancel_requested,
           q.cancel_reason, q.cancel_by, q.failure_code
    FROM fencepost.run_queue AS q
    WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at
    UNION ALL
    SELECT d.attempt, d.state, false, d.forced, false, d.cancel_reason, NULL,
           d.failure_code
    FROM fencepost.dead_letters AS d
    WHERE d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at
    UNION ALL
    SELECT h.attempt, h.state, false, h.forced, false, h.cancel_reason, NULL,
           h.failure_code
    FROM fencepost.job_runs AS h
    WHERE h.job_id = k.job_id AND h.scheduled_at = k.scheduled_at
    UNION ALL
    SELECT s.attempt, s.state, false, s.forced, false, s.cancel_reason, NULL,
           s.failure_code
    FROM fencepost.job_runs_stray AS s
    WHERE s.job_id = k.job_id AND s.scheduled_at = k.scheduled_at
) AS r;

-- name: promote_runs
-- Moves: T4 promote (blocked -> queued).
-- The oldest blocked run of each of these jobs, where no other due run is live; the caller
-- has locked the jobs in an earlier statement. Backfill runs wait behind regular fires.
WITH next AS (
    SELECT j.job_id,
           (SELECT b.scheduled_at FROM fencepost.run_queue AS b
            WHERE b.job_id = j.job_id AND b.state = 'blocked'
            ORDER BY b.origin = 'backfill', b.scheduled_at
            LIMIT 1) AS scheduled_at
    FROM unnest(@job_ids::uuid[]) AS j (job_id)
    WHERE (SELECT true FROM fencepost.run_queue AS q
           WHERE q.job_id = j.job_id AND q.state <> 'blocked' AND q.scheduled_at <= @now
           LIMIT 1) IS NOT TRUE
), promoted AS (
    UPDATE fencepost.run_queue AS q
    SET state = 'queued', available_at = greatest(q.available_at, @now),
        wait_until = greatest(q.available_at, @now) + q.queue_timeout_s * interval '1 second'
    FROM next AS n
    WHERE q.job_id = n.job_id AND q.scheduled_at = n.scheduled_at AND q.state = 'blocked'
    RETURNING q.job_id, q.scheduled_at, q.queue_id, q.kind_id, q.priority
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM promoted
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT queue_id, kind_id, priority FROM promoted;

-- name: lock_jobs_to_promote
-- Locks the jobs whose blocked runs are to be looked at; others are looked at next time.
SELECT s.job_id
FROM fencepost.job_schedules AS s
WHERE s.job_id = ANY (@job_ids::uuid[])
ORDER BY s.job_id
FOR UPDATE SKIP LOCKED;

-- name: jobs_with_blocked_runs
-- Jobs with blocked runs, after one id, a probe each.
WITH RECURSIVE found AS (
    (SELECT q.job_id FROM fencepost.run_queue AS q
     WHERE q.state = 'blocked' AND q.job_id > @after
     ORDER BY q.job_id LIMIT 1)
    UNION ALL
    SELECT n.job_id FROM found AS f CROSS JOIN LATERAL (
        SELECT q.job_id FROM fencepost.run_queue AS q
        WHERE q.state = 'blocked' AND q.job_id > f.job_id
        ORDER BY q.job_id LIMIT 1
    ) AS n
)
SELECT job_id FROM found LIMIT @jobs_max;
