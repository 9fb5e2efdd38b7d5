-- name: insert_calendar
-- No row: the name is taken.
INSERT INTO fencepost.calendars
    (tenant_id, name, description, dates, range_days, ics, time_zone, created_at, updated_at)
VALUES (@tenant_id, @name, @description, @dates::text[], @range_days::text[], @ics, @time_zone,
        @now, @now)
ON CONFLICT (tenant_id, name) DO NOTHING
RETURNING *;

-- name: read_calendar
SELECT * FROM fencepost.calendars WHERE tenant_id = @tenant_id AND name = @name;

-- name: lock_calendar
-- Waits for jobs that are being made to name it.
SELECT * FROM fencepost.calendars WHERE tenant_id = @tenant_id AND name = @name FOR UPDATE;

-- name: list_calendars
SELECT calendar_id, name, description, dates, range_days, '' AS ics, time_zone, revision,
       created_at, updated_at
FROM fencepost.calendars
WHERE tenant_id = @tenant_id AND (@after::text IS NULL OR name > @after)
ORDER BY name LIMIT @page_max;

-- name: update_calendar
UPDATE fencepost.calendars
SET description = @description, dates = @dates::text[], range_days = @range_days::text[],
    ics = @ics, time_zone = @time_zone, revision = revision + 1, updated_at = @now
WHERE calendar_id = @calendar_id
RETURNING *;

-- name: calendar_users
-- Jobs that name a locked calendar, read in a statement after the lock.
SELECT j.name
FROM fencepost.job_calendars AS u
JOIN fencepost.jobs AS j ON j.job_id = u.job_id
WHERE u.calendar_id = @calendar_id
ORDER BY j.name LIMIT @names_max;

-- name: delete_calendar
DELETE FROM fencepost.calendars WHERE calendar_id = @calendar_id;

-- name: find_calendars
-- By name, with what they exclude.
SELECT * FROM fencepost.calendars WHERE tenant_id = @tenant_id AND name = ANY (@names::text[]);

-- name: hold_calendars
-- Keeps calendars from being deleted until the end of the transaction.
SELECT calendar_id, name FROM fencepost.calendars
WHERE tenant_id = @tenant_id AND name = ANY (@names::text[])
ORDER BY calendar_id FOR KEY SHARE;

-- name: forget_job_calendars
DELETE FROM fencepost.job_calendars WHERE job_id = ANY (@job_ids::uuid[]);

-- name: name_job_calendars
INSERT INTO fencepost.job_calendars (job_id, calendar_id)
SELECT * FROM unnest(@job_ids::uuid[], @calendar_ids::int[])
ON CONFLICT DO NOTHING;

-- name: mark_jobs_with_calendars
-- From now on the fires of these new jobs take the path that looks at calendars.
UPDATE fencepost.job_schedules SET has_calendars = true WHERE job_id = ANY (@job_ids::uuid[]);

-- name: calendars_of_jobs
SELECT job_id, calendar_id FROM fencepost.job_calendars
WHERE job_id = ANY (@job_ids::uuid[]) ORDER BY job_id, calendar_id;

-- name: calendars_by_id
SELECT * FROM fencepost.calendars WHERE calendar_id = ANY (@calendar_ids::int[]);
