-- name: adopt_tzdata
-- Takes zone data over that is newer than any before, and empties the memo; the version only
-- rises. Everybody else who adopts waits here.
WITH adopted AS (
    UPDATE fencepost.shard_state SET tzdata_version = @version
    WHERE tzdata_version COLLATE "C" < @version
    RETURNING 1
), emptied AS (
    DELETE FROM fencepost.schedule_fires WHERE EXISTS (SELECT FROM adopted)
)
SELECT EXISTS (SELECT FROM adopted) AS changed;

-- name: stored_tzdata
-- The newest version that any server had, and whether stored fires are still being moved.
SELECT s.tzdata_version,
       EXISTS (SELECT FROM fencepost.zones WHERE moved_until IS NOT NULL) AS is_moving,
       EXISTS (SELECT FROM fencepost.zones) AS has_zones
FROM fencepost.shard_state AS s;

-- name: zone_digests
SELECT name, sha256(content) AS digest FROM fencepost.zones;

-- name: store_zones
-- Zones that are new or differ; what they were before tells which stored fires move.
INSERT INTO fencepost.zones AS z (name, content)
SELECT * FROM unnest(@names::text[], @contents::bytea[])
ON CONFLICT (name) DO UPDATE
SET previous = z.content, content = excluded.content, moved_until = @moved_until;

-- name: moved_zones
SELECT name, content, previous, moved_until FROM fencepost.zones WHERE moved_until IS NOT NULL;

-- name: schedules_in_zones
SELECT schedule_id, rule FROM fencepost.schedules
WHERE rule -> 'cron' ->> 'time_zone' = ANY (@zones::text[]);

-- name: scan_fires
-- Stored fires to come of these schedules among the next jobs by id.
WITH page AS MATERIALIZED (
    SELECT s.job_id, s.schedule_id, s.next_run_at
    FROM fencepost.job_schedules AS s
    WHERE s.job_id > @after
    ORDER BY s.job_id LIMIT @scan_max
)
SELECT (SELECT job_id FROM page ORDER BY job_id DESC LIMIT 1) AS last_scanned,
       (SELECT count(*) FROM page) AS scanned,
       coalesce(array_agg(p.job_id ORDER BY p.job_id), '{}') AS job_ids,
       coalesce(array_agg(p.schedule_id ORDER BY p.job_id), '{}') AS schedule_ids,
       coalesce(array_agg(p.next_run_at ORDER BY p.job_id), '{}') AS next_run_ats
FROM page AS p
WHERE p.schedule_id = ANY (@schedule_ids::int[]) AND p.next_run_at > @now
  AND (SELECT true FROM fencepost.zone_moves AS m WHERE m.job_id = p.job_id) IS NOT TRUE;

-- name: lock_fires_to_move
-- Jobs whose next fire is to move, locked in key order; those moved already are left out.
SELECT s.job_id, s.schedule_id, s.next_run_at, s.last_scheduled_at, v.spec, v.created_at
FROM fencepost.job_schedules AS s
JOIN fencepost.job_versions AS v ON v.job_id = s.job_id AND v.version = s.version
WHERE s.job_id = ANY (@job_ids::uuid[]) AND s.next_run_at > @now
  AND (SELECT true FROM fencepost.zone_moves AS m WHERE m.job_id = s.job_id) IS NOT TRUE
ORDER BY s.job_id
FOR UPDATE OF s;

-- name: move_fires
WITH moved AS (
    INSERT INTO fencepost.zone_moves (job_id) SELECT unnest(@job_ids::uuid[])
    ON CONFLICT DO NOTHING
    RETURNING job_id
)
UPDATE fencepost.job_schedules AS s
SET next_run_at = n.next_run_at
FROM unnest(@job_ids::uuid[], @next_run_ats::timestamptz[]) AS n (job_id, next_run_at)
JOIN moved USING (job_id)
WHERE s.job_id = n.job_id
RETURNING s.job_id;

-- name: forget_moves
DELETE FROM fencepost.zone_moves;

-- name: end_moves
-- Every stored fire is where the newest data has it.
WITH ended AS (
    UPDATE fencepost.zones SET previous = NULL, moved_until = NULL WHERE moved_until < @now
)
DELETE FROM fencepost.zone_moves
WHERE NOT EXISTS (SELECT FROM fencepost.zones WHERE moved_until >= @now);
