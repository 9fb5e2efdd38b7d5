-- What a page of runs is read with. All but the first two run in one snapshot, with plans made
-- for their values: a condition that is not asked for is a NULL that the planner takes away.

-- name: hold_snapshot
-- A run that moves from one place to another while a page is read is seen in one of them.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;

-- name: plan_for_values
SET LOCAL plan_cache_mode = force_custom_plan;

-- name: plan_as_usual
SET LOCAL plan_cache_mode = auto;

-- name: history_days
-- The stretch of days that have tables.
SELECT s.history_from, s.history_until FROM fencepost.shard_state AS s;

-- name: kinds_named
-- Ids of kinds by name or prefix.
SELECT k.kind_id FROM fencepost.kinds AS k
WHERE k.name = ANY (@names::text[])
   OR EXISTS (SELECT FROM unnest(@prefixes::text[]) AS p (prefix) WHERE starts_with(k.name, p.prefix));

-- name: queues_named
-- Ids of a tenant's queues by name.
SELECT q.queue_id FROM fencepost.queues AS q
WHERE q.tenant_id = @tenant_id AND q.name = ANY (@names::text[]);

-- name: jobs_named
-- Ids of a tenant's jobs by name or prefix, also of deleted ones.
SELECT j.job_id FROM fencepost.jobs AS j
WHERE j.tenant_id = @tenant_id AND j.name COLLATE "C" = ANY (@names::text[])
UNION
SELECT j.job_id
FROM unnest(@prefixes::text[]) AS p (prefix)
CROSS JOIN LATERAL (
    SELECT j.job_id FROM fencepost.jobs AS j
    WHERE j.tenant_id = @tenant_id AND j.name COLLATE "C" >= p.prefix
      AND j.name COLLATE "C" < p.prefix || chr(1114111)
    LIMIT @jobs_max) AS j
LIMIT @jobs_max;

-- name: versions_labelled
-- Jobs that some version of gave its runs one of these labels, or this key.
SELECT DISTINCT v.job_id
FROM fencepost.job_versions AS v
JOIN fencepost.jobs AS j ON j.job_id = v.job_id
WHERE j.tenant_id = @tenant_id
  AND v.spec -> 'labels' IS NOT NULL
  AND (@job_id::uuid IS NULL OR v.job_id = @job_id)
  AND ((@own_labels::jsonb[] IS NOT NULL AND v.spec -> 'labels' @> ANY (@own_labels))
       OR (@own_key::text IS NOT NULL AND v.spec -> 'labels' ? @own_key))
LIMIT @jobs_max;

-- name: page_of_live
-- Keys of live runs, newest first. There is no index in this order, because it would cost
-- every fire more than a list is worth: of a tenant with many live runs it reads them all.
SELECT r.job_id, r.scheduled_at
FROM fencepost.run_queue AS r
WHERE (@tenant_id::int IS NULL OR r.tenant_id = @tenant_id)
  AND r.scheduled_at >= @from_at AND r.scheduled_at <= @before_at
  AND (r.scheduled_at, r.job_id) < (@before_at, @before_id::uuid)
  AND (@job_id::uuid IS NULL OR r.job_id = @job_id)
  AND (@job_ids::uuid[] IS NULL OR r.job_id = ANY (@job_ids))
  AND (@not_job_ids::uuid[] IS NULL OR r.job_id <> ALL (@not_job_ids))
  AND (@states::fencepost.run_state[] IS NULL OR r.state = ANY (@states))
  AND (@origins::fencepost.run_origin[] IS NULL OR r.origin = ANY (@origins))
  AND (@kind_ids::int[] IS NULL OR r.kind_id = ANY (@kind_ids))
  AND (@not_kind_ids::int[] IS NULL OR r.kind_id <> ALL (@not_kind_ids))
  AND (@queue_ids::int[] IS NULL OR r.queue_id = ANY (@queue_ids))
  AND (@not_queue_ids::int[] IS NULL OR r.queue_id <> ALL (@not_queue_ids))
  AND (@workers::uuid[] IS NULL OR r.worker_id = ANY (@workers))
  AND (@not_workers::uuid[] IS NULL OR r.worker_id IS NULL OR r.worker_id <> ALL (@not_workers))
  AND (@failure_codes::text[] IS NULL OR r.failure_code = ANY (@failure_codes))
  AND (@not_failure_codes::text[] IS NULL OR r.failure_code IS NULL
       OR r.failure_code <> ALL (@not_failure_codes))
  AND (@unique_keys::text[] IS NULL OR r.unique_key = ANY (@unique_keys))
  AND (@not_unique_keys::text[] IS NULL OR r.unique_key IS NULL
       OR r.unique_key <> ALL (@not_unique_keys))
  AND (@cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause = ANY (@cancel_causes))
  AND (@not_cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause IS NULL
       OR r.cancel_cause <> ALL (@not_cancel_causes))
  AND (@created_from::timestamptz IS NULL OR r.created_at >= @created_from)
  AND (@created_before::timestamptz IS NULL OR r.created_at < @created_before)
  -- Which rows can have the first wanted label at all, in a form that indexes serve.
  AND (@labelled_job_ids::uuid[] IS NULL
       OR (r.labels IS NULL AND r.job_id = ANY (@labelled_job_ids))
       OR (@own_labels::jsonb[] IS NOT NULL AND r.labels @> ANY (@own_labels))
       OR (@own_key::text IS NOT NULL AND r.labels ? @own_key))
  AND (@label_tests::jsonb[] IS NULL OR NOT EXISTS (
      SELECT FROM unnest(@label_tests) AS c (wanted)
      CROSS JOIN LATERAL (
          SELECT coalesce(r.labels, (
              SELECT v.spec -> 'labels' FROM fencepost.job_versions AS v
              WHERE v.job_id = r.job_id AND v.version = r.version)) ->> (c.wanted ->> 'key')
          AS value) AS found
      WHERE (c.wanted -> 'negated')::boolean = coalesce(
          CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
               ELSE jsonb_exists(c.wanted -> 'values', found.value) END, false)))
ORDER BY r.scheduled_at DESC, r.job_id DESC
LIMIT @page_max;

-- name: page_of_apart
-- Keys of runs that ended and have no place in a day table, newest first.
SELECT r.job_id, r.scheduled_at
FROM (
    SELECT d.job_id, d.scheduled_at, d.version, d.tenant_id, d.state, d.origin,
           d.queue_id, d.kind_id, d.worker_id, d.created_at, d.ended_at,
           d.failure_code, d.labels, d.skip_reason, d.dead_reason,
           d.cancel_cause, d.unique_key
    FROM fencepost.dead_letters AS d
    WHERE @with_dead::boolean
    UNION ALL
    SELECT s.job_id, s.scheduled_at, s.version, s.tenant_id, s.state, s.origin,
           s.queue_id, s.kind_id, s.worker_id, s.created_at, s.ended_at,
           s.failure_code, s.labels, s.skip_reason, s.dead_reason,
           s.cancel_cause, s.unique_key
    FROM fencepost.job_runs_stray AS s
    WHERE @with_history::boolean AND s.scheduled_at >= @history_from
) AS r
WHERE (@tenant_id::int IS NULL OR r.tenant_id = @tenant_id)
  AND r.scheduled_at >= @from_at AND r.scheduled_at <= @before_at
  AND (r.scheduled_at, r.job_id) < (@before_at, @before_id::uuid)
  AND (@job_id::uuid IS NULL OR r.job_id = @job_id)
  AND (@job_ids::uuid[] IS NULL OR r.job_id = ANY (@job_ids))
  AND (@not_job_ids::uuid[] IS NULL OR r.job_id <> ALL (@not_job_ids))
  AND (@states::fencepost.run_state[] IS NULL OR r.state = ANY (@states))
  AND (@origins::fencepost.run_origin[] IS NULL OR r.origin = ANY (@origins))
  AND (@kind_ids::int[] IS NULL OR r.kind_id = ANY (@kind_ids))
  AND (@not_kind_ids::int[] IS NULL OR r.kind_id <> ALL (@not_kind_ids))
  AND (@queue_ids::int[] IS NULL OR r.queue_id = ANY (@queue_ids))
  AND (@not_queue_ids::int[] IS NULL OR r.queue_id <> ALL (@not_queue_ids))
  AND (@workers::uuid[] IS NULL OR r.worker_id = ANY (@workers))
  AND (@not_workers::uuid[] IS NULL OR r.worker_id IS NULL OR r.worker_id <> ALL (@not_workers))
  AND (@failure_codes::text[] IS NULL OR r.failure_code = ANY (@failure_codes))
  AND (@not_failure_codes::text[] IS NULL OR r.failure_code IS NULL
       OR r.failure_code <> ALL (@not_failure_codes))
  AND (@unique_keys::text[] IS NULL OR r.unique_key = ANY (@unique_keys))
  AND (@not_unique_keys::text[] IS NULL OR r.unique_key IS NULL
       OR r.unique_key <> ALL (@not_unique_keys))
  AND (@cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause = ANY (@cancel_causes))
  AND (@not_cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause IS NULL
       OR r.cancel_cause <> ALL (@not_cancel_causes))
  AND (@created_from::timestamptz IS NULL OR r.created_at >= @created_from)
  AND (@created_before::timestamptz IS NULL OR r.created_at < @created_before)
  AND (@ended_from::timestamptz IS NULL OR r.ended_at >= @ended_from)
  AND (@ended_before::timestamptz IS NULL OR r.ended_at < @ended_before)
  AND (@skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason = ANY (@skip_reasons))
  AND (@not_skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason IS NULL
       OR r.skip_reason <> ALL (@not_skip_reasons))
  AND (@dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason = ANY (@dead_reasons))
  AND (@not_dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason IS NULL
       OR r.dead_reason <> ALL (@not_dead_reasons))
  -- Which rows can have the first wanted label at all, in a form that indexes serve.
  AND (@labelled_job_ids::uuid[] IS NULL
       OR (r.labels IS NULL AND r.job_id = ANY (@labelled_job_ids))
       OR (@own_labels::jsonb[] IS NOT NULL AND r.labels @> ANY (@own_labels))
       OR (@own_key::text IS NOT NULL AND r.labels ? @own_key))
  AND (@label_tests::jsonb[] IS NULL OR NOT EXISTS (
      SELECT FROM unnest(@label_tests) AS c (wanted)
      CROSS JOIN LATERAL (
          SELECT coalesce(r.labels, (
              SELECT v.spec -> 'labels' FROM fencepost.job_versions AS v
              WHERE v.job_id = r.job_id AND v.version = r.version)) ->> (c.wanted ->> 'key')
          AS value) AS found
      WHERE (c.wanted -> 'negated')::boolean = coalesce(
          CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
               ELSE jsonb_exists(c.wanted -> 'values', found.value) END, false)))
ORDER BY r.scheduled_at DESC, r.job_id DESC
LIMIT @page_max;

-- name: page_of_history
-- Keys of ended runs in day tables between two instants, newest first: in the order of the index
-- until there are enough, which is best when many match.
SELECT r.job_id, r.scheduled_at
FROM fencepost.job_runs AS r
WHERE (@tenant_id::int IS NULL OR r.tenant_id = @tenant_id)
  AND r.scheduled_at >= @from_at AND r.scheduled_at <= @before_at
  AND (r.scheduled_at, r.job_id) < (@before_at, @before_id::uuid)
  AND (@job_id::uuid IS NULL OR r.job_id = @job_id)
  AND (@job_ids::uuid[] IS NULL OR r.job_id = ANY (@job_ids))
  AND (@not_job_ids::uuid[] IS NULL OR r.job_id <> ALL (@not_job_ids))
  AND (@states::fencepost.run_state[] IS NULL OR r.state = ANY (@states))
  AND (@origins::fencepost.run_origin[] IS NULL OR r.origin = ANY (@origins))
  AND (@kind_ids::int[] IS NULL OR r.kind_id = ANY (@kind_ids))
  AND (@not_kind_ids::int[] IS NULL OR r.kind_id <> ALL (@not_kind_ids))
  AND (@queue_ids::int[] IS NULL OR r.queue_id = ANY (@queue_ids))
  AND (@not_queue_ids::int[] IS NULL OR r.queue_id <> ALL (@not_queue_ids))
  AND (@workers::uuid[] IS NULL OR r.worker_id = ANY (@workers))
  AND (@not_workers::uuid[] IS NULL OR r.worker_id IS NULL OR r.worker_id <> ALL (@not_workers))
  AND (@failure_codes::text[] IS NULL OR r.failure_code = ANY (@failure_codes))
  AND (@not_failure_codes::text[] IS NULL OR r.failure_code IS NULL
       OR r.failure_code <> ALL (@not_failure_codes))
  AND (@unique_keys::text[] IS NULL OR r.unique_key = ANY (@unique_keys))
  AND (@not_unique_keys::text[] IS NULL OR r.unique_key IS NULL
       OR r.unique_key <> ALL (@not_unique_keys))
  AND (@cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause = ANY (@cancel_causes))
  AND (@not_cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause IS NULL
       OR r.cancel_cause <> ALL (@not_cancel_causes))
  AND (@created_from::timestamptz IS NULL OR r.created_at >= @created_from)
  AND (@created_before::timestamptz IS NULL OR r.created_at < @created_before)
  AND (@ended_from::timestamptz IS NULL OR r.ended_at >= @ended_from)
  AND (@ended_before::timestamptz IS NULL OR r.ended_at < @ended_before)
  AND (@skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason = ANY (@skip_reasons))
  AND (@not_skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason IS NULL
       OR r.skip_reason <> ALL (@not_skip_reasons))
  AND (@dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason = ANY (@dead_reasons))
  AND (@not_dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason IS NULL
       OR r.dead_reason <> ALL (@not_dead_reasons))
  -- Which rows can have the first wanted label at all, in a form that indexes serve.
  AND (@labelled_job_ids::uuid[] IS NULL
       OR (r.labels IS NULL AND r.job_id = ANY (@labelled_job_ids))
       OR (@own_labels::jsonb[] IS NOT NULL AND r.labels @> ANY (@own_labels))
       OR (@own_key::text IS NOT NULL AND r.labels ? @own_key))
  AND (@label_tests::jsonb[] IS NULL OR NOT EXISTS (
      SELECT FROM unnest(@label_tests) AS c (wanted)
      CROSS JOIN LATERAL (
          SELECT coalesce(r.labels, (
              SELECT v.spec -> 'labels' FROM fencepost.job_versions AS v
              WHERE v.job_id = r.job_id AND v.version = r.version)) ->> (c.wanted ->> 'key')
          AS value) AS found
      WHERE (c.wanted -> 'negated')::boolean = coalesce(
          CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
               ELSE jsonb_exists(c.wanted -> 'values', found.value) END, false)))
ORDER BY r.scheduled_at DESC, r.job_id DESC
LIMIT @page_max;

-- name: page_of_sparse_history
-- The same, by whatever indexes single out what matches, sorted afterwards. The OFFSET keeps the
-- planner from walking the order all the same, in the hope of an early match.
SELECT m.job_id, m.scheduled_at
FROM (
    SELECT r.job_id, r.scheduled_at
    FROM fencepost.job_runs AS r
    WHERE (@tenant_id::int IS NULL OR r.tenant_id = @tenant_id)
      AND r.scheduled_at >= @from_at AND r.scheduled_at <= @before_at
      AND (r.scheduled_at, r.job_id) < (@before_at, @before_id::uuid)
      AND (@job_id::uuid IS NULL OR r.job_id = @job_id)
      AND (@job_ids::uuid[] IS NULL OR r.job_id = ANY (@job_ids))
      AND (@not_job_ids::uuid[] IS NULL OR r.job_id <> ALL (@not_job_ids))
      AND (@states::fencepost.run_state[] IS NULL OR r.state = ANY (@states))
      AND (@origins::fencepost.run_origin[] IS NULL OR r.origin = ANY (@origins))
      AND (@kind_ids::int[] IS NULL OR r.kind_id = ANY (@kind_ids))
      AND (@not_kind_ids::int[] IS NULL OR r.kind_id <> ALL (@not_kind_ids))
      AND (@queue_ids::int[] IS NULL OR r.queue_id = ANY (@queue_ids))
      AND (@not_queue_ids::int[] IS NULL OR r.queue_id <> ALL (@not_queue_ids))
      AND (@workers::uuid[] IS NULL OR r.worker_id = ANY (@workers))
      AND (@not_workers::uuid[] IS NULL OR r.worker_id IS NULL OR r.worker_id <> ALL (@not_workers))
      AND (@failure_codes::text[] IS NULL OR r.failure_code = ANY (@failure_codes))
      AND (@not_failure_codes::text[] IS NULL OR r.failure_code IS NULL
           OR r.failure_code <> ALL (@not_failure_codes))
      AND (@unique_keys::text[] IS NULL OR r.unique_key = ANY (@unique_keys))
      AND (@not_unique_keys::text[] IS NULL OR r.unique_key IS NULL
           OR r.unique_key <> ALL (@not_unique_keys))
      AND (@cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause = ANY (@cancel_causes))
      AND (@not_cancel_causes::fencepost.cancel_cause[] IS NULL OR r.cancel_cause IS NULL
           OR r.cancel_cause <> ALL (@not_cancel_causes))
      AND (@created_from::timestamptz IS NULL OR r.created_at >= @created_from)
      AND (@created_before::timestamptz IS NULL OR r.created_at < @created_before)
      AND (@ended_from::timestamptz IS NULL OR r.ended_at >= @ended_from)
      AND (@ended_before::timestamptz IS NULL OR r.ended_at < @ended_before)
      AND (@skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason = ANY (@skip_reasons))
      AND (@not_skip_reasons::fencepost.skip_reason[] IS NULL OR r.skip_reason IS NULL
           OR r.skip_reason <> ALL (@not_skip_reasons))
      AND (@dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason = ANY (@dead_reasons))
      AND (@not_dead_reasons::fencepost.dead_reason[] IS NULL OR r.dead_reason IS NULL
           OR r.dead_reason <> ALL (@not_dead_reasons))
      -- Which rows can have the first wanted label at all, in a form that indexes serve.
      AND (@labelled_job_ids::uuid[] IS NULL
           OR (r.labels IS NULL AND r.job_id = ANY (@labelled_job_ids))
           OR (@own_labels::jsonb[] IS NOT NULL AND r.labels @> ANY (@own_labels))
           OR (@own_key::text IS NOT NULL AND r.labels ? @own_key))
      AND (@label_tests::jsonb[] IS NULL OR NOT EXISTS (
          SELECT FROM unnest(@label_tests) AS c (wanted)
          CROSS JOIN LATERAL (
              SELECT coalesce(r.labels, (
                  SELECT v.spec -> 'labels' FROM fencepost.job_versions AS v
                  WHERE v.job_id = r.job_id AND v.version = r.version)) ->> (c.wanted ->> 'key')
              AS value) AS found
          WHERE (c.wanted -> 'negated')::boolean = coalesce(
              CASE WHEN (c.wanted -> 'has_key')::boolean THEN found.value IS NOT NULL
                   ELSE jsonb_exists(c.wanted -> 'values', found.value) END, false)))
    OFFSET 0
) AS m
ORDER BY m.scheduled_at DESC, m.job_id DESC
LIMIT @page_max;
