-- Schedules made complete: jitter, intervals after completion, exclusion calendars, and zone
-- data that can change under stored fires.

ALTER TABLE fencepost.job_schedules
    -- How far available_at may move behind scheduled_at.
    ADD COLUMN jitter_s         int NOT NULL DEFAULT 0,
    -- every_s counts from the end of the last fire's run.
    ADD COLUMN after_completion boolean NOT NULL DEFAULT false,
    -- The end of the last fire's run decides next_run_at, which is NULL until then.
    ADD COLUMN awaits_end       boolean NOT NULL DEFAULT false,
    -- job_calendars has rows of the job: its fires need thought.
    ADD COLUMN has_calendars    boolean NOT NULL DEFAULT false,
    ADD CONSTRAINT job_schedules_awaits CHECK (NOT (awaits_end AND next_run_at IS NOT NULL)) NOT VALID;
CREATE INDEX job_schedules_awaiting ON fencepost.job_schedules (job_id) WHERE awaits_end;

-- A number in [0, 1) that depends on the text alone: the first 56 bits of its SHA-256. The
-- server has the same in domain/run.py, and a test holds the two together.
CREATE FUNCTION fencepost.stable_fraction(the_text text) RETURNS double precision
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS
$$ SELECT ('x' || substr(encode(sha256(convert_to(the_text, 'UTF8')), 'hex'), 1, 14))::bit(56)::bigint
          / 72057594037927936::double precision $$;

-- When a fire's run may be claimed: scheduled_at plus a stable part of the jitter, never as
-- late as the next fire (NULL: there is none, or none is known).
CREATE FUNCTION fencepost.jittered(
    the_job_id uuid, the_scheduled_at timestamptz, the_jitter_s int, the_next_at timestamptz)
    RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS
$$ SELECT CASE WHEN the_jitter_s = 0 THEN the_scheduled_at ELSE
       the_scheduled_at + floor(
           fencepost.stable_fraction(
               the_job_id || to_char(the_scheduled_at AT TIME ZONE 'UTC',
                                     '"/"YYYY-MM-DD"T"HH24:MI:SS"Z/jitter"'))
           * least(the_jitter_s * 1000000.0::double precision,
                   extract(epoch FROM the_next_at - the_scheduled_at)::double precision * 1000000.0)
       ) * interval '1 microsecond' END $$;

-- Exclusion calendars, shared by jobs of a tenant by name.
CREATE TABLE fencepost.calendars (
    calendar_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   int NOT NULL REFERENCES fencepost.tenants,
    name        text NOT NULL,
    description text NOT NULL DEFAULT '',
    dates       text[] NOT NULL DEFAULT '{}',
    -- First and last days, alternating.
    range_days  text[] NOT NULL DEFAULT '{}',
    ics         text NOT NULL DEFAULT '',
    time_zone   text NOT NULL DEFAULT '',
    revision    int NOT NULL DEFAULT 1,
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    UNIQUE (tenant_id, name)
);

-- Which jobs name which calendars, by their newest definition.
CREATE TABLE fencepost.job_calendars (
    job_id      uuid NOT NULL,
    calendar_id int NOT NULL REFERENCES fencepost.calendars,
    PRIMARY KEY (job_id, calendar_id)
);
CREATE INDEX job_calendars_users ON fencepost.job_calendars (calendar_id, job_id);

-- The memo belongs to the zone data that computed it; servers with other data have their own.
DROP TABLE fencepost.schedule_fires;
CREATE UNLOGGED TABLE fencepost.schedule_fires (
    schedule_id  int NOT NULL,
    scheduled_at timestamptz NOT NULL,
    tzdata       text NOT NULL DEFAULT '',
    next_at      timestamptz,
    PRIMARY KEY (schedule_id, scheduled_at, tzdata)
);

-- The zones of the newest time zone data that any server had, and what they were before:
-- until moved_until is over, stored fires of a changed zone are brought from one to the other.
CREATE TABLE fencepost.zones (
    name        text PRIMARY KEY,
    content     bytea NOT NULL,
    previous    bytea,
    moved_until timestamptz
);

-- Jobs whose next fire was brought to the newest zone data already, while that goes on.
CREATE TABLE fencepost.zone_moves (
    job_id uuid PRIMARY KEY
);
