"""The words that flags with a fixed choice take; each is the proto's value in lower case."""

from enum import StrEnum


class Overlap(StrEnum):
    """What to do with a fire while a run of the job is live."""

    SKIP = "skip"
    QUEUE_ONE = "queue-one"
    QUEUE_ALL = "queue-all"
    ALLOW = "allow"
    CANCEL_PREVIOUS = "cancel-previous"


class Misfire(StrEnum):
    """What to do with fires that come too late."""

    RUN_ONCE = "run-once"
    SKIP = "skip"
    CATCH_UP = "catch-up"


class DstGap(StrEnum):
    """What to do with a local time that does not exist."""

    RUN_AFTER_GAP = "run-after-gap"
    SKIP = "skip"


class DstFold(StrEnum):
    """What to do with a local time that comes twice."""

    FIRST = "first"
    LAST = "last"
    BOTH = "both"


class JobState(StrEnum):
    """Lifecycle of a definition."""

    ACTIVE = "active"
    PAUSED = "paused"
    FINISHED = "finished"


class OperationState(StrEnum):
    """Whether an operation goes on."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"


class OnConflict(StrEnum):
    """What to do when a run holds the unique key."""

    RETURN_EXISTING = "return-existing"
    REJECT = "reject"
    REPLACE_WAITING = "replace-waiting"


class RunState(StrEnum):
    """Life of a run."""

    QUEUED = "queued"
    BLOCKED = "blocked"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    DEAD = "dead"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
