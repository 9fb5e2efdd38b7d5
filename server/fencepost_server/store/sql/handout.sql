-- name: enqueue_run
-- Moves: T1 make ( -> queued).
-- Moves: T5 claim (queued -> running).
-- Makes one run that is due now and, where nothing speaks against it, claims it in the same
-- commit; no row: somebody else has to decide. The work is done by a function of the database.
SELECT version, queue_id, kind_id, priority, concurrency_key, run_labels, lease_s, claimed_at
FROM fencepost.enqueue_run(
    @tenant_id, @now, @job_id::uuid, @job_name, @scheduled_at, @payload, @priority::smallint,
    @labels::jsonb, @concurrency_key, @unique_key, @keep_for_s, @trace_context::jsonb,
    @request_id, @body_hash, @note, @remember_until, @worker_id::uuid, @queue_id::int,
    @lane_kinds::int[], @lane_priorities::smallint[], @seen_after);
