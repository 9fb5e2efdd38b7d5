-- Lists over a month of history that are fast, and clean-up of everything that grows; see
-- docs/adr/0040-lists-of-history.md and docs/history.md.

-- Lists -------------------------------------------------------------------------------------

-- The order of lists, exact also where a burst shares one instant. Kind and queue are in it so
-- that a filter on them skips rows without reading them: the table of the day that is being
-- written has no other index for these.
CREATE INDEX job_runs_order
    ON fencepost.job_runs (tenant_id, scheduled_at, job_id, kind_id, queue_id);
DROP INDEX fencepost.job_runs_list;
CREATE INDEX job_runs_stray_order
    ON fencepost.job_runs_stray (tenant_id, scheduled_at, job_id, kind_id, queue_id);
DROP INDEX fencepost.job_runs_stray_list;
CREATE INDEX dead_letters_order
    ON fencepost.dead_letters (tenant_id, scheduled_at, job_id, kind_id, queue_id);
DROP INDEX fencepost.dead_letters_list;

-- What is rare among ended runs is indexed when it is written, because it costs only those
-- rows something. What every row has (kind, queue, worker, origin, times) gets its indexes when
-- the day is over: store/day_tables.py builds them.
CREATE INDEX job_runs_state ON fencepost.job_runs (tenant_id, state, scheduled_at)
    WHERE state <> 'succeeded';
CREATE INDEX job_runs_failure ON fencepost.job_runs (tenant_id, failure_code, scheduled_at)
    WHERE failure_code IS NOT NULL;
CREATE INDEX job_runs_cancel ON fencepost.job_runs (tenant_id, cancel_cause, scheduled_at)
    WHERE cancel_cause IS NOT NULL;
CREATE INDEX job_runs_labelled ON fencepost.job_runs (tenant_id, scheduled_at)
    WHERE labels IS NOT NULL;
CREATE INDEX job_runs_key ON fencepost.job_runs (tenant_id, unique_key)
    WHERE unique_key IS NOT NULL;

-- Strays and dead letters are few, and some of them old: their filters are indexed throughout.
CREATE INDEX job_runs_stray_key ON fencepost.job_runs_stray (tenant_id, unique_key)
    WHERE unique_key IS NOT NULL;
CREATE INDEX dead_letters_by_kind ON fencepost.dead_letters (kind_id, scheduled_at);
CREATE INDEX dead_letters_by_queue ON fencepost.dead_letters (queue_id, scheduled_at);
CREATE INDEX dead_letters_by_failure ON fencepost.dead_letters (tenant_id, failure_code, scheduled_at)
    WHERE failure_code IS NOT NULL;
CREATE INDEX dead_letters_by_key ON fencepost.dead_letters (tenant_id, unique_key)
    WHERE unique_key IS NOT NULL;
CREATE INDEX dead_letters_by_label ON fencepost.dead_letters USING gin (labels)
    WHERE labels IS NOT NULL;
CREATE INDEX dead_letters_by_discard ON fencepost.dead_letters (discarded_at)
    WHERE discarded_at IS NOT NULL;

-- Names of jobs, with those of deleted ones, so that filters on names become filters on ids.
CREATE INDEX jobs_names ON fencepost.jobs (tenant_id, name COLLATE "C");
-- Runs without labels of their own have those of their version.
CREATE INDEX job_versions_labels ON fencepost.job_versions USING gin ((spec -> 'labels'))
    WHERE spec -> 'labels' IS NOT NULL;

-- Clean-up ------------------------------------------------------------------------------------

ALTER TABLE fencepost.job_versions
    -- When the version was replaced, or later: clean-up looked then, and it was still needed.
    ADD COLUMN aged_from timestamptz;
ALTER TABLE fencepost.jobs
    -- When clean-up last found that something of the deleted job is kept.
    ADD COLUMN aged_from timestamptz;
ALTER TABLE fencepost.schedules
    -- When somebody last wanted the rule, to within a day.
    ADD COLUMN used_at timestamptz NOT NULL DEFAULT now();

UPDATE fencepost.job_versions AS v
SET aged_from = n.created_at
FROM fencepost.job_versions AS n
WHERE n.job_id = v.job_id AND n.version = v.version + 1;

-- A new version replaces the one before it.
CREATE FUNCTION fencepost.age_replaced_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE fencepost.job_versions SET aged_from = NEW.created_at
    WHERE job_id = NEW.job_id AND version = NEW.version - 1;
    RETURN NULL;
END $$;
CREATE TRIGGER job_versions_replace AFTER INSERT ON fencepost.job_versions
    FOR EACH ROW WHEN (NEW.version > 1) EXECUTE FUNCTION fencepost.age_replaced_version();

CREATE INDEX job_versions_age ON fencepost.job_versions (aged_from) WHERE aged_from IS NOT NULL;
CREATE INDEX jobs_age ON fencepost.jobs ((coalesce(aged_from, deleted_at)))
    WHERE deleted_at IS NOT NULL;
CREATE INDEX schedules_age ON fencepost.schedules (used_at);
