-- name: memory_for_groups
-- Groups of all jobs fit into memory; else every job would be sorted on disk first.
SET LOCAL work_mem = '64MB';

-- name: jobs_estimated
-- About how many jobs there are, as of the last vacuum or analyze.
SELECT c.reltuples::bigint AS jobs FROM pg_class AS c
WHERE c.oid = 'fencepost.job_schedules'::regclass;

-- name: fire_groups
-- The jobs that fire before @until_at, grouped by what makes them fire alike. One pass over the
-- table and no index: one on the rule would cost every fire a write.
SELECT a.schedule_id, a.every_s, a.first_at, a.end_at, a.fires_left, count(*) AS jobs
FROM fencepost.fires_alike(@start_at, @until_at, '(0,0)', '(4294967295,0)') AS a
WHERE @tenant_id::int IS NULL OR a.tenant_id = @tenant_id
GROUP BY a.schedule_id, a.every_s, a.first_at, a.end_at, a.fires_left
ORDER BY jobs DESC, schedule_id, every_s, first_at
LIMIT @groups_max;

-- name: counted_groups
-- As fire_groups, from the last complete count.
SELECT g.schedule_id, g.every_s, g.first_at, g.end_at, g.fires_left, sum(g.jobs)::bigint AS jobs
FROM fencepost.forecast_groups AS g
WHERE g.count_id = @count_id AND g.first_at < @until_at
  AND (@tenant_id::int IS NULL OR g.tenant_id = @tenant_id)
GROUP BY g.schedule_id, g.every_s, g.first_at, g.end_at, g.fires_left
ORDER BY jobs DESC, g.schedule_id, g.every_s, g.first_at
LIMIT @groups_max;

-- name: last_count
-- The last complete count; counted_at NULL: there is none.
SELECT f.count_id, f.counted_at FROM fencepost.forecast_state AS f;

-- name: take_count
-- Lets one server count, until @next_at, in how many blocks. No row: not yet.
UPDATE fencepost.forecast_state AS f SET next_at = @next_at
WHERE f.next_at <= @now AND fencepost.clock_agrees(@now)
RETURNING pg_relation_size('fencepost.job_schedules') / 8192 AS blocks;

-- name: count_groups
-- Adds the jobs in a range of blocks to a count, as long as it is this server's.
INSERT INTO fencepost.forecast_groups
    (count_id, tenant_id, schedule_id, every_s, first_at, end_at, fires_left, jobs)
SELECT @count_id, a.tenant_id, a.schedule_id, a.every_s, a.first_at, a.end_at, a.fires_left,
       count(*)
FROM fencepost.fires_alike(@start_at, @until_at, format('(%s,0)', @from_block::bigint)::tid,
                           format('(%s,0)', @to_block::bigint)::tid) AS a
WHERE (SELECT f.next_at = @next_at FROM fencepost.forecast_state AS f)
GROUP BY a.tenant_id, a.schedule_id, a.every_s, a.first_at, a.end_at, a.fires_left;

-- name: finish_count
-- Makes a count the one that is read, if it is still this server's.
UPDATE fencepost.forecast_state AS f SET count_id = @count_id, counted_at = @start_at
WHERE f.next_at = @next_at AND f.count_id < @count_id
RETURNING f.count_id;

-- name: drop_counts
-- Deletes rows of counts that are not read any more, or were never finished.
DELETE FROM fencepost.forecast_groups AS g
WHERE g.ctid = ANY (ARRAY(
    SELECT x.ctid FROM fencepost.forecast_groups AS x
    WHERE x.count_id <> (SELECT f.count_id FROM fencepost.forecast_state AS f)
    LIMIT @rows_max));

-- name: rules
SELECT schedule_id, rule FROM fencepost.schedules WHERE schedule_id = ANY (@schedule_ids::int[]);
