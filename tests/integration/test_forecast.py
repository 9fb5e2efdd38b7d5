"""The forecast counts per rule what a walk over every job's fires counts one by one."""

import pytest
from fencepost.v1 import admin_service_pb2 as pb
from fencepost.v1 import job_pb2
from fencepost_server.clock import DAY, HOUR, MINUTE, SECOND
from fencepost_server.domain.schedule import CronSpec, IntervalSpec, OnceSpec
from fencepost_server.engine.forecast import PEAKS_MAX, Forecasts
from fencepost_server.errors import ServerOverloaded
from fencepost_server.policy.schedule import compile_rule

from tests.integration.definition_calls import PARENT, a_request
from tests.integration.definition_server import refusal, serving
from tests.integration.forecast_jobs import StoredJob, compute, random_jobs, store, walked
from tests.integration.world import World


@pytest.mark.parametrize(("tenant_id", "hours"), [(None, 24), (1, 24), (2, 24), (None, 1)])
async def test_every_minute_has_the_number_that_a_walk_over_the_jobs_finds(
    world: World, tenant_id: int | None, hours: int
) -> None:
    await world.move(17 * SECOND + 250_000)
    jobs = random_jobs(world.now, 500)
    await store(world, jobs)
    mine = [job for job in jobs if tenant_id in (None, job.tenant_id)]
    start = world.now // MINUTE * MINUTE

    found = await compute(world, tenant_id, hours)

    assert walked(mine, start, hours) == list(found.fires_per_minute)
    assert (start, world.now) == (found.start_at, found.computed_at)
    assert sum(found.fires_per_minute) > 10_000


async def test_a_week_ahead_is_counted_over_a_change_of_clocks(world: World) -> None:
    await world.move_to(world.now + 113 * DAY)  # 2027-03-24, four days before Berlin's gap
    spec = CronSpec(expressions=("30 2 * * *", "0 3 * * *"), time_zone="Europe/Berlin")
    at = compile_rule(spec, anchor=0).next_after(world.now)
    assert at is not None
    jobs = [StoredJob(spec=spec, next_run_at=at)] * 3
    await store(world, jobs)

    found = await compute(world, hours=168)

    assert walked(jobs, found.start_at, 168) == list(found.fires_per_minute)
    # Seven nights with two fires, but one where both are the first instant after the gap.
    assert sum(found.fires_per_minute) == 3 * 13


async def test_peaks_are_the_busiest_minutes_with_their_largest_shares(world: World) -> None:
    hourly = CronSpec(expressions=("0 * * * *",))
    each = IntervalSpec(every=5 * MINUTE)
    jobs = [StoredJob(spec=hourly, next_run_at=world.now + HOUR)] * 5
    jobs += [StoredJob(spec=each, next_run_at=world.now + 5 * MINUTE)] * 3
    jobs += [StoredJob(spec=OnceSpec(at=0), next_run_at=world.now + 2 * HOUR + SECOND)] * 2
    await store(world, jobs)

    found = await compute(world)

    assert len(found.peaks) == PEAKS_MAX
    first, second = found.peaks[:2]
    assert (world.now + 2 * HOUR, 10) == (first.minute_at, first.fires)
    assert [(share.rule, share.jobs, share.fires) for share in first.shares] == [
        ("0 * * * * UTC", 5, 5),
        ("every 5 min", 3, 3),
        ("once", 2, 2),
    ]
    assert (world.now + HOUR, 8) == (second.minute_at, second.fires)


async def test_a_kept_answer_is_cut_to_the_minute_of_the_call(world: World) -> None:
    hourly = [StoredJob(spec=IntervalSpec(every=HOUR), next_run_at=world.now + MINUTE)]
    await store(world, hourly)
    forecasts = Forecasts(database=world.database, clock=world.database.clock)
    first = await forecasts.get(tenant_id=None, hours=1)
    await world.raw.execute("DELETE FROM fencepost.job_schedules")

    await world.move(9 * MINUTE)
    kept = await forecasts.get(tenant_id=None, hours=1)
    await world.move(2 * MINUTE)
    computed = await forecasts.get(tenant_id=None, hours=1)

    assert [minute for minute, count in enumerate(first.fires_per_minute) if count] == [1]
    assert first.computed_at == kept.computed_at
    assert first.start_at + 9 * MINUTE == kept.start_at
    assert [minute for minute, count in enumerate(kept.fires_per_minute) if count] == [52]
    assert [first.start_at + 61 * MINUTE] == [peak.minute_at for peak in kept.peaks]
    assert (len(computed.fires_per_minute), sum(computed.fires_per_minute)) == (60, 0)
    assert world.now == computed.computed_at


async def test_intervals_after_completion_are_left_out(world: World) -> None:
    every = IntervalSpec(every=5 * MINUTE)
    await store(world, [StoredJob(spec=every, next_run_at=world.now + MINUTE)] * 2)
    await world.raw.execute(
        "UPDATE fencepost.job_schedules SET after_completion = true"
        " WHERE job_id = '00000000-0000-7000-8000-000000000001'"
    )

    found = await compute(world, hours=1)

    assert sum(found.fires_per_minute) == 12


async def test_rules_that_are_too_many_to_count_are_refused(world: World) -> None:
    each_second = CronSpec(expressions=("* * * * * *",))
    await store(world, [StoredJob(spec=each_second, next_run_at=world.now + SECOND)])
    forecasts = Forecasts(database=world.database, clock=world.database.clock, steps_max=1000)

    with pytest.raises(ServerOverloaded, match="more than 1000 fires of different rules"):
        await forecasts.get(tenant_id=None, hours=1)
    await world.raw.execute("DELETE FROM fencepost.job_schedules")
    with pytest.raises(ServerOverloaded, match="more than 1000 fires of different rules"):
        await forecasts.get(tenant_id=None, hours=1)
    await world.move(11 * MINUTE)
    assert sum((await forecasts.get(tenant_id=None, hours=1)).fires_per_minute) == 0


async def test_the_forecast_is_served(database_url: str) -> None:
    async with serving(database_url) as server:
        job = job_pb2.Job(target=job_pb2.Target(kind="k"))
        # Hours away from now, or the minute of the call might be the fire's.
        hour = (server.now() // HOUR + 6) % 24
        job.schedule.cron.expressions.append(f"0 {hour} * * *")
        await server.jobs.CreateJob(a_request("daily", job))
        await server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name="other"))

        mine = await server.admin.GetForecast(pb.GetForecastRequest(parent=PARENT))
        everybody = await server.admin.GetForecast(
            pb.GetForecastRequest(parent="tenants/-", hours=168)
        )
        theirs = await server.admin.GetForecast(pb.GetForecastRequest(parent="tenants/other"))

        assert (len(mine.fires_per_minute), sum(mine.fires_per_minute)) == (1440, 1)
        assert (len(everybody.fires_per_minute), sum(everybody.fires_per_minute)) == (10_080, 7)
        assert sum(theirs.fires_per_minute) == 0
        peak = mine.peaks[0]
        assert peak.minute_at.seconds % 86_400 == hour * 3600
        assert (
            peak.shares[0].rule,
            peak.shares[0].jobs,
            peak.shares[0].fires,
        ) == (f"0 {hour} * * * UTC", 1, 1)
        for hours in (-1, 169):
            request = pb.GetForecastRequest(parent=PARENT, hours=hours)
            assert (await refusal(server.admin.GetForecast(request))).fields == ["hours"]
        missing = pb.GetForecastRequest(parent="tenants/none")
        assert (await refusal(server.admin.GetForecast(missing))).reason == "TENANT_NOT_FOUND"
