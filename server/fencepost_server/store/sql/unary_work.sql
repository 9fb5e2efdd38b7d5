-- name: ready_lanes_of_queue
-- The lanes of one queue that hold runs claimable now: a probe per lane.
WITH RECURSIVE lanes AS (
    (SELECT q.kind_id, q.priority, q.available_at
     FROM fencepost.run_queue AS q
     WHERE q.state IN ('queued', 'retrying') AND q.queue_id = @queue_id
     ORDER BY q.kind_id, q.priority, q.available_at
     LIMIT 1)
    UNION ALL
    SELECT n.kind_id, n.priority, n.available_at
    FROM lanes AS l
    CROSS JOIN LATERAL (
        SELECT q.kind_id, q.priority, q.available_at
        FROM fencepost.run_queue AS q
        WHERE q.state IN ('queued', 'retrying') AND q.queue_id = @queue_id
          AND (q.kind_id, q.priority) > (l.kind_id, l.priority)
        ORDER BY q.kind_id, q.priority, q.available_at
        LIMIT 1
    ) AS n
)
SELECT kind_id, priority FROM lanes WHERE available_at <= @now LIMIT @lanes_max;

-- name: lease_target
-- What decides whether one named live run may be taken.
SELECT q.state, q.available_at, q.lease_until, q.attempt_open, q.queue_id, q.max_in_flight,
       q.concurrency_key, q.parked
FROM fencepost.run_queue AS q
WHERE q.job_id = @job_id AND q.scheduled_at = @scheduled_at;
