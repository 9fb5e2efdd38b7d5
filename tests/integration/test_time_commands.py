"""tz-diff and forecast, as typed, against a server with jobs."""

import asyncio
import json
from pathlib import Path

import pytest
from fencepost.v1 import job_pb2
from fencepost_server.cli.main import main

from tests.integration.definition_calls import a_request
from tests.integration.definition_server import DefinitionServer, serving
from tests.unit.policy.zone_files import compiled, write_zones

STILL = compiled([], first_offset=0, rule="UTC0")
# From 2000 on an hour ahead: every fire moves.
AHEAD = compiled([(946_684_800, 3600)], first_offset=0, rule="<+01>-1")


async def create_cron_job(server: DefinitionServer, name: str, cron: str, zone: str) -> None:
    job = job_pb2.Job(target=job_pb2.Target(kind="k"))
    job.schedule.cron.expressions.append(cron)
    job.schedule.cron.time_zone = zone
    await server.jobs.CreateJob(a_request(name, job))


async def test_moved_jobs_and_busy_minutes_of_stored_jobs(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In the other zone data London is what it was, and Lagos an hour ahead.
    old = write_zones(tmp_path / "old", {"Africa/Lagos": STILL, "Europe/London": STILL})
    new = write_zones(tmp_path / "new", {"Africa/Lagos": AHEAD, "Europe/London": STILL})
    async with serving(database_url) as server:
        for number in range(3):
            await create_cron_job(server, f"lagos-{number}", f"{number} 9 * * *", "Africa/Lagos")
        await create_cron_job(server, "london", "0 9 * * *", "Europe/London")
        for number in range(5):
            await create_cron_job(server, f"hourly-{number}", "0 * * * *", "UTC")
        capsys.readouterr()

        async def run(*arguments: str, code: int = 0) -> dict[str, object]:
            command = [*arguments, "--server", server.address, "-o", "json"]
            assert await asyncio.to_thread(main, command) == code
            document: dict[str, object] = json.loads(capsys.readouterr().out)
            return document

        moved = await run("tz-diff", "--from", str(old), "--to", str(new), code=9)
        forecast = await run("forecast", "--hours", "2")

    jobs = moved["jobs"]
    assert isinstance(jobs, list)
    assert sorted(job["name"].rpartition("/")[2] for job in jobs) == [
        "lagos-0",
        "lagos-1",
        "lagos-2",
    ]
    peaks = forecast["peaks"]
    assert isinstance(peaks, list)
    share = {"rule": "0 * * * * UTC", "jobs": "5", "fires": "5"}
    assert any(share in peak["shares"] for peak in peaks)
