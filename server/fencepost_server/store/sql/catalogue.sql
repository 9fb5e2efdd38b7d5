-- name: find_tenant
SELECT tenant_id, name FROM fencepost.tenants WHERE name = @name;

-- name: find_tenants
SELECT tenant_id, name FROM fencepost.tenants WHERE tenant_id = ANY (@tenant_ids::int[]);

-- name: find_queues
SELECT queue_id, name FROM fencepost.queues
WHERE tenant_id = @tenant_id AND name = ANY (@names::text[]);

-- name: find_named_queues
-- Queues of tenants by name; queue_id is NULL where a tenant has no queue of that name.
SELECT t.name AS tenant, t.tenant_id, w.name, q.queue_id
FROM unnest(@tenants::text[], @names::text[]) AS w (tenant, name)
JOIN fencepost.tenants AS t ON t.name = w.tenant
LEFT JOIN fencepost.queues AS q ON q.tenant_id = t.tenant_id AND q.name = w.name;

-- name: find_queue_names
SELECT queue_id, tenant_id, name FROM fencepost.queues WHERE queue_id = ANY (@queue_ids::int[]);

-- name: find_kinds
SELECT kind_id, name FROM fencepost.kinds WHERE name = ANY (@names::text[]);

-- name: find_kind_names
SELECT kind_id, name FROM fencepost.kinds WHERE kind_id = ANY (@kind_ids::int[]);

-- name: intern_kinds
-- In the order of names, so that two callers cannot deadlock.
INSERT INTO fencepost.kinds (name)
SELECT name FROM unnest(@names::text[]) AS n (name) ORDER BY name
ON CONFLICT (name) DO NOTHING;

-- name: find_schedules
SELECT schedule_id, rule_hash FROM fencepost.schedules WHERE rule_hash = ANY (@hashes::bytea[]);

-- name: intern_schedules
-- In the order of hashes, so that two callers cannot deadlock. A rule that is there is marked
-- as wanted, so that clean-up leaves it alone for a while.
INSERT INTO fencepost.schedules AS s (rule_hash, rule, used_at)
SELECT rule_hash, rule, fencepost.clock()
FROM unnest(@hashes::bytea[], @rules::jsonb[]) AS r (rule_hash, rule)
ORDER BY rule_hash
ON CONFLICT (rule_hash) DO UPDATE SET used_at = excluded.used_at
WHERE s.used_at < excluded.used_at - interval '1 day';

-- name: page_token_key
SELECT page_token_key FROM fencepost.shard_state;
