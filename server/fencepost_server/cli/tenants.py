"""`fencepost tenants`: owners of jobs and queues, and what each of them may use."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost_server.cli.failure import note, usage
from fencepost_server.cli.options import LimitOption, option
from fencepost_server.cli.paging import LIMIT_DEFAULT, collect
from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import (
    instant,
    one_line,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
)
from fencepost_server.cli.values import last_part, tenant_path

if TYPE_CHECKING:
    from fencepost.v1.admin_pb2 import Tenant

app = typer.Typer(help="Tenants: list, read, create, set limits.", no_args_is_help=True)

TenantName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tenant.")]


@app.command("list")
@calls_server
def list_tenants(settings: Settings, limit: LimitOption = LIMIT_DEFAULT) -> None:
    """List tenants by name.

    Examples:

      fencepost tenants list

      fencepost tenants list --limit 1000

      fencepost tenants list -o json
    """
    from fencepost.v1.admin_service_pb2 import ListTenantsRequest

    from fencepost_server.cli.connection import connected

    with connected(settings) as server:

        def fetch(size: int, token: str) -> tuple[Any, str]:
            request = ListTenantsRequest(page_size=size, page_token=token)
            page = server.call(server.admin.ListTenants, request, what="list tenants")
            return page.tenants, page.next_page_token

        tenants = collect(fetch, limit=limit)
    _show_many(settings, tenants)


@app.command("get")
@calls_server
def get(settings: Settings, name: TenantName) -> None:
    """Show one tenant with its limits.

    Examples:

      fencepost tenants get default

      fencepost tenants get acme

      fencepost tenants get acme -o json
    """
    from fencepost.v1.admin_service_pb2 import GetTenantRequest

    from fencepost_server.cli.connection import connected

    request = GetTenantRequest(name=tenant_path(name))
    with connected(settings) as server:
        answer = server.call(server.admin.GetTenant, request, what=f"get tenant {name!r}")
    _show(settings, answer.tenant)


@app.command("create")
@calls_server
def create(
    settings: Settings,
    name: TenantName,
    display_name: Annotated[str, option("--display-name", help="For people.")] = "",
) -> None:
    """Add a tenant, and its queue "default".

    Examples:

      fencepost tenants create acme

      fencepost tenants create acme --display-name "Acme Ltd."

      fencepost tenants create acme -o json
    """
    from fencepost.v1.admin_pb2 import Tenant
    from fencepost.v1.admin_service_pb2 import CreateTenantRequest

    from fencepost_server.cli.connection import connected, new_request_id

    request = CreateTenantRequest(
        tenant_name=name, tenant=Tenant(display_name=display_name), request_id=new_request_id()
    )
    with connected(settings) as server:
        answer = server.call(server.admin.CreateTenant, request, what=f"create tenant {name!r}")
    _show(settings, answer.tenant)
    note(f"work in it: fencepost --tenant {name} jobs create ...")


@app.command("limits")
@calls_server
def limits(
    settings: Settings,
    name: TenantName,
    max_in_flight: Annotated[
        int | None, option("--max-in-flight", help="Runs at once; 0: no limit.")
    ] = None,
    weight: Annotated[
        int | None, option("--weight", help="Share of shared workers, 1 to 1000.")
    ] = None,
    max_jobs: Annotated[int | None, option("--max-jobs", help="Jobs; 0: no limit.")] = None,
    max_live_runs: Annotated[
        int | None, option("--max-live-runs", help="Runs that have not ended; 0: no limit.")
    ] = None,
    max_creates_per_second: Annotated[
        int | None,
        option("--max-creates-per-second", help="Jobs and runs made per second; 0: no limit."),
    ] = None,
) -> None:
    """Change the limits of a tenant; they hold from the next call or claim on.

    Examples:

      fencepost tenants limits acme --max-in-flight 50

      fencepost tenants limits acme --weight 3

      fencepost tenants limits acme --max-in-flight 0
    """
    from fencepost.v1.admin_pb2 import Tenant
    from fencepost.v1.admin_service_pb2 import UpdateTenantRequest

    from fencepost_server.cli.connection import connected

    given = {
        "max_in_flight": max_in_flight,
        "weight": weight,
        "max_jobs": max_jobs,
        "max_live_runs": max_live_runs,
        "max_creates_per_second": max_creates_per_second,
    }
    tenant = Tenant(name=tenant_path(name))
    request = UpdateTenantRequest()
    for field, value in given.items():
        if value is None:
            continue
        try:
            setattr(tenant, field, value)
        except ValueError as error:
            flag = "--" + field.replace("_", "-")
            raise usage(f"{flag} {value} is out of range", why=str(error)) from error
        request.update_mask.paths.append(field)
    if not request.update_mask.paths:
        raise usage("nothing to set", why="no flag says what", hint="--max-in-flight N")
    request.tenant.CopyFrom(tenant)
    with connected(settings) as server:
        answer = server.call(server.admin.UpdateTenant, request, what=f"change tenant {name!r}")
    _show(settings, answer.tenant)


def _show_many(settings: Settings, tenants: "Sequence[Tenant]") -> None:
    if settings.json:
        print_json_list("tenants", tenants)
        return
    print_rows(
        ("TENANT", "DISPLAY NAME", "WEIGHT", "AT ONCE", "CREATED"),
        [
            (
                last_part(each.name),
                one_line(each.display_name),
                str(each.weight),
                _bound(each.max_in_flight),
                instant(each, "created_at"),
            )
            for each in tenants
        ],
    )


def _show(settings: Settings, tenant: "Tenant") -> None:
    if settings.json:
        print_json(tenant)
        return
    print_pairs(
        [
            ("tenant", last_part(tenant.name)),
            ("display name", one_line(tenant.display_name)),
            ("weight", str(tenant.weight)),
            ("at once", _bound(tenant.max_in_flight)),
            ("jobs", _bound(tenant.max_jobs)),
            ("live runs", _bound(tenant.max_live_runs)),
            ("creates/s", _bound(tenant.max_creates_per_second)),
            ("created", instant(tenant, "created_at")),
            ("changed", instant(tenant, "updated_at")),
        ]
    )


def _bound(limit: int) -> str:
    return str(limit) if limit else "no limit"
