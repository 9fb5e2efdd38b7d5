"""What applies where a job says nothing: the tenant's retry policy, field by field."""

from fencepost.v1 import admin_pb2, admin_service_pb2, job_pb2, run_service_pb2
from fencepost_server.clock import SECOND, from_datetime
from fencepost_server.domain.run import RunState
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from tests.factories import failed, job_spec, plain_retry
from tests.integration.running_server import RunningServer, running
from tests.integration.world import World

POLICY = job_pb2.RetryPolicy(
    max_failures=2,
    base=Duration(seconds=1),
    jitter=job_pb2.BACKOFF_JITTER_NONE,
    non_retryable_codes=["BAD"],
)


async def _set(server: RunningServer, policy: job_pb2.RetryPolicy | None) -> admin_pb2.Tenant:
    tenant = admin_pb2.Tenant(name="tenants/default", default_retry_policy=policy)
    tenant_answer = await server.admin.UpdateTenant(
        admin_service_pb2.UpdateTenantRequest(
            tenant=tenant, update_mask=FieldMask(paths=["default_retry_policy"])
        )
    )
    changed: admin_pb2.Tenant = tenant_answer.tenant
    return changed


async def test_a_tenants_policy_comes_back_and_can_be_taken_away(database_url: str) -> None:
    async with running(database_url) as server:
        get = admin_service_pb2.GetTenantRequest(name="tenants/default")
        before = (await server.admin.GetTenant(get)).tenant
        assert not before.HasField("default_retry_policy")
        changed = await _set(server, POLICY)
        assert changed.default_retry_policy == POLICY
        assert (await server.admin.GetTenant(get)).tenant == changed
        # The same again changes nothing.
        assert (await _set(server, POLICY)).etag == changed.etag != before.etag
        assert not (await _set(server, None)).HasField("default_retry_policy")
        created = await server.admin.CreateTenant(
            admin_service_pb2.CreateTenantRequest(
                tenant_name="acme", tenant=admin_pb2.Tenant(default_retry_policy=POLICY)
            )
        )
        assert created.tenant.default_retry_policy == POLICY


async def test_a_run_shows_the_tenants_policy_under_its_jobs(database_url: str) -> None:
    async with running(database_url) as server:
        await _set(server, POLICY)
        own = job_pb2.RetryPolicy(max_failures=7, cap=Duration(seconds=60))
        for name, policy in (("plain", None), ("own", own)):
            await server.make_job(name, retry_policy=policy)
        seen = {}
        for name in ("plain", "own"):
            job = f"tenants/default/jobs/{name}"
            made = await server.runs.EnqueueRun(run_service_pb2.EnqueueRunRequest(job=job))
            request = run_service_pb2.GetRunRequest(name=made.run.name)
            seen[name] = (await server.runs.GetRun(request)).run.retry_policy
        assert (seen["plain"].max_failures, seen["plain"].cap.seconds) == (2, 3600)
        assert (seen["own"].max_failures, seen["own"].cap.seconds) == (7, 60)
        for policy in seen.values():
            assert (policy.base.seconds, list(policy.non_retryable_codes)) == (1, ["BAD"])


async def _store(world: World, policy: str | None) -> None:
    await world.raw.execute("UPDATE fencepost.tenants SET default_retry_policy = $1", policy)
    # As after the few seconds for which a server may overlook a change.
    world.specs._defaults.clear()


async def test_the_budget_is_the_jobs_then_the_tenants_then_the_default(world: World) -> None:
    await _store(world, '{"max_failures": 1}')
    tenants = await world.started(name="tenants")
    jobs = await world.started(job_spec(retry=plain_retry(max_failures=2)), name="jobs")
    assert (await world.report(tenants, failed())).run_state is RunState.DEAD
    assert (await world.report(jobs, failed())).run_state is RunState.RETRYING
    await _store(world, None)
    default = await world.started(name="default")
    assert (await world.report(default, failed())).run_state is RunState.RETRYING


async def test_a_change_reaches_runs_that_exist(world: World) -> None:
    run = await world.started()
    await _store(world, '{"max_lost_leases": 1, "jitter": 3, "base": 1000000}')
    await world.report(run, failed())
    at = from_datetime((await world.live(run.key))["available_at"])
    assert at == world.now + 2 * SECOND
    await world.pass_time(2 * SECOND)
    assert len(await world.claim()) == 1
    await world.pass_time(31 * SECOND)
    assert await world.reaper.reap() == 1
    row = await world.ended(run.key, "dead_letters")
    assert row["dead_reason"] == "max_lost_leases"


async def test_a_tenants_policy_is_not_read_for_every_report(world: World) -> None:
    await world.enqueue(await world.add_job(), 2)
    first, second = await world.claim(2)
    await world.report(first, failed())
    await world.raw.execute(
        "UPDATE fencepost.tenants SET default_retry_policy = '{\"max_failures\": 1}'"
    )
    # Within the few seconds for which a change may be overlooked.
    assert (await world.report(second, failed())).run_state is RunState.RETRYING
