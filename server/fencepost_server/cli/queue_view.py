"""How `fencepost queues` shows queues: as a table, as pairs, or as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencepost_server.cli.failure import note
from fencepost_server.cli.settings import Settings
from fencepost_server.cli.tables import (
    instant,
    print_json,
    print_json_list,
    print_pairs,
    print_rows,
    short_seconds,
)
from fencepost_server.cli.values import last_part

if TYPE_CHECKING:
    from fencepost.v1.admin_pb2 import Queue


def show_queues(settings: Settings, queues: "Sequence[Queue]") -> None:
    """Many, a line for each."""
    if settings.json:
        print_json_list("queues", queues)
        return
    if not queues:
        note("no queues; add one: fencepost queues create NAME")
        return
    print_rows(
        ("QUEUE", "STATE", "READY", "OLDEST", "RUNNING", "RETRYING", "DEAD", "WORKERS", "LIMITS"),
        [
            (
                last_part(each.name),
                _state(each),
                str(each.stats.ready_runs),
                _oldest(each),
                str(each.stats.running_runs),
                str(each.stats.retrying_runs),
                str(each.stats.dead_runs),
                str(each.stats.workers),
                _limits(each),
            )
            for each in queues
        ],
    )


def show_queue(settings: Settings, queue: "Queue") -> None:
    """One, whole."""
    if settings.json:
        print_json(queue)
        return
    stats = queue.stats
    counts = [
        ("ready", stats.ready_runs),
        ("delayed", stats.delayed_runs),
        ("retrying", stats.retrying_runs),
        ("blocked", stats.blocked_runs),
        ("running", stats.running_runs),
        ("dead", stats.dead_runs),
        ("workers", stats.workers),
    ]
    print_pairs(
        [
            ("queue", last_part(queue.name)),
            ("state", _state(queue) + (f" ({queue.pause_reason})" if queue.pause_reason else "")),
            ("limits", _limits(queue)),
            *((name, str(count)) for name, count in counts if queue.HasField("stats")),
            ("oldest", _oldest(queue)),
            ("counted", instant(stats, "measured_at")),
            ("changed", instant(queue, "updated_at")),
        ]
    )


def _state(queue: "Queue") -> str:
    return "paused" if queue.paused else "active"


def _oldest(queue: "Queue") -> str:
    micros = queue.stats.oldest_ready_age.ToMicroseconds()
    return short_seconds(micros / 1e6) if micros else ""


def _limits(queue: "Queue") -> str:
    parts = [
        f"{queue.max_in_flight} at once" if queue.max_in_flight else "",
        f"{queue.max_in_flight_per_key} per key" if queue.max_in_flight_per_key else "",
        f"{queue.rate_limit:g} a second" if queue.rate_limit else "",
    ]
    return ", ".join(part for part in parts if part)
