-- name: clock
-- The database clock.
SELECT fencepost.clock() AS clock;

-- name: day_tables
-- The day tables of one parent by name.
SELECT c.relname AS name, i.inhdetachpending AS is_detaching
FROM pg_catalog.pg_inherits AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = @parent::text::regclass
ORDER BY c.relname;

-- name: day_indexes
-- The indexes of one day table by name; one whose making was interrupted is not valid.
SELECT c.relname AS name, i.indisvalid AS is_valid
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid
WHERE i.indrelid = to_regclass(@name::text);

-- name: detached_day_tables
-- Day tables that were detached and not dropped yet.
SELECT c.relname AS name
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'fencepost' AND c.relkind = 'r' AND c.relname ~ @pattern
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_inherits AS i WHERE i.inhrelid = c.oid)
ORDER BY c.relname;

-- name: raise_retention_floor
-- From now on nothing is made for an instant before it.
UPDATE fencepost.shard_state SET retention_floor = @floor
WHERE retention_floor < @floor;

-- name: set_history_bounds
-- The days that have history tables now.
UPDATE fencepost.shard_state SET history_from = @from_at, history_until = @until_at;

-- name: prune_strays
-- Ended runs without a day table, by when they ended.
DELETE FROM fencepost.job_runs_stray AS s
WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.job_runs_stray AS x
                          WHERE x.ended_at < @before ORDER BY x.ended_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_fire_skips
-- The ledger's other half, as old as history.
DELETE FROM fencepost.fire_skips AS s
WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.fire_skips AS x
                          WHERE x.last_at < @before ORDER BY x.last_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_requests
-- First answers nobody may ask for again.
DELETE FROM fencepost.requests AS r
WHERE r.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.requests AS x
                          WHERE x.expires_at < @now ORDER BY x.expires_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_claim_requests
-- Claims nobody may ask for again.
DELETE FROM fencepost.claim_requests AS r
WHERE r.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.claim_requests AS x
                          WHERE x.expires_at < @now ORDER BY x.expires_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: stamp_run_keys
-- Says until when the unique keys of runs that have ended are held, so that they outlive their
-- holder's history, and no longer. A key that somebody is just taking is looked at next time.
WITH ended AS MATERIALIZED (
    SELECT k.job_id, k.unique_key, k.scheduled_at, k.keep_for_s
    FROM fencepost.run_keys AS k
    WHERE k.until IS NULL
      AND NOT EXISTS (SELECT FROM fencepost.run_queue AS q
                      WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at)
    LIMIT @rows_max
), judged AS MATERIALIZED (
    SELECT n.job_id, n.unique_key, n.scheduled_at,
           coalesce(e.ended_at + n.keep_for_s * interval '1 second', @now) AS until
    FROM ended AS n
    LEFT JOIN LATERAL (
        SELECT h.ended_at FROM fencepost.job_runs AS h
        WHERE h.job_id = n.job_id AND h.scheduled_at = n.scheduled_at
        UNION ALL
        SELECT s.ended_at FROM fencepost.job_runs_stray AS s
        WHERE s.job_id = n.job_id AND s.scheduled_at = n.scheduled_at
        UNION ALL
        SELECT d.ended_at FROM fencepost.dead_letters AS d
        WHERE d.job_id = n.job_id AND d.scheduled_at = n.scheduled_at
        LIMIT 1
    ) AS e ON true
), locked AS MATERIALIZED (
    SELECT k.ctid AS tid, k.job_id, g.until
    FROM judged AS g
    JOIN fencepost.run_keys AS k ON k.job_id = g.job_id AND k.unique_key = g.unique_key
    WHERE k.scheduled_at = g.scheduled_at AND k.until IS NULL
    ORDER BY k.job_id, k.unique_key COLLATE "C"
    FOR UPDATE OF k SKIP LOCKED
)
UPDATE fencepost.run_keys AS k SET until = g.until
FROM locked AS g
WHERE k.ctid = g.tid AND k.job_id = g.job_id;

-- name: prune_run_keys
-- Forgets keys that nobody holds any more. A holder that lives again was replayed: its key loses
-- its stamp instead, and gets another when the run has ended.
WITH over AS MATERIALIZED (
    SELECT k.ctid AS tid, k.job_id, k.scheduled_at
    FROM fencepost.run_keys AS k
    WHERE k.until < @now
    ORDER BY k.until
    LIMIT @rows_max
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT o.tid, o.job_id,
           EXISTS (SELECT FROM fencepost.run_queue AS q
                   WHERE q.job_id = o.job_id AND q.scheduled_at = o.scheduled_at) AS is_live
    FROM over AS o
), kept AS (
    UPDATE fencepost.run_keys AS k SET until = NULL
    FROM judged AS g
    WHERE k.ctid = g.tid AND k.job_id = g.job_id AND g.is_live
)
DELETE FROM fencepost.run_keys AS k
USING judged AS g
WHERE k.ctid = g.tid AND k.job_id = g.job_id AND NOT g.is_live;

-- name: prune_operations
-- Operations nobody asks for any more.
DELETE FROM fencepost.operations AS o
WHERE o.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.operations AS x
                          WHERE x.ended_at < @before ORDER BY x.ended_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_run_changes
-- Told changes that watchers have had time to read, by the number of their transaction. Only
-- of transactions that everybody sees as ended; what is gone is remembered, so that a watcher
-- who comes back too late knows that it has missed something.
WITH oldest AS MATERIALIZED (
    SELECT c.ctid AS tid, c.changed_at
    FROM fencepost.run_changes AS c
    WHERE c.xid < pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())
    ORDER BY c.xid
    LIMIT @rows_max
), gone AS (
    DELETE FROM fencepost.run_changes AS c
    WHERE c.ctid = ANY (ARRAY(SELECT o.tid FROM oldest AS o WHERE o.changed_at < @before))
    RETURNING c.xid
), kept AS (
    UPDATE fencepost.shard_state AS s
    SET changes_pruned_to = greatest(s.changes_pruned_to, n.xid)
    FROM (SELECT g.xid FROM gone AS g ORDER BY g.xid DESC LIMIT 1) AS n
)
SELECT count(*) AS gone FROM gone;

-- name: prune_workers
-- Workers not heard of for long.
DELETE FROM fencepost.workers AS w
WHERE w.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.workers AS x
                          WHERE x.last_heartbeat_at < @before
                          ORDER BY x.last_heartbeat_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_discarded
-- Dead letters that somebody gave up, once they are as old as history. Others are never pruned.
DELETE FROM fencepost.dead_letters AS d
WHERE d.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.dead_letters AS x
                          WHERE x.discarded_at < @before ORDER BY x.discarded_at LIMIT @rows_max
                          FOR UPDATE SKIP LOCKED));

-- name: prune_versions
-- Versions that were replaced before an instant. Those that a live run, a dead letter or a
-- running backfill names stay, and are looked at again when @again is as old; so the oldest of
-- them never stand in the way of the rest.
WITH old AS MATERIALIZED (
    SELECT v.job_id, v.version
    FROM fencepost.job_versions AS v
    WHERE v.aged_from < @before
    ORDER BY v.aged_from
    LIMIT @rows_max
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT o.job_id, o.version,
           EXISTS (SELECT FROM fencepost.run_queue AS q
                   WHERE q.job_id = o.job_id AND q.version = o.version)
           OR EXISTS (SELECT FROM fencepost.dead_letters AS d
                      WHERE d.job_id = o.job_id AND d.version = o.version)
           OR EXISTS (SELECT FROM fencepost.operations AS p
                      WHERE p.job_id = o.job_id AND p.state = 'running' AND p.version = o.version)
           OR EXISTS (SELECT FROM fencepost.jobs AS j
                      WHERE j.job_id = o.job_id AND j.version = o.version) AS is_needed
    FROM old AS o
), kept AS (
    UPDATE fencepost.job_versions AS v SET aged_from = @again
    FROM judged AS o
    WHERE v.job_id = o.job_id AND v.version = o.version AND o.is_needed
), gone AS (
    DELETE FROM fencepost.job_versions AS v
    USING judged AS o
    WHERE v.job_id = o.job_id AND v.version = o.version AND NOT o.is_needed
)
SELECT count(*) AS looked_at FROM old;

-- name: keep_attempts
-- Copies the attempts of one day that runs which are not over, and dead letters, still need.
INSERT INTO fencepost.run_attempts_kept
    (job_id, scheduled_at, attempt, outcome, late, worker_id, claimed_at, ended_at, failure,
     timings, aged_from)
SELECT a.job_id, a.scheduled_at, a.attempt, a.outcome, a.late, a.worker_id, a.claimed_at,
       a.ended_at, a.failure, a.timings, fencepost.clock()
FROM (
    SELECT d.job_id, d.scheduled_at FROM fencepost.dead_letters AS d WHERE d.discarded_at IS NULL
    UNION ALL
    SELECT q.job_id, q.scheduled_at FROM fencepost.run_queue AS q WHERE q.attempt > 0
) AS r
JOIN fencepost.run_attempts AS a ON a.job_id = r.job_id AND a.scheduled_at = r.scheduled_at
WHERE a.ended_at >= @from_at AND a.ended_at < @until_at
ON CONFLICT DO NOTHING;

-- name: prune_kept_attempts
-- Attempts beyond their day whose run is over by now, and no dead letter. The others are looked
-- at again when @again is as old.
WITH old AS MATERIALIZED (
    SELECT k.job_id, k.scheduled_at, k.attempt, k.ended_at
    FROM fencepost.run_attempts_kept AS k
    WHERE k.aged_from < @before
    ORDER BY k.aged_from
    LIMIT @rows_max
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT o.*,
           EXISTS (SELECT FROM fencepost.dead_letters AS d
                   WHERE d.job_id = o.job_id AND d.scheduled_at = o.scheduled_at)
           OR EXISTS (SELECT FROM fencepost.run_queue AS q
                      WHERE q.job_id = o.job_id AND q.scheduled_at = o.scheduled_at) AS is_needed
    FROM old AS o
), kept AS (
    UPDATE fencepost.run_attempts_kept AS k SET aged_from = @again
    FROM judged AS o
    WHERE k.job_id = o.job_id AND k.scheduled_at = o.scheduled_at AND k.attempt = o.attempt
      AND k.ended_at = o.ended_at AND o.is_needed
), gone AS (
    DELETE FROM fencepost.run_attempts_kept AS k
    USING judged AS o
    WHERE k.job_id = o.job_id AND k.scheduled_at = o.scheduled_at AND k.attempt = o.attempt
      AND k.ended_at = o.ended_at AND NOT o.is_needed
)
SELECT count(*) AS looked_at FROM old;

-- name: prune_jobs
-- Tombstones of jobs that were deleted before an instant, with all that hangs on them, once
-- nothing of them is kept: no live run, no dead letter, no history, no skipped fires. Others
-- are looked at again when @again is as old.
WITH old AS MATERIALIZED (
    SELECT j.job_id
    FROM fencepost.jobs AS j
    WHERE j.deleted_at IS NOT NULL AND coalesce(j.aged_from, j.deleted_at) < @before
    ORDER BY coalesce(j.aged_from, j.deleted_at)
    LIMIT @rows_max
    FOR UPDATE SKIP LOCKED
), judged AS MATERIALIZED (
    SELECT o.job_id,
           EXISTS (SELECT FROM fencepost.run_queue AS q WHERE q.job_id = o.job_id)
           OR EXISTS (SELECT FROM fencepost.dead_letters AS d WHERE d.job_id = o.job_id)
           OR EXISTS (SELECT FROM fencepost.job_runs AS h WHERE h.job_id = o.job_id)
           OR EXISTS (SELECT FROM fencepost.job_runs_stray AS s WHERE s.job_id = o.job_id)
           OR EXISTS (SELECT FROM fencepost.fire_skips AS k WHERE k.job_id = o.job_id)
           OR EXISTS (SELECT FROM fencepost.operations AS p
                      WHERE p.job_id = o.job_id AND p.state = 'running') AS is_needed
    FROM old AS o
), kept AS (
    UPDATE fencepost.jobs AS j SET aged_from = @again
    FROM judged AS o
    WHERE j.job_id = o.job_id AND o.is_needed
), versions AS (
    DELETE FROM fencepost.job_versions AS v
    USING judged AS o WHERE v.job_id = o.job_id AND NOT o.is_needed
), schedules AS (
    DELETE FROM fencepost.job_schedules AS s
    USING judged AS o WHERE s.job_id = o.job_id AND NOT o.is_needed
), calendars AS (
    DELETE FROM fencepost.job_calendars AS c
    USING judged AS o WHERE c.job_id = o.job_id AND NOT o.is_needed
), keys AS (
    DELETE FROM fencepost.run_keys AS k
    USING judged AS o WHERE k.job_id = o.job_id AND NOT o.is_needed
), gone AS (
    DELETE FROM fencepost.jobs AS j
    USING judged AS o WHERE j.job_id = o.job_id AND NOT o.is_needed
)
SELECT count(*) AS looked_at FROM old;

-- name: old_rules
-- Cron rules that nobody has asked for since an instant.
SELECT r.schedule_id FROM fencepost.schedules AS r
WHERE r.used_at < @before
ORDER BY r.used_at
LIMIT @rows_max;

-- name: keep_used_rules
-- Those of them that a job has. It reads the scheduling state of all jobs, once for all rules.
UPDATE fencepost.schedules AS r SET used_at = @now
WHERE r.schedule_id IN (
    SELECT s.schedule_id FROM fencepost.job_schedules AS s
    WHERE s.schedule_id = ANY (@schedule_ids::int[]));

-- name: prune_rules
-- The rest. Whoever wants the rule again marks it as used first, or makes it anew.
DELETE FROM fencepost.schedules AS r
WHERE r.schedule_id = ANY (ARRAY(SELECT x.schedule_id FROM fencepost.schedules AS x
                                 WHERE x.schedule_id = ANY (@schedule_ids::int[])
                                   AND x.used_at < @before
                                 ORDER BY x.schedule_id
                                 FOR UPDATE SKIP LOCKED));

-- name: upsert_workers
-- What worker processes last said of themselves; one row each, however often they say it.
INSERT INTO fencepost.workers AS w_old
    (worker_id, display_name, state, sdk, subscriptions, tenant_ids, labels, slots, held_runs,
     free_credits, session_id, server_id, first_seen_at, last_heartbeat_at)
SELECT w.worker_id, w.display_name, w.state, w.sdk, w.subscriptions,
       ARRAY(SELECT jsonb_array_elements_text(w.tenant_ids::jsonb)::int), w.labels::jsonb, w.slots,
       w.held_runs, w.free_credits, w.session_id, w.server_id, @now, @now
FROM unnest(@worker_ids::uuid[], @display_names::text[], @states::text[], @sdks::bytea[],
            @subscriptions::bytea[], @tenant_ids::text[], @labels::text[], @slots::int[],
            @held_runs::int[], @free_credits::bigint[], @session_ids::text[], @server_ids::text[])
         AS w (worker_id, display_name, state, sdk, subscriptions, tenant_ids, labels, slots,
               held_runs, free_credits, session_id, server_id)
ORDER BY w.worker_id
ON CONFLICT (worker_id) DO UPDATE
SET display_name = excluded.display_name, state = excluded.state, sdk = excluded.sdk,
    subscriptions = excluded.subscriptions, tenant_ids = excluded.tenant_ids,
    labels = excluded.labels, slots = excluded.slots, held_runs = excluded.held_runs,
    free_credits = excluded.free_credits, session_id = excluded.session_id,
    server_id = excluded.server_id, last_heartbeat_at = excluded.last_heartbeat_at
-- A session that ends late must not hide the newer one of the same worker.
WHERE excluded.state <> 'disconnected' OR w_old.session_id = excluded.session_id;
