"""The options that every command which calls the server has, before or after its name."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from fencepost_server.cli.failure import usage

SERVER_DEFAULT = "localhost:7600"
TENANT_DEFAULT = "default"

P = ParamSpec("P")


class OutputFormat(StrEnum):
    """What a command writes to standard output."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Options as typed; None where they were not."""

    server: str | None = None
    tenant: str | None = None
    output: OutputFormat | None = None
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where a command goes and how it answers."""

    server: str
    tenant: str
    output: OutputFormat
    verbose: bool

    @property
    def parent(self) -> str:
        """Resource name of the tenant."""
        return f"tenants/{self.tenant}"

    @property
    def json(self) -> bool:
        """Whether standard output is JSON."""
        return self.output is OutputFormat.JSON


ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help=f"Server to call; else FENCEPOST_SERVER, else {SERVER_DEFAULT}.",
        show_default=False,
    ),
]
TenantOption = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help=f"Tenant to work in; else FENCEPOST_TENANT, else {TENANT_DEFAULT}.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    OutputFormat | None,
    typer.Option(
        "-o",
        "--output",
        help="Form of the answer; else FENCEPOST_OUTPUT, else table.",
        show_default=False,
    ),
]
VerboseOption = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show status codes and request ids of errors.")
]

_OPTIONS = [
    inspect.Parameter(
        "server", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ServerOption
    ),
    inspect.Parameter(
        "tenant", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=TenantOption
    ),
    inspect.Parameter(
        "output", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OutputOption
    ),
    inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VerboseOption
    ),
]


def calls_server(command: Callable[Concatenate[Settings, P], None]) -> Callable[..., None]:
    """Give a command the options above; it takes them together as its first argument."""

    @functools.wraps(command)
    def with_options(
        *,
        context: typer.Context,
        server: str | None,
        tenant: str | None,
        output: OutputFormat | None,
        verbose: bool,
        **values: Any,
    ) -> None:
        after = Given(server=server, tenant=tenant, output=output, verbose=verbose)
        before = context.obj if isinstance(context.obj, Given) else Given()
        call: Callable[..., None] = command
        call(resolve(before, after), **values)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    typed: Any = with_options
    typed.__signature__ = inspect.Signature([context, *own, *_OPTIONS])
    # typer would look through to the command itself.
    typed.__annotations__ = {}
    del typed.__wrapped__
    return with_options


def resolve(before: Given, after: Given) -> Settings:
    """An option after the command's name wins over one before it, that over the environment."""
    output = after.output or before.output
    if output is None:
        named = os.environ.get("FENCEPOST_OUTPUT") or OutputFormat.TABLE
        if named not in list(OutputFormat):
            raise usage(f"FENCEPOST_OUTPUT={named} is not known", why="it must be table or json")
        output = OutputFormat(named)
    tenant = after.tenant or before.tenant or os.environ.get("FENCEPOST_TENANT") or TENANT_DEFAULT
    if "/" in tenant:
        raise usage(
            f"{tenant!r} is not the name of a tenant", why="it is the last part only, without /"
        )
    return Settings(
        server=after.server
        or before.server
        or os.environ.get("FENCEPOST_SERVER")
        or SERVER_DEFAULT,
        tenant=tenant,
        output=output,
        verbose=after.verbose or before.verbose,
    )
