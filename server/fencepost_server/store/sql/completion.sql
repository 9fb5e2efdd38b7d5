-- name: jobs_awaiting_ends
-- Jobs that wait for the end of their last fire's run, after one id, and whether it is live.
SELECT s.job_id,
       (SELECT true FROM fencepost.run_queue AS q
        WHERE q.job_id = s.job_id AND q.scheduled_at = s.last_scheduled_at) IS TRUE AS is_live
FROM fencepost.job_schedules AS s
WHERE s.awaits_end AND s.job_id > @after
ORDER BY s.job_id LIMIT @jobs_max;

-- name: read_ends
-- Where the runs of these fires are. Live and ended in one snapshot, so none is missed.
SELECT k.job_id, k.scheduled_at,
       (SELECT true FROM fencepost.run_queue AS q
        WHERE q.job_id = k.job_id AND q.scheduled_at = k.scheduled_at) IS TRUE AS is_live,
       coalesce(
           (SELECT h.ended_at FROM fencepost.job_runs AS h
            WHERE h.job_id = k.job_id AND h.scheduled_at = k.scheduled_at),
           (SELECT d.ended_at FROM fencepost.dead_letters AS d
            WHERE d.job_id = k.job_id AND d.scheduled_at = k.scheduled_at),
           (SELECT t.ended_at FROM fencepost.job_runs_stray AS t
            WHERE t.job_id = k.job_id AND t.scheduled_at = k.scheduled_at)) AS ended_at
FROM unnest(@job_ids::uuid[], @scheduled_ats::timestamptz[]) AS k (job_id, scheduled_at);

-- name: follow_ends
-- The next fires of locked jobs whose awaited run has ended; NULL: the schedule has ended too.
UPDATE fencepost.job_schedules AS s
SET next_run_at = n.next_run_at, awaits_end = false
FROM unnest(@job_ids::uuid[], @next_run_ats::timestamptz[]) AS n (job_id, next_run_at)
WHERE s.job_id = n.job_id AND s.awaits_end;
