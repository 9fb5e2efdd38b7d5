-- Replays of dead letters, and changes to all runs that match a filter.

-- The attempt of a replayed run that the server itself had ended before: its worker is told so,
-- and not that its late report was stored.
ALTER TABLE fencepost.run_queue ADD COLUMN forced_attempt int;

ALTER TABLE fencepost.operations
    -- Of all but backfills: which runs, as the store reads it; their order is that of
    -- (scheduled_at, job_id), and all up to (position_at, position_id) have been looked at.
    ADD COLUMN query              jsonb,
    ADD COLUMN position_id        uuid,
    -- 0: no bound.
    ADD COLUMN max_runs           bigint NOT NULL DEFAULT 0 CHECK (max_runs >= 0),
    ADD COLUMN use_newest_version boolean NOT NULL DEFAULT false,
    -- Replayed runs that have ended since and were counted, and of them those DEAD again.
    ADD COLUMN ended_runs         bigint NOT NULL DEFAULT 0,
    ADD COLUMN dead_runs          bigint NOT NULL DEFAULT 0,
    -- When the others are looked at next; NULL: there are none.
    ADD COLUMN follow_at          timestamptz,
    ADD CONSTRAINT operations_query CHECK (action = 'backfill' OR query IS NOT NULL);
CREATE INDEX operations_followed ON fencepost.operations (follow_at) WHERE follow_at IS NOT NULL;

-- Runs that an operation has replayed and that have not been counted as ended: so it is as
-- small as what goes on. A run with a higher replay_count died and was replayed again.
CREATE TABLE fencepost.operation_runs (
    operation_id uuid NOT NULL REFERENCES fencepost.operations ON DELETE CASCADE,
    job_id       uuid NOT NULL,
    scheduled_at timestamptz NOT NULL,
    replay_count int NOT NULL,
    PRIMARY KEY (operation_id, job_id, scheduled_at)
);

-- Replays of an operation that have ended and were not counted yet. History is asked only about
-- those that are nowhere else, one key at a time.
CREATE FUNCTION fencepost.ended_replays(the_operation uuid)
RETURNS TABLE (job_id uuid, scheduled_at timestamptz, is_dead boolean)
LANGUAGE sql STABLE AS $$
    SELECT r.job_id, r.scheduled_at,
           coalesce(q.replay_count, h.replay_count, r.replay_count) > r.replay_count
           OR d.job_id IS NOT NULL
    FROM fencepost.operation_runs AS r
    LEFT JOIN fencepost.run_queue AS q
      ON q.job_id = r.job_id AND q.scheduled_at = r.scheduled_at
    LEFT JOIN fencepost.dead_letters AS d
      ON d.job_id = r.job_id AND d.scheduled_at = r.scheduled_at
    LEFT JOIN LATERAL (
        SELECT x.replay_count FROM (
            SELECT e.replay_count FROM fencepost.job_runs AS e
            WHERE e.job_id = r.job_id AND e.scheduled_at = r.scheduled_at
            UNION ALL
            SELECT s.replay_count FROM fencepost.job_runs_stray AS s
            WHERE s.job_id = r.job_id AND s.scheduled_at = r.scheduled_at
        ) AS x
        WHERE q.job_id IS NULL AND d.job_id IS NULL
        LIMIT 1
    ) AS h ON true
    WHERE r.operation_id = the_operation
      AND (q.job_id IS NULL OR q.replay_count > r.replay_count)
$$;

-- Whether a run passes the row-by-row conditions of a filter, in the form that the filter of
-- lists writes.
CREATE FUNCTION fencepost.run_fits(
    conditions jsonb[], job_name text, job_id uuid, origin fencepost.run_origin, queue_name text,
    kind_name text, worker_id uuid, failure_code text, unique_key text, skip_reason fencepost.skip_reason,
    dead_reason fencepost.dead_reason, cancel_cause fencepost.cancel_cause, labels jsonb)
RETURNS boolean LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    wanted jsonb;
    value  text;
    fits   boolean;
BEGIN
    FOREACH wanted IN ARRAY conditions LOOP
        value := CASE wanted ->> 'field'
            WHEN 'job' THEN job_name
            WHEN 'job_id' THEN job_id::text
            WHEN 'origin' THEN origin::text
            WHEN 'queue' THEN queue_name
            WHEN 'kind' THEN kind_name
            WHEN 'worker' THEN worker_id::text
            WHEN 'last_failure.code' THEN failure_code
            WHEN 'unique_key' THEN unique_key
            WHEN 'skip_reason' THEN skip_reason::text
            WHEN 'dead_reason' THEN dead_reason::text
            WHEN 'cancel_cause' THEN cancel_cause::text
            WHEN 'labels' THEN labels ->> (wanted ->> 'key')
        END;
        IF (wanted -> 'has_key')::boolean THEN
            fits := value IS NOT NULL;
        ELSE
            fits := coalesce(jsonb_exists(wanted -> 'values', value), false)
                OR (wanted -> 'prefixes' <> '[]'::jsonb AND coalesce((
                    SELECT bool_or(starts_with(value, p.prefix))
                    FROM jsonb_array_elements_text(wanted -> 'prefixes') AS p (prefix)), false));
        END IF;
        IF fits = (wanted -> 'negated')::boolean THEN
            RETURN false;
        END IF;
    END LOOP;
    RETURN true;
END $$;
