-- name: find_ledger_job
-- The job a ledger is asked of, by name while it exists or by id for good.
SELECT j.job_id, j.name, j.version, j.pause_reason, j.created_at, j.deleted_at,
       t.name AS tenant_name
FROM (
    SELECT n.* FROM fencepost.jobs AS n
    WHERE n.tenant_id = @tenant_id AND n.name = @name AND n.deleted_at IS NULL
    UNION ALL
    SELECT i.* FROM fencepost.jobs AS i
    WHERE i.tenant_id = @tenant_id AND i.job_id = @job_id::uuid
) AS j
JOIN fencepost.tenants AS t ON t.tenant_id = j.tenant_id;

-- name: read_ledger
-- What the ledger of one job is made of, in one snapshot: its scheduling state, runs made by
-- fires wherever they are, and skipped stretches, each newest first and at most @rows_max.
-- Without @with_regular only those runs that may lie inside a skipped stretch, or are skips.
WITH runs AS MATERIALIZED (
    (SELECT q.scheduled_at, q.state, q.origin, q.version, q.created_at AS decided_at
     FROM fencepost.run_queue AS q
     WHERE q.job_id = @job_id AND q.scheduled_at >= @since AND q.scheduled_at < @before
       AND q.origin <> 'enqueue' AND (@with_regular OR q.origin = 'backfill')
     ORDER BY q.scheduled_at DESC LIMIT @rows_max)
    UNION ALL
    (SELECT d.scheduled_at, d.state, d.origin, d.version, d.created_at
     FROM fencepost.dead_letters AS d
     WHERE d.job_id = @job_id AND d.scheduled_at >= @since AND d.scheduled_at < @before
       AND d.origin <> 'enqueue' AND (@with_regular OR d.origin = 'backfill')
     ORDER BY d.scheduled_at DESC LIMIT @rows_max)
    UNION ALL
    (SELECT h.scheduled_at, h.state, h.origin, h.version,
            CASE WHEN h.state = 'skipped' THEN h.ended_at ELSE h.created_at END
     FROM fencepost.job_runs AS h
     WHERE h.job_id = @job_id AND h.scheduled_at >= @since AND h.scheduled_at < @before
       AND h.origin <> 'enqueue'
       AND (@with_regular OR h.origin = 'backfill' OR h.state = 'skipped')
     ORDER BY h.scheduled_at DESC LIMIT @rows_max)
    UNION ALL
    (SELECT s.scheduled_at, s.state, s.origin, s.version,
            CASE WHEN s.state = 'skipped' THEN s.ended_at ELSE s.created_at END
     FROM fencepost.job_runs_stray AS s
     WHERE s.job_id = @job_id AND s.scheduled_at >= @since AND s.scheduled_at < @before
       AND s.origin <> 'enqueue'
       AND (@with_regular OR s.origin = 'backfill' OR s.state = 'skipped')
     ORDER BY s.scheduled_at DESC LIMIT @rows_max)
), skips AS MATERIALIZED (
    SELECT k.first_at, k.last_at, k.reason, k.stand_in_at, k.version, k.decided_at
    FROM fencepost.fire_skips AS k
    WHERE k.job_id = @job_id AND k.first_at < @before AND k.last_at >= @since
      -- Stretches hardly overlap, so a few that begin before the range are enough to look at.
      AND k.first_at >= coalesce(
          (SELECT p.first_at FROM fencepost.fire_skips AS p
           WHERE p.job_id = @job_id AND p.first_at <= @since
           ORDER BY p.first_at DESC OFFSET 64 LIMIT 1), '-infinity')
    ORDER BY k.first_at DESC
    LIMIT @rows_max
)
SELECT 'job' AS source, s.next_run_at AS first_at, s.last_scheduled_at AS last_at,
       CASE WHEN s.paused THEN 'paused' ELSE 'active' END AS state, NULL AS origin,
       NULL AS reason,
       CASE WHEN s.fire_count >= s.max_fires THEN s.last_scheduled_at END AS stand_in_at,
       s.version, NULL::timestamptz AS decided_at
FROM fencepost.job_schedules AS s WHERE s.job_id = @job_id
UNION ALL
SELECT 'run', r.scheduled_at, r.scheduled_at, r.state::text, r.origin::text, NULL, NULL,
       r.version, r.decided_at
FROM runs AS r
UNION ALL
SELECT 'skip', k.first_at, k.last_at, NULL, NULL, k.reason::text, k.stand_in_at, k.version,
       k.decided_at
FROM skips AS k;

-- name: schedules_in_force
-- The versions of a job that were the newest at some instant of the range, and others by
-- number, with their schedules.
SELECT v.version, v.created_at, v.spec -> 'schedule' AS schedule
FROM fencepost.job_versions AS v
WHERE v.job_id = @job_id
  AND (v.version = ANY (@versions::int[])
       OR (v.created_at < @until AND v.version >= coalesce(
              (SELECT max(p.version) FROM fencepost.job_versions AS p
               WHERE p.job_id = @job_id AND p.created_at <= @since), 0)))
ORDER BY v.version;
