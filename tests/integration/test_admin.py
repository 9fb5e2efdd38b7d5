"""AdminService over gRPC and a real database."""

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
from fencepost.v1 import admin_pb2, job_pb2, job_service_pb2, worker_pb2
from fencepost.v1 import admin_service_pb2 as pb
from fencepost_server.api.wire_admin import pack_subscriptions
from google.protobuf.field_mask_pb2 import FieldMask

from tests.integration.definition_server import DefinitionServer, refusal, serving

QUEUE = "tenants/default/queues/q"


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[DefinitionServer]:
    async with serving(database_url) as running:
        yield running


async def create_queue(server: DefinitionServer, name: str = "q") -> admin_pb2.Queue:
    request = pb.CreateQueueRequest(parent="tenants/default", queue_name=name)
    return (await server.admin.CreateQueue(request)).queue


async def test_the_server_tells_what_it_enforces(server: DefinitionServer) -> None:
    info = await server.admin.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.version, info.min_revision, info.max_revision) == ("0.0.0", 1, 1)
    assert info.limits.max_payload_bytes == 262_144
    assert info.limits.max_batch_entries == 1000
    assert info.history_retention.seconds == 30 * 86_400
    assert abs(info.server_at.ToMicroseconds() - server.now()) < 60_000_000
    assert info.tzdata_version.startswith("20")


async def test_a_tenant_comes_with_its_default_queue(server: DefinitionServer) -> None:
    request = pb.CreateTenantRequest(
        tenant_name="acme", tenant=admin_pb2.Tenant(display_name="Acme", weight=3)
    )
    made = (await server.admin.CreateTenant(request)).tenant
    assert (made.name, made.display_name, made.weight) == ("tenants/acme", "Acme", 3)
    assert (await server.admin.GetTenant(pb.GetTenantRequest(name=made.name))).tenant == made
    queues = await server.admin.ListQueues(pb.ListQueuesRequest(parent=made.name))
    assert [queue.name for queue in queues.queues] == ["tenants/acme/queues/default"]
    job = job_pb2.Job(target=job_pb2.Target(kind="k"))
    created = await server.jobs.CreateJob(
        job_service_pb2.CreateJobRequest(parent=made.name, job_name="a", job=job)
    )
    assert created.job.target.queue == "tenants/acme/queues/default"
    seen = await refusal(server.admin.CreateTenant(request))
    assert (seen.reason, seen.resource) == ("TENANT_ALREADY_EXISTS", "tenants/acme")


async def test_tenants_are_apart(server: DefinitionServer) -> None:
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name="acme"))
    job = job_pb2.Job(target=job_pb2.Target(kind="k"))
    mine = await server.jobs.CreateJob(
        job_service_pb2.CreateJobRequest(parent="tenants/default", job_name="a", job=job)
    )
    for last_part in ("a", mine.job.job_id):
        name = f"tenants/acme/jobs/{last_part}"
        seen = await refusal(server.jobs.GetJob(job_service_pb2.GetJobRequest(name=name)))
        assert seen.reason == "JOB_NOT_FOUND"
    theirs = job_pb2.Job(target=job_pb2.Target(kind="k", queue="tenants/acme/queues/default"))
    request = job_service_pb2.CreateJobRequest(parent="tenants/default", job=theirs)
    assert (await refusal(server.jobs.CreateJob(request))).reason == "QUEUE_NOT_FOUND"


async def test_a_tenant_changes_where_the_mask_says(server: DefinitionServer) -> None:
    made = (await server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name="acme"))).tenant
    wanted = admin_pb2.Tenant(
        name=made.name, display_name="x", max_in_flight=5, labels={"a": "b"}, etag=made.etag
    )
    request = pb.UpdateTenantRequest(
        tenant=wanted, update_mask=FieldMask(paths=["max_in_flight", "labels"])
    )
    changed = (await server.admin.UpdateTenant(request)).tenant
    assert (changed.display_name, changed.max_in_flight) == ("", 5)
    assert changed.labels == {"a": "b"}
    assert (await refusal(server.admin.UpdateTenant(request))).reason == "ETAG_MISMATCH"
    request.tenant.etag = changed.etag
    assert (await server.admin.UpdateTenant(request)).tenant == changed
    request.tenant.name = "tenants/none"
    assert (await refusal(server.admin.UpdateTenant(request))).reason == "TENANT_NOT_FOUND"


async def test_a_queue_is_made_read_and_paused(server: DefinitionServer) -> None:
    made = await create_queue(server)
    assert (made.name, made.paused) == (QUEUE, False)
    read = (await server.admin.GetQueue(pb.GetQueueRequest(name=QUEUE))).queue
    assert read.HasField("stats")
    read.ClearField("stats")
    assert read == made
    wanted = admin_pb2.Queue(name=QUEUE, paused=True, pause_reason="migration", max_in_flight=7)
    paused = (await server.admin.UpdateQueue(pb.UpdateQueueRequest(queue=wanted))).queue
    assert (paused.paused, paused.pause_reason, paused.max_in_flight) == (True, "migration", 7)
    row = (await server.query("SELECT * FROM fencepost.queues WHERE name = 'q'"))[0]
    assert (row["paused"], row["max_in_flight"], row["max_in_flight_per_key"]) == (True, 7, None)
    mask = FieldMask(paths=["paused"])
    resumed = await server.admin.UpdateQueue(
        pb.UpdateQueueRequest(queue=admin_pb2.Queue(name=QUEUE), update_mask=mask)
    )
    assert (resumed.queue.paused, resumed.queue.pause_reason) == (False, "")
    assert resumed.queue.max_in_flight == 7
    seen = await refusal(create_queue(server))
    assert (seen.code, seen.reason) == (grpc.StatusCode.ALREADY_EXISTS, "QUEUE_ALREADY_EXISTS")
    stale = admin_pb2.Queue(name=QUEUE, paused=True, etag=made.etag)
    assert (
        await refusal(server.admin.UpdateQueue(pb.UpdateQueueRequest(queue=stale)))
    ).reason == "ETAG_MISMATCH"


async def test_a_rate_is_set_read_and_removed(server: DefinitionServer) -> None:
    made = await server.admin.CreateQueue(
        pb.CreateQueueRequest(
            parent="tenants/default", queue_name="q", queue=admin_pb2.Queue(rate_limit=0.5)
        )
    )
    assert made.queue.rate_limit == 0.5
    read = await server.admin.GetQueue(pb.GetQueueRequest(name=QUEUE))
    assert read.queue.rate_limit == 0.5
    mask = FieldMask(paths=["rate_limit"])
    for rate in (1_000_000, 0.001, 0):
        wanted = admin_pb2.Queue(name=QUEUE, rate_limit=rate)
        request = pb.UpdateQueueRequest(queue=wanted, update_mask=mask)
        assert (await server.admin.UpdateQueue(request)).queue.rate_limit == rate


async def test_creations_sent_again_get_the_first_answer(server: DefinitionServer) -> None:
    tenant = pb.CreateTenantRequest(tenant_name="acme", request_id="t")
    queue = pb.CreateQueueRequest(parent="tenants/default", queue_name="q", request_id="q")
    tenants = await asyncio.gather(*(server.admin.CreateTenant(tenant) for _ in range(3)))
    queues = await asyncio.gather(*(server.admin.CreateQueue(queue) for _ in range(3)))
    assert all(each == tenants[0] for each in tenants)
    assert all(each == queues[0] for each in queues)
    tenant.tenant_name = queue.queue_name = "other"
    assert (await refusal(server.admin.CreateTenant(tenant))).reason == "REQUEST_ID_REUSED"
    assert (await refusal(server.admin.CreateQueue(queue))).reason == "REQUEST_ID_REUSED"


async def test_lists_are_in_the_order_of_names(server: DefinitionServer) -> None:
    for name in ("c", "a", "b"):
        await create_queue(server, name)
        await server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name=name))
    queues = pb.ListQueuesRequest(parent="tenants/default", page_size=3)
    first = await server.admin.ListQueues(queues)
    queues.page_token = first.next_page_token
    second = await server.admin.ListQueues(queues)
    found = [queue.name.rpartition("/")[2] for queue in (*first.queues, *second.queues)]
    assert (found, second.next_page_token) == (["a", "b", "c", "default"], "")
    tenants = pb.ListTenantsRequest(page_size=2)
    page = await server.admin.ListTenants(tenants)
    tenants.page_token = page.next_page_token
    rest = await server.admin.ListTenants(tenants)
    assert [each.name for each in (*page.tenants, *rest.tenants)] == [
        "tenants/a",
        "tenants/b",
        "tenants/c",
        "tenants/default",
    ]
    queues.page_token = page.next_page_token
    assert (await refusal(server.admin.ListQueues(queues))).reason == "INVALID_PAGE_TOKEN"


async def test_what_is_wrong_or_not_served_is_named(server: DefinitionServer) -> None:
    retry, limits = job_pb2.RetryPolicy(max_failures=1001), job_pb2.RunLimits(max_in_flight=1)
    for tenant, reason, name in (
        (admin_pb2.Tenant(max_jobs=1), "UNSPECIFIED", "tenant.max_jobs"),
        (admin_pb2.Tenant(max_live_runs=1), "UNSPECIFIED", "tenant.max_live_runs"),
        (
            admin_pb2.Tenant(max_creates_per_second=1),
            "UNSPECIFIED",
            "tenant.max_creates_per_second",
        ),
        (
            admin_pb2.Tenant(default_retry_policy=retry),
            "INVALID_FIELD",
            "tenant.default_retry_policy.max_failures",
        ),
        (admin_pb2.Tenant(weight=1001), "INVALID_FIELD", "tenant.weight"),
        (admin_pb2.Tenant(max_in_flight=-1), "INVALID_FIELD", "tenant.max_in_flight"),
    ):
        request = pb.CreateTenantRequest(tenant_name="acme", tenant=tenant)
        seen = await refusal(server.admin.CreateTenant(request))
        assert (seen.reason, seen.fields) == (reason, [name])
    for queue, reason, name in (
        (admin_pb2.Queue(rate_limit=-1), "INVALID_FIELD", "queue.rate_limit"),
        (admin_pb2.Queue(rate_limit=0.0001), "INVALID_FIELD", "queue.rate_limit"),
        (admin_pb2.Queue(rate_limit=1_000_001), "INVALID_FIELD", "queue.rate_limit"),
        (admin_pb2.Queue(rate_limit=math.nan), "INVALID_FIELD", "queue.rate_limit"),
        (admin_pb2.Queue(rate_limit=math.inf), "INVALID_FIELD", "queue.rate_limit"),
        (admin_pb2.Queue(default_limits=limits), "UNSPECIFIED", "queue.default_limits"),
        (admin_pb2.Queue(max_in_flight_per_key=-2), "INVALID_FIELD", "queue.max_in_flight_per_key"),
        (admin_pb2.Queue(labels={"": "x"}), "INVALID_FIELD", "queue.labels (key)"),
    ):
        create = pb.CreateQueueRequest(parent="tenants/default", queue_name="x", queue=queue)
        seen = await refusal(server.admin.CreateQueue(create))
        assert (seen.reason, seen.fields) == (reason, [name])
    for name in ("", "A", "1a", "a_b"):
        seen = await refusal(server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name=name)))
        assert seen.fields == ["tenant_name"]
    assert (await refusal(create_queue(server, "Q"))).fields == ["queue_name"]
    missing = pb.GetQueueRequest(name="tenants/default/queues/none")
    assert (await refusal(server.admin.GetQueue(missing))).reason == "QUEUE_NOT_FOUND"


@pytest.mark.parametrize(
    "method",
    [
        "DrainWorker",
        "CreateApiKey",
        "ListApiKeys",
        "RevokeApiKey",
    ],
)
async def test_methods_that_are_not_served_say_so(server: DefinitionServer, method: str) -> None:
    seen = await refusal(getattr(server.admin, method)(getattr(pb, f"{method}Request")()))
    assert seen.code is grpc.StatusCode.UNIMPLEMENTED
    assert seen.message.startswith(f"{method} is not served")


async def test_workers_are_listed_newest_heartbeat_first(server: DefinitionServer) -> None:
    await server.admin.CreateTenant(pb.CreateTenantRequest(tenant_name="acme"))
    subscriptions = pack_subscriptions(
        [
            worker_pb2.QueueSubscription(queue="tenants/default/queues/default", kinds=["k"]),
            worker_pb2.QueueSubscription(queue="tenants/acme/queues/default"),
        ]
    )
    insert = (
        "INSERT INTO fencepost.workers (worker_id, display_name, state, sdk, subscriptions,"
        " tenant_ids, labels, slots, first_seen_at, last_heartbeat_at)"
        " VALUES ($1::text::uuid, 'w', 'ready', $2, $3, $4, '{\"zone\": \"a\"}', 8, now(),"
        " now() - $5 * interval '1 minute')"
    )
    ids = [f"0197a4c2-7d1e-7b1a-9c55-00000000000{number}" for number in range(4)]
    sdk = worker_pb2.SdkInfo(name="fencepost-python").SerializeToString()
    for number, (tenants, minutes) in enumerate([([1], 3), ([1, 2], 1), ([2], 2), ([1], 61)]):
        await server.query(insert, ids[number], sdk, subscriptions, tenants, minutes)

    async def listed(parent: str, size: int = 1) -> list[str]:
        found, request = [], pb.ListWorkersRequest(parent=parent, page_size=size)
        while True:
            answer = await server.admin.ListWorkers(request)
            found += [worker.name.removeprefix("workers/") for worker in answer.workers]
            request.page_token = answer.next_page_token
            if not answer.next_page_token:
                return found

    assert await listed("tenants/-") == [ids[1], ids[2], ids[0]]
    assert await listed("tenants/default") == [ids[1], ids[0]]
    assert await listed("tenants/default", 10) == [ids[1], ids[0]]
    worker = (await server.admin.GetWorker(pb.GetWorkerRequest(name=f"workers/{ids[0]}"))).worker
    assert (worker.state, worker.slots) == (admin_pb2.WORKER_STATE_READY, 8)
    assert worker.labels == {"zone": "a"}
    assert worker.sdk.name == "fencepost-python"
    assert len(worker.subscriptions) == 2
    one = await server.admin.ListWorkers(pb.ListWorkersRequest(parent="tenants/acme", page_size=1))
    assert [each.queue for each in one.workers[0].subscriptions] == ["tenants/acme/queues/default"]
    lost = pb.GetWorkerRequest(name="workers/0197a4c2-7d1e-7b1a-9c55-000000000009")
    assert (await refusal(server.admin.GetWorker(lost))).reason == "WORKER_NOT_FOUND"
    filtered = pb.ListWorkersRequest(parent="tenants/-", filter="state:READY")
    assert (await refusal(server.admin.ListWorkers(filtered))).code is grpc.StatusCode.UNIMPLEMENTED
