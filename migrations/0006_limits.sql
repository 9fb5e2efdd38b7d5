-- Rates of queues, and claims under limits that cost less and leave nobody behind.

ALTER TABLE fencepost.queues
    -- Claims per second over all workers. NULL: no limit.
    ADD COLUMN rate_limit double precision CHECK (rate_limit > 0);

-- What claims under limits remember of a queue: its token bucket (none: a full one), and when
-- they last looked behind a long head. Written only under the lock of lock_caps.
CREATE TABLE fencepost.queue_limits (
    queue_id   int PRIMARY KEY,
    tokens     double precision,
    counted_at timestamptz,
    stepped_at timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Finds what may go behind a long head of runs that may not: by job and key, in their order.
CREATE INDEX run_queue_capped ON fencepost.run_queue
    (queue_id, kind_id, priority, job_id, coalesce(concurrency_key, ''), available_at)
    WHERE state IN ('queued', 'retrying')
      AND (max_in_flight IS NOT NULL OR concurrency_key IS NOT NULL);

-- What the numbers of a queue are counted by.
CREATE INDEX run_queue_blocked_queue ON fencepost.run_queue (queue_id) WHERE state = 'blocked';
CREATE INDEX dead_letters_queue ON fencepost.dead_letters (queue_id) WHERE discarded_at IS NULL;

-- How many claims the rate of a queue allows at an instant: at most one second's worth, or one.
-- NULL: it has no rate. A clock that went back adds nothing and takes nothing.
CREATE FUNCTION fencepost.tokens_at(the_queue int, at timestamptz) RETURNS double precision
    -- Not in SQL: such a function is planned anew in every claim.
    LANGUAGE plpgsql STABLE AS
$$
BEGIN
    RETURN (
        SELECT least(greatest(1, q.rate_limit),
                     coalesce(b.tokens + q.rate_limit * greatest(
                                  0, extract(epoch FROM at - b.counted_at)::double precision),
                              'infinity'))
        FROM fencepost.queues AS q
        LEFT JOIN fencepost.queue_limits AS b ON b.queue_id = q.queue_id
        WHERE q.queue_id = the_queue AND q.rate_limit IS NOT NULL);
END $$;

-- Takes tokens for claims that were made. The caller holds the lock of lock_caps; a queue
-- without a rate is left alone.
CREATE FUNCTION fencepost.take_tokens(the_queue int, taken int) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    -- One instant for all: the database's own, whatever the caller believes.
    at timestamptz := fencepost.clock();
    there double precision := fencepost.tokens_at(the_queue, at);
BEGIN
    IF there IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO fencepost.queue_limits AS b (queue_id, tokens, counted_at)
    VALUES (the_queue, there - taken, at)
    ON CONFLICT (queue_id) DO UPDATE
    SET tokens = excluded.tokens, counted_at = excluded.counted_at;
END $$;

-- The first runs of each job and key that are not full, groups in their order from `from_job`
-- on; at most `groups_max` of them are looked at.
CREATE FUNCTION fencepost.heads_of_groups(
    the_queue int, the_kinds int[], the_priorities smallint[], from_job uuid, open_jobs jsonb,
    open_keys jsonb, key_cap int, groups_max int, each_max int, the_now timestamptz)
RETURNS tid[] LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    RETURN (
        WITH RECURSIVE groups AS (
            SELECT l.kind_id, l.priority, f.*
            FROM unnest(the_kinds, the_priorities) AS l (kind_id, priority)
            CROSS JOIN LATERAL (
                SELECT q.job_id, coalesce(q.concurrency_key, '') AS the_key, q.max_in_flight
                FROM fencepost.run_queue q
                WHERE q.queue_id = the_queue AND q.kind_id = l.kind_id AND q.priority = l.priority
                  AND q.job_id >= from_job AND q.state IN ('queued', 'retrying')
                  AND (q.max_in_flight IS NOT NULL OR q.concurrency_key IS NOT NULL)
                ORDER BY q.job_id, coalesce(q.concurrency_key, ''), q.available_at
                LIMIT 1
            ) f
            UNION ALL
            SELECT g.kind_id, g.priority, f.*
            FROM groups g
            CROSS JOIN LATERAL (
                SELECT q.job_id, coalesce(q.concurrency_key, '') AS the_key, q.max_in_flight
                FROM fencepost.run_queue q
                WHERE q.queue_id = the_queue AND q.kind_id = g.kind_id AND q.priority = g.priority
                  AND (q.job_id, coalesce(q.concurrency_key, '')) > (g.job_id, g.the_key)
                  AND q.state IN ('queued', 'retrying')
                  AND (q.max_in_flight IS NOT NULL OR q.concurrency_key IS NOT NULL)
                ORDER BY q.job_id, coalesce(q.concurrency_key, ''), q.available_at
                LIMIT 1
            ) f
        )
        SELECT array_agg(r.tid)
        FROM (SELECT * FROM groups LIMIT groups_max) g
        CROSS JOIN LATERAL (
            SELECT q.ctid AS tid
            FROM fencepost.run_queue q
            WHERE q.queue_id = the_queue AND q.kind_id = g.kind_id AND q.priority = g.priority
              AND q.job_id = g.job_id AND coalesce(q.concurrency_key, '') = g.the_key
              AND q.state IN ('queued', 'retrying')
              AND (q.max_in_flight IS NOT NULL OR q.concurrency_key IS NOT NULL)
              AND q.available_at <= the_now
            ORDER BY q.available_at
            LIMIT each_max
        ) r
        WHERE (g.max_in_flight IS NULL
               OR coalesce((open_jobs ->> g.job_id::text)::int, 0) < g.max_in_flight)
          AND (key_cap IS NULL OR g.the_key = ''
               OR coalesce((open_keys ->> g.the_key)::int, 0) < key_cap));
END $$;

-- As before: lock, then count in the next statement, then claim. What is new: open attempts are
-- read once; runs of full jobs and keys are stepped over in the order of the lane, so they hold
-- up nobody behind them; lost attempts are found where open attempts are, however many runs
-- wait; only rows that are claimed are locked; rates, and time bounds of waiting.
CREATE OR REPLACE FUNCTION fencepost.claim_capped_runs(
    the_queue int, the_kinds int[], the_priorities smallint[], the_workers uuid[], runs_max int,
    ageing_s int, the_now timestamptz)
RETURNS TABLE (place bigint, job_id uuid, scheduled_at timestamptz, attempt int, kind_id int,
               version int, lease_s smallint, failure_count int, payload bytea, labels jsonb,
               progress bytea, last_failure bytea, serial boolean)
-- Planning takes longer than what is planned.
LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    is_paused boolean;
    tenant_cap int;
    queue_cap int;
    key_cap int;
    caps_jobs boolean;
    -- The queues whose open attempts count for some cap.
    counted int[];
    in_tenant bigint;
    in_queue bigint;
    open_jobs jsonb;
    open_keys jsonb;
    lost tid[];
    near tid[];
    far tid[];
    steps_max CONSTANT int := 1000;
    groups_max CONSTANT int := 500;
    allowed int := runs_max;
    room int;
    taken int;
BEGIN
    IF NOT fencepost.clock_agrees(the_now) THEN
        RETURN;
    END IF;
    PERFORM fencepost.lock_caps(the_queue);
    -- From here on each statement has a snapshot newer than the lock.
    SELECT q.paused, t.max_in_flight, q.max_in_flight, q.max_in_flight_per_key, q.has_capped_jobs,
           CASE WHEN t.max_in_flight IS NULL AND NOT q.has_capped_jobs THEN ARRAY[q.queue_id]
                ELSE ARRAY(SELECT s.queue_id FROM fencepost.queues s
                           WHERE s.tenant_id = q.tenant_id) END,
           -- A whole token is a claim; the tiny amount makes up for binary fractions.
           least(runs_max, floor(fencepost.tokens_at(q.queue_id, fencepost.clock()) + 1e-9))::int
    INTO is_paused, tenant_cap, queue_cap, key_cap, caps_jobs, counted, allowed
    FROM fencepost.queues q JOIN fencepost.tenants t USING (tenant_id)
    WHERE q.queue_id = the_queue;
    IF is_paused OR allowed <= 0 THEN
        RETURN;
    END IF;

    WITH open AS MATERIALIZED (
        SELECT r.ctid AS tid, r.queue_id, r.job_id, r.concurrency_key,
               r.queue_id = the_queue AND r.state <> 'running' AND r.available_at <= the_now AS is_lost
        FROM fencepost.run_queue r
        WHERE r.attempt_open AND r.queue_id = ANY (counted)
    )
    SELECT count(*), count(*) FILTER (WHERE o.queue_id = the_queue),
           array_agg(o.tid) FILTER (WHERE o.is_lost),
           CASE WHEN caps_jobs THEN (
               SELECT jsonb_object_agg(x.job_id, x.n)
               FROM (SELECT i.job_id, count(*) AS n FROM open i GROUP BY i.job_id) x) END,
           CASE WHEN key_cap IS NOT NULL THEN (
               SELECT jsonb_object_agg(x.concurrency_key, x.n)
               FROM (SELECT i.concurrency_key, count(*) AS n FROM open i
                     WHERE i.queue_id = the_queue AND i.concurrency_key IS NOT NULL
                     GROUP BY i.concurrency_key) x) END
    INTO in_tenant, in_queue, lost, open_jobs, open_keys
    FROM open o;
    room := greatest(0, least(allowed, tenant_cap - in_tenant, queue_cap - in_queue));
    IF room = 0 AND lost IS NULL THEN
        RETURN;
    END IF;

    IF room > 0 THEN
        -- The head of each lane, without runs of full jobs and keys.
        SELECT array_agg(r.tid) INTO near
        FROM unnest(the_kinds, the_priorities) AS l (kind_id, priority)
        CROSS JOIN LATERAL (
            SELECT w.tid
            FROM (
                SELECT q.ctid AS tid, q.job_id, q.max_in_flight, q.concurrency_key
                FROM fencepost.run_queue q
                WHERE q.queue_id = the_queue AND q.kind_id = l.kind_id
                  AND q.priority = l.priority AND q.state IN ('queued', 'retrying')
                  AND q.available_at <= the_now AND NOT q.attempt_open
                  AND (q.wait_until IS NULL OR q.wait_until > the_now)
                  AND (q.total_until IS NULL OR q.total_until > the_now)
                ORDER BY q.available_at
                LIMIT greatest(steps_max, room * 4)
            ) w
            WHERE (w.max_in_flight IS NULL
                   OR coalesce((open_jobs ->> w.job_id::text)::int, 0) < w.max_in_flight)
              AND (key_cap IS NULL OR w.concurrency_key IS NULL
                   OR coalesce((open_keys ->> w.concurrency_key)::int, 0) < key_cap)
            -- More than there is room for: some may be of one job or key. What this leaves
            -- out the next claim finds, since that job or key is full then.
            LIMIT room * 4
        ) r;
        -- Behind a long head of runs that may not go: a probe for each job and key, from a
        -- random one on, so that none is beyond the last probe for ever.
        IF coalesce(cardinality(near), 0) < room AND (caps_jobs OR key_cap IS NOT NULL)
           AND EXISTS (
               SELECT FROM unnest(the_kinds, the_priorities) AS l (kind_id, priority)
               CROSS JOIN LATERAL (
                   SELECT FROM fencepost.run_queue q
                   WHERE q.queue_id = the_queue AND q.kind_id = l.kind_id
                     AND q.priority = l.priority AND q.state IN ('queued', 'retrying')
                     AND q.available_at <= the_now
                   ORDER BY q.available_at OFFSET steps_max LIMIT 1) r)
        THEN
            far := fencepost.heads_of_groups(
                the_queue, the_kinds, the_priorities, '00000000-0000-0000-0000-000000000000',
                open_jobs, open_keys, key_cap, groups_max, room, the_now);
            far := far || fencepost.heads_of_groups(
                the_queue, the_kinds, the_priorities, gen_random_uuid(),
                open_jobs, open_keys, key_cap, groups_max, room, the_now);
            -- Runs without any such limit have no index of their own. They are looked for one
            -- by one, and that at most once a second.
            INSERT INTO fencepost.queue_limits AS b (queue_id, stepped_at)
            VALUES (the_queue, fencepost.clock())
            ON CONFLICT (queue_id) DO UPDATE SET stepped_at = excluded.stepped_at
            WHERE b.stepped_at IS NULL
               OR abs(extract(epoch FROM excluded.stepped_at - b.stepped_at)) >= 1;
            IF FOUND THEN
                SELECT far || array_agg(r.tid) INTO far
                FROM unnest(the_kinds, the_priorities) AS l (kind_id, priority)
                CROSS JOIN LATERAL (
                    SELECT q.ctid AS tid
                    FROM fencepost.run_queue q
                    WHERE q.queue_id = the_queue AND q.kind_id = l.kind_id
                      AND q.priority = l.priority AND q.state IN ('queued', 'retrying')
                      AND q.available_at <= the_now
                      AND q.max_in_flight IS NULL AND q.concurrency_key IS NULL
                    ORDER BY q.available_at
                    LIMIT room
                ) r;
            END IF;
        END IF;
    END IF;
    IF coalesce(lost, near, far) IS NULL THEN
        RETURN;
    END IF;

    RETURN QUERY
    WITH found AS (
        SELECT q.ctid AS tid, q.job_id, q.max_in_flight, q.concurrency_key,
               -- An open attempt has its place already; claiming it again takes no more.
               q.attempt_open AS was_open,
               q.available_at - q.priority * ageing_s * interval '1 second' AS rank_at
        FROM fencepost.run_queue q
        WHERE q.ctid = ANY (lost || near || far) AND q.queue_id = the_queue
          AND (q.kind_id, q.priority) IN (SELECT * FROM unnest(the_kinds, the_priorities))
          AND q.state IN ('queued', 'retrying') AND q.available_at <= the_now
          AND (q.wait_until IS NULL OR q.wait_until > the_now)
          AND (q.total_until IS NULL OR q.total_until > the_now)
    ), counted_in AS (
        SELECT f.*,
               count(*) FILTER (WHERE NOT f.was_open)
                   OVER (PARTITION BY f.job_id ORDER BY f.rank_at, f.tid) AS of_job,
               count(*) FILTER (WHERE NOT f.was_open)
                   OVER (PARTITION BY f.concurrency_key ORDER BY f.rank_at, f.tid) AS of_key
        FROM found f
    ), fitting AS (
        SELECT c.*, count(*) FILTER (WHERE NOT c.was_open) OVER (ORDER BY c.rank_at, c.tid) AS of_all
        FROM counted_in c
        WHERE c.was_open
           OR ((c.max_in_flight IS NULL
                OR coalesce((open_jobs ->> c.job_id::text)::int, 0) + c.of_job <= c.max_in_flight)
               AND (key_cap IS NULL OR c.concurrency_key IS NULL
                    OR coalesce((open_keys ->> c.concurrency_key)::int, 0) + c.of_key <= key_cap))
    ), chosen AS MATERIALIZED (
        SELECT t.tid, t.job_id, t.rank_at
        FROM fitting t
        WHERE t.was_open OR t.of_all <= room
        ORDER BY t.rank_at, t.tid
        LIMIT allowed
    ), held AS MATERIALIZED (
        -- A row that somebody changes or has changed meanwhile is left to the next claim.
        SELECT q.ctid AS tid, q.job_id, c.rank_at, q.attempt AS lost_attempt,
               q.attempt_open AS was_open, q.worker_id AS lost_worker_id,
               q.claimed_at AS lost_claimed_at
        FROM chosen c
        JOIN fencepost.run_queue q ON q.ctid = c.tid AND q.job_id = c.job_id
        WHERE q.state IN ('queued', 'retrying')
        FOR UPDATE OF q SKIP LOCKED
    ), candidates AS MATERIALIZED (
        SELECT h.*, row_number() OVER (ORDER BY h.rank_at, h.tid) AS place FROM held h
    ), claimed AS (
        UPDATE fencepost.run_queue q
        SET state = 'running',
            attempt = q.attempt + 1,
            attempt_open = true,
            lease_until = the_now + q.lease_s * interval '1 second',
            claimed_at = the_now,
            first_claimed_at = coalesce(q.first_claimed_at, the_now),
            undelivered = false,
            worker_id = the_workers[c.place]
        FROM candidates c
        WHERE q.ctid = c.tid AND q.job_id = c.job_id
        RETURNING c.place, c.was_open, c.lost_attempt, c.lost_worker_id, c.lost_claimed_at,
                  q.job_id, q.scheduled_at, q.attempt, q.kind_id, q.version, q.lease_s,
                  q.failure_count, q.payload, q.labels, q.progress, q.last_failure, q.serial
    ), closed AS (
        INSERT INTO fencepost.run_attempts
            (job_id, scheduled_at, attempt, outcome, worker_id, claimed_at, ended_at)
        SELECT c.job_id, c.scheduled_at, c.lost_attempt, 'lease_expired', c.lost_worker_id,
               c.lost_claimed_at, the_now
        FROM claimed c WHERE c.was_open
    ), told AS (
        INSERT INTO fencepost.run_changes (changed_at, job_ids, scheduled_ats)
        SELECT the_now, array_agg(c.job_id), array_agg(c.scheduled_at) FROM claimed c
        WHERE (SELECT s.watched_until > the_now FROM fencepost.shard_state s)
        HAVING count(*) > 0
    )
    SELECT c.place, c.job_id, c.scheduled_at, c.attempt, c.kind_id, c.version, c.lease_s,
           c.failure_count, c.payload, c.labels, c.progress, c.last_failure, c.serial
    FROM claimed c;
    GET DIAGNOSTICS taken = ROW_COUNT;
    IF taken > 0 THEN
        PERFORM fencepost.take_tokens(the_queue, taken);
    END IF;
END $$;

-- As claim_capped_runs, in a transaction that has ended attempts of the queue: their places are
-- taken again in the same commit. It has locked rows, so it must not wait for the lock of claims:
-- if somebody else has it, nothing is claimed.
CREATE FUNCTION fencepost.refill_capped_runs(
    the_queue int, the_kinds int[], the_priorities smallint[], the_workers uuid[], runs_max int,
    ageing_s int, the_now timestamptz)
RETURNS TABLE (place bigint, job_id uuid, scheduled_at timestamptz, attempt int, kind_id int,
               version int, lease_s smallint, failure_count int, payload bytea, labels jsonb,
               progress bytea, last_failure bytea, serial boolean)
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(61, (SELECT q.tenant_id FROM fencepost.queues q
                                          WHERE q.queue_id = the_queue)) THEN
        RETURN;
    END IF;
    -- A process that freezes before its commit holds up its tenant no longer than this.
    PERFORM set_config('idle_in_transaction_session_timeout', '2000', true);
    RETURN QUERY
    SELECT * FROM fencepost.claim_capped_runs(the_queue, the_kinds, the_priorities, the_workers,
                                              runs_max, ageing_s, the_now);
END $$;

-- Concurrency keys made from a run's labels and payload ------------------------------------------

ALTER TABLE fencepost.job_schedules
    -- The key as the job's definition has it, if it has parts in braces; concurrency_key is what
    -- it comes to for fires, whose labels and payload are the job's own.
    ADD COLUMN concurrency_template text;

-- The JSON text of a stored payload message, NULL if it has none or something was done to it:
-- field 1 (tag 10) is the text, its length before it in groups of seven bits, and nothing after.
CREATE FUNCTION fencepost.payload_json(payload bytea) RETURNS text
    LANGUAGE plpgsql IMMUTABLE AS
$$
DECLARE
    place int := 1;
    shift int := 0;
    size int := 0;
    part int;
BEGIN
    IF payload IS NULL OR length(payload) < 2 OR get_byte(payload, 0) <> 10 THEN
        RETURN NULL;
    END IF;
    LOOP
        part := get_byte(payload, place);
        size := size | ((part & 127) << shift);
        place := place + 1;
        shift := shift + 7;
        EXIT WHEN part < 128 OR shift > 21 OR place >= length(payload);
    END LOOP;
    IF place + size <> length(payload) THEN
        RETURN NULL;
    END IF;
    RETURN convert_from(substr(payload, place + 1, size), 'UTF8');
END $$;

-- The concurrency key of a run. {label.NAME} and {payload.PATH} stand for what the run has there,
-- {{ and }} for braces. NULL: it has nothing there, or nothing that is a text, number or boolean.
CREATE FUNCTION fencepost.run_concurrency_key(template text, labels jsonb, payload bytea)
RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    part text[];
    body json;
    value text;
    made text := '';
BEGIN
    IF template IS NULL OR template !~ '[{}]' THEN
        RETURN template;
    END IF;
    FOR part IN
        SELECT regexp_matches(template, '(\{\{|\}\}|[^{}]+)|\{(label|payload)\.([^{}]+)\}', 'g')
    LOOP
        IF part[1] IS NOT NULL THEN
            value := CASE part[1] WHEN '{{' THEN '{' WHEN '}}' THEN '}' ELSE part[1] END;
        ELSIF part[2] = 'label' THEN
            value := labels ->> part[3];
        ELSE
            BEGIN
                body := fencepost.payload_json(payload)::json #> string_to_array(part[3], '.');
                value := CASE WHEN json_typeof(body) IN ('string', 'number', 'boolean')
                              THEN body #>> '{}' END;
            EXCEPTION
                -- Not JSON, not UTF-8, too deep, or a NUL character, which no text can hold.
                WHEN invalid_text_representation OR untranslatable_character
                     OR character_not_in_repertoire OR statement_too_complex
                     OR program_limit_exceeded THEN
                    value := NULL;
            END;
        END IF;
        IF value IS NULL THEN
            RETURN NULL;
        END IF;
        made := made || value;
    END LOOP;
    -- As long as a key may be; a longer one is told from others by its hash.
    IF octet_length(made) > 128 THEN
        RETURN encode(sha256(convert_to(made, 'UTF8')), 'hex');
    END IF;
    RETURN nullif(made, '');
END $$;
