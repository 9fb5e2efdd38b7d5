-- After an outage late runs wait in a park, and a releaser takes the newest first from it.

ALTER TABLE fencepost.run_queue
    -- Waits for its place after an outage: available_at is only until when at the latest.
    ADD COLUMN parked boolean NOT NULL DEFAULT false;
-- Both the order of release and, tenant by tenant, who has any.
CREATE INDEX run_queue_parked ON fencepost.run_queue (tenant_id, scheduled_at DESC, job_id)
    WHERE parked;

-- Until when places have been given out, by tenant; also the lock that lets one server at a
-- time release a tenant's runs.
CREATE TABLE fencepost.release_cursors (
    tenant_id int PRIMARY KEY REFERENCES fencepost.tenants,
    free_at   timestamptz NOT NULL
) WITH (fillfactor = 50);

-- When schedulers were last firing, and since when without a pause: what fell due before that
-- fell due in an outage.
CREATE TABLE fencepost.firing_state (
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    fired_at     timestamptz NOT NULL DEFAULT '-infinity',
    firing_since timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);
INSERT INTO fencepost.firing_state DEFAULT VALUES;

-- What makes jobs fire alike before the_until: rule, first fire, and what ends them before then,
-- a row for each job in a range of the table. Whatever is due already counts from the_start;
-- intervals of whole minutes and one-off fires begin with their minute. When an interval after
-- completion fires depends on its runs, so it is left out.
CREATE FUNCTION fencepost.fires_alike(
    the_start timestamptz, the_until timestamptz, from_row tid, to_row tid)
RETURNS TABLE (tenant_id int, schedule_id int, every_s int, first_at timestamptz,
               end_at timestamptz, fires_left bigint)
LANGUAGE sql STABLE AS $$
    SELECT s.tenant_id, s.schedule_id, s.every_s,
           CASE WHEN s.schedule_id IS NULL AND coalesce(s.every_s, 60) % 60 = 0
                    THEN date_trunc('minute', s.next_run_at)
                WHEN s.schedule_id IS NOT NULL AND b.fires_left IS NULL
                    THEN greatest(s.next_run_at, the_start)
                ELSE s.next_run_at END,
           CASE WHEN s.schedule_id IS NOT NULL AND s.end_at < the_until THEN s.end_at END,
           b.fires_left
    FROM fencepost.job_schedules AS s
    CROSS JOIN LATERAL (
        SELECT CASE
            -- No rule fires more often than each second.
            WHEN s.every_s IS NULL THEN
                CASE WHEN s.max_fires - s.fire_count
                          < extract(epoch FROM the_until - s.next_run_at)
                     THEN s.max_fires - s.fire_count END
            -- An interval's end, as a number of fires; only where it comes before the_until.
            WHEN s.end_at < the_until OR s.max_fires IS NOT NULL THEN
                least(s.max_fires - s.fire_count,
                      ceil(extract(epoch FROM least(s.end_at, the_until) - s.next_run_at)
                           / s.every_s)::bigint)
        END AS fires_left
    ) AS b
    WHERE s.ctid >= from_row AND s.ctid < to_row
      AND s.next_run_at < the_until AND NOT s.paused AND NOT s.after_completion
$$;

-- Jobs counted by what makes them fire alike, where they are too many to be counted for every
-- forecast. A count is complete once forecast_state names it; other rows are to be deleted.
CREATE TABLE fencepost.forecast_groups (
    count_id    bigint NOT NULL,
    tenant_id   int NOT NULL,
    schedule_id int,
    every_s     int,
    first_at    timestamptz NOT NULL,
    end_at      timestamptz,
    fires_left  bigint,
    jobs        bigint NOT NULL
);
CREATE INDEX forecast_groups_read ON fencepost.forecast_groups (count_id, tenant_id);
CREATE TABLE fencepost.forecast_state (
    only_row   boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    count_id   bigint NOT NULL DEFAULT 0,
    counted_at timestamptz,
    -- Whoever moves it on counts, and goes on as long as nobody else has.
    next_at    timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO fencepost.forecast_state DEFAULT VALUES;
