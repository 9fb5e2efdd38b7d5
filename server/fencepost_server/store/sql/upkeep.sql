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
                          WHERE x.ended_at < @before ORDER BY x.ended_at LIMIT @rows_max));

-- name: prune_fire_skips
-- The ledger's other half, as old as history.
DELETE FROM fencepost.fire_skips AS s
WHERE s.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.fire_skips AS x
                          WHERE x.last_at < @before ORDER BY x.last_at LIMIT @rows_max));

-- name: prune_requests
-- First answers nobody may ask for again.
DELETE FROM fencepost.requests AS r
WHERE r.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.requests AS x
                          WHERE x.expires_at < @now ORDER BY x.expires_at LIMIT @rows_max));

-- name: prune_claim_requests
-- Claims nobody may ask for again.
DELETE FROM fencepost.claim_requests AS r
WHERE r.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.claim_requests AS x
                          WHERE x.expires_at < @now ORDER BY x.expires_at LIMIT @rows_max));

-- name: prune_operations
-- Operations nobody asks for any more.
DELETE FROM fencepost.operations AS o
WHERE o.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.operations AS x
                          WHERE x.ended_at < @before ORDER BY x.ended_at LIMIT @rows_max));

-- name: prune_workers
-- Workers not heard of for long.
DELETE FROM fencepost.workers AS w
WHERE w.ctid = ANY (ARRAY(SELECT x.ctid FROM fencepost.workers AS x
                          WHERE x.last_heartbeat_at < @before
                          ORDER BY x.last_heartbeat_at LIMIT @rows_max));

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
