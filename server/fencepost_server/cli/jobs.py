"""`fencepost jobs`: definitions are created, listed, read, paused, resumed and deleted."""

from typing import Annotated, Any

import typer

from fencepost_server.cli.choices import DstFold, DstGap, JobState, Misfire, Overlap
from fencepost_server.cli.confirm import confirm
from fencepost_server.cli.failure import note
from fencepost_server.cli.job_view import show_job, show_jobs
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect, join_filter
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.values import job_path, last_part

app = typer.Typer(
    help="Definitions: create, list, read, pause, resume, delete; fires and backfills.",
    no_args_is_help=True,
)

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of the job.")]
_SCHEDULE, _POLICY = "Schedule (one of --cron, --every, --at, --delay, or none)", "Policies"


def _option(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


@app.command("create")
@calls_server
def create(
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 63 of a-z 0-9 . _ -")],
    kind: Annotated[str, _option("--kind", help="Handler that takes the runs.")],
    queue: Annotated[str | None, _option("--queue", help="Queue; default: default.")] = None,
    priority: Annotated[int, _option("--priority", help="0 to 9, higher is sooner.")] = 0,
    cron: Annotated[
        list[str] | None,
        _option("--cron", metavar="EXPR", help="Five or six fields, or @daily; may be repeated."),
    ] = None,
    tz: Annotated[str | None, _option("--tz", help="IANA zone of --cron; default UTC.")] = None,
    dst_gap: Annotated[
        DstGap | None, _option("--dst-gap", help="Local times that do not exist.")
    ] = None,
    dst_fold: Annotated[
        DstFold | None, _option("--dst-fold", help="Local times that come twice.")
    ] = None,
    every: Annotated[
        str | None, _option("--every", metavar="DURATION", help="Interval: 30s, 5m, 1h30m.")
    ] = None,
    after_completion: Annotated[
        bool, _option("--after-completion", help="Count --every from the end of the run.")
    ] = False,
    at: Annotated[
        str | None, _option("--at", metavar="INSTANT", help="Once, at 2027-03-28T09:00:00Z.")
    ] = None,
    delay: Annotated[
        str | None, _option("--delay", metavar="DURATION", help="Once, this long from now.")
    ] = None,
    start_at: Annotated[
        str | None, _option("--start-at", metavar="INSTANT", help="No fire before.")
    ] = None,
    end_at: Annotated[
        str | None, _option("--end-at", metavar="INSTANT", help="No fire at or after.")
    ] = None,
    max_fires: Annotated[int, _option("--max-fires", help="Finished after so many.")] = 0,
    exclude_calendar: Annotated[
        list[str] | None,
        _option("--exclude-calendar", metavar="NAME", help="No fire on its days; repeatable."),
    ] = None,
    jitter: Annotated[
        str | None, _option("--jitter", metavar="DURATION", help="Spread runs over so long.")
    ] = None,
    overlap: Annotated[
        Overlap | None, _option("--overlap", help="A fire while a run is live; default skip.")
    ] = None,
    misfire: Annotated[
        Misfire | None, _option("--misfire", help="Fires that come too late; default run-once.")
    ] = None,
    misfire_threshold: Annotated[
        str | None, _option("--misfire-threshold", metavar="DURATION", help="Too late; 60s.")
    ] = None,
    max_catch_up: Annotated[int, _option("--max-catch-up", help="Runs of catch-up.")] = 0,
    payload: Annotated[
        str | None,
        _option("--payload", metavar="JSON", help="Input of every run: JSON, @file, or @- ."),
    ] = None,
    label: Annotated[
        list[str] | None, _option("--label", metavar="K=V", help="May be repeated.")
    ] = None,
    description: Annotated[str, _option("--description", help="For people.")] = "",
    max_failures: Annotated[
        int | None,
        typer.Option(
            "--max-failures", min=1, max=1000, help="Dead after so many failures; default 5."
        ),
    ] = None,
    attempt_timeout: Annotated[
        str | None, _option("--attempt-timeout", metavar="DURATION", help="One attempt; 1h.")
    ] = None,
    queue_timeout: Annotated[
        str | None, _option("--queue-timeout", metavar="DURATION", help="One wait for a worker.")
    ] = None,
    total_timeout: Annotated[
        str | None, _option("--total-timeout", metavar="DURATION", help="All attempts together.")
    ] = None,
    max_in_flight: Annotated[int, _option("--max-in-flight", help="Runs at once.")] = 0,
    paused: Annotated[bool, _option("--paused", help="Make it paused.")] = False,
    validate_only: Annotated[
        bool, _option("--validate-only", help="Check everything, store nothing.")
    ] = False,
) -> None:
    """Create a job.

    Examples:

      fencepost jobs create hello --kind demo.hello --every 30s

      fencepost jobs create nightly --kind report --cron "30 2 * * *" --tz Europe/Berlin

      fencepost jobs create import --kind import --payload @input.json --label team=web
    """
    from fencepost.v1.job_service_pb2 import CreateJobRequest

    from fencepost_server.cli.connection import connected, new_request_id
    from fencepost_server.cli.definition import JobFlags, build_job

    flags = JobFlags(
        name=name,
        kind=kind,
        queue=queue,
        priority=priority,
        cron=cron or (),
        tz=tz,
        dst_gap=dst_gap,
        dst_fold=dst_fold,
        every=every,
        after_completion=after_completion,
        at=at,
        delay=delay,
        start_at=start_at,
        end_at=end_at,
        max_fires=max_fires,
        exclude_calendar=exclude_calendar or (),
        jitter=jitter,
        overlap=overlap,
        misfire=misfire,
        misfire_threshold=misfire_threshold,
        max_catch_up=max_catch_up,
        payload=payload,
        label=label or (),
        description=description,
        max_failures=max_failures,
        attempt_timeout=attempt_timeout,
        queue_timeout=queue_timeout,
        total_timeout=total_timeout,
        max_in_flight=max_in_flight,
        paused=paused,
    )
    request = CreateJobRequest(
        parent=settings.parent,
        job_name=name,
        job=build_job(flags, tenant=settings.tenant),
        request_id=new_request_id(),
        validate_only=validate_only,
    )
    with connected(settings) as server:
        job = server.call(server.jobs.CreateJob, request, what=f"create job {name!r}").job
    show_job(settings, job)
    if validate_only:
        note("checked, nothing stored")
    elif not job.HasField("schedule"):
        note(f"run it: fencepost run {name} --watch")


@app.command("list")
@calls_server
def list_jobs(
    settings: Settings,
    filter: Annotated[
        str | None, _option("--filter", help="""Conditions: 'queue=mail labels.team=web'.""")
    ] = None,
    state: Annotated[list[JobState] | None, _option("--state", help="May be repeated.")] = None,
    queue: Annotated[str | None, _option("--queue", help="Only of this queue.")] = None,
    kind: Annotated[str | None, _option("--kind", help="Only of this handler.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000)] = LIMIT_DEFAULT,
) -> None:
    """List jobs, newest first.

    Examples:

      fencepost jobs list

      fencepost jobs list --state paused --queue billing

      fencepost jobs list --limit 1000 -o json
    """
    from fencepost.v1.job_service_pb2 import ListJobsRequest

    from fencepost_server.cli.connection import connected

    states = [each.upper() for each in state or ()]
    joined = join_filter(filter, [("state", states), ("queue", queue), ("kind", kind)])
    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListJobsRequest(
                parent=settings.parent, page_size=size, page_token=token, filter=joined
            )
            page = server.call(server.jobs.ListJobs, request, what="list jobs")
            return page.jobs, page.next_page_token

        jobs = collect(fetch, limit=limit)
    show_jobs(settings, jobs, conditions=joined)


@app.command("get")
@calls_server
def get(settings: Settings, name: JobName) -> None:
    """Show one job.

    Examples:

      fencepost jobs get nightly

      fencepost jobs get nightly -o json

      fencepost --tenant acme jobs get nightly
    """
    from fencepost.v1.job_service_pb2 import GetJobRequest

    from fencepost_server.cli.connection import connected

    request = GetJobRequest(name=job_path(settings.tenant, name))
    with connected(settings) as server:
        show_job(settings, server.call(server.jobs.GetJob, request, what=f"get job {name!r}").job)


@app.command("pause")
@calls_server
def pause(
    settings: Settings,
    name: JobName,
    reason: Annotated[str, _option("--reason", help="For people.")] = "",
) -> None:
    """Stop the fires of a job; runs already made go on.

    Examples:

      fencepost jobs pause nightly

      fencepost jobs pause nightly --reason "the warehouse is down"

      fencepost jobs pause nightly -o json
    """
    from fencepost.v1.job_service_pb2 import PauseJobRequest

    from fencepost_server.cli.connection import connected

    request = PauseJobRequest(name=job_path(settings.tenant, name), reason=reason)
    with connected(settings) as server:
        show_job(
            settings, server.call(server.jobs.PauseJob, request, what=f"pause job {name!r}").job
        )


@app.command("resume")
@calls_server
def resume(settings: Settings, name: JobName) -> None:
    """Let a paused job fire again; fires missed meanwhile meet its misfire policy.

    Examples:

      fencepost jobs resume nightly

      fencepost jobs resume nightly -o json

      fencepost --tenant acme jobs resume nightly
    """
    from fencepost.v1.job_service_pb2 import ResumeJobRequest

    from fencepost_server.cli.connection import connected

    request = ResumeJobRequest(name=job_path(settings.tenant, name))
    with connected(settings) as server:
        answer = server.call(server.jobs.ResumeJob, request, what=f"resume job {name!r}")
    show_job(settings, answer.job)


@app.command("delete")
@calls_server
def delete(
    settings: Settings,
    name: JobName,
    cancel_runs: Annotated[
        bool, _option("--cancel-runs", help="Also cancel its live runs.")
    ] = False,
    yes: Annotated[bool, _option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a job. Its live runs go on unless --cancel-runs; ended ones stay in the history.

    Examples:

      fencepost jobs delete nightly

      fencepost jobs delete nightly --yes

      fencepost jobs delete nightly --cancel-runs --yes
    """
    from fencepost.v1.job_service_pb2 import DeleteJobRequest

    from fencepost_server.cli.connection import connected

    confirm(f"delete job {name!r} of tenant {settings.tenant}", yes=yes)
    request = DeleteJobRequest(name=job_path(settings.tenant, name), cancel_runs=cancel_runs)
    with connected(settings) as server:
        server.call(server.jobs.DeleteJob, request, what=f"delete job {name!r}")
    note(f"deleted {last_part(name)}")
