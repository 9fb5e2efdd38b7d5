"""`fencepost tz-diff`: which zones, jobs and fires another release of tzdata would move."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.failure import CliError, ExitCode, note, usage
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import print_rows

if TYPE_CHECKING:
    from fencepost_server.policy.zone_diff import MovedFire, ZoneDifference
    from fencepost_server.policy.zone_source import ZoneSource

ZONES_AHEAD_DAYS = 3 * 366
FIRES_AHEAD_DAYS = 90
JOBS_MAX = 100_000
FIRES_SHOWN_MAX = 5
_PAGE = 1000
_DOWNLOAD_TIMEOUT_S = 120
_VERSION = re.compile(r"(20\d\d)(?:([a-z])|\.(\d{1,2}))")


@calls_server
def tz_diff(
    settings: Settings,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="VERSION|PATH",
            help="The other zone data: a release such as 2026b, fetched with pip; or a tzdata "
            "wheel, an unpacked one, or a folder of zoneinfo files.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="VERSION|PATH",
            help="Compare with this instead of the zone data in use here.",
            show_default=False,
        ),
    ] = None,
    zones_only: Annotated[
        bool, typer.Option("--zones-only", help="Call no server: leave the jobs out.")
    ] = False,
) -> None:
    """List the zones that differ within three years, and the tenant's jobs with fires that
    would move within 90 days. The exit code is 9 if there are any.

    Examples:

      fencepost tz-diff --to 2026b

      fencepost tz-diff --to ./tzdata-2026.2-py2.py3-none-any.whl --tenant acme

      fencepost tz-diff --from 2026a --to /usr/share/zoneinfo --zones-only
    """
    from fencepost_server.clock import DAY, SECOND
    from fencepost_server.policy.zone_diff import differing_zones

    now = int(time.time()) * SECOND
    with _source("--from", base) as old, _source("--to", to) as new:
        zones = differing_zones(old, new, first=now, last=now + ZONES_AHEAD_DAYS * DAY)
        document: dict[str, Any] = {
            "fromVersion": old.version,
            "toVersion": new.version,
            "zones": [_zone_document(zone) for zone in zones],
        }
        if not settings.json:
            print(f"zones that differ from tzdata {old.version} to {new.version}: {len(zones)}")
            _print_zones(zones)
        if not zones_only:
            jobs = list(_moved_jobs(settings, zones, old, new, now)) if zones else []
            document["jobs"] = [_job_document(*job) for job in jobs]
            if not settings.json:
                print(f"jobs of {settings.parent} with fires that would move: {len(jobs)}")
                _print_jobs(jobs)
        if settings.json:
            print(json.dumps(document, indent=2, ensure_ascii=False))
    if zones:
        raise typer.Exit(ExitCode.DIFFERENT)


@contextmanager
def _source(flag: str, text: str | None) -> Iterator["ZoneSource"]:
    from fencepost_server.policy.zone_source import NoZoneData, open_source, pinned

    if text is None:
        yield pinned()
        return
    release = None if Path(text).exists() else _VERSION.fullmatch(text)
    with tempfile.TemporaryDirectory(prefix="fencepost-tzdata-") as folder:
        path = Path(text) if release is None else _download(text, release, Path(folder))
        try:
            source = open_source(path)
        except NoZoneData as error:
            raise usage(
                f"{flag} {text!r} is no zone data",
                why=str(error),
                hint="give a release such as 2026b, a tzdata wheel, or a folder of zoneinfo files",
            ) from error
        except OSError as error:
            raise usage(f"cannot read {flag} {text}", why=error.strerror or str(error)) from error
        yield source


def _download(text: str, release: re.Match[str], folder: Path) -> Path:
    """The wheel of a release, by this interpreter's pip from wherever pip is set up to look."""
    number = int(release[3]) if release[3] else ord(release[2]) - ord("a") + 1
    version = f"{release[1]}.{number}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"tzdata=={version}"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
        why = (ended.stderr.strip().splitlines() or ["it gave no reason"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {_DOWNLOAD_TIMEOUT_S} s"
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise CliError(
            f"tzdata {text} (package version {version}) is not available",
            why=f"pip download: {why}",
            hint="fetch the wheel elsewhere and give its path with --to",
        )
    return wheels[0]


def _moved_jobs(
    settings: Settings,
    zones: Sequence["ZoneDifference"],
    old: "ZoneSource",
    new: "ZoneSource",
    now: int,
) -> Iterator[tuple[Any, list["MovedFire"]]]:
    from fencepost_server.api.wire_schedule import read_schedule
    from fencepost_server.clock import DAY
    from fencepost_server.domain.schedule import CronSpec
    from fencepost_server.errors import FencepostError
    from fencepost_server.policy.zone_diff import ZoneState, moved_fires

    states = {zone.name: zone.state for zone in zones}
    for job in _jobs(settings):
        try:
            spec = read_schedule(job.schedule, now=now, field="schedule").spec
        except FencepostError as error:
            note(f"{job.name} was not compared: {error.message}")
            continue
        if not isinstance(spec, CronSpec) or spec.time_zone not in states:
            continue
        if states[spec.time_zone] is not ZoneState.CHANGED:
            note(
                f"{job.name}: its zone {spec.time_zone} is {states[spec.time_zone]} in the other "
                "zone data, so its fires cannot be compared"
            )
            continue
        _, tenant, _, name = job.name.split("/")
        fires = moved_fires(
            spec,
            seed=f"{tenant}/{name}",
            old=old,
            new=new,
            first=now,
            last=now + FIRES_AHEAD_DAYS * DAY,
        )
        if fires:
            yield job, fires


def _jobs(settings: Settings) -> Iterator[Any]:
    """The tenant's jobs that have a cron schedule, page by page."""
    from fencepost.v1 import job_service_pb2

    from fencepost_server.cli.connection import connected

    with connected(settings) as server:
        request = job_service_pb2.ListJobsRequest(parent=settings.parent, page_size=_PAGE)
        seen = 0
        while True:
            answer = server.call(server.jobs.ListJobs, request, what="list the jobs")
            for job in answer.jobs:
                if job.schedule.WhichOneof("spec") == "cron":
                    yield job
            seen += len(answer.jobs)
            if not answer.next_page_token:
                return
            if seen >= JOBS_MAX:
                note(f"stopped after {seen} jobs; the others were not compared")
                return
            request.page_token = answer.next_page_token


def _print_zones(zones: Sequence["ZoneDifference"]) -> None:
    rows = []
    for zone in zones:
        first = zone.spans[0] if zone.spans else None
        rows.append(
            (
                zone.name,
                str(zone.state),
                _rfc3339(first.start) if first else "",
                _rfc3339(first.until) if first else "",
                f"{_offset(first.offset_before)} → {_offset(first.offset_after)}" if first else "",
                str(len(zone.spans)) if zone.spans else "",
            )
        )
    if rows:
        print_rows(("ZONE", "STATE", "FIRST DIFFERS", "UNTIL", "OFFSET", "SPANS"), rows)
    print()


def _print_jobs(jobs: Sequence[tuple[Any, list["MovedFire"]]]) -> None:
    rows = []
    for job, fires in jobs:
        rows += [
            (
                job.name.rpartition("/")[2],
                job.schedule.cron.time_zone,
                _rfc3339(fire.before) if fire.before is not None else "none",
                _rfc3339(fire.after) if fire.after is not None else "none",
            )
            for fire in fires[:FIRES_SHOWN_MAX]
        ]
        if len(fires) > FIRES_SHOWN_MAX:
            more = f"and {len(fires) - FIRES_SHOWN_MAX} more within {FIRES_AHEAD_DAYS} d"
            rows.append((job.name.rpartition("/")[2], "", more, ""))
    if rows:
        print_rows(("JOB", "ZONE", "BEFORE", "AFTER"), rows)


def _zone_document(zone: "ZoneDifference") -> dict[str, Any]:
    return {
        "zone": zone.name,
        "state": str(zone.state),
        "spans": [
            {
                "start": _rfc3339(span.start),
                "until": _rfc3339(span.until),
                "offsetBefore": f"{span.offset_before}s",
                "offsetAfter": f"{span.offset_after}s",
            }
            for span in zone.spans
        ],
    }


def _job_document(job: Any, fires: Sequence["MovedFire"]) -> dict[str, Any]:
    return {
        "name": job.name,
        "timeZone": job.schedule.cron.time_zone,
        "fires": [
            {
                "before": None if fire.before is None else _rfc3339(fire.before),
                "after": None if fire.after is None else _rfc3339(fire.after),
            }
            for fire in fires
        ],
    }


def _rfc3339(at: int) -> str:
    from fencepost_server.clock import format_instant

    return format_instant(at)


def _offset(seconds: int) -> str:
    sign, minutes = "-" if seconds < 0 else "+", abs(seconds) // 60
    return f"{sign}{minutes // 60:02d}:{minutes % 60:02d}"
