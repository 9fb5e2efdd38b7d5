"""Time of one next fire of a compiled expression, against croniter and cronsim, averaged over
common expressions in one run.

Usage: python -m benchmarks.cron [--fires 2000]
"""

import argparse
import time
from collections.abc import Callable
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from croniter import croniter
from cronsim import CronSim
from fencepost_server.clock import SECOND
from fencepost_server.domain.schedule import CronSpec
from fencepost_server.policy.cron import compile_cron

from benchmarks.setting import median

EXPRESSIONS = (
    "* * * * *",
    "*/5 * * * *",
    "0 * * * *",
    "*/15 9-17 * * 1-5",
    "0 */6 * * *",
    "30 2 * * *",
    "0 0 * * *",
    "0 9 * * 1-5",
    "15 3 * * 0",
    "0 0 1 * *",
    "0 6 1,15 * *",
)
ZONES = ("UTC", "Europe/Berlin", "America/New_York")
START = datetime(2026, 11, 30, 8, 17, 42, tzinfo=UTC)
# A scheduler asks about the near future: later than this, a case begins again at START.
DAYS_MAX = 400
ROUNDS = 3

Step = Callable[[], float]


def _ours(expression: str, zone: str) -> Step:
    rule = compile_cron(CronSpec(expressions=(expression,), time_zone=zone))
    at = int(START.timestamp()) * SECOND

    def step() -> float:
        nonlocal at
        found = rule.next_after(at)
        assert found is not None
        at = found
        return at / SECOND

    return step


def _croniter(expression: str, zone: str) -> Step:
    fires = croniter(expression, START.astimezone(ZoneInfo(zone)))
    return lambda: float(fires.get_next(float))


def _cronsim(expression: str, zone: str) -> Step:
    fires = CronSim(expression, START.astimezone(ZoneInfo(zone)))
    return lambda: next(fires).timestamp()


EVALUATORS = {"fencepost": _ours, "croniter": _croniter, "cronsim": _cronsim}


def _measure(make: Callable[[str, str], Step], expression: str, zone: str, fires: int) -> float:
    """Microseconds for one next fire."""
    end = START.timestamp() + DAYS_MAX * 86_400
    spent, left = 0.0, fires
    while left > 0:
        step = make(expression, zone)
        began, at = time.perf_counter(), 0.0
        while left > 0 and at < end:
            at = step()
            left -= 1
        spent += time.perf_counter() - began
    return spent / fires * 1e6


def main() -> None:
    """Print a table of µs for one next fire, the averages and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fires", type=int, default=2000, help="of ours, for each case")
    fires = parser.parse_args().fires
    totals = dict.fromkeys(EVALUATORS, 0.0)
    print(f"{'µs for one next fire':<34}" + "".join(f"{name:>11}" for name in EVALUATORS))
    for expression in EXPRESSIONS:
        for zone in ZONES:
            figures = {
                name: median(
                    [
                        # The others are slower; fewer fires measure them as well.
                        _measure(
                            make, expression, zone, fires if name == "fencepost" else fires // 10
                        )
                        for _ in range(ROUNDS)
                    ]
                )
                for name, make in EVALUATORS.items()
            }
            cells = "".join(f"{figure:11.1f}" for figure in figures.values())
            print(f"{expression:<18}{zone:<16}{cells}")
            for name, figure in figures.items():
                totals[name] += figure
    count = len(EXPRESSIONS) * len(ZONES)
    ours = totals["fencepost"]
    print(f"{'average':<34}" + "".join(f"{total / count:11.1f}" for total in totals.values()))
    print(f"{'times ours':<34}" + "".join(f"{total / ours:11.1f}" for total in totals.values()))


if __name__ == "__main__":
    main()
