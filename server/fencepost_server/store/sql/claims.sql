-- name: ready_lanes
-- The lanes that hold claimable or waiting runs and the earliest available_at of each: one
-- loose index scan, a probe per lane however many runs it holds.
WITH RECURSIVE lanes AS (
    (SELECT q.queue_id, q.kind_id, q.priority, q.available_at
     FROM fencepost.run_queue AS q
     WHERE q.state IN ('queued', 'retrying')
     ORDER BY q.queue_id, q.kind_id, q.priority, q.available_at
     LIMIT 1)
    UNION ALL
    SELECT n.queue_id, n.kind_id, n.priority, n.available_at
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT q.queue_id, q.kind_id, q.priority, q.available_at
        FROM fencepost.run_queue AS q
        WHERE q.state IN ('queued', 'retrying')
          AND (q.queue_id, q.kind_id, q.priority) > (l.queue_id, l.kind_id, l.priority)
        ORDER BY q.queue_id, q.kind_id, q.priority, q.available_at
        LIMIT 1
    ) AS n
)
SELECT queue_id, kind_id, priority, available_at FROM lanes LIMIT @lanes_max;

-- name: lane_heads
-- How many of the next @runs_max runs of some lanes of one queue, in the order of claim_runs, each
-- lane has. Locks nothing: a claim that may lock only so many of each lane writes less.
SELECT h.kind_id, h.priority, count(*) AS runs
FROM (
    SELECT l.kind_id, l.priority
    FROM (SELECT u.kind_id, u.priority, u.priority * @ageing_s * interval '1 second' AS ahead
          FROM unnest(@kind_ids::int[], @priorities::smallint[]) AS u (kind_id, priority)
          OFFSET 0) AS l
    CROSS JOIN LATERAL (
        SELECT q.available_at
        FROM fencepost.run_queue AS q
        WHERE q.queue_id = @queue_id AND q.kind_id = l.kind_id AND q.priority = l.priority
          AND q.state IN ('queued', 'retrying')
          AND q.available_at > @after AND q.available_at <= @now
          AND (q.wait_until IS NULL OR q.wait_until > @now)
          AND (q.total_until IS NULL OR q.total_until > @now)
        ORDER BY q.available_at
        LIMIT @runs_max
    ) AS r
    ORDER BY r.available_at - l.ahead
    LIMIT @runs_max
) AS h
GROUP BY h.kind_id, h.priority;

-- name: claim_runs
-- Moves: T5 claim (queued, retrying -> running).
-- Takes the oldest runs of some lanes of one queue, of each no more than @lane_maxes says, each for the worker in @worker_ids that its
-- place in @slots names, the first where @slots ends. A lost attempt that was still open is closed by the claim. What the
-- caller remembers of the queue may be old: paused or under caps now, it gives nothing.
WITH candidates AS MATERIALIZED (
    SELECT c.*, row_number() OVER () AS place
    FROM (
        SELECT r.*
        -- How far ahead of its time a lane's priority puts its runs, once per lane.
        FROM (SELECT u.kind_id, u.priority, u.runs_max,
                     u.priority * @ageing_s * interval '1 second' AS ahead
              FROM unnest(@kind_ids::int[], @priorities::smallint[], @lane_maxes::int[])
                   AS u (kind_id, priority, runs_max)
              OFFSET 0) AS l
        CROSS JOIN LATERAL (
            SELECT q.ctid AS tid, q.job_id, q.available_at, q.attempt AS lost_attempt,
                   q.attempt_open AS was_open, q.worker_id AS lost_worker_id,
                   q.claimed_at AS lost_claimed_at
            FROM fencepost.run_queue AS q
            WHERE q.queue_id = @queue_id AND q.kind_id = l.kind_id AND q.priority = l.priority
              AND q.state IN ('queued', 'retrying')
              AND q.available_at > @after AND q.available_at <= @now
              AND (q.wait_until IS NULL OR q.wait_until > @now)
              AND (q.total_until IS NULL OR q.total_until > @now)
            ORDER BY q.available_at
            LIMIT l.runs_max
            FOR UPDATE SKIP LOCKED
        ) AS r
        WHERE fencepost.clock_agrees(@now)
          AND (SELECT NOT (q.paused OR q.has_capped_jobs) AND q.max_in_flight IS NULL
                      AND q.max_in_flight_per_key IS NULL AND q.rate_limit IS NULL
                      AND t.max_in_flight IS NULL
               FROM fencepost.queues AS q JOIN fencepost.tenants AS t USING (tenant_id)
               WHERE q.queue_id = @queue_id)
        ORDER BY r.available_at - l.ahead
        LIMIT @runs_max
    ) AS c
), claimed AS (
    UPDATE fencepost.run_queue AS q
    SET state = 'running',
        attempt = q.attempt + 1,
        attempt_open = true,
        lease_until = @now + q.lease_s * interval '1 second',
        claimed_at = @now,
        first_claimed_at = coalesce(q.first_claimed_at, @now),
        undelivered = false,
        worker_id = (@worker_ids::uuid[])[coalesce((@slots::int[])[c.place], 1)]
    FROM candidates AS c
    -- Said so that no index on job_id can take the place of the row's address.
    WHERE q.ctid = c.tid AND q.job_id IS NOT DISTINCT FROM c.job_id
    RETURNING c.place, c.was_open, c.lost_attempt, c.lost_worker_id, c.lost_claimed_at,
              q.job_id, q.scheduled_at, q.attempt, q.kind_id, q.version, q.lease_s,
              q.failure_count, q.payload, q.labels, q.progress, q.last_failure, q.serial
), closed AS (
    INSERT INTO fencepost.run_attempts
        (job_id, scheduled_at, attempt, outcome, worker_id, claimed_at, ended_at)
    SELECT job_id, scheduled_at, lost_attempt, 'lease_expired', lost_worker_id, lost_claimed_at,
           @now
    FROM claimed
    WHERE was_open
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM claimed
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT place, job_id::text AS job_id, scheduled_at, attempt, kind_id, version, lease_s,
       failure_count, payload, labels, progress, last_failure
FROM claimed
ORDER BY place;

-- name: claim_capped_runs
-- As claim_runs, for a queue under caps or a rate: only as many as they leave; see the function.
SELECT place, job_id, scheduled_at, attempt, kind_id, version, lease_s, failure_count, payload,
       labels, progress, last_failure, serial
FROM fencepost.claim_capped_runs(@queue_id, @kind_ids::int[], @priorities::smallint[],
                                 @worker_ids::uuid[], @runs_max, @ageing_s, @now)
ORDER BY place;

-- name: refill_capped_runs
-- As claim_capped_runs, behind ends in one transaction; see the function.
SELECT place, job_id, scheduled_at, attempt, kind_id, version, lease_s, failure_count, payload,
       labels, progress, last_failure, serial
FROM fencepost.refill_capped_runs(@queue_id, @kind_ids::int[], @priorities::smallint[],
                                  @worker_ids::uuid[], @runs_max, @ageing_s, @now)
ORDER BY place;

-- name: lease_run
-- Moves: T5 claim (queued, retrying -> running).
-- Takes one named run, if it is claimable now and its queue is not paused.
WITH candidate AS MATERIALIZED (
    SELECT q.ctid AS tid, q.attempt AS lost_attempt, q.attempt_open AS was_open,
           q.worker_id AS lost_worker_id, q.claimed_at AS lost_claimed_at
    FROM fencepost.run_queue AS q
    WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at
      AND q.state IN ('queued', 'retrying') AND q.available_at <= @now
      AND (q.wait_until IS NULL OR q.wait_until > @now)
      AND (q.total_until IS NULL OR q.total_until > @now)
      AND fencepost.clock_agrees(@now)
      AND NOT (SELECT u.paused FROM fencepost.queues AS u WHERE u.queue_id = q.queue_id)
    FOR UPDATE
), claimed AS (
    UPDATE fencepost.run_queue AS q
    SET state = 'running',
        attempt = q.attempt + 1,
        attempt_open = true,
        lease_until = @now + q.lease_s * interval '1 second',
        claimed_at = @now,
        first_claimed_at = coalesce(q.first_claimed_at, @now),
        undelivered = false,
        worker_id = @worker_id
    FROM candidate AS c
    WHERE q.ctid = c.tid
    RETURNING c.was_open, c.lost_attempt, c.lost_worker_id, c.lost_claimed_at,
              q.job_id, q.scheduled_at, q.attempt, q.queue_id, q.kind_id, q.version, q.lease_s,
              q.failure_count, q.payload, q.labels, q.progress, q.last_failure, q.serial
), closed AS (
    INSERT INTO fencepost.run_attempts
        (job_id, scheduled_at, attempt, outcome, worker_id, claimed_at, ended_at)
    SELECT job_id, scheduled_at, lost_attempt, 'lease_expired', lost_worker_id, lost_claimed_at,
           @now
    FROM claimed
    WHERE was_open
), told AS (
    INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
    SELECT @now, array_agg(job_id), array_agg(scheduled_at) FROM claimed
    WHERE (SELECT s.watched_until > @now FROM fencepost.shard_state AS s)
    HAVING count(*) > 0
)
SELECT job_id, scheduled_at, attempt, queue_id, kind_id, version, lease_s, failure_count, payload,
       labels, progress, last_failure, serial
FROM claimed;

-- name: lock_caps
-- Serialises the claims of one queue under caps with claim_capped_runs.
SELECT fencepost.lock_caps(@queue_id);

-- name: cap_room
-- How many more runs of a run's scopes may be open: queue, tenant, job, key. NULL: no cap.
SELECT fencepost.cap_room(@queue_id, @job_id, @max_in_flight::int, @concurrency_key::text) AS room;

-- name: claims_allowed
-- How many claims the rate of a queue allows now, and when it allows @wanted. NULL: no rate.
SELECT r.tokens, r.clock, r.clock + greatest(0, least(@wanted, greatest(1, r.rate_limit)) - r.tokens)
                        / r.rate_limit * interval '1 second' AS allowed_at
FROM (
    SELECT q.rate_limit, c.clock, fencepost.tokens_at(q.queue_id, c.clock) AS tokens
    FROM fencepost.queues AS q CROSS JOIN (SELECT fencepost.clock() AS clock) AS c
    WHERE q.queue_id = @queue_id AND q.rate_limit IS NOT NULL
) AS r;

-- name: take_tokens
-- Takes the token of a claim, under the lock of lock_caps.
SELECT fencepost.take_tokens(@queue_id, 1);

-- name: queue_settings
-- What the dispatcher must know of the queues it serves.
SELECT q.queue_id, q.name, q.tenant_id, t.name AS tenant_name, q.paused, t.weight, q.rate_limit,
       q.has_capped_jobs OR q.max_in_flight IS NOT NULL OR q.max_in_flight_per_key IS NOT NULL
           OR q.rate_limit IS NOT NULL OR t.max_in_flight IS NOT NULL AS is_capped,
       q.has_capped_jobs OR q.max_in_flight_per_key IS NOT NULL AS is_capped_in_parts,
       q.has_capped_jobs OR t.max_in_flight IS NOT NULL AS shares_places
FROM fencepost.queues AS q
JOIN fencepost.tenants AS t USING (tenant_id)
WHERE q.queue_id = ANY (@queue_ids::int[]);

-- name: versions_of_runs
-- The definitions that claimed runs were made with.
SELECT v.job_id, v.version, v.spec, v.payload, j.name, t.name AS tenant_name
FROM unnest(@job_ids::uuid[], @versions::int[]) AS w (job_id, version)
JOIN fencepost.job_versions AS v ON v.job_id = w.job_id AND v.version = w.version
JOIN fencepost.jobs AS j ON j.job_id = w.job_id
JOIN fencepost.tenants AS t ON t.tenant_id = j.tenant_id;

-- name: tenant_defaults
-- What tenants say of the retries of their runs.
SELECT t.name, t.default_retry_policy FROM fencepost.tenants AS t
WHERE t.name = ANY (@names::text[]);

-- name: reserve_claim_request
-- Takes a request id before its claim, in the claim's transaction; no row: it came before.
INSERT INTO fencepost.claim_requests (request_id, worker_id, body_hash, expires_at)
VALUES (@request_id, @worker_id, @body_hash, @expires_at)
ON CONFLICT (request_id) DO NOTHING
RETURNING request_id;

-- name: remember_claims
-- What the claim of a request id handed out.
UPDATE fencepost.claim_requests
SET job_ids = @job_ids::uuid[], scheduled_ats = @scheduled_ats::timestamptz[],
    attempts = @attempts::int[]
WHERE request_id = @request_id;

-- name: find_claim_request
-- The first answer to a request id.
SELECT worker_id, body_hash FROM fencepost.claim_requests WHERE request_id = @request_id;

-- name: claims_of_request
-- Those claims of a request id whose leases still hold.
SELECT q.job_id, q.scheduled_at, q.attempt, q.queue_id, q.kind_id, q.version, q.lease_s,
       q.failure_count, q.payload, q.labels, q.progress, q.last_failure, q.serial, q.lease_until
FROM fencepost.claim_requests AS c
CROSS JOIN LATERAL unnest(c.job_ids, c.scheduled_ats, c.attempts) AS k (job_id, scheduled_at, attempt)
JOIN fencepost.run_queue AS q
  ON q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at AND q.attempt = k.attempt
WHERE c.request_id = @request_id AND q.state = 'running' AND q.lease_until > @now
ORDER BY q.job_id, q.scheduled_at;
