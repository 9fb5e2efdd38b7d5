-- Ad-hoc runs are made by one function, wherever the caller stands: the server's calls come
-- here, and so does an application in a transaction of its own (docs/adr/0035).
--
-- A VOLATILE function in plpgsql takes a new snapshot for each of its statements under READ
-- COMMITTED, so "wait, then look in the next statement" holds inside of it as it does outside.

-- An advisory lock of a job; purposes: 62 there are enqueues under way, 63 places are given.
CREATE FUNCTION fencepost.job_lock(the_job uuid, the_purpose bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
$$ SELECT uuid_hash_extended(the_job, the_purpose) $$;

-- Waits until no enqueue of the job is under way, and lets none begin until the caller's
-- transaction ends. Applications hold the row instead of the advisory lock: a transaction that
-- enqueues runs of many jobs must not fill the lock table.
CREATE FUNCTION fencepost.lock_out_enqueues(the_job uuid) RETURNS void
    LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(fencepost.job_lock(the_job, 62));
    PERFORM 1 FROM fencepost.jobs AS j WHERE j.job_id = the_job FOR UPDATE;
END $$;

-- Messages as bytes ------------------------------------------------------------------------

CREATE FUNCTION fencepost.wire_varint(the_number int) RETURNS bytea
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
$$ SELECT CASE
       WHEN the_number < 128 THEN set_byte('\x00'::bytea, 0, the_number)
       WHEN the_number < 16384 THEN
           set_byte(set_byte('\x0000'::bytea, 0, the_number & 127 | 128), 1, the_number >> 7)
       ELSE set_byte(set_byte(set_byte('\x000000'::bytea, 0, the_number & 127 | 128),
                              1, the_number >> 7 & 127 | 128), 2, the_number >> 14) END $$;

-- A field of bytes, text or a message, up to 2 MiB.
CREATE FUNCTION fencepost.wire_field(the_field int, the_content bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
$$ SELECT set_byte('\x00'::bytea, 0, the_field << 3 | 2)
          || fencepost.wire_varint(length(the_content)) || the_content $$;

-- fencepost.v1.Payload as the server stores it; NULL without a body.
CREATE FUNCTION fencepost.payload_message(
    the_json text, the_data bytea, the_content_type text, the_encoding text) RETURNS bytea
    LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN the_json IS NOT NULL THEN fencepost.wire_field(1, convert_to(the_json, 'UTF8'))
               ELSE fencepost.wire_field(2, the_data)
                    || coalesce(fencepost.wire_field(3, convert_to(nullif(the_content_type, ''), 'UTF8')), '')
          END || coalesce(fencepost.wire_field(4, convert_to(nullif(the_encoding, ''), 'UTF8')), '') $$;

-- An instant as run names and run keys spell it.
CREATE FUNCTION fencepost.instant_text(the_at timestamptz) RETURNS text
    LANGUAGE sql STABLE STRICT PARALLEL SAFE AS
$$ SELECT to_char(the_at AT TIME ZONE 'UTC',
                  CASE WHEN extract(microseconds FROM the_at)::bigint % 1000000 = 0
                       THEN 'YYYY-MM-DD"T"HH24:MI:SS"Z"'
                       ELSE 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"' END) $$;

-- Unique keys ------------------------------------------------------------------------------

-- Who holds these keys by one snapshot; no row for a key that nobody ever took. A holder that
-- is nowhere any more holds its key only if `until` says so.
CREATE FUNCTION fencepost.key_holders(
    the_ordinals int[], the_jobs uuid[], the_keys text[], the_now timestamptz)
RETURNS TABLE (ordinal int, holder_at timestamptz, is_held boolean, is_waiting boolean)
LANGUAGE sql STABLE AS $$
    SELECT w.ordinal, k.scheduled_at,
           CASE WHEN q.state IS NOT NULL THEN true
                WHEN e.ended_at IS NOT NULL
                    THEN e.ended_at + k.keep_for_s * interval '1 second' > the_now
                ELSE coalesce(k.until > the_now, false) END,
           coalesce(q.state = 'queued' AND q.attempt = 0, false)
    FROM unnest(the_ordinals) AS w (ordinal)
    CROSS JOIN LATERAL (
        SELECT k.job_id, k.scheduled_at, k.keep_for_s, k.until
        FROM fencepost.run_keys AS k
        WHERE k.job_id = the_jobs[w.ordinal] AND k.unique_key = the_keys[w.ordinal]
        OFFSET 0
    ) AS k
    LEFT JOIN LATERAL (
        SELECT q.state, q.attempt FROM fencepost.run_queue AS q
        WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at
        OFFSET 0
    ) AS q ON true
    LEFT JOIN LATERAL (
        SELECT h.ended_at FROM fencepost.job_runs AS h
        WHERE q.state IS NULL AND h.job_id = k.job_id AND h.scheduled_at = k.scheduled_at
        UNION ALL
        SELECT s.ended_at FROM fencepost.job_runs_stray AS s
        WHERE q.state IS NULL AND s.job_id = k.job_id AND s.scheduled_at = k.scheduled_at
        UNION ALL
        SELECT d.ended_at FROM fencepost.dead_letters AS d
        WHERE q.state IS NULL AND d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at
        LIMIT 1
    ) AS e ON true
$$;

-- Ends runs that were never claimed because others take their place; how many it ended. One
-- that a claim was faster with is left alone.
CREATE FUNCTION fencepost.replace_waiting(
    the_jobs uuid[], the_ats timestamptz[], the_now timestamptz)
RETURNS TABLE (job_id uuid, scheduled_at timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM (
        SELECT q.job_id
        FROM unnest(the_jobs, the_ats) AS w (job_id, scheduled_at)
        JOIN fencepost.run_queue AS q
          ON q.job_id = w.job_id AND q.scheduled_at = w.scheduled_at
        ORDER BY q.job_id, q.scheduled_at
        FOR UPDATE OF q) AS locked;
    RETURN QUERY
    WITH gone AS (
        DELETE FROM fencepost.run_queue AS q
        USING unnest(the_jobs, the_ats) AS w (job_id, scheduled_at)
        WHERE q.job_id = w.job_id AND q.scheduled_at = w.scheduled_at
          AND q.state = 'queued' AND q.attempt = 0
        RETURNING q.*
    ), kept AS (
        INSERT INTO fencepost.job_runs
            (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at,
             ended_at, tenant_id, queue_id, kind_id, version, attempt, failure_count,
             lost_lease_count, snooze_count, replay_count, state, origin, priority, worker_id,
             concurrency_key, payload, labels, progress, last_failure, failure_code,
             cancel_cause, cancel_reason, trace_context, unique_key)
        SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at,
               the_now, tenant_id, queue_id, kind_id, version, attempt, failure_count,
               lost_lease_count, snooze_count, replay_count, 'cancelled', origin, priority,
               worker_id, concurrency_key, payload, labels, progress, last_failure, failure_code,
               'replaced', cancel_reason, trace_context, unique_key
        FROM gone
        WHERE scheduled_at >= (SELECT history_from FROM fencepost.shard_state)
          AND scheduled_at < (SELECT history_until FROM fencepost.shard_state)
    ), strayed AS (
        INSERT INTO fencepost.job_runs_stray
            (job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at,
             ended_at, tenant_id, queue_id, kind_id, version, attempt, failure_count,
             lost_lease_count, snooze_count, replay_count, state, origin, priority, worker_id,
             concurrency_key, payload, labels, progress, last_failure, failure_code,
             cancel_cause, cancel_reason, trace_context, unique_key)
        SELECT job_id, scheduled_at, available_at, created_at, first_claimed_at, claimed_at,
               the_now, tenant_id, queue_id, kind_id, version, attempt, failure_count,
               lost_lease_count, snooze_count, replay_count, 'cancelled', origin, priority,
               worker_id, concurrency_key, payload, labels, progress, last_failure, failure_code,
               'replaced', cancel_reason, trace_context, unique_key
        FROM gone
        WHERE scheduled_at < (SELECT history_from FROM fencepost.shard_state)
           OR scheduled_at >= (SELECT history_until FROM fencepost.shard_state)
    ), told AS (
        INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
        SELECT the_now, array_agg(job_id), array_agg(scheduled_at) FROM gone
        WHERE (SELECT s.watched_until > the_now FROM fencepost.shard_state AS s)
        HAVING count(*) > 0
    )
    SELECT g.job_id, g.scheduled_at FROM gone AS g;
END $$;

-- Takes distinct keys for runs that are about to be made; the arrays are in the order of
-- (job, key), so that two callers wait for each other in one order. Returns those that others
-- hold. Conflicts: 1 return existing, 2 reject, 3 replace waiting.
CREATE FUNCTION fencepost.take_keys(
    the_jobs uuid[], the_keys text[], the_ats timestamptz[], the_keep_fors int[],
    the_conflicts smallint[], the_now timestamptz)
RETURNS TABLE (ordinal int, holder_at timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    -- Keys that are neither ours nor known to be held.
    pending int[] := ARRAY(SELECT generate_subscripts(the_jobs, 1));
    got_jobs uuid[];
    got_keys text[];
    doubtful int[];
    settled int[];
    won int[];
    waiting int[];
    waiting_ats timestamptz[];
    seen record;
BEGIN
    FOR round IN 1..32 LOOP
        -- Waits for a transaction that is taking one of them; if it rolls back, the key is ours.
        WITH taken AS (
            INSERT INTO fencepost.run_keys AS k (job_id, unique_key, scheduled_at, keep_for_s)
            SELECT the_jobs[p.o], the_keys[p.o], the_ats[p.o], the_keep_fors[p.o]
            FROM unnest(pending) AS p (o)
            ORDER BY p.o
            ON CONFLICT (job_id, unique_key) DO NOTHING
            RETURNING k.job_id, k.unique_key
        )
        SELECT array_agg(job_id), array_agg(unique_key) INTO got_jobs, got_keys FROM taken;
        IF cardinality(got_jobs) = cardinality(pending) THEN
            RETURN;
        END IF;
        IF got_jobs IS NOT NULL THEN
            pending := ARRAY(
                SELECT max(b.o) FROM (
                    SELECT p.o, the_jobs[p.o] AS job_id, the_keys[p.o] AS unique_key
                    FROM unnest(pending) AS p (o)
                    UNION ALL
                    SELECT NULL, g.job_id, g.unique_key
                    FROM unnest(got_jobs, got_keys) AS g (job_id, unique_key)
                ) AS b
                GROUP BY b.job_id, b.unique_key HAVING count(*) = 1 ORDER BY 1);
        END IF;
        -- A key that is plainly held needs no lock: whoever only asks holds up nobody.
        doubtful := '{}';
        settled := '{}';
        FOR seen IN
            SELECT h.* FROM fencepost.key_holders(pending, the_jobs, the_keys, the_now) AS h
        LOOP
            IF seen.is_held AND NOT (the_conflicts[seen.ordinal] = 3 AND seen.is_waiting) THEN
                settled := settled || seen.ordinal;
                ordinal := seen.ordinal;
                holder_at := seen.holder_at;
                RETURN NEXT;
            ELSE
                doubtful := doubtful || seen.ordinal;
            END IF;
        END LOOP;
        IF doubtful <> '{}' THEN
            PERFORM 1 FROM (
                SELECT k.job_id
                FROM unnest(doubtful) AS d (o)
                JOIN fencepost.run_keys AS k
                  ON k.job_id = the_jobs[d.o] AND k.unique_key = the_keys[d.o]
                ORDER BY d.o
                FOR UPDATE OF k) AS locked;
            -- Judged again by a snapshot that is newer than the locks.
            won := '{}';
            waiting := '{}';
            waiting_ats := '{}';
            FOR seen IN
                SELECT h.* FROM fencepost.key_holders(doubtful, the_jobs, the_keys, the_now) AS h
            LOOP
                IF NOT seen.is_held THEN
                    won := won || seen.ordinal;
                ELSIF the_conflicts[seen.ordinal] = 3 AND seen.is_waiting THEN
                    waiting := waiting || seen.ordinal;
                    waiting_ats := waiting_ats || seen.holder_at;
                ELSE
                    settled := settled || seen.ordinal;
                    ordinal := seen.ordinal;
                    holder_at := seen.holder_at;
                    RETURN NEXT;
                END IF;
            END LOOP;
            IF waiting <> '{}' THEN
                won := won || ARRAY(
                    SELECT max(b.o) FROM (
                        SELECT w.o, the_jobs[w.o] AS job_id, w.at
                        FROM unnest(waiting, waiting_ats) AS w (o, at)
                        UNION ALL
                        SELECT NULL, r.job_id, r.scheduled_at
                        FROM fencepost.replace_waiting(
                            ARRAY(SELECT the_jobs[w.o] FROM unnest(waiting) AS w (o)),
                            waiting_ats, the_now) AS r
                    ) AS b
                    GROUP BY b.job_id, b.at HAVING count(*) = 2);
            END IF;
            IF won <> '{}' THEN
                UPDATE fencepost.run_keys AS k
                SET scheduled_at = the_ats[w.o], keep_for_s = the_keep_fors[w.o], until = NULL
                FROM unnest(won) AS w (o)
                WHERE k.job_id = the_jobs[w.o] AND k.unique_key = the_keys[w.o];
                settled := settled || won;
            END IF;
        END IF;
        pending := ARRAY(SELECT p.o FROM unnest(pending) AS p (o)
                         EXCEPT SELECT s.o FROM unnest(settled) AS s (o) ORDER BY 1);
        IF pending = '{}' THEN
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'unique keys change hands too fast' USING ERRCODE = 'lock_not_available';
END $$;

-- Gives dead runs that are replayed their keys back, where nobody else holds them; returns the
-- runs that have theirs. The caller has locked the dead letters. Nobody is waited for long: a
-- run whose key somebody is just taking goes on without it.
CREATE FUNCTION fencepost.retake_keys(
    job_ids uuid[], scheduled_ats timestamptz[], the_now timestamptz)
RETURNS TABLE (job_id uuid, scheduled_at timestamptz) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    wanted record;
    holder record;
    is_ours boolean;
    old_timeout text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', '100ms', true);
    FOR wanted IN
        SELECT d.job_id, d.unique_key, d.scheduled_at
        FROM unnest(job_ids, scheduled_ats) AS w (job_id, scheduled_at)
        JOIN fencepost.dead_letters AS d
          ON d.job_id = w.job_id AND d.scheduled_at = w.scheduled_at
        WHERE d.unique_key IS NOT NULL
        ORDER BY d.job_id, d.unique_key COLLATE "C", d.scheduled_at
    LOOP
        is_ours := false;
        BEGIN
            -- What the key was kept for is forgotten with its row; the default stands in.
            INSERT INTO fencepost.run_keys AS k (job_id, unique_key, scheduled_at, keep_for_s)
            VALUES (wanted.job_id, wanted.unique_key, wanted.scheduled_at, 86400)
            ON CONFLICT (job_id, unique_key) DO NOTHING;
            is_ours := FOUND;
            IF NOT is_ours THEN
                PERFORM 1 FROM fencepost.run_keys AS k
                WHERE k.job_id = wanted.job_id AND k.unique_key = wanted.unique_key
                FOR UPDATE;
                SELECT h.* INTO holder FROM fencepost.key_holders(
                    ARRAY[1], ARRAY[wanted.job_id], ARRAY[wanted.unique_key], the_now) AS h;
                is_ours := FOUND
                    AND (NOT holder.is_held OR holder.holder_at = wanted.scheduled_at);
                IF is_ours THEN
                    UPDATE fencepost.run_keys AS k
                    SET scheduled_at = wanted.scheduled_at, until = NULL
                    WHERE k.job_id = wanted.job_id AND k.unique_key = wanted.unique_key;
                END IF;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            is_ours := false;
        END;
        IF is_ours THEN
            job_id := wanted.job_id;
            scheduled_at := wanted.scheduled_at;
            RETURN NEXT;
        END IF;
    END LOOP;
    PERFORM set_config('lock_timeout', old_timeout, true);
END $$;

-- Enqueue ----------------------------------------------------------------------------------

-- Inserts runs in the order of their keys; returns the keys that were free. `places` are where
-- in the other arrays a run's own values stand.
CREATE FUNCTION fencepost.insert_enqueued(
    places int[], the_jobs uuid[], the_ats timestamptz[], dues timestamptz[], payloads bytea[],
    priorities smallint[], labels jsonb[], concurrency_keys text[], unique_keys text[],
    the_tenant int, the_trace jsonb, the_now timestamptz,
    OUT made_jobs uuid[], OUT made_ats timestamptz[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    WITH made AS (
        INSERT INTO fencepost.run_queue
            (job_id, scheduled_at, available_at, created_at, tenant_id, queue_id, kind_id,
             version, state, origin, priority, lease_s, cancel_grace_s, attempt_timeout_s,
             max_in_flight, concurrency_key, payload, labels, trace_context,
             queue_timeout_s, wait_until, total_until, unique_key)
        SELECT e.job_id, e.at, dues[e.p], the_now, the_tenant, s.queue_id, s.kind_id,
               s.version, 'queued', 'enqueue', coalesce(priorities[e.p], s.priority),
               s.lease_s, s.cancel_grace_s, s.attempt_timeout_s, s.max_in_flight,
               nullif(coalesce(concurrency_keys[e.p], CASE WHEN s.concurrency_template IS NULL
                   THEN s.concurrency_key ELSE (
                       SELECT fencepost.run_concurrency_key(
                           s.concurrency_template, coalesce(labels[e.p], v.spec -> 'labels'),
                           coalesce(payloads[e.p], v.payload))
                       FROM fencepost.job_versions AS v
                       WHERE v.job_id = s.job_id AND v.version = s.version) END), ''),
               payloads[e.p], labels[e.p], the_trace, s.queue_timeout_s,
               dues[e.p] + s.queue_timeout_s * interval '1 second',
               dues[e.p] + s.total_timeout_s * interval '1 second', unique_keys[e.p]
        FROM unnest(places, the_jobs, the_ats) AS e (p, job_id, at)
        CROSS JOIN LATERAL (
            SELECT s.* FROM fencepost.job_schedules AS s
            WHERE s.job_id = e.job_id
            OFFSET 0
        ) AS s
        ORDER BY e.job_id, e.at
        ON CONFLICT (job_id, scheduled_at) DO NOTHING
        RETURNING job_id, scheduled_at
    ), told AS (
        INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
        SELECT the_now, array_agg(m.job_id), array_agg(m.scheduled_at) FROM made AS m
        WHERE (SELECT s.watched_until > the_now FROM fencepost.shard_state AS s)
        HAVING count(*) > 0
    )
    SELECT array_agg(m.job_id), array_agg(m.scheduled_at) INTO made_jobs, made_ats
    FROM made AS m;
END $$;

-- Makes ad-hoc runs, one per entry, each of which succeeds or fails alone.
--
-- jobs: names or ids. due_ats: NULL or past is now. priorities, concurrency_keys, payloads: NULL
-- is the job's; '' no concurrency key. labels are laid over the job's. conflicts: as take_keys.
-- Of labels, unique_keys and request_ids an empty array says that no entry has one.
-- is_lasting: the caller's transaction may go on for long, so nothing is left that others
-- would wait for: no advisory locks, and places at a shared instant apart from others' places.
--
-- Outcomes: 'made'; 'existing' and 'held' (scheduled_at is the holder's, REJECT or not);
-- 'repeated' (note is what the first answer is made of) and 'reused' for request ids; 'no_job';
-- 'labels' (too many; priority is their number); 'busy' (the key is being taken).
-- Raises FP001 when a call with the same request id came first: call again; FP002 when too
-- many callers press into one instant; lock_not_available as 'busy' of a single entry.
CREATE FUNCTION fencepost.enqueue_runs(
    the_tenant int, the_now timestamptz, is_lasting boolean, jobs text[],
    due_ats timestamptz[], payloads bytea[], priorities smallint[], labels jsonb[],
    concurrency_keys text[], unique_keys text[], conflicts smallint[], keep_fors int[],
    the_trace jsonb, request_ids text[], body_hashes bytea[], remember_until timestamptz)
RETURNS TABLE (place int, outcome text, job_id uuid, scheduled_at timestamptz, note bytea,
               version int, queue_id int, kind_id int, priority int, available_at timestamptz,
               concurrency_key text, run_labels jsonb)
LANGUAGE plpgsql
-- Plans as written, made once (docs/adr/0004): planning takes longer than the work itself.
SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
SET enable_hashjoin = off SET enable_mergejoin = off SET enable_bitmapscan = off AS $$
#variable_conflict use_column
DECLARE
    entries int := cardinality(jobs);
    since timestamptz := date_trunc('second', the_now);
    is_exact boolean;
    -- By place:
    outcomes text[] := array_fill(NULL::text, ARRAY[entries]);
    notes bytea[] := array_fill(NULL::bytea, ARRAY[entries]);
    entry_jobs uuid[];
    dues timestamptz[];
    starts timestamptz[];
    ats timestamptz[] := array_fill(NULL::timestamptz, ARRAY[entries]);
    merged jsonb[] := array_fill(NULL::jsonb, ARRAY[entries]);
    counts int[] := array_fill(NULL::int, ARRAY[entries]);
    heads int[];
    turns int[];
    -- Of jobs:
    names text[];
    ids uuid[];
    known jsonb;
    -- Of one turn:
    last_turn int := 1;
    wave int[];
    keyed int[];
    key_jobs uuid[];
    key_texts text[];
    key_ats timestamptz[];
    key_keeps int[];
    key_conflicts smallint[];
    held_ordinals int[];
    held_ats timestamptz[];
    old_timeout text := current_setting('lock_timeout');
    -- Of one round of placing:
    pending int[];
    apart uuid[];
    own_ms bigint;
    tried int[];
    tried_jobs uuid[];
    tried_ats timestamptz[];
    made_jobs uuid[];
    made_ats timestamptz[];
    ended_jobs uuid[];
    ended_ats timestamptz[];
    first_at timestamptz;
    last_at timestamptz;
    prefix text;
    name_bytes int;
    head bytea;
    total int;
    found record;
    p int;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'runs are enqueued under READ COMMITTED, not under %',
                upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported',
                  DETAIL = 'With one snapshot for the whole transaction the key of a run that has '
                           'just ended would look free.',
                  HINT = 'Begin the transaction with ISOLATION LEVEL READ COMMITTED.';
    END IF;

    -- Calls that came before.
    IF cardinality(request_ids) > 0 THEN
        FOR found IN
            SELECT w.place::int AS place, r.response, r.body_hash = body_hashes[w.place] AS is_same
            FROM unnest(request_ids) WITH ORDINALITY AS w (request_id, place)
            CROSS JOIN LATERAL (
                SELECT r.response, r.body_hash FROM fencepost.requests AS r
                WHERE r.tenant_id = the_tenant AND r.method = 'EnqueueRun'
                  AND r.request_id = w.request_id AND r.expires_at > the_now
                OFFSET 0
            ) AS r
        LOOP
            outcomes[found.place] := CASE WHEN found.is_same THEN 'repeated' ELSE 'reused' END;
            notes[found.place] := found.response;
        END LOOP;
    END IF;

    -- Jobs: found, held against their deletion in the order of ids, and looked at again.
    SELECT array_agg(d.job ORDER BY x.job_id), array_agg(x.job_id ORDER BY x.job_id)
    INTO names, ids
    FROM (
        SELECT DISTINCT w.job,
               CASE WHEN w.job ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                    THEN w.job::uuid END AS id
        FROM unnest(jobs) AS w (job)
    ) AS d
    CROSS JOIN LATERAL (
        SELECT j.job_id FROM fencepost.jobs AS j
        WHERE j.tenant_id = the_tenant AND j.name = d.job AND j.deleted_at IS NULL
        UNION ALL
        SELECT j.job_id FROM fencepost.jobs AS j
        WHERE j.job_id = d.id AND j.tenant_id = the_tenant AND j.deleted_at IS NULL
        LIMIT 1
    ) AS x;
    is_exact := NOT is_lasting AND coalesce(cardinality(ids), 0) <= 64;
    IF is_exact THEN
        PERFORM pg_advisory_xact_lock_shared(fencepost.job_lock(t.job_id, 62))
        FROM unnest(ids) AS t (job_id);
    ELSE
        PERFORM 1 FROM (
            SELECT j.job_id FROM unnest(ids) AS t (job_id)
            JOIN fencepost.jobs AS j ON j.job_id = t.job_id
            ORDER BY j.job_id
            FOR KEY SHARE OF j) AS locked;
    END IF;
    SELECT jsonb_object_agg(t.job, t.job_id) INTO known
    FROM unnest(names, ids) AS t (job, job_id)
    CROSS JOIN LATERAL (
        SELECT FROM fencepost.jobs AS j
        WHERE j.job_id = t.job_id AND j.deleted_at IS NULL
        OFFSET 0
    ) AS j;
    SELECT array_agg((known ->> w.job)::uuid ORDER BY w.place),
           array_agg(greatest(w.due_at, the_now) ORDER BY w.place)
    INTO entry_jobs, dues
    FROM unnest(jobs, due_ats) WITH ORDINALITY AS w (job, due_at, place);
    starts := dues;

    IF cardinality(labels) > 0 THEN
        FOR found IN
            SELECT x.place, x.all_labels,
                   (SELECT count(*)::int FROM jsonb_object_keys(x.all_labels)) AS total
            FROM (
                SELECT w.place::int AS place,
                       coalesce(v.spec -> 'labels', '{}') || w.own AS all_labels
                FROM unnest(labels) WITH ORDINALITY AS w (own, place)
                CROSS JOIN LATERAL (
                    SELECT s.version FROM fencepost.job_schedules AS s
                    WHERE s.job_id = entry_jobs[w.place] OFFSET 0
                ) AS s
                CROSS JOIN LATERAL (
                    SELECT v.spec FROM fencepost.job_versions AS v
                    WHERE v.job_id = entry_jobs[w.place] AND v.version = s.version OFFSET 0
                ) AS v
                WHERE w.own IS NOT NULL
            ) AS x
        LOOP
            merged[found.place] := found.all_labels;
            IF found.total > 32 AND outcomes[found.place] IS NULL THEN
                outcomes[found.place] := 'labels';
                counts[found.place] := found.total;
            END IF;
        END LOOP;
    END IF;

    FOR p IN 1..entries LOOP
        IF outcomes[p] IS NULL AND entry_jobs[p] IS NULL THEN
            outcomes[p] := 'no_job';
        END IF;
    END LOOP;

    -- Entries of one batch with one key take turns, because the later sees the earlier. Only
    -- those that may replace need a turn of their own: after any entry the key is held, and the
    -- others get its holder.
    IF cardinality(unique_keys) > 0 THEN
        heads := array_fill(NULL::int, ARRAY[entries]);
        turns := array_fill(NULL::int, ARRAY[entries]);
        FOR found IN
            SELECT y.place, min(y.place) OVER g AS head,
                   dense_rank() OVER (PARTITION BY y.job_id, y.unique_key, y.alone
                                      ORDER BY y.part) AS turn
            FROM (
                SELECT x.*, count(*) FILTER (WHERE x.conflict = 3) OVER (
                           PARTITION BY x.job_id, x.unique_key, x.alone ORDER BY x.place) AS part
                FROM (
                    SELECT s AS place, entry_jobs[s] AS job_id, unique_keys[s] AS unique_key,
                           conflicts[s] AS conflict,
                           CASE WHEN unique_keys[s] IS NULL THEN s END AS alone
                    FROM generate_series(1, entries) AS s
                    WHERE outcomes[s] IS NULL
                ) AS x
            ) AS y
            WINDOW g AS (PARTITION BY y.job_id, y.unique_key, y.alone, y.part)
        LOOP
            heads[found.place] := found.head;
            turns[found.place] := found.turn;
            last_turn := greatest(last_turn, found.turn);
        END LOOP;
    END IF;

    FOR turn IN 1..last_turn LOOP
        wave := ARRAY(
            SELECT s FROM generate_series(1, entries) AS s
            WHERE outcomes[s] IS NULL
              AND (heads IS NULL OR (heads[s] = s AND turns[s] = turn)));
        CONTINUE WHEN wave = '{}';
        pending := wave;
        keyed := '{}';
        FOR round IN 1..64 LOOP
            -- Who shares an instant with others who have not committed would wait for them, and
            -- they for him: whoever cannot have the job's places to himself goes elsewhere in
            -- the second, where transactions of about the same time have a millisecond each.
            apart := '{}';
            IF is_exact THEN
                SELECT array_agg(x.job_id) INTO apart FROM (
                    SELECT DISTINCT entry_jobs[u.p] AS job_id FROM unnest(pending) AS u (p)
                    WHERE round > 1 OR starts[u.p] > the_now
                ) AS x
                WHERE NOT pg_try_advisory_xact_lock(fencepost.job_lock(x.job_id, 63));
            ELSIF round > 1 THEN
                apart := ARRAY(SELECT DISTINCT entry_jobs[u.p] FROM unnest(pending) AS u (p));
            ELSE
                apart := ARRAY(SELECT DISTINCT entry_jobs[u.p] FROM unnest(pending) AS u (p)
                               WHERE starts[u.p] > the_now);
            END IF;
            apart := coalesce(apart, '{}');
            IF apart <> '{}' THEN
                own_ms := (pg_current_xact_id()::text::bigint * 613 + (round - 1) / 2 * 211) % 998 + 1;
                FOREACH p IN ARRAY pending LOOP
                    IF entry_jobs[p] = ANY (apart) THEN
                        starts[p] := dues[p] + own_ms * interval '1 millisecond';
                    END IF;
                END LOOP;
            END IF;
            IF round > 1 OR apart <> '{}' THEN
                FOR found IN
                    SELECT k.places, greatest(
                           (SELECT max(q.scheduled_at) FROM fencepost.run_queue AS q
                            WHERE q.job_id = k.job_id AND q.scheduled_at >= k.from_at
                              AND q.scheduled_at < k.from_at + interval '1 second'),
                           (SELECT max(h.scheduled_at) FROM fencepost.job_runs AS h
                            WHERE h.job_id = k.job_id AND h.scheduled_at >= k.from_at
                              AND h.scheduled_at < k.from_at + interval '1 second'),
                           (SELECT max(s.scheduled_at) FROM fencepost.job_runs_stray AS s
                            WHERE s.job_id = k.job_id AND s.scheduled_at >= k.from_at
                              AND s.scheduled_at < k.from_at + interval '1 second'),
                           (SELECT max(d.scheduled_at) FROM fencepost.dead_letters AS d
                            WHERE d.job_id = k.job_id AND d.scheduled_at >= k.from_at
                              AND d.scheduled_at < k.from_at + interval '1 second')) AS highest_at
                    FROM (
                        SELECT entry_jobs[u.p] AS job_id, starts[u.p] AS from_at,
                               array_agg(u.p) AS places
                        FROM unnest(pending) AS u (p)
                        WHERE round > 1 OR entry_jobs[u.p] = ANY (apart)
                        GROUP BY 1, 2
                    ) AS k
                LOOP
                    IF found.highest_at IS NOT NULL THEN
                        FOREACH p IN ARRAY found.places LOOP
                            starts[p] := found.highest_at + interval '1 microsecond';
                        END LOOP;
                    END IF;
                END LOOP;
            END IF;
            -- Consecutive places per job. They are counted in slots, which leave out the whole
            -- seconds: those belong to fires.
            SELECT array_agg(y.place ORDER BY y.job_id, y.slot),
                   array_agg(y.job_id ORDER BY y.job_id, y.slot),
                   array_agg(since + (y.slot / 999999 * 1000000 + y.slot % 999999 + 1)
                             * interval '1 microsecond' ORDER BY y.job_id, y.slot)
            INTO tried, tried_jobs, tried_ats
            FROM (
                SELECT x.place, x.job_id,
                       x.turn + max(x.slot - x.turn) OVER (PARTITION BY x.job_id ORDER BY x.turn)
                           AS slot
                FROM (
                    SELECT v.p AS place, v.job_id,
                           v.micros / 1000000 * 999999 + greatest(v.micros % 1000000, 1) - 1 AS slot,
                           row_number() OVER (PARTITION BY v.job_id ORDER BY v.micros, v.p) AS turn
                    FROM (
                        SELECT u.p, entry_jobs[u.p] AS job_id,
                               (extract(epoch FROM starts[u.p] - since) * 1000000)::bigint AS micros
                        FROM unnest(pending) AS u (p)
                    ) AS v
                ) AS x
            ) AS y;
            FOR i IN 1..cardinality(tried) LOOP
                ats[tried[i]] := tried_ats[i];
            END LOOP;

            -- Keys come before runs; once placed, they only follow their runs.
            IF round = 1 AND cardinality(unique_keys) > 0 THEN
                keyed := ARRAY(
                    SELECT w.p FROM unnest(wave) AS w (p) WHERE unique_keys[w.p] IS NOT NULL
                    ORDER BY entry_jobs[w.p], unique_keys[w.p] COLLATE "C");
            END IF;
            IF round = 1 AND keyed <> '{}' THEN
                SELECT array_agg(entry_jobs[k.p] ORDER BY k.o),
                       array_agg(unique_keys[k.p] ORDER BY k.o), array_agg(ats[k.p] ORDER BY k.o),
                       array_agg(keep_fors[k.p] ORDER BY k.o),
                       array_agg(conflicts[k.p] ORDER BY k.o)
                INTO key_jobs, key_texts, key_ats, key_keeps, key_conflicts
                FROM unnest(keyed) WITH ORDINALITY AS k (p, o);
                held_ordinals := '{}';
                held_ats := '{}';
                IF old_timeout::interval = interval '0'
                        OR old_timeout::interval > interval '2 seconds' THEN
                    PERFORM set_config('lock_timeout', '2s', true);
                END IF;
                IF entries = 1 THEN
                    SELECT array_agg(t.ordinal), array_agg(t.holder_at)
                    INTO held_ordinals, held_ats
                    FROM fencepost.take_keys(key_jobs, key_texts, key_ats, key_keeps,
                                             key_conflicts, the_now) AS t;
                ELSE
                    BEGIN
                        SELECT array_agg(t.ordinal), array_agg(t.holder_at)
                        INTO held_ordinals, held_ats
                        FROM fencepost.take_keys(key_jobs, key_texts, key_ats, key_keeps,
                                                 key_conflicts, the_now) AS t;
                    EXCEPTION WHEN lock_not_available THEN
                        -- One of them is being taken for too long: each by itself, unwaited for.
                        held_ordinals := '{}';
                        held_ats := '{}';
                        PERFORM set_config('lock_timeout', '1ms', true);
                        FOR i IN 1..cardinality(keyed) LOOP
                            BEGIN
                                FOR found IN
                                    SELECT t.holder_at FROM fencepost.take_keys(
                                        key_jobs[i:i], key_texts[i:i], key_ats[i:i],
                                        key_keeps[i:i], key_conflicts[i:i], the_now) AS t
                                LOOP
                                    held_ordinals := held_ordinals || i;
                                    held_ats := held_ats || found.holder_at;
                                END LOOP;
                            EXCEPTION WHEN lock_not_available THEN
                                outcomes[keyed[i]] := 'busy';
                            END;
                        END LOOP;
                    END;
                END IF;
                PERFORM set_config('lock_timeout', old_timeout, true);
                FOR i IN 1..coalesce(cardinality(held_ordinals), 0) LOOP
                    p := keyed[held_ordinals[i]];
                    outcomes[p] := CASE WHEN conflicts[p] = 2 THEN 'held' ELSE 'existing' END;
                    ats[p] := held_ats[i];
                END LOOP;
                -- Places of those that make nothing stay empty.
                SELECT array_agg(t.p ORDER BY t.o), array_agg(t.job_id ORDER BY t.o),
                       array_agg(t.at ORDER BY t.o)
                INTO tried, tried_jobs, tried_ats
                FROM unnest(tried, tried_jobs, tried_ats) WITH ORDINALITY AS t (p, job_id, at, o)
                WHERE outcomes[t.p] IS NULL;
                EXIT WHEN tried IS NULL;
            END IF;

            made_jobs := NULL;
            IF entries = 1 THEN
                SELECT m.made_jobs, m.made_ats INTO made_jobs, made_ats
                FROM fencepost.insert_enqueued(
                    tried, tried_jobs, tried_ats, dues, payloads, priorities, merged,
                    concurrency_keys, unique_keys, the_tenant, the_trace, the_now) AS m;
            ELSE
                -- Many places are more easily those of somebody's long transaction; who meets
                -- one does not wait for its end, but goes elsewhere.
                BEGIN
                    PERFORM set_config('lock_timeout', '100ms', true);
                    SELECT m.made_jobs, m.made_ats INTO made_jobs, made_ats
                    FROM fencepost.insert_enqueued(
                        tried, tried_jobs, tried_ats, dues, payloads, priorities, merged,
                        concurrency_keys, unique_keys, the_tenant, the_trace, the_now) AS m;
                    PERFORM set_config('lock_timeout', old_timeout, true);
                EXCEPTION WHEN lock_not_available THEN
                    is_exact := false;
                END;
            END IF;
            -- In a statement of its own: one snapshot with the insert would miss a run that has
            -- ended between the snapshot and the check of the unique index.
            ended_jobs := NULL;
            IF made_jobs IS NOT NULL THEN
                SELECT min(m.at), max(m.at) INTO first_at, last_at FROM unnest(made_ats) AS m (at);
                SELECT array_agg(k.job_id), array_agg(k.at) INTO ended_jobs, ended_ats
                FROM unnest(made_jobs, made_ats) AS k (job_id, at)
                WHERE (SELECT true FROM fencepost.job_runs AS h
                       WHERE h.job_id = k.job_id AND h.scheduled_at = k.at
                         AND h.scheduled_at >= first_at AND h.scheduled_at <= last_at)
                   OR (SELECT true FROM fencepost.job_runs_stray AS s
                       WHERE s.job_id = k.job_id AND s.scheduled_at = k.at)
                   OR (SELECT true FROM fencepost.dead_letters AS d
                       WHERE d.job_id = k.job_id AND d.scheduled_at = k.at);
            END IF;
            IF ended_jobs IS NOT NULL THEN
                DELETE FROM fencepost.run_queue AS q
                USING unnest(ended_jobs, ended_ats) AS k (job_id, at)
                WHERE q.job_id = k.job_id AND q.scheduled_at = k.at AND q.attempt = 0;
            END IF;
            EXIT WHEN ended_jobs IS NULL AND cardinality(made_jobs) = cardinality(tried);
            pending := ARRAY(
                SELECT max(b.p) FROM (
                    SELECT t.p, t.job_id, t.at
                    FROM unnest(tried, tried_jobs, tried_ats) AS t (p, job_id, at)
                    UNION ALL
                    SELECT NULL, m.job_id, m.at FROM unnest(made_jobs, made_ats) AS m (job_id, at)
                    UNION ALL
                    SELECT NULL, e.job_id, e.at FROM unnest(ended_jobs, ended_ats) AS e (job_id, at)
                ) AS b
                GROUP BY b.job_id, b.at HAVING count(*) <> 2);
            IF round = 64 THEN
                RAISE EXCEPTION '% runs found no free instant in % tries; spread run_at',
                        cardinality(pending), round
                    USING ERRCODE = 'FP002';
            END IF;
        END LOOP;
        IF keyed <> '{}' THEN
            UPDATE fencepost.run_keys AS k SET scheduled_at = ats[m.p]
            FROM unnest(keyed, key_ats) AS m (p, at)
            WHERE outcomes[m.p] IS NULL AND ats[m.p] <> m.at
              AND k.job_id = entry_jobs[m.p] AND k.unique_key = unique_keys[m.p];
        END IF;
        FOREACH p IN ARRAY wave LOOP
            outcomes[p] := coalesce(outcomes[p], 'made');
        END LOOP;
    END LOOP;

    IF heads IS NOT NULL THEN
        FOR p IN 1..entries LOOP
            IF heads[p] <> p THEN
                outcomes[p] := CASE WHEN outcomes[heads[p]] NOT IN ('made', 'existing', 'held')
                                        THEN outcomes[heads[p]]
                                    WHEN conflicts[p] = 2 THEN 'held' ELSE 'existing' END;
                ats[p] := ats[heads[p]];
            END IF;
        END LOOP;
    END IF;

    IF cardinality(request_ids) > 0 THEN
        -- A fencepost.v1.EnqueueRunResponse with no more than the run's name, which has the same
        -- length for all: the rest of the answer is read again from the run.
        SELECT 'tenants/' || t.name || '/jobs/' INTO prefix
        FROM fencepost.tenants AS t WHERE t.tenant_id = the_tenant;
        name_bytes := octet_length(prefix) + 69;
        head := fencepost.wire_varint(name_bytes);
        head := '\x0a'::bytea || fencepost.wire_varint(name_bytes + length(head) + 1)
                || '\x0a'::bytea || head || convert_to(prefix, 'UTF8');
        WITH remembered AS (
            INSERT INTO fencepost.requests AS r
                (tenant_id, method, request_id, body_hash, response, expires_at)
            SELECT the_tenant, 'EnqueueRun', request_ids[s], body_hashes[s],
                   head || convert_to(entry_jobs[s] || '/runs/' || to_char(
                       ats[s] AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'UTF8')
                   || CASE WHEN outcomes[s] = 'existing' THEN '\x1001'::bytea ELSE '' END,
                   remember_until
            FROM generate_series(1, entries) AS s
            WHERE request_ids[s] IS NOT NULL AND outcomes[s] IN ('made', 'existing')
            ORDER BY request_ids[s] COLLATE "C"
            ON CONFLICT (tenant_id, method, request_id) DO UPDATE
                SET body_hash = excluded.body_hash, response = excluded.response,
                    expires_at = excluded.expires_at
                WHERE r.expires_at <= the_now
            RETURNING 1
        )
        SELECT count(*) INTO total FROM remembered;
        IF total <> (SELECT count(*) FROM generate_series(1, entries) AS s
                     WHERE request_ids[s] IS NOT NULL AND outcomes[s] IN ('made', 'existing')) THEN
            RAISE EXCEPTION 'a call with the same request id came first' USING ERRCODE = 'FP001';
        END IF;
    END IF;

    RETURN QUERY
    SELECT s, outcomes[s], entry_jobs[s], ats[s], notes[s], q.version, q.queue_id, q.kind_id,
           coalesce(q.priority::int, counts[s]), q.available_at, q.concurrency_key, merged[s]
    FROM generate_series(1, entries) AS s
    LEFT JOIN LATERAL (
        SELECT q.version, q.queue_id, q.kind_id, q.priority, q.available_at, q.concurrency_key
        FROM fencepost.run_queue AS q
        WHERE outcomes[s] = 'made' AND q.job_id = entry_jobs[s] AND q.scheduled_at = ats[s]
        OFFSET 0
    ) AS q ON true;
END $$;

-- For applications that share the database --------------------------------------------------

-- The refusal of a parameter: its name, the value, and what is allowed.
CREATE FUNCTION fencepost.refuse_parameter(the_name text, the_value text, is_allowed text)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%: got %, want %', the_name, coalesce(quote_literal(left(the_value, 100)), 'NULL'),
            is_allowed
        USING ERRCODE = 'invalid_parameter_value',
              DETAIL = format('Parameter: %s. Value: %s.', the_name,
                              coalesce(quote_literal(left(the_value, 100)), 'NULL')),
              HINT = format('Allowed: %s.', is_allowed);
END $$;

-- Makes one ad-hoc run of a job in the caller's transaction, and disappears with it.
--
-- It runs with the rights of its owner, so that an application's role needs no more than USAGE
-- on the schema and EXECUTE on this function. Nobody is notified: NOTIFY in a transaction that
-- writes would make commits of the whole database take turns. The run is found by the poll,
-- within a second of the commit.
CREATE FUNCTION fencepost.enqueue(
    job text,
    payload text DEFAULT NULL,
    data bytea DEFAULT NULL,
    content_type text DEFAULT NULL,
    encoding text DEFAULT NULL,
    run_at timestamptz DEFAULT NULL,
    delay interval DEFAULT NULL,
    priority int DEFAULT NULL,
    labels jsonb DEFAULT NULL,
    concurrency_key text DEFAULT NULL,
    unique_key text DEFAULT NULL,
    on_conflict text DEFAULT NULL,
    keep_for interval DEFAULT NULL,
    traceparent text DEFAULT NULL,
    tracestate text DEFAULT NULL,
    tenant text DEFAULT 'default')
RETURNS TABLE (job_id uuid, scheduled_at timestamptz, existing boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
#variable_conflict use_variable
DECLARE
    now_at timestamptz := fencepost.clock();
    latest_at timestamptz := now_at + interval '8784 hours';
    due_at timestamptz;
    tenant_id int;
    conflict smallint;
    trace jsonb;
    made record;
    bytes int;
    each record;
BEGIN
    IF tenant IS NULL OR tenant !~ '^[a-z][a-z0-9-]{0,62}$' THEN
        PERFORM fencepost.refuse_parameter(
            'tenant', tenant, '1 to 63 of [a-z0-9-], beginning with a letter');
    END IF;
    IF job IS NULL OR job !~ '^[a-z0-9][a-z0-9._-]{0,62}$' THEN
        PERFORM fencepost.refuse_parameter(
            'job', job, 'the name of a job (1 to 63 of [a-z0-9._-], beginning with a letter or '
                        'digit) or its id');
    END IF;

    IF payload IS NOT NULL AND data IS NOT NULL THEN
        PERFORM fencepost.refuse_parameter('data', length(data) || ' bytes', 'payload or data, not both');
    END IF;
    bytes := CASE WHEN payload IS NULL THEN length(data) ELSE octet_length(convert_to(payload, 'UTF8')) END;
    IF bytes > 262144 THEN
        PERFORM fencepost.refuse_parameter(
            CASE WHEN payload IS NULL THEN 'data' ELSE 'payload' END, bytes || ' bytes',
            'at most 262144 bytes');
    END IF;
    IF bytes IS NULL AND (coalesce(content_type, '') <> '' OR coalesce(encoding, '') <> '') THEN
        PERFORM fencepost.refuse_parameter(
            CASE WHEN coalesce(content_type, '') <> '' THEN 'content_type' ELSE 'encoding' END,
            coalesce(nullif(content_type, ''), encoding), 'payload or data with it');
    END IF;
    IF data IS NOT NULL AND coalesce(content_type, '') = '' THEN
        PERFORM fencepost.refuse_parameter('content_type', content_type, 'the media type of data');
    END IF;
    IF content_type !~ '^[ -~]{0,127}$' THEN
        PERFORM fencepost.refuse_parameter(
            'content_type', content_type, 'at most 127 printable ASCII characters');
    END IF;
    IF encoding !~ '^[ -~]{0,63}$' THEN
        PERFORM fencepost.refuse_parameter(
            'encoding', encoding, 'at most 63 printable ASCII characters');
    END IF;

    IF run_at IS NOT NULL AND delay IS NOT NULL THEN
        PERFORM fencepost.refuse_parameter('delay', delay::text, 'run_at or delay, not both');
    END IF;
    due_at := coalesce(run_at, now_at + delay);
    IF run_at > latest_at THEN
        PERFORM fencepost.refuse_parameter('run_at', run_at::text, 'at most 366 d ahead');
    END IF;
    IF delay IS NOT NULL AND (due_at < now_at OR due_at > latest_at) THEN
        PERFORM fencepost.refuse_parameter('delay', delay::text, '0 s to 366 d');
    END IF;
    IF priority NOT BETWEEN 0 AND 9 THEN
        PERFORM fencepost.refuse_parameter('priority', priority::text, '0 to 9');
    END IF;
    IF labels IS NOT NULL AND jsonb_typeof(labels) <> 'object' THEN
        PERFORM fencepost.refuse_parameter('labels', labels::text, 'a JSON object of text values');
    END IF;
    IF labels IS NOT NULL THEN
        IF (SELECT count(*) FROM jsonb_object_keys(labels)) > 32 THEN
            PERFORM fencepost.refuse_parameter(
                'labels', (SELECT count(*) FROM jsonb_object_keys(labels)) || ' labels',
                'at most 32 labels');
        END IF;
        FOR each IN SELECT l.key, jsonb_typeof(l.value) AS kind, l.value #>> '{}' AS content
                    FROM jsonb_each(labels) AS l LOOP
            IF each.key = '' OR length(each.key) > 63 THEN
                PERFORM fencepost.refuse_parameter('labels (key)', each.key, '1 to 63 characters');
            END IF;
            IF each.kind <> 'string' THEN
                PERFORM fencepost.refuse_parameter(
                    format('labels[%s]', each.key), coalesce(each.content, 'null'), 'a text value');
            END IF;
            IF length(each.content) > 63 THEN
                PERFORM fencepost.refuse_parameter(
                    format('labels[%s]', each.key), each.content, 'at most 63 characters');
            END IF;
        END LOOP;
    END IF;
    IF octet_length(convert_to(concurrency_key, 'UTF8')) > 128 THEN
        PERFORM fencepost.refuse_parameter('concurrency_key', concurrency_key, 'at most 128 bytes');
    END IF;

    IF octet_length(convert_to(unique_key, 'UTF8')) NOT BETWEEN 1 AND 256 THEN
        PERFORM fencepost.refuse_parameter('unique_key', unique_key, '1 to 256 bytes');
    END IF;
    IF unique_key IS NULL AND (on_conflict IS NOT NULL OR keep_for IS NOT NULL) THEN
        PERFORM fencepost.refuse_parameter(
            'unique_key', NULL, '1 to 256 bytes, because on_conflict or keep_for is set');
    END IF;
    conflict := CASE coalesce(on_conflict, 'return_existing')
        WHEN 'return_existing' THEN 1 WHEN 'reject' THEN 2 WHEN 'replace_waiting' THEN 3 END;
    IF conflict IS NULL THEN
        PERFORM fencepost.refuse_parameter(
            'on_conflict', on_conflict, 'return_existing, reject or replace_waiting');
    END IF;
    keep_for := coalesce(keep_for, interval '24 hours');
    IF extract(epoch FROM keep_for) NOT BETWEEN 0 AND 2592000 THEN
        PERFORM fencepost.refuse_parameter('keep_for', keep_for::text, '0 s to 30 d');
    END IF;

    -- A trace is a help and never a reason to refuse a run: what is malformed is left out.
    IF traceparent ~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$' THEN
        trace := jsonb_build_object('traceparent', traceparent);
        IF tracestate ~ '^[ -~]+$' AND length(tracestate) <= 512 THEN
            trace := trace || jsonb_build_object('tracestate', tracestate);
        END IF;
    END IF;

    SELECT t.tenant_id INTO tenant_id FROM fencepost.tenants AS t WHERE t.name = tenant;
    IF tenant_id IS NULL THEN
        RAISE EXCEPTION 'tenants/% does not exist', tenant
            USING ERRCODE = 'no_data_found', DETAIL = format('Parameter: tenant. Value: %L.', tenant),
                  HINT = 'Create the tenant first, or name another.';
    END IF;
    SELECT e.* INTO made FROM fencepost.enqueue_runs(
        tenant_id, now_at, true, ARRAY[job], ARRAY[due_at],
        ARRAY[CASE WHEN bytes IS NOT NULL THEN
                  fencepost.payload_message(payload, data, content_type, encoding) END],
        ARRAY[priority::smallint],
        CASE WHEN labels IS NULL OR labels = '{}' THEN '{}'::jsonb[] ELSE ARRAY[labels] END,
        ARRAY[concurrency_key],
        CASE WHEN unique_key IS NULL THEN '{}'::text[] ELSE ARRAY[unique_key] END,
        ARRAY[conflict], ARRAY[ceil(extract(epoch FROM keep_for))::int], trace,
        '{}', '{}', NULL) AS e;
    CASE made.outcome
    WHEN 'no_job' THEN
        RAISE EXCEPTION 'tenants/%/jobs/% does not exist', tenant, job
            USING ERRCODE = 'no_data_found', DETAIL = format('Parameter: job. Value: %L.', job),
                  HINT = 'Create the job first, or name another; deleted jobs take no runs.';
    WHEN 'labels' THEN
        PERFORM fencepost.refuse_parameter(
            'labels', made.priority || ' together with the job''s', 'at most 32 labels');
    WHEN 'held' THEN
        RAISE EXCEPTION 'unique_key: % is held by tenants/%/jobs/%/runs/%', quote_literal(unique_key),
                tenant, job, fencepost.instant_text(made.scheduled_at)
            USING ERRCODE = 'unique_violation',
                  DETAIL = format('Parameter: unique_key. Value: %L.', unique_key),
                  HINT = 'Use another key, wait until it is free, or leave on_conflict at '
                         'return_existing.';
    ELSE
        job_id := made.job_id;
        scheduled_at := made.scheduled_at;
        existing := made.outcome = 'existing';
        RETURN NEXT;
    END CASE;
END $$;

REVOKE EXECUTE ON FUNCTION
    fencepost.lock_out_enqueues, fencepost.key_holders, fencepost.replace_waiting,
    fencepost.take_keys, fencepost.retake_keys, fencepost.insert_enqueued, fencepost.enqueue_runs,
    fencepost.enqueue
    FROM PUBLIC;
