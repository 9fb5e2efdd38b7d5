"""Hints of other processes, however they are spelled."""

from collections.abc import Iterable

from fencepost_server.clock import Instant
from fencepost_server.domain.run import Lane
from fencepost_server.engine.wake import JOBS_CHANNEL, LANES_CHANNEL, Wakes


def test_each_channel_wakes_its_own_listeners() -> None:
    jobs: list[str] = []
    lanes: list[tuple[list[Lane], Instant]] = []

    def woken(known: Iterable[Lane], at: Instant) -> None:
        lanes.append((sorted(known), at))

    wakes = Wakes()
    wakes.jobs_woken.append(lambda: jobs.append("jobs"))
    wakes.lanes_woken.append(woken)
    wakes.heard(JOBS_CHANNEL, "3 4")
    wakes.heard(LANES_CHANNEL, "1:2:3 4:5:6")
    wakes.heard(LANES_CHANNEL, "")
    wakes.heard("somebody_else", "x")
    assert jobs == ["jobs"]
    assert lanes == [([Lane(1, 2, 3), Lane(4, 5, 6)], 0), ([], 0)]
