-- name: keep_watching
-- Has changes of runs told for the next @ahead_s. Once nobody has asked for that in time,
-- changes may have gone untold and a new epoch begins. The margin is for writers whose idea of
-- now is ahead of ours.
UPDATE fencepost.shard_state AS s
SET watch_epoch = s.watch_epoch
        + (s.watched_until < fencepost.clock() + @margin_s * interval '1 second')::int,
    watched_until = greatest(s.watched_until, fencepost.clock() + @ahead_s * interval '1 second')
RETURNING s.watch_epoch;

-- name: transactions_under_way
-- Everything that may still hold a snapshot from before this statement: after watching has
-- begun, statements that these run do not tell what they change. Background workers, which
-- have no user, change no runs.
SELECT l.virtualtransaction AS name
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'virtualxid' AND l.pid <> pg_catalog.pg_backend_pid()
  AND a.usesysid IS NOT NULL
  AND a.datid = (SELECT d.oid FROM pg_catalog.pg_database AS d
                 WHERE d.datname = pg_catalog.current_database());

-- name: look_at_changes
-- Which transactions have ended by now, and what is still kept of what they told.
SELECT pg_catalog.pg_current_snapshot()::text AS snapshot, s.watch_epoch,
       s.changes_pruned_to::text AS pruned_to
FROM fencepost.shard_state AS s;

-- name: read_changes
-- The runs of some tenants that were changed by transactions which had ended in the snapshot
-- @until but not in the one whose end and open transactions are given: neither order of
-- numbers nor order of commits matters. One page of told statements, after a place in it.
WITH unseen AS (
    SELECT c.xid, c.ctid AS place, c.changed_at, c.job_ids, c.scheduled_ats
    FROM fencepost.run_changes AS c
    WHERE c.xid >= @since_end::text::xid8
    UNION ALL
    SELECT c.xid, c.ctid, c.changed_at, c.job_ids, c.scheduled_ats
    FROM fencepost.run_changes AS c
    WHERE c.xid = ANY (@since_open::text[]::xid8[])
), page AS MATERIALIZED (
    SELECT u.*
    FROM unseen AS u
    WHERE (u.xid, u.place) > (@after_xid::text::xid8, @after_place::text::tid)
      AND pg_catalog.pg_visible_in_snapshot(u.xid, @until::text::pg_snapshot)
    ORDER BY u.xid, u.place
    LIMIT @statements_max
)
SELECT p.xid::text AS xid, p.place::text AS place, p.changed_at,
       array_agg(k.job_id) FILTER (WHERE k.job_id IS NOT NULL) AS job_ids,
       array_agg(k.scheduled_at) FILTER (WHERE k.job_id IS NOT NULL) AS scheduled_ats,
       array_agg(k.tenant_id) FILTER (WHERE k.job_id IS NOT NULL) AS tenant_ids
FROM page AS p
LEFT JOIN LATERAL (
    SELECT r.job_id, r.scheduled_at, j.tenant_id
    FROM unnest(p.job_ids, p.scheduled_ats) AS r (job_id, scheduled_at)
    JOIN fencepost.jobs AS j ON j.job_id = r.job_id
    WHERE j.tenant_id = ANY (@tenant_ids::int[])
) AS k ON true
GROUP BY p.xid, p.place, p.changed_at
ORDER BY p.xid, p.place;
