"""How `fencepost jobs` shows jobs: as a table, as pairs, or as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.cli.failure import note
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import (
    instant,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
    short_seconds,
)
from fencepost_server.cli.values import last_part

if TYPE_CHECKING:
    from fencepost.v1.job_pb2 import Job
    from fencepost.v1.schedule_pb2 import Schedule


def show_jobs(settings: Settings, jobs: "Sequence[Job]", *, conditions: str) -> None:
    """Many, a line for each; `conditions` is the filter that they match."""
    if settings.json:
        print_json_list("jobs", jobs)
        return
    if not jobs:
        note(
            f"no job matches {conditions}"
            if conditions
            else "no jobs; create one: fencepost jobs create NAME --kind KIND --every 30s"
        )
        return
    rows = [
        (
            last_part(job.name),
            _state(job),
            _schedule_in_words(job.schedule) if job.HasField("schedule") else "",
            instant(job, "next_run_at"),
            last_part(job.target.queue),
            job.target.kind,
        )
        for job in jobs
    ]
    print_rows(("NAME", "STATE", "SCHEDULE", "NEXT FIRE", "QUEUE", "KIND"), rows)


def show_job(settings: Settings, job: "Job") -> None:
    """One job, whole."""
    if settings.json:
        print_json(job)
        return
    labels = " ".join(f"{key}={value}" for key, value in sorted(job.labels.items()))
    print_pairs(
        [
            ("name", last_part(job.name)),
            ("job id", job.job_id),
            ("state", _state(job) + (f" ({job.pause_reason})" if job.pause_reason else "")),
            ("schedule", _schedule_in_words(job.schedule) if job.HasField("schedule") else "none"),
            ("next fire", instant(job, "next_run_at")),
            ("last fire", instant(job, "last_scheduled_at")),
            ("fires", str(job.fire_count)),
            ("queue", last_part(job.target.queue)),
            ("kind", job.target.kind),
            ("payload", job.payload.json),
            ("labels", labels),
            ("description", job.description),
            ("version", str(job.version)),
            ("created", instant(job, "created_at")),
            ("updated", instant(job, "updated_at")),
        ]
    )


def _state(job: "Job") -> str:
    from fencepost.v1.job_pb2 import JobState as Wire

    return Wire.Name(job.state).removeprefix("JOB_STATE_").lower()


def _schedule_in_words(schedule: "Schedule") -> str:
    rule = schedule.WhichOneof("spec")
    if rule == "cron":
        return f"{' | '.join(schedule.cron.expressions)} {schedule.cron.time_zone or 'UTC'}"
    if rule == "interval":
        every = short_seconds(schedule.interval.every.ToTimedelta().total_seconds())
        return f"every {every}" + (" after it ends" if schedule.interval.after_completion else "")
    if schedule.once.HasField("at"):
        return f"once at {instant(schedule.once, 'at')}"
    return "once"
