"""`fencepost forecast`: the busiest minutes ahead, and what spreading them would do."""

from typing import Annotated, Any

import typer

from fencepost_server.cli.settings import Settings, calls_server
from fencepost_server.cli.tables import instant, one_line, print_json, print_rows

HOURS_MAX = 168
_CALL_TIMEOUT_S = 60.0
_RULE_CHARS = 40
_HOUR = 60


@calls_server
def forecast(
    settings: Settings,
    hours: Annotated[
        int, typer.Option(min=1, max=HOURS_MAX, help="How far to look ahead, in hours.")
    ] = 24,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="The jobs of every tenant.")
    ] = False,
) -> None:
    """Show the minutes in which most fires are expected, and where they come from.

    Examples:

      fencepost forecast

      fencepost forecast --hours 168 --tenant acme

      fencepost forecast --all-tenants -o json
    """
    from fencepost.v1 import admin_service_pb2

    from fencepost_server.cli.connection import connected

    request = admin_service_pb2.GetForecastRequest(
        parent="tenants/-" if all_tenants else settings.parent, hours=hours
    )
    with connected(settings) as server:
        answer = server.call(
            server.admin.GetForecast, request, what="forecast fires", timeout_s=_CALL_TIMEOUT_S
        )
    if settings.json:
        print_json(answer)
    else:
        _print(answer, hours)


def _print(answer: Any, hours: int) -> None:
    minutes = list(answer.fires_per_minute)
    total = sum(minutes)
    start = instant(answer, "start_at")
    if not total:
        print(f"no fires within {hours} h from {start}")
        return
    average = total / len(minutes)
    print(
        f"{total:,} fires within {hours} h from {start}: on average {average:,.1f} a minute, "
        f"in the busiest {max(minutes):,}"
    )
    print()
    rows = [(instant(peak, "minute_at"), f"{peak.fires:,}", _shares(peak)) for peak in answer.peaks]
    print_rows(("MINUTE", "FIRES", "FROM"), rows)
    print()
    for line in _spread_lines(answer, minutes):
        print(line)


def _shares(peak: Any) -> str:
    words = []
    for share in peak.shares:
        jobs = f"{share.jobs:,} job" + ("" if share.jobs == 1 else "s")
        words.append(f"{share.fires:,}: {one_line(share.rule, _RULE_CHARS)} ({jobs})")
    rest = peak.fires - sum(share.fires for share in peak.shares)
    if rest:
        words.append(f"{rest:,}: other rules")
    return "; ".join(words)


def _spread_lines(answer: Any, minutes: list[int]) -> list[str]:
    """What the worst minute would be if its hour's fires were spread evenly over the hour."""
    peak = answer.peaks[0]
    number = (peak.minute_at.seconds - answer.start_at.seconds) // 60
    # The clock hour in UTC, as far as it lies in the forecast.
    first = max(0, number - peak.minute_at.seconds // 60 % _HOUR)
    end = min(len(minutes), number - peak.minute_at.seconds // 60 % _HOUR + _HOUR)
    fires = sum(minutes[first:end])
    spread = -(-fires // (end - first))
    if spread >= peak.fires:
        return ["spread  the busiest hour is even already"]
    return [
        f"spread  evenly over its hour, the busiest minute would have {spread:,} fires, "
        f"not {peak.fires:,}",
        "        H in the minute field does that and moves the nominal times (H 0 * * * for "
        "0 0 * * *);",
        "        a jitter of 1h keeps the nominal times and delays when runs may start",
    ]
