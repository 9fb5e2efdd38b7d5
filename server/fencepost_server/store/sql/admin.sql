-- name: insert_tenant
-- A tenant and its queue "default". No row: the name is taken.
WITH made AS (
    INSERT INTO fencepost.tenants
        (name, display_name, labels, max_in_flight, weight, created_at, updated_at)
    VALUES (@name, @display_name, @labels::jsonb, @max_in_flight, @weight, @now, @now)
    ON CONFLICT (name) DO NOTHING
    RETURNING *
), first_queue AS (
    INSERT INTO fencepost.queues (tenant_id, name, created_at, updated_at)
    SELECT tenant_id, 'default', @now, @now FROM made
)
SELECT * FROM made;

-- name: read_tenant
SELECT * FROM fencepost.tenants WHERE name = @name;

-- name: lock_tenant
SELECT * FROM fencepost.tenants WHERE name = @name FOR UPDATE;

-- name: list_tenants
SELECT * FROM fencepost.tenants
WHERE @after::text IS NULL OR name > @after
ORDER BY name LIMIT @page_max;

-- name: update_tenant
UPDATE fencepost.tenants
SET display_name = @display_name, labels = @labels::jsonb, max_in_flight = @max_in_flight,
    weight = @weight, revision = revision + 1, updated_at = @now
WHERE name = @name
RETURNING *;

-- name: insert_queue
-- No row: the name is taken.
INSERT INTO fencepost.queues
    (tenant_id, name, labels, paused, pause_reason, max_in_flight, max_in_flight_per_key,
     created_at, updated_at)
VALUES (@tenant_id, @name, @labels::jsonb, @paused, @pause_reason, @max_in_flight,
        @max_in_flight_per_key, @now, @now)
ON CONFLICT (tenant_id, name) DO NOTHING
RETURNING *;

-- name: read_queue
SELECT * FROM fencepost.queues WHERE tenant_id = @tenant_id AND name = @name;

-- name: lock_queue
SELECT * FROM fencepost.queues WHERE tenant_id = @tenant_id AND name = @name FOR UPDATE;

-- name: list_queues
SELECT * FROM fencepost.queues
WHERE tenant_id = @tenant_id AND (@after::text IS NULL OR name > @after)
ORDER BY name LIMIT @page_max;

-- name: update_queue
UPDATE fencepost.queues
SET labels = @labels::jsonb, paused = @paused, pause_reason = @pause_reason,
    max_in_flight = @max_in_flight, max_in_flight_per_key = @max_in_flight_per_key,
    revision = revision + 1, updated_at = @now
WHERE tenant_id = @tenant_id AND name = @name
RETURNING *;

-- name: read_worker
SELECT * FROM fencepost.workers WHERE worker_id = @worker_id::uuid;

-- name: list_workers
-- Newest heartbeat first; those silent for longer than an hour are left out.
SELECT * FROM fencepost.workers
WHERE last_heartbeat_at > @since
  AND (@tenant_id::int IS NULL OR @tenant_id = ANY (tenant_ids))
  AND (@before_at::timestamptz IS NULL
       OR (last_heartbeat_at, worker_id) < (@before_at, @before_id::uuid))
ORDER BY last_heartbeat_at DESC, worker_id DESC
LIMIT @page_max;
