"""Every setting of a server process, read from FENCEPOST_* and checked once at its start.

Durations are seconds and their names end in `_s`; counts say of what. `app.py` hands each
part only what it needs.
"""

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

ENV_PREFIX = "FENCEPOST_"

Role = Literal["api", "scheduler"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


class ConfigError(Exception):
    """Settings that do not pass; one line for each, naming variable, value and what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _split(value: object) -> object:
    if isinstance(value, str):
        return frozenset(part.strip() for part in value.split(",") if part.strip())
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class Config(BaseSettings):
    """The settings of one server process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False
    )

    database_url: str = Field(
        repr=False,
        description="Postgres, version 14 or newer, as postgresql://user@host:port/database. "
        "Required.",
    )
    listen: str = Field(
        default="127.0.0.1:7600",
        description="Address and port of gRPC: a loopback address unless `insecure` is set, "
        "because callers are not authenticated. Port 0 takes a free one. IPv6 as [::1]:7600.",
    )
    insecure: bool = Field(
        default=False,
        description="Allow any address in `listen`, although whoever reaches it may do everything.",
    )
    roles: Annotated[frozenset[Role], NoDecode, BeforeValidator(_split)] = Field(
        default=frozenset({"api", "scheduler"}),
        min_length=1,
        description="What this process does, comma-separated: api (calls and worker sessions), "
        "scheduler (fires, reaper, retention).",
    )
    reflection: bool = Field(
        default=True, description="Let tools such as grpcurl read the contract from the server."
    )

    request_pool_size: int = Field(
        default=8, ge=1, le=200, description="Connections to Postgres for calls of the API."
    )
    hot_pool_size: int = Field(
        default=4,
        ge=2,
        le=200,
        description="Connections to Postgres for fires, claims, heartbeats and completions; reads "
        "never take one of these.",
    )

    fire_batch_max: int = Field(
        default=2000, ge=1, le=10_000, description="Jobs fired in one transaction."
    )
    fire_concurrency: int = Field(
        default=2, ge=1, le=16, description="Transactions that fire side by side."
    )
    fire_poll_s: float = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="Longest sleep between two looks for due jobs, in seconds: what guarantees a "
        "fire when a hint is lost.",
    )
    fire_contended_s: float = Field(
        default=0.1,
        ge=0.01,
        le=5,
        description="Sleep after a look that found due jobs and could lock none, in seconds.",
    )

    catch_up_rate_per_tenant: float = Field(
        default=500.0,
        ge=0,
        le=1_000_000,
        description="Late runs of one tenant that become claimable per second after an outage, "
        "the newest first; fires handled within 10 seconds are not held back. 0: all at once.",
    )

    claim_batch_max: int = Field(
        default=500, ge=1, le=5000, description="Runs claimed by one statement."
    )
    claim_poll_s: float = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="Longest sleep between two looks for claimable runs of a queue, in seconds.",
    )
    tick_s: float = Field(
        default=0.01,
        ge=0.001,
        le=0.1,
        description="How long completions, heartbeats and releases gather before one statement "
        "stores them, in seconds.",
    )
    tick_batch_max: int = Field(
        default=1000,
        ge=1,
        le=5000,
        description="Completions, heartbeats or releases stored by one statement.",
    )
    notify_interval_s: float = Field(
        default=0.01,
        ge=0.001,
        le=1,
        description="Shortest time between two hints on one channel, in seconds.",
    )

    heartbeat_interval_s: float = Field(
        default=10.0,
        ge=1,
        le=10,
        description="How often workers send heartbeats, in seconds; workers that hold shorter "
        "leases than 30 s send them at a third of the shortest.",
    )
    reap_interval_s: float = Field(
        default=1.0,
        ge=0.1,
        le=60,
        description="How often leases that ran out are looked for, in seconds.",
    )
    promote_interval_s: float = Field(
        default=1.0,
        ge=0.1,
        le=60,
        description="How often blocked runs are looked at beside the hints, in seconds.",
    )

    history_retention_days: int = Field(
        default=30, ge=1, le=3650, description="Days that ended runs and their fires are kept."
    )
    day_tables_ahead: int = Field(
        default=8, ge=7, le=60, description="Days for which history tables are made in advance."
    )
    retention_interval_s: float = Field(
        default=600.0,
        ge=1,
        le=86_400,
        description="How often day tables are made and dropped, in seconds.",
    )

    drain_grace_s: float = Field(
        default=45.0,
        ge=0,
        le=3600,
        description="How long a stopping process lets calls and sessions finish, in seconds.",
    )

    log_level: Annotated[LogLevel, BeforeValidator(_lower)] = Field(
        default="info", description="Least important line that is logged."
    )
    log_format: Annotated[LogFormat, BeforeValidator(_lower)] = Field(
        default="auto",
        description="json: one object per line; console: for people; auto: console on a terminal.",
    )

    @field_validator("database_url")
    @classmethod
    def _is_postgres(cls, value: str) -> str:
        if urlsplit(value).scheme not in ("postgresql", "postgres"):
            # The value may hold a password, so it is not repeated.
            raise ValueError("must begin with postgresql:// or postgres://")
        return value

    @field_validator("listen")
    @classmethod
    def _has_host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        host, _ = split_address(self.listen)
        if not self.insecure and not is_loopback(host):
            raise ValueError(
                f"{ENV_PREFIX}LISTEN={self.listen} can be reached from other machines and callers "
                f"are not authenticated; use 127.0.0.1, ::1 or localhost, or set "
                f"{ENV_PREFIX}INSECURE=true"
            )
        return self


def load_config(**overrides: Any) -> Config:
    """The settings of the environment, with `overrides` (by field name) laid over them.

    Raises ConfigError with a line for each setting that does not pass.
    """
    try:
        return Config(**overrides)
    except ValidationError as error:
        raise ConfigError([_in_words(problem) for problem in error.errors()]) from None


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port". Raises ValueError saying what is allowed."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError("must be host:port, or [address]:port for IPv6")
    if not (port.isascii() and port.isdigit()) or int(port) > 65_535:
        raise ValueError(f"port {port!r} must be a number from 0 to 65535")
    return (host[1:-1] if bracketed else host), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost never counts."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in_words(problem: Any) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    field = str(problem["loc"][0])
    variable = f"{ENV_PREFIX}{field.upper()}"
    if problem["type"] == "missing":
        return f"{variable} is not set; it is required"
    if field == "database_url":
        return f"{variable} {message}"
    return f"{variable}={problem['input']}: {message[:1].lower()}{message[1:]}"
