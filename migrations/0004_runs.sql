-- Time bounds of waiting and of whole runs, and the business key of ad-hoc runs.

ALTER TABLE fencepost.job_schedules
    ADD COLUMN queue_timeout_s int,
    ADD COLUMN total_timeout_s int;

ALTER TABLE fencepost.run_queue
    ADD COLUMN queue_timeout_s int,
    -- available_at plus queue_timeout_s, kept with every change of available_at: a run that
    -- waits beyond it is over.
    ADD COLUMN wait_until      timestamptz,
    -- The first available_at (or the last replay) plus total_timeout: no run goes on beyond it.
    ADD COLUMN total_until     timestamptz,
    ADD COLUMN unique_key      text;
CREATE INDEX run_queue_wait_until ON fencepost.run_queue (wait_until)
    WHERE wait_until IS NOT NULL AND state IN ('queued', 'retrying');
CREATE INDEX run_queue_total_until ON fencepost.run_queue (total_until)
    WHERE total_until IS NOT NULL;

ALTER TABLE fencepost.job_runs ADD COLUMN unique_key text;
ALTER TABLE fencepost.job_runs_stray ADD COLUMN unique_key text;
ALTER TABLE fencepost.dead_letters ADD COLUMN unique_key text;

-- Which run holds a business key of a job. Endings never write it: whether the key is still
-- held follows from its holder, whenever somebody asks; a sweeper stamps `until` once the
-- holder has ended, so that a row outlives neither its time nor its holder's history.
CREATE TABLE fencepost.run_keys (
    job_id       uuid NOT NULL,
    unique_key   text NOT NULL,
    scheduled_at timestamptz NOT NULL,
    keep_for_s   int NOT NULL CHECK (keep_for_s >= 0),
    until        timestamptz,
    PRIMARY KEY (job_id, unique_key)
) WITH (fillfactor = 85);
CREATE INDEX run_keys_expiry ON fencepost.run_keys (until) WHERE until IS NOT NULL;
CREATE INDEX run_keys_unstamped ON fencepost.run_keys (job_id, scheduled_at) WHERE until IS NULL;

-- Which runs a statement has changed: one row per statement, and only while somebody watches
-- runs, so that it costs nothing otherwise. Only keys are kept: a watcher reads what has become
-- of the run, so neither order nor repetition can tell it anything wrong.
ALTER TABLE fencepost.shard_state
    ADD COLUMN watched_until timestamptz NOT NULL DEFAULT '-infinity';
CREATE TABLE fencepost.run_changes (
    xid           xid8 NOT NULL DEFAULT pg_current_xact_id(),
    changed_at    timestamptz NOT NULL,
    job_ids       uuid[] NOT NULL,
    scheduled_ats timestamptz[] NOT NULL
);
CREATE INDEX run_changes_order ON fencepost.run_changes (xid);
