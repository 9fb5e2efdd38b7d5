-- name: begin_requests
-- Takes every id that is free or whose memory has expired. Somebody else's unfinished call
-- with one of them makes this wait for its end. In key order, so that two batches cannot
-- deadlock.
INSERT INTO fencepost.requests AS r (tenant_id, method, request_id, body_hash, response, expires_at)
SELECT @tenant_id, @method, n.request_id, n.body_hash, '', @expires_at
FROM unnest(@request_ids::text[], @body_hashes::bytea[]) AS n (request_id, body_hash)
ORDER BY n.request_id
ON CONFLICT (tenant_id, method, request_id) DO UPDATE
    SET body_hash = excluded.body_hash, response = '', expires_at = excluded.expires_at
    WHERE r.expires_at <= @now
RETURNING request_id;

-- name: read_requests
SELECT request_id, body_hash, response FROM fencepost.requests
WHERE tenant_id = @tenant_id AND method = @method AND request_id = ANY (@request_ids::text[])
  AND expires_at > @now;

-- name: finish_requests
-- Stores the first answers; an id without an answer is forgotten, so that its call can be
-- sent again. The rows are this transaction's own, so their ctids hold still; a join by key
-- would read every id of the tenant when the planner takes them for few.
WITH answers AS MATERIALIZED (
    SELECT a.response, f.tid
    FROM unnest(@request_ids::text[], @responses::bytea[]) AS a (request_id, response)
    CROSS JOIN LATERAL (
        SELECT r.ctid AS tid FROM fencepost.requests AS r
        WHERE r.tenant_id = @tenant_id AND r.method = @method AND r.request_id = a.request_id
        OFFSET 0
    ) AS f
), stored AS (
    UPDATE fencepost.requests AS r SET response = a.response
    FROM answers AS a
    WHERE r.ctid = a.tid AND a.response IS NOT NULL
)
DELETE FROM fencepost.requests AS r
USING answers AS a
WHERE r.ctid = a.tid AND a.response IS NULL;
