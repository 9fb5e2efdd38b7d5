-- name: memory_for_groups
-- Groups of all jobs fit into memory; else every job would be sorted on disk first.
SET LOCAL work_mem = '64MB';

-- name: fire_groups
-- The jobs that fire before `until_at`, grouped by what makes them fire alike: rule, first
-- fire, and what ends them before `until_at`. One pass over the table and no index: one on
-- the rule would cost every fire a write. Whatever is due already counts from `start_at`;
-- intervals of whole minutes and one-off fires are grouped by minute. When an interval after
-- completion fires depends on its runs, so it is left out.
SELECT schedule_id, every_s, first_at, end_at, fires_left, count(*) AS jobs
FROM (
    SELECT s.schedule_id, s.every_s, b.fires_left,
           CASE WHEN s.schedule_id IS NOT NULL AND s.end_at < @until_at THEN s.end_at END
               AS end_at,
           CASE WHEN s.schedule_id IS NULL AND coalesce(s.every_s, 60) % 60 = 0
                    THEN date_trunc('minute', s.next_run_at)
                WHEN s.schedule_id IS NOT NULL AND b.fires_left IS NULL
                    THEN greatest(s.next_run_at, @start_at)
                ELSE s.next_run_at END AS first_at
    FROM fencepost.job_schedules AS s
    CROSS JOIN LATERAL (
        SELECT CASE
            -- No rule fires more often than each second.
            WHEN s.every_s IS NULL THEN
                CASE WHEN s.max_fires - s.fire_count
                          < extract(epoch FROM @until_at - s.next_run_at)
                     THEN s.max_fires - s.fire_count END
            -- An interval's end, as a number of fires; only where it comes before `until_at`.
            WHEN s.end_at < @until_at OR s.max_fires IS NOT NULL THEN
                least(s.max_fires - s.fire_count,
                      ceil(extract(epoch FROM least(s.end_at, @until_at) - s.next_run_at)
                           / s.every_s)::bigint)
        END AS fires_left
    ) AS b
    WHERE s.next_run_at < @until_at AND NOT s.paused AND NOT s.after_completion
      AND (@tenant_id::int IS NULL OR s.tenant_id = @tenant_id)
) AS each
GROUP BY schedule_id, every_s, first_at, end_at, fires_left
ORDER BY jobs DESC, schedule_id, every_s, first_at
LIMIT @groups_max;

-- name: rules
SELECT schedule_id, rule FROM fencepost.schedules WHERE schedule_id = ANY (@schedule_ids::int[]);
