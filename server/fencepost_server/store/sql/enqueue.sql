-- name: enqueue_runs
-- Moves: T1 make ( -> queued).
-- Moves: T15 cancel (queued -> cancelled).
-- Makes ad-hoc runs, one outcome per entry; the work is done by a function of the database, which
-- applications call from their own transactions too.
SELECT place, outcome, job_id, scheduled_at, note, version, queue_id, kind_id, priority,
       available_at, concurrency_key, run_labels
FROM fencepost.enqueue_runs(
    @tenant_id, @now, false, @jobs::text[], @due_ats::timestamptz[], @payloads::bytea[],
    @priorities::smallint[], @labels::jsonb[], @concurrency_keys::text[], @unique_keys::text[],
    @conflicts::smallint[], @keep_fors::int[], @trace_context::jsonb, @request_ids::text[],
    @body_hashes::bytea[], @remember_until)
ORDER BY place;

-- name: enqueue_plain_runs
-- Moves: T1 make ( -> queued).
-- Makes the runs of a batch whose entries are all plain, or none of them.
SELECT number, job_id, version, queue_id, kind_id, priority, concurrency_key, taken_until
FROM fencepost.enqueue_plain_runs(
    @tenant_id, @now, @jobs::text[], @numbers::smallint[], @places::int[], @payloads::bytea[],
    @unique_keys::text[], @trace_context::jsonb, @request_ids::text[], @body_hashes::bytea[],
    @notes::bytea[], @remember_until)
ORDER BY number;

-- name: lock_out_enqueues
-- Waits for enqueues of a job that are under way; none begins until the transaction ends.
SELECT fencepost.lock_out_enqueues(@job_id::uuid);
