-- name: insert_jobs
-- Makes jobs, their first versions and scheduling state. A name that is taken, also by an
-- earlier entry or by a transaction that commits first, is left out of the answer. In the
-- order of names, so that two batches cannot deadlock.
WITH entries AS MATERIALIZED (
    SELECT e.*
    FROM unnest(
        @job_ids::uuid[], @names::text[], @specs::jsonb[], @payloads::bytea[],
        @next_run_ats::timestamptz[], @end_ats::timestamptz[], @max_fires::bigint[],
        @queue_ids::int[], @kind_ids::int[], @schedule_ids::int[], @every_ss::int[],
        @after_completions::boolean[], @jitter_ss::int[], @misfire_after_ss::int[], @misfire_window_ss::int[], @max_in_flights::int[],
        @misfires::text[], @overlaps::text[], @partition_ids::smallint[], @priorities::smallint[],
        @lease_ss::smallint[], @cancel_grace_ss::smallint[], @attempt_timeout_ss::int[],
        @paused::boolean[], @pause_reasons::text[], @concurrency_keys::text[],
        @queue_timeout_ss::int[], @total_timeout_ss::int[]
    ) WITH ORDINALITY AS e (
        job_id, name, spec, payload, next_run_at, end_at, max_fires, queue_id, kind_id,
        schedule_id, every_s, after_completion, jitter_s, misfire_after_s, misfire_window_s,
        max_in_flight, misfire, overlap, partition_id, priority, lease_s, cancel_grace_s, attempt_timeout_s, paused, pause_reason,
        concurrency_key, queue_timeout_s, total_timeout_s, ordinal
    )
), made AS (
    INSERT INTO fencepost.jobs
        (job_id, tenant_id, name, version, pause_reason, trace_context, created_at, updated_at)
    SELECT job_id, @tenant_id, name, 1, pause_reason, @trace_context::jsonb, @now, @now
    FROM entries ORDER BY name, ordinal
    ON CONFLICT (tenant_id, name) WHERE deleted_at IS NULL DO NOTHING
    RETURNING job_id
), first_versions AS (
    INSERT INTO fencepost.job_versions (job_id, version, spec, payload, created_at)
    SELECT job_id, 1, spec, payload, @now FROM entries JOIN made USING (job_id)
), schedules AS (
    INSERT INTO fencepost.job_schedules
        (job_id, next_run_at, end_at, max_fires, tenant_id, queue_id, kind_id, version,
         schedule_id, every_s, after_completion, jitter_s, misfire_after_s, misfire_window_s, max_in_flight, misfire, overlap,
         partition_id, priority, lease_s, cancel_grace_s, attempt_timeout_s, paused,
         concurrency_key, concurrency_template, queue_timeout_s, total_timeout_s)
    SELECT job_id, next_run_at, end_at, max_fires, @tenant_id, queue_id, kind_id, 1,
           schedule_id, every_s, after_completion, jitter_s, misfire_after_s, misfire_window_s, max_in_flight,
           misfire::fencepost.misfire_action, overlap::fencepost.overlap_policy,
           partition_id, priority, lease_s, cancel_grace_s, attempt_timeout_s, paused,
           fencepost.run_concurrency_key(concurrency_key, spec -> 'labels', payload),
           CASE WHEN concurrency_key ~ '[{}]' THEN concurrency_key END, queue_timeout_s,
           total_timeout_s
    FROM entries JOIN made USING (job_id)
)
SELECT job_id FROM made;

-- name: mark_capped_queues
-- From now on claims of these queues count what runs.
UPDATE fencepost.queues SET has_capped_jobs = true
WHERE queue_id IN (
    SELECT queue_id FROM fencepost.queues
    WHERE queue_id = ANY (@queue_ids::int[]) AND NOT has_capped_jobs
    ORDER BY queue_id FOR UPDATE
);

-- name: find_taken_names
SELECT name FROM fencepost.jobs
WHERE tenant_id = @tenant_id AND deleted_at IS NULL AND name = ANY (@names::text[]);

-- name: find_job_by_name
SELECT job_id FROM fencepost.jobs
WHERE tenant_id = @tenant_id AND deleted_at IS NULL AND name = @name;

-- name: find_job_by_id
SELECT job_id FROM fencepost.jobs
WHERE tenant_id = @tenant_id AND deleted_at IS NULL AND job_id = @job_id::uuid;

-- name: lock_job
-- The lock that every path which makes runs by schedule takes first.
SELECT partition_id FROM fencepost.job_schedules WHERE job_id = @job_id::uuid FOR UPDATE;

-- name: read_jobs
-- Jobs with the newest version of their definition, or with version @version of it.
SELECT j.job_id, j.tenant_id, j.name, v.version, j.version AS newest_version, j.revision,
       j.pause_reason, j.trace_context, j.created_at, j.updated_at, v.spec,
       CASE WHEN @with_payload::boolean THEN v.payload END AS payload,
       s.paused, s.next_run_at, s.awaits_end, s.last_scheduled_at, s.fire_count, s.queue_id, s.kind_id,
       s.partition_id,
       newest.spec -> 'schedule' IS NOT NULL AS has_schedule
FROM fencepost.jobs AS j
JOIN fencepost.job_schedules AS s USING (job_id)
JOIN fencepost.job_versions AS v
    ON v.job_id = j.job_id AND v.version = coalesce(@version::int, j.version)
JOIN fencepost.job_versions AS newest
    ON newest.job_id = j.job_id AND newest.version = j.version
WHERE j.job_id = ANY (@job_ids::uuid[]) AND j.deleted_at IS NULL;

-- name: list_jobs
-- One page, newest first. Of a filtered list at most @scan_max jobs are looked at per page;
-- the page then ends at the last one looked at.
WITH scanned AS MATERIALIZED (
    SELECT job_id, name, version, created_at
    FROM fencepost.jobs
    WHERE tenant_id = @tenant_id AND deleted_at IS NULL
      AND (@before::uuid IS NULL OR job_id < @before)
      AND (@names::text[] IS NULL OR name = ANY (@names))
      AND (@created_from::timestamptz IS NULL OR created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR created_at < @created_before)
    ORDER BY job_id DESC
    LIMIT @scan_max
), described AS (
    SELECT j.job_id, j.name, v.spec, s.next_run_at,
           CASE WHEN s.paused THEN 2
                WHEN v.spec -> 'schedule' IS NOT NULL AND s.next_run_at IS NULL
                     AND NOT s.awaits_end THEN 3
                ELSE 1 END AS state
    FROM scanned AS j
    JOIN fencepost.job_schedules AS s USING (job_id)
    JOIN fencepost.job_versions AS v ON v.job_id = j.job_id AND v.version = j.version
), fitting AS (
    SELECT d.job_id
    FROM described AS d
    WHERE (@next_from::timestamptz IS NULL OR d.next_run_at >= @next_from)
      AND (@next_before::timestamptz IS NULL OR d.next_run_at < @next_before)
      AND NOT EXISTS (
          SELECT FROM unnest(@conditions::jsonb[]) AS c (wanted)
          CROSS JOIN LATERAL (
              SELECT CASE c.wanted ->> 'field'
                  WHEN 'job_name' THEN d.name
                  WHEN 'state' THEN d.state::text
                  WHEN 'queue' THEN d.spec -> 'target' ->> 'queue_name'
                  WHEN 'kind' THEN d.spec -> 'target' ->> 'kind'
                  WHEN 'labels' THEN d.spec -> 'labels' ->> (c.wanted ->> 'key')
              END AS value
          ) AS found
          WHERE (c.wanted -> 'negated')::boolean = coalesce(
              CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
                   ELSE jsonb_exists(c.wanted -> 'values', found.value)
                       OR EXISTS (
                           SELECT FROM jsonb_array_elements_text(c.wanted -> 'prefixes') AS p (prefix)
                           WHERE starts_with(found.value, p.prefix)
                       ) END,
              false)
      )
    ORDER BY d.job_id DESC
    LIMIT @page_max
)
SELECT (SELECT coalesce(array_agg(job_id ORDER BY job_id DESC), '{}') FROM fitting) AS job_ids,
       (SELECT count(*) FROM scanned) AS scanned,
       (SELECT job_id FROM scanned ORDER BY job_id LIMIT 1) AS last_scanned;

-- name: insert_version
INSERT INTO fencepost.job_versions (job_id, version, spec, payload, created_at)
VALUES (@job_id::uuid, @version, @spec::jsonb, @payload, @now);

-- name: touch_job
-- Something about the job has changed: a new version of it, or only why it is paused.
UPDATE fencepost.jobs
SET version = @version, pause_reason = @pause_reason, revision = revision + 1, updated_at = @now
WHERE job_id = @job_id::uuid;

-- name: redefine_schedule
-- Brings the scheduling state up to a new version; @moves says whether next_run_at moves.
UPDATE fencepost.job_schedules
SET version = @version,
    next_run_at = CASE WHEN @moves::boolean THEN @next_run_at ELSE next_run_at END,
    awaits_end = CASE WHEN @moves::boolean THEN @awaits_end::boolean ELSE awaits_end END,
    after_completion = @after_completion, jitter_s = @jitter_s, has_calendars = @has_calendars,
    end_at = @end_at, max_fires = @max_fires, queue_id = @queue_id, kind_id = @kind_id,
    schedule_id = @schedule_id, every_s = @every_s,
    misfire_after_s = @misfire_after_s, misfire_window_s = @misfire_window_s,
    max_in_flight = @max_in_flight, misfire = @misfire::text::fencepost.misfire_action,
    overlap = @overlap::text::fencepost.overlap_policy, priority = @priority, lease_s = @lease_s,
    cancel_grace_s = @cancel_grace_s, attempt_timeout_s = @attempt_timeout_s,
    concurrency_key = (
        SELECT fencepost.run_concurrency_key(@concurrency_key, v.spec -> 'labels', v.payload)
        FROM fencepost.job_versions AS v
        WHERE v.job_id = @job_id::uuid AND v.version = @version),
    concurrency_template = CASE WHEN @concurrency_key::text ~ '[{}]' THEN @concurrency_key END,
    queue_timeout_s = @queue_timeout_s,
    total_timeout_s = @total_timeout_s
WHERE job_id = @job_id::uuid;

-- name: set_paused
UPDATE fencepost.job_schedules SET paused = @paused WHERE job_id = @job_id::uuid;

-- name: bury_job
-- The tombstone that a deleted job leaves; its name is free.
WITH ended AS (
    UPDATE fencepost.job_schedules SET next_run_at = NULL, awaits_end = false
    WHERE job_id = @job_id::uuid
)
UPDATE fencepost.jobs SET deleted_at = @now, updated_at = @now, revision = revision + 1
WHERE job_id = @job_id::uuid;
