-- name: note_firing
-- A scheduler fires: since when has one, without a pause longer than @gap_s.
UPDATE fencepost.firing_state AS f
SET firing_since = CASE WHEN f.fired_at < @now - @gap_s * interval '1 second'
                        THEN @now ELSE f.firing_since END,
    fired_at = greatest(f.fired_at, @now)
WHERE fencepost.clock_agrees(@now)
RETURNING firing_since;

-- name: parked_tenants
-- Tenants with parked runs, after one of them: a probe each, however many runs it has.
WITH RECURSIVE found AS (
    (SELECT q.tenant_id FROM fencepost.run_queue AS q
     WHERE q.parked AND q.tenant_id > @after
     ORDER BY q.tenant_id LIMIT 1)
    UNION ALL
    SELECT n.tenant_id
    FROM found AS f
    CROSS JOIN LATERAL (
        SELECT q.tenant_id FROM fencepost.run_queue AS q
        WHERE q.parked AND q.tenant_id > f.tenant_id
        ORDER BY q.tenant_id LIMIT 1
    ) AS n
)
SELECT tenant_id FROM found LIMIT @tenants_max;

-- name: overdue_fires
-- The earliest fire before @before that nobody has decided, of each partition that has one.
SELECT p.partition_id, n.next_run_at
FROM generate_series(0, 255) AS p (partition_id)
CROSS JOIN LATERAL (
    SELECT s.next_run_at
    FROM fencepost.job_schedules AS s
    WHERE s.partition_id = p.partition_id::smallint
      AND s.next_run_at IS NOT NULL AND NOT s.paused AND s.next_run_at < @before
    ORDER BY s.next_run_at
    LIMIT 1
) AS n
ORDER BY p.partition_id;

-- name: begin_releases
-- Cursors of tenants that have none yet.
INSERT INTO fencepost.release_cursors (tenant_id, free_at)
SELECT t.tenant_id, @now FROM unnest(@tenant_ids::int[]) AS t (tenant_id)
ORDER BY t.tenant_id
ON CONFLICT (tenant_id) DO NOTHING;

-- name: release_runs
-- Takes the newest runs of these tenants out of the park: one every 1/@rate seconds, from where
-- the tenant's last place was up to @until, at most @runs_max of each. Whoever has a tenant's
-- cursor releases; the times that count from available_at move along with it. A run that was
-- claimed all the same, because it had been parked for too long, keeps its times. A tenant may
-- have more places to give out only if it was given @runs_max.
WITH paced AS MATERIALIZED (
    SELECT c.tenant_id, greatest(c.free_at, @now) AS first_at,
           least(@runs_max::bigint,
                 1 + floor(extract(epoch FROM @until - greatest(c.free_at, @now))::double precision
                           * @rate::double precision)::bigint) AS places
    FROM fencepost.release_cursors AS c
    WHERE c.tenant_id = ANY (@tenant_ids::int[]) AND c.free_at <= @until
      AND fencepost.clock_agrees(@now)
    ORDER BY c.tenant_id
    FOR UPDATE SKIP LOCKED
), newest AS MATERIALIZED (
    SELECT r.tid, r.job_id, r.parked_until, r.attempt, p.tenant_id, p.first_at,
           row_number() OVER (PARTITION BY p.tenant_id ORDER BY r.scheduled_at DESC, r.job_id) - 1
               AS place
    FROM paced AS p
    CROSS JOIN LATERAL (
        SELECT q.ctid AS tid, q.job_id, q.scheduled_at, q.available_at AS parked_until,
               q.attempt
        FROM fencepost.run_queue AS q
        WHERE q.tenant_id = p.tenant_id AND q.parked
        ORDER BY q.scheduled_at DESC, q.job_id
        LIMIT p.places
        FOR UPDATE SKIP LOCKED
    ) AS r
), released AS (
    UPDATE fencepost.run_queue AS q
    SET parked = false,
        available_at = f.free_at,
        wait_until = q.wait_until + (f.free_at - n.parked_until),
        total_until = q.total_until + (f.free_at - n.parked_until)
    FROM newest AS n
    CROSS JOIN LATERAL (
        SELECT CASE WHEN n.attempt > 0 THEN n.parked_until
                    ELSE n.first_at + n.place / @rate * interval '1 second' END AS free_at
    ) AS f
    WHERE q.ctid = n.tid AND q.job_id = n.job_id
    RETURNING q.tenant_id, q.queue_id, q.kind_id, q.priority
), moved AS (
    UPDATE fencepost.release_cursors AS c
    SET free_at = n.first_at + n.runs / @rate * interval '1 second'
    FROM (SELECT tenant_id, first_at, count(*) AS runs FROM newest GROUP BY tenant_id, first_at)
             AS n
    WHERE c.tenant_id = n.tenant_id
)
SELECT (SELECT count(*) FROM released) AS runs,
       (SELECT coalesce(array_agg(x.tenant_id), '{}')
        FROM (SELECT tenant_id FROM released GROUP BY tenant_id
              HAVING count(*) >= @runs_max) AS x) AS full_tenants,
       (SELECT coalesce(array_agg(ARRAY[queue_id, kind_id, priority::int]), '{}')
        FROM (SELECT DISTINCT queue_id, kind_id, priority FROM released) AS x) AS lanes;
