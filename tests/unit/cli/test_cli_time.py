"""explain, tz-diff and forecast as people type them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fencepost.v1 import admin_pb2, admin_service_pb2, job_pb2, job_service_pb2
from fencepost_server.cli import tz_diff
from google.protobuf.timestamp_pb2 import Timestamp
from icalendar import Calendar

from tests.unit.cli.scripted import Run, ScriptedServer
from tests.unit.cli.test_cli_tree import loaded_by
from tests.unit.policy.zone_files import compiled, write_zones

AT = ("--at", "2026-11-30T09:08:00+01:00")
STILL = compiled([], first_offset=0, rule="UTC0")
# From 2000 on an hour ahead: every fire moves.
AHEAD = compiled([(946_684_800, 3600)], first_offset=0, rule="<+01>-1")


def test_explain_needs_no_grpc() -> None:
    assert loaded_by("explain", "0 9 * * *") == ["typer"]


def test_explain_shows_words_fires_gaps_and_clock_changes(run: Run) -> None:
    result = run("explain", "0 9 * * 1-5", "--tz", "Europe/Berlin", "-n", "2", *AT)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "At 09:00, on Monday to Friday, in the time zone Europe/Berlin."
    assert lines[2] == "  next    Tue 2026-12-01 09:00 +01:00   08:00Z   in 23h 52m"
    assert lines[3] == "          Wed 2026-12-02 09:00 +01:00   08:00Z"
    for words in (
        "smallest 24h, from ",
        "largest 72h, from ",
        "71h across a clock change, from Fri 2027-03-26 09:00 +01:00 to Mon 2027-03-29",
        "Sun 2027-03-28 03:00 +02:00: clocks go forward by 1h; no fire falls into what is skipped",
        "from Mon 2027-03-29 09:00 +02:00 the same wall time is 07:00Z, no longer 08:00Z",
    ):
        assert words in result.out


def test_explain_tells_a_night_that_lacks_the_time(run: Run) -> None:
    result = run("explain", "30 2 * * *", "--tz", "Europe/Berlin", "--gap", "skip", *AT)
    assert "! Sun 2027-03-28 03:00 +02:00: clocks go forward by 1h" in result.out
    assert "2027-03-28T02:30:00 does not exist here: clocks jump over it, so it does" in result.out
    after = run("explain", "30 2 * * *", "--tz", "Europe/Berlin", *AT)
    assert "so it fires at the first instant after" in after.out


def test_explain_shows_a_suppressed_fire_in_its_place(run: Run) -> None:
    at = ("--at", "2027-03-28T00:00:00Z")
    result = run("explain", "30 2 * * *", "--tz", "Europe/Berlin", "--gap", "skip", "-n", "2", *at)
    assert "next    Sun 2027-03-28 02:30   does not fire   (2027-03-28T02:30:00" in result.out
    assert "Mon 2027-03-29 02:30 +02:00   00:30Z" in result.out


def test_explain_answers_json_with_the_names_of_the_preview(run: Run) -> None:
    arguments = ("30 2 * * *", "--tz", "Europe/Berlin", "--fold", "both", "-n", "1", "-o", "json")
    document = json.loads(run("explain", *arguments, *AT).out)
    assert document["fires"] == [
        {"scheduledAt": "2026-12-01T01:30:00Z", "localTime": "2026-12-01T02:30:00+01:00"}
    ]
    assert document["gaps"]["smallest"]["length"] == "86400s"
    assert document["gaps"]["changed"][0]["length"] == f"{23.5 * 3600:.0f}s"
    back = document["clockChanges"][1]
    assert (back["at"], back["offsetBefore"], back["offsetAfter"]) == (
        "2027-10-31T01:00:00Z",
        "7200s",
        "3600s",
    )
    assert [fire["scheduledAt"] for fire in back["fires"]] == [
        "2027-10-31T00:30:00Z",
        "2027-10-31T01:30:00Z",
    ]


def test_explain_shows_the_fires_of_a_period(run: Run) -> None:
    until = ("--until", "2026-12-03T09:00:00Z")
    result = run("explain", "0 9 * * *", "--from", "2026-12-01T09:00:00Z", *until, "-o", "json")
    assert [fire["scheduledAt"] for fire in json.loads(result.out)["fires"]] == [
        "2026-12-02T09:00:00Z"
    ]
    assert run("explain", "0 9 * * *", *AT, "--until", "2026-11-30T08:00:00Z").code == 2


def test_explain_sets_two_rules_side_by_side(run: Run) -> None:
    period = ("--from", "2026-12-04T00:00:00Z", "--until", "2026-12-08T00:00:00Z")
    other = ("--compare", "0 9 * * 1-5", "--compare", "30 9 * * 1")
    result = run("explain", "0 9 * * *", *period, *other)
    assert "until Tue 2026-12-08 00:00 +00:00: 2 fires of both, 2 of the first alone, 1 of" in (
        result.out
    )
    assert "first alone   Sat 2026-12-05 09:00 +00:00   09:00Z" in result.out
    assert "other alone   Mon 2026-12-07 09:30 +00:00   09:30Z" in result.out
    document = json.loads(run("explain", "0 9 * * *", *period, *other, "-o", "json").out)
    assert document["comparison"] == {
        "expressions": ["0 9 * * 1-5", "30 9 * * 1"],
        "until": "2026-12-08T00:00:00Z",
        "both": ["2026-12-04T09:00:00Z", "2026-12-07T09:00:00Z"],
        "onlyHere": ["2026-12-05T09:00:00Z", "2026-12-06T09:00:00Z"],
        "onlyThere": ["2026-12-07T09:30:00Z"],
    }
    refused = run("explain", "0 9 * * *", "--compare", "0 25 * * *")
    assert refused.code == 2
    assert "0 25 * * *" in refused.err


def test_explain_writes_a_calendar_that_a_calendar_library_reads(run: Run) -> None:
    result = run("explain", "0 9 * * 1-5", "-n", "2", *AT, "--ics", "--job", "report")
    events = list(Calendar.from_ical(result.out).walk("VEVENT"))
    assert [str(event["summary"]) for event in events] == ["report", "report"]
    assert [event.decoded("dtstart").isoformat() for event in events] == [
        "2026-11-30T09:00:00+00:00",
        "2026-12-01T09:00:00+00:00",
    ]


def test_explain_says_for_whom_h_was_drawn(run: Run) -> None:
    unnamed = run("explain", "H H * * *", *AT).out
    assert "for a job without a name; name it with --job NAME" in unnamed
    # sha256("default/report minute") and ("default/report hour"), as docs/time.md shows.
    named = run("explain", "H H * * *", "--job", "report", "--tenant", "default", *AT).out
    assert "hash    H stands for '5 18 * * *' for this job" in named
    assert "hash" not in run("explain", "5 18 * * *", *AT).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("61 0 * * *",), ['minute: "61" at column 1', "allowed: 0-59"]),
        (("0 0 * * MOO",), ['day of week: "MOO" at column 9', "0-7, SUN-SAT"]),
        (("0 0 30 2 *",), ["day of month", "column 5", "it would never fire"]),
        (("0 0 * *",), ["has 4 fields", "5 fields (minute hour"]),
        (("0 9 ? * 2 *",), ['hour: "?" at column 5', "only for the two day fields"]),
        (("0 0 * * *", "--tz", "Europe/berlin"), ["did you mean 'Europe/Berlin'?"]),
        (("0 0 * * *", "--at", "noon"), ["--at 'noon' is not an instant"]),
        (("0 0 * * *", "--gap", "later"), ["run-after-gap"]),
        (("0 0 * * *", "-n", "0"), ["greater than or equal to 1"]),
    ],
)
def test_explain_refuses_in_words(run: Run, arguments: tuple[str, ...], words: list[str]) -> None:
    result = run("explain", *arguments)
    assert (result.code, result.out) == (2, "")
    assert [text for text in words if text not in result.err] == []


def cron_job(name: str, expression: str, zone: str) -> job_pb2.Job:
    job = job_pb2.Job(name=f"tenants/default/jobs/{name}")
    job.schedule.cron.expressions.append(expression)
    job.schedule.cron.time_zone = zone
    return job


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    old = write_zones(tmp_path / "old", {"A": STILL, "B": STILL, "C": STILL}, version="2031a")
    new = write_zones(tmp_path / "new", {"A": STILL, "B": AHEAD}, version="2031b")
    return str(old), str(new)


def test_tz_diff_lists_zones_jobs_and_fires(
    server: ScriptedServer, run: Run, sources: tuple[str, str]
) -> None:
    pages = [
        job_service_pb2.ListJobsResponse(
            jobs=[cron_job("still", "0 9 * * *", "A"), cron_job("moves", "0 9 * * *", "B")],
            next_page_token="more",
        ),
        job_service_pb2.ListJobsResponse(
            jobs=[
                cron_job("gone", "0 9 * * *", "C"),
                cron_job("often", "*/5 * * * *", "B"),
                job_pb2.Job(name="tenants/default/jobs/by-hand"),
            ]
        ),
    ]
    server.on("ListJobs", *pages)
    result = run("tz-diff", "--from", sources[0], "--to", sources[1], "-o", "json")
    assert result.code == 9
    document = json.loads(result.out)
    assert (document["fromVersion"], document["toVersion"]) == ("2031a", "2031b")
    assert [(zone["zone"], zone["state"]) for zone in document["zones"]] == [
        ("B", "changed"),
        ("C", "removed"),
    ]
    (job,) = document["jobs"]
    assert (job["name"], job["timeZone"]) == ("tenants/default/jobs/moves", "B")
    assert len(job["fires"]) in (90, 91)
    moved = job["fires"][1]
    assert (moved["before"][11:], moved["after"][11:]) == ("09:00:00Z", "08:00:00Z")
    assert moved["before"][:10] == moved["after"][:10]
    assert "gone: its zone C is removed in the other zone data" in result.err
    assert [request.page_token for request in server.requests["ListJobs"]] == ["", "more"]


def test_tz_diff_shows_a_few_fires_of_each_job(
    server: ScriptedServer, run: Run, sources: tuple[str, str]
) -> None:
    server.on("ListJobs", job_service_pb2.ListJobsResponse(jobs=[cron_job("m", "0 9 * * *", "B")]))
    result = run("tz-diff", "--from", sources[0], "--to", sources[1])
    assert "zones that differ from tzdata 2031a to 2031b: 2" in result.out
    assert "jobs of tenants/default with fires that would move: 1" in result.out
    assert "+00:00 → +01:00" in result.out
    assert "more within 90 d" in result.out
    assert result.out.count("09:00:00Z") >= tz_diff.FIRES_SHOWN_MAX


def test_tz_diff_calls_no_server_for_zones_only(
    server: ScriptedServer, run: Run, sources: tuple[str, str]
) -> None:
    result = run("tz-diff", "--from", sources[0], "--to", sources[1], "--zones-only")
    assert (result.code, "jobs of" in result.out, dict(server.requests)) == (9, False, {})
    same = run("tz-diff", "--from", sources[0], "--to", sources[0])
    assert (same.code, "differ from tzdata 2031a to 2031a: 0" in same.out) == (0, True)


def test_tz_diff_says_what_is_no_zone_data(run: Run, tmp_path: Path) -> None:
    result = run("tz-diff", "--to", str(tmp_path), "--zones-only")
    assert (result.code, "holds no compiled zones" in result.err) == (2, True)


def test_a_release_that_cannot_be_had_is_told_apart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="a\nERROR: not reached\n")

    monkeypatch.setattr(subprocess, "run", pip)
    result = run("tz-diff", "--to", "2031c", "--zones-only")
    assert (result.code, result.out) == (1, "")
    assert "tzdata 2031c (package version 2031.3) is not available" in result.err
    assert "ERROR: not reached" in result.err
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert asked[0][-1] == "tzdata==2031.3"


def forecast_answer(minutes: list[int], *peaks: admin_pb2.ForecastPeak) -> object:
    return admin_service_pb2.GetForecastResponse(
        start_at=Timestamp(seconds=1_796_000_400), fires_per_minute=minutes, peaks=peaks
    )


def test_forecast_shows_the_worst_minutes_and_what_spreading_would_do(
    server: ScriptedServer, run: Run
) -> None:
    minutes = [0] * 60 + [5000] + [10] * 59 + [0] * 1320
    share = admin_pb2.ForecastShare(rule="0 * * * * UTC", jobs=4990, fires=4990)
    peak = admin_pb2.ForecastPeak(
        minute_at=Timestamp(seconds=1_796_000_400 + 3600), fires=5000, shares=[share]
    )
    server.on("GetForecast", forecast_answer(minutes, peak))
    result = run("forecast", "--all-tenants")
    assert result.code == 0
    assert "5,590 fires within 24 h" in result.out
    assert "4,990: 0 * * * * UTC (4,990 jobs); 10: other rules" in result.out
    assert f"would have {-(-sum(minutes[60:120]) // 60)} fires, not 5,000" in result.out
    (request,) = server.requests["GetForecast"]
    assert (request.parent, request.hours) == ("tenants/-", 24)


def test_forecast_of_nothing_says_so(server: ScriptedServer, run: Run) -> None:
    server.on("GetForecast", forecast_answer([0] * 60))
    result = run("forecast", "--hours", "1", "--tenant", "acme")
    assert "no fires within 1 h" in result.out
    assert server.requests["GetForecast"][0].parent == "tenants/acme"
