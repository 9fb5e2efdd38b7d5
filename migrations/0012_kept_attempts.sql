-- Attempts that outlive the day table they were recorded in: those of dead letters, which are
-- kept until a person replays or discards them, and those of runs that are still live.
CREATE TABLE fencepost.run_attempts_kept (
    LIKE fencepost.run_attempts INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    -- From when on it is looked whether anything still needs them.
    aged_from timestamptz NOT NULL,
    PRIMARY KEY (job_id, scheduled_at, attempt, ended_at)
);
CREATE INDEX run_attempts_kept_age ON fencepost.run_attempts_kept (aged_from);
