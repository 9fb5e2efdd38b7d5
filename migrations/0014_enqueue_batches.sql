-- Batches of plain ad-hoc runs take a short way: runs that are due now, of jobs that exist, with
-- no more than a payload, a unique key that nobody holds and a request id that is new. It does
-- what enqueue_runs would do for such a batch, without arrays of outcomes and rounds, and rather
-- makes nothing than judge: whatever is not plain is left to enqueue_runs.

-- Makes the runs, one per element of `places`: microseconds after the_now where its instant is, no
-- whole second, ascending within a job. Returns a row per job. Nothing is made when it returns no
-- row, or one without a job: a run has a place up to taken_until, and the call may look for others.
--
-- the_jobs: distinct names or ids. numbers: which of them, from 1, an entry is of; an empty array
-- when there is only one. payloads: NULL is the job's. unique_keys: an empty array when no entry
-- has one; distinct within a job, returned to others and kept for a day as by default.
-- request_ids, body_hashes, notes: empty, or of all entries; the ids are distinct. A note is what
-- remains to be said of a run once head_of_note has named its job.
--
-- Races that are lost after something was written end in an error, and all is undone:
-- unique_violation (a place, a key or a request id was taken meanwhile), lock_not_available
-- (somebody is about to take one and goes on for 100 ms), FP003 (the job is gone, or a run that
-- has ended had one of the places).
CREATE FUNCTION fencepost.enqueue_plain_runs(
    the_tenant int, the_now timestamptz, the_jobs text[], numbers smallint[], places int[],
    payloads bytea[], unique_keys text[], the_trace jsonb, request_ids text[],
    body_hashes bytea[], notes bytea[], remember_until timestamptz)
RETURNS TABLE (number int, job_id uuid, version int, queue_id int, kind_id int, priority int,
               concurrency_key text, taken_until timestamptz)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off
SET lock_timeout = '100ms' AS $$
#variable_conflict use_column
DECLARE
    first_at timestamptz;
    last_at timestamptz;
    ids uuid[];
    versions int[];
    queue_ids int[];
    kind_ids int[];
    priorities int[];
    concurrency_keys text[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'runs are enqueued under READ COMMITTED, not under %',
                upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT the_now + min(w.place) * interval '1 microsecond',
           the_now + max(w.place) * interval '1 microsecond'
    INTO first_at, last_at FROM unnest(places) AS w (place);

    -- Jobs: found, held against their deletion in the order of ids, and looked at again below.
    SELECT array_agg(x.job_id ORDER BY w.number) INTO ids
    FROM unnest(the_jobs) WITH ORDINALITY AS w (job, number)
    CROSS JOIN LATERAL (
        SELECT j.job_id FROM fencepost.jobs AS j
        WHERE j.tenant_id = the_tenant AND j.name = w.job AND j.deleted_at IS NULL
        UNION ALL
        SELECT j.job_id FROM fencepost.jobs AS j
        WHERE w.job ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
          AND j.job_id = CASE WHEN w.job ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                              THEN w.job::uuid END
          AND j.tenant_id = the_tenant AND j.deleted_at IS NULL
        LIMIT 1
    ) AS x;
    IF cardinality(ids) IS DISTINCT FROM cardinality(the_jobs)
            OR (SELECT count(DISTINCT t.job_id) FROM unnest(ids) AS t (job_id)) < cardinality(ids) THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(fencepost.job_lock(t.job_id, 62))
    FROM (SELECT u.job_id FROM unnest(ids) AS u (job_id) ORDER BY u.job_id OFFSET 0) AS t;

    -- Whatever is there already, or needs a look at each run, is not plain.
    IF EXISTS (
        SELECT FROM unnest(ids) AS t (job_id)
        JOIN fencepost.job_schedules AS s ON s.job_id = t.job_id
        WHERE s.concurrency_template IS NOT NULL
    ) THEN
        RETURN;
    END IF;
    -- Who sends a call again sends all of it.
    IF cardinality(request_ids) > 0 AND EXISTS (
        SELECT FROM fencepost.requests AS r
        WHERE r.tenant_id = the_tenant AND r.method = 'EnqueueRun' AND r.request_id = request_ids[1]
    ) THEN
        RETURN;
    END IF;
    IF cardinality(unique_keys) > 0 AND EXISTS (
        SELECT FROM unnest(numbers, unique_keys) AS w (number, unique_key)
        WHERE w.unique_key IS NOT NULL
          AND EXISTS (SELECT FROM fencepost.run_keys AS k
                      WHERE k.job_id = ids[coalesce(w.number, 1)]
                        AND k.unique_key = w.unique_key)
    ) THEN
        RETURN;
    END IF;
    SELECT max(x.at) INTO taken_until
    FROM unnest(ids) AS t (job_id)
    CROSS JOIN LATERAL (
        SELECT max(q.scheduled_at) AS at FROM fencepost.run_queue AS q
        WHERE q.job_id = t.job_id AND q.scheduled_at >= first_at AND q.scheduled_at <= last_at
    ) AS x;
    IF taken_until IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;

    -- Keys come before runs.
    IF cardinality(unique_keys) > 0 THEN
        INSERT INTO fencepost.run_keys (job_id, unique_key, scheduled_at, keep_for_s)
        SELECT ids[coalesce(w.number, 1)], w.unique_key,
               the_now + w.place * interval '1 microsecond', 86400
        FROM unnest(numbers, places, unique_keys) AS w (number, place, unique_key)
        WHERE w.unique_key IS NOT NULL
        ORDER BY 1, w.unique_key COLLATE "C";
    END IF;
    WITH s AS MATERIALIZED (
        SELECT t.number, s.*
        FROM unnest(ids) WITH ORDINALITY AS t (job_id, number)
        CROSS JOIN LATERAL (
            SELECT s.* FROM fencepost.job_schedules AS s WHERE s.job_id = t.job_id OFFSET 0
        ) AS s
        CROSS JOIN LATERAL (
            SELECT FROM fencepost.jobs AS j
            WHERE j.job_id = t.job_id AND j.deleted_at IS NULL OFFSET 0
        ) AS j
        WHERE s.concurrency_template IS NULL
    ), made AS (
        INSERT INTO fencepost.run_queue
            (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
             version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s,
             max_in_flight, concurrency_key, payload, trace_context, queue_timeout_s,
             wait_until, total_until, unique_key)
        SELECT s.job_id, the_now + w.place * interval '1 microsecond', the_now, the_now,
               the_tenant, s.queue_id, s.kind_id, s.version, 'queued', 'enqueue', s.priority,
               s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, s.max_in_flight,
               nullif(s.concurrency_key, ''), w.payload, the_trace, s.queue_timeout_s,
               the_now + s.queue_timeout_s * interval '1 second',
               the_now + s.total_timeout_s * interval '1 second', w.unique_key
        FROM unnest(numbers, places, payloads, unique_keys) AS w (number, place, payload, unique_key)
        JOIN s ON s.number = coalesce(w.number, 1)
        ORDER BY s.job_id, w.place
    )
    SELECT array_agg(s.version ORDER BY s.number), array_agg(s.queue_id ORDER BY s.number),
           array_agg(s.kind_id ORDER BY s.number), array_agg(s.priority ORDER BY s.number),
           array_agg(nullif(s.concurrency_key, '') ORDER BY s.number)
    INTO versions, queue_ids, kind_ids, priorities, concurrency_keys
    FROM s;
    IF cardinality(versions) IS DISTINCT FROM cardinality(ids) THEN
        RAISE EXCEPTION 'a job was deleted meanwhile' USING ERRCODE = 'FP003';
    END IF;
    IF (SELECT s.watched_until > the_now FROM fencepost.shard_state AS s) THEN
        INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
        SELECT the_now, array_agg(ids[coalesce(w.number, 1)]),
               array_agg(the_now + w.place * interval '1 microsecond')
        FROM unnest(numbers, places) AS w (number, place);
    END IF;
    -- In a statement of its own: one snapshot with the insert would miss a run that has ended
    -- between the snapshot and the check of the unique index.
    IF EXISTS (
        SELECT FROM unnest(ids) AS t (job_id)
        WHERE EXISTS (SELECT FROM fencepost.job_runs AS h
                      WHERE h.job_id = t.job_id AND h.scheduled_at >= first_at
                        AND h.scheduled_at <= last_at)
           OR EXISTS (SELECT FROM fencepost.job_runs_stray AS h
                      WHERE h.job_id = t.job_id AND h.scheduled_at >= first_at
                        AND h.scheduled_at <= last_at)
           OR EXISTS (SELECT FROM fencepost.dead_letters AS d
                      WHERE d.job_id = t.job_id AND d.scheduled_at >= first_at
                        AND d.scheduled_at <= last_at)
    ) THEN
        RAISE EXCEPTION 'a run that has ended had one of the places' USING ERRCODE = 'FP003';
    END IF;
    IF cardinality(request_ids) > 0 THEN
        INSERT INTO fencepost.requests
            (tenant_id, method, request_id, body_hash, response, expires_at)
        SELECT the_tenant, 'EnqueueRun', w.request_id, w.body_hash, h.head || w.note,
               remember_until
        FROM unnest(numbers, request_ids, body_hashes, notes)
            AS w (number, request_id, body_hash, note)
        JOIN (SELECT t.number, '\x0a2812260a24'::bytea || convert_to(t.job_id::text, 'UTF8') AS head
              FROM unnest(ids) WITH ORDINALITY AS t (job_id, number) OFFSET 0) AS h
          ON h.number = coalesce(w.number, 1)
        ORDER BY w.request_id COLLATE "C";
    END IF;
    RETURN QUERY
    SELECT t.number::int, t.job_id, t.version, t.queue_id, t.kind_id, t.priority,
           t.concurrency_key, NULL::timestamptz
    FROM unnest(ids, versions, queue_ids, kind_ids, priorities, concurrency_keys)
        WITH ORDINALITY AS t (job_id, version, queue_id, kind_id, priority, concurrency_key, number);
END $$;

REVOKE EXECUTE ON FUNCTION fencepost.enqueue_plain_runs FROM PUBLIC;

-- One run enqueued alone ---------------------------------------------------------------------

-- Makes one run that is due now and, if `the_worker` is given and nothing speaks against it, hands
-- it to that worker in the same commit: made and claimed at once, it is running from its first
-- moment (docs/adr/0044). It knows only what nearly every call needs; for all else it makes
-- nothing, and the caller asks enqueue_runs.
--
-- No row: the job of this id and name is not there (any more), somebody has the unique key, or the
-- place is taken. FP001: the request id came before. FP003: a run of this key has ended, the job
-- went away while its key was taken, or there are too many labels. Nothing is written then;
-- lock_not_available: the unique key is being taken.
--
-- the_at: the run's place, which is no whole second. the_labels: laid over the job's. the_note:
-- what the request id is remembered by. A run is handed out if it is of the_queue and of the first
-- of the lanes (lane_kinds, lane_priorities), the queue has no pause, cap or rate, and no other run
-- is ready in any of the lanes, from seen_after on; claimed_at says that it was.
CREATE OR REPLACE FUNCTION fencepost.enqueue_run(
    the_tenant int, the_now timestamptz, the_job uuid, the_name text, the_at timestamptz,
    the_payload bytea, the_priority smallint, the_labels jsonb, the_concurrency_key text,
    the_key text, the_keep_for int, the_trace jsonb,
    the_request_id text, the_body_hash bytea, the_note bytea, remember_until timestamptz,
    the_worker uuid, the_queue int, lane_kinds int[], lane_priorities smallint[],
    seen_after timestamptz,
    OUT version int, OUT queue_id int, OUT kind_id int, OUT priority int,
    OUT concurrency_key text, OUT run_labels jsonb, OUT lease_s int, OUT claimed_at timestamptz)
RETURNS SETOF record LANGUAGE plpgsql
-- Plans as written, made once (docs/adr/0004).
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    old_timeout text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(fencepost.job_lock(the_job, 62));
    IF the_key IS NOT NULL THEN
        old_timeout := current_setting('lock_timeout');
        IF old_timeout::interval = interval '0' OR old_timeout::interval > interval '2 seconds' THEN
            PERFORM set_config('lock_timeout', '2s', true);
        END IF;
        INSERT INTO fencepost.run_keys AS k (job_id, unique_key, scheduled_at, keep_for_s)
        VALUES (the_job, the_key, the_at, the_keep_for)
        ON CONFLICT (job_id, unique_key) DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        PERFORM set_config('lock_timeout', old_timeout, true);
    END IF;
    -- By a snapshot newer than the lock of the job.
    WITH made AS (
        INSERT INTO fencepost.run_queue AS r
            (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
             version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s,
             max_in_flight, concurrency_key, payload, labels, trace_context, queue_timeout_s,
             wait_until, total_until, unique_key, attempt, attempt_open, worker_id, lease_until,
             claimed_at, first_claimed_at)
        SELECT s.job_id, the_at, the_now, the_now, the_tenant, s.queue_id, s.kind_id, s.version,
               CASE WHEN h.is_given THEN 'running' ELSE 'queued' END::fencepost.run_state,
               'enqueue', coalesce(the_priority, s.priority), s.lease_s, s.cancel_grace_s,
               s.attempt_timeout_s, s.max_in_flight,
               nullif(coalesce(the_concurrency_key, CASE WHEN s.concurrency_template IS NULL
                   THEN s.concurrency_key ELSE (
                       SELECT fencepost.run_concurrency_key(
                           s.concurrency_template, coalesce(l.labels, v.spec -> 'labels'),
                           coalesce(the_payload, v.payload))
                       FROM fencepost.job_versions AS v
                       WHERE v.job_id = s.job_id AND v.version = s.version) END), ''),
               the_payload, l.labels, the_trace, s.queue_timeout_s,
               the_now + s.queue_timeout_s * interval '1 second',
               the_now + s.total_timeout_s * interval '1 second', the_key,
               CASE WHEN h.is_given THEN 1 ELSE 0 END, h.is_given,
               CASE WHEN h.is_given THEN the_worker END,
               CASE WHEN h.is_given THEN the_now + s.lease_s * interval '1 second' END,
               CASE WHEN h.is_given THEN the_now END, CASE WHEN h.is_given THEN the_now END
        FROM fencepost.job_schedules AS s
        JOIN fencepost.jobs AS j ON j.job_id = s.job_id
        CROSS JOIN LATERAL (
            SELECT CASE WHEN the_labels IS NOT NULL THEN (
                SELECT coalesce(v.spec -> 'labels', '{}') || the_labels
                FROM fencepost.job_versions AS v
                WHERE v.job_id = s.job_id AND v.version = s.version) END AS labels
            OFFSET 0
        ) AS l
        CROSS JOIN LATERAL (
            SELECT coalesce(
                the_worker IS NOT NULL AND s.queue_id = the_queue AND s.kind_id = lane_kinds[1]
                AND coalesce(the_priority, s.priority) = lane_priorities[1]
                AND s.max_in_flight IS NULL
                AND fencepost.clock_agrees(the_now)
                AND (SELECT NOT (u.paused OR u.has_capped_jobs) AND u.max_in_flight IS NULL
                            AND u.max_in_flight_per_key IS NULL AND u.rate_limit IS NULL
                            AND t.max_in_flight IS NULL
                     FROM fencepost.queues AS u JOIN fencepost.tenants AS t USING (tenant_id)
                     WHERE u.queue_id = the_queue)
                AND NOT EXISTS (
                    SELECT FROM unnest(lane_kinds, lane_priorities) AS w (kind_id, priority)
                    CROSS JOIN LATERAL (
                        SELECT FROM fencepost.run_queue AS q
                        WHERE q.queue_id = the_queue AND q.kind_id = w.kind_id
                          AND q.priority = w.priority AND q.state IN ('queued', 'retrying')
                          AND q.available_at > seen_after AND q.available_at <= the_now
                        LIMIT 1
                    ) AS older
                    OFFSET 0), false) AS is_given
            OFFSET 0
        ) AS h
        WHERE s.job_id = the_job AND j.tenant_id = the_tenant AND j.name = the_name
          AND j.deleted_at IS NULL
        ON CONFLICT (job_id, scheduled_at) DO NOTHING
        RETURNING r.version, r.queue_id, r.kind_id, r.priority, r.concurrency_key, r.labels,
                  r.lease_s, r.claimed_at
    ), told AS (
        INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
        SELECT the_now, ARRAY[the_job], ARRAY[the_at] FROM made
        WHERE (SELECT s.watched_until > the_now FROM fencepost.shard_state AS s)
    )
    SELECT m.version, m.queue_id, m.kind_id, m.priority::int, m.concurrency_key, m.labels,
           m.lease_s::int, m.claimed_at
    INTO version, queue_id, kind_id, priority, concurrency_key, run_labels, lease_s, claimed_at
    FROM made AS m;
    IF NOT FOUND THEN
        IF the_key IS NULL THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'the key would be left behind' USING ERRCODE = 'FP003';
    END IF;
    -- In a statement of its own, as in enqueue_runs.
    IF EXISTS (SELECT FROM fencepost.job_runs AS h
               WHERE h.job_id = the_job AND h.scheduled_at = the_at)
       OR EXISTS (SELECT FROM fencepost.job_runs_stray AS s
                  WHERE s.job_id = the_job AND s.scheduled_at = the_at)
       OR EXISTS (SELECT FROM fencepost.dead_letters AS d
                  WHERE d.job_id = the_job AND d.scheduled_at = the_at) THEN
        RAISE EXCEPTION 'a run of this key has ended' USING ERRCODE = 'FP003';
    END IF;
    IF run_labels IS NOT NULL
            AND (SELECT count(*) FROM jsonb_object_keys(run_labels)) > 32 THEN
        RAISE EXCEPTION 'too many labels' USING ERRCODE = 'FP003';
    END IF;
    IF the_request_id IS NOT NULL THEN
        INSERT INTO fencepost.requests AS r
            (tenant_id, method, request_id, body_hash, response, expires_at)
        VALUES (the_tenant, 'EnqueueRun', the_request_id, the_body_hash, the_note, remember_until)
        ON CONFLICT (tenant_id, method, request_id) DO UPDATE
            SET body_hash = excluded.body_hash, response = excluded.response,
                expires_at = excluded.expires_at
            WHERE r.expires_at <= the_now;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a call with the same request id came first' USING ERRCODE = 'FP001';
        END IF;
    END IF;
    RETURN NEXT;
END $$;

REVOKE EXECUTE ON FUNCTION fencepost.enqueue_run FROM PUBLIC;
