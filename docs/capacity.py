"""What a load needs, from what one run, fire, heartbeat and stored row cost: cores, server
processes, Postgres shards, disk and network.

Usage: python -m docs.capacity [--schedules N] [--fires N] [--peak N] [--days N]
       [--run-seconds S] [--payload BYTES]
The costs are measured with benchmarks/ (docs/performance.md); the rest is arithmetic.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured: CPU in microseconds, space and traffic in bytes; each for one fire, run, ...."""

    fire_database_us: float
    fire_scheduler_us: float
    run_database_us: float
    run_server_us: float
    renewal_database_us: float
    renewal_server_us: float
    wal_per_fire: int
    wal_per_run: int
    wal_per_renewal: int
    schedule_bytes: int
    history_bytes: int
    live_run_bytes: int
    wire_per_run: int
    wire_per_renewal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked. `peak` and `fires` are per second; `run_seconds` is how long a run takes."""

    name: str
    schedules: int
    fires: int
    peak: int
    days: int = 30
    run_seconds: float = 10.0
    payload: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How machines are loaded and cut: chosen, not measured."""

    # A core is planned for this share on average, so that a peak finds the rest.
    core_share: float = 0.5
    # One Postgres: cores, disk in bytes, and WAL in bytes per second that it may use.
    shard_cores: int = 16
    shard_disk: float = 8e12
    shard_wal: float = 100e6
    # Fires that are due together may start within so many seconds.
    spread_s: int = 60
    heartbeat_s: float = 10.0
    # What the disk needs over what is stored: bloat, WAL kept, room for one more day.
    disk_room: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The answer for one load; bytes and bytes per second."""

    load: Load
    due_at_once: int
    in_flight: float
    renewals: float
    server_cores: float
    server_processes: int
    scheduler_cores: float
    database_cores: float
    shards: int
    bound: str
    history: float
    disk: float
    wal: float
    network: float
    peak_database_cores: float


# Of 2026-11-30, two cores, Postgres 15, durable commits; page images included. docs/performance.md.
MEASURED = Costs(
    fire_database_us=47,
    fire_scheduler_us=0.8,
    run_database_us=47,
    run_server_us=33,
    renewal_database_us=12.6,
    renewal_server_us=7.7,
    wal_per_fire=831,
    wal_per_run=1_042,
    wal_per_renewal=104,
    schedule_bytes=1_000,
    history_bytes=330,
    live_run_bytes=385,
    wire_per_run=350,
    wire_per_renewal=55,
)
LOADS = (
    Load(name="10 million schedules", schedules=10_000_000, fires=2_800, peak=50_000),
    Load(name="100 million", schedules=100_000_000, fires=28_000, peak=500_000),
    Load(name="a billion", schedules=1_000_000_000, fires=280_000, peak=5_000_000),
)


def needs(load: Load, costs: Costs = MEASURED, rules: Rules = Rules()) -> Needs:
    """What this load needs. `peak` is fired at once, its runs start within `spread_s`."""
    in_flight = load.fires * load.run_seconds
    renewals = in_flight / rules.heartbeat_s
    server = (load.fires * costs.run_server_us + renewals * costs.renewal_server_us) / 1e6
    scheduler = load.fires * costs.fire_scheduler_us / 1e6
    database = (
        load.fires * (costs.fire_database_us + costs.run_database_us)
        + renewals * costs.renewal_database_us
    ) / 1e6
    wal = load.fires * (costs.wal_per_fire + costs.wal_per_run) + renewals * costs.wal_per_renewal
    history = load.fires * DAY_S * load.days * costs.history_bytes
    disk = rules.disk_room * (
        history
        + load.schedules * costs.schedule_bytes
        + (in_flight + load.peak * rules.spread_s) * (costs.live_run_bytes + load.payload)
    )
    shards = {
        "cores": database / (rules.shard_cores * rules.core_share),
        "disk": disk / rules.shard_disk,
        "WAL": wal / rules.shard_wal,
    }
    bound = max(shards, key=shards.__getitem__)
    return Needs(
        load=load,
        due_at_once=load.peak * rules.spread_s,
        in_flight=in_flight,
        renewals=renewals,
        server_cores=server,
        server_processes=math.ceil((server + scheduler) / rules.core_share),
        scheduler_cores=scheduler,
        database_cores=database,
        shards=math.ceil(shards[bound]),
        bound=bound,
        history=history,
        disk=disk,
        wal=wal,
        network=load.fires * (costs.wire_per_run + load.payload)
        + renewals * costs.wire_per_renewal,
        peak_database_cores=load.peak * costs.fire_database_us / 1e6,
    )


def cost_rows(costs: Costs = MEASURED) -> list[tuple[str, ...]]:
    """What the arithmetic stands on, as lines of a Markdown table."""
    return [
        (
            "a fire",
            f"{costs.fire_database_us:g} µs",
            f"{costs.fire_scheduler_us:g} µs",
            f"{costs.wal_per_fire:,} B",
            "",
        ),
        (
            "a run, claim to history",
            f"{costs.run_database_us:g} µs",
            f"{costs.run_server_us:g} µs",
            f"{costs.wal_per_run:,} B",
            f"{costs.wire_per_run:,} B and the payload",
        ),
        (
            "a heartbeat of one run",
            f"{costs.renewal_database_us:g} µs",
            f"{costs.renewal_server_us:g} µs",
            f"{costs.wal_per_renewal:,} B",
            f"{costs.wire_per_renewal:,} B",
        ),
    ]


def rows(answers: Sequence[Needs]) -> list[tuple[str, ...]]:
    """One line per quantity, one column per load: the lines of a Markdown table."""

    def line(name: str, values: Sequence[str]) -> tuple[str, ...]:
        return (name, *values)

    return [
        line("fires per second, on average", [f"{each.load.fires:,}" for each in answers]),
        line("due at one instant", [f"{each.due_at_once:,}" for each in answers]),
        line("runs in flight", [f"{each.in_flight:,.0f}" for each in answers]),
        line("heartbeats per second", [f"{each.renewals:,.0f}" for each in answers]),
        line(
            "cores of servers (sessions, claims, ends)",
            [f"{each.server_cores:,.1f}" for each in answers],
        ),
        line("cores of schedulers", [f"{each.scheduler_cores:,.2f}" for each in answers]),
        line(
            "server processes, half of a core each",
            [f"{each.server_processes:,}" for each in answers],
        ),
        line("cores of Postgres, on average", [f"{each.database_cores:,.1f}" for each in answers]),
        line(
            "cores of Postgres that fire the peak",
            [f"{each.peak_database_cores:,.1f}" for each in answers],
        ),
        line("Postgres shards (bound by)", [f"{each.shards:,} ({each.bound})" for each in answers]),
        line("history", [_size(each.history) for each in answers]),
        line("disk, all shards", [_size(each.disk) for each in answers]),
        line("WAL", [f"{_size(each.wal)}/s" for each in answers]),
        line(
            "network between servers and workers", [f"{_size(each.network)}/s" for each in answers]
        ),
    ]


def _size(value: float) -> str:
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value / 1e3:,.1f} kB"


def main() -> None:
    """Print the table, for the three loads or for the one that is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, help="one load of your own; the rest defaults")
    parser.add_argument("--fires", type=int, help="per second, on average")
    parser.add_argument("--peak", type=int, help="fires per second of the largest minute")
    parser.add_argument("--days", type=int, default=30, help="of history")
    parser.add_argument("--run-seconds", type=float, default=10.0)
    parser.add_argument("--payload", type=int, default=200, help="bytes")
    options = parser.parse_args()
    loads: Sequence[Load] = LOADS
    if options.schedules:
        fires = options.fires or max(1, round(options.schedules * 2_800 / 10_000_000))
        loads = [
            Load(
                name=f"{options.schedules:,} schedules",
                schedules=options.schedules,
                fires=fires,
                peak=options.peak or fires * 18,
                days=options.days,
                run_seconds=options.run_seconds,
                payload=options.payload,
            )
        ]
    answers = [needs(load) for load in loads]
    table = [("", *(each.load.name for each in answers)), *rows(answers)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for each in table:
        sys.stdout.write(
            "  ".join(
                value.ljust(width) for value, width in zip(each, widths, strict=True)
            ).rstrip()
            + "\n"
        )


if __name__ == "__main__":
    main()
