"""What a caller decides about a job: its versioned definition, and whether it starts paused."""

from dataclasses import dataclass

from fencepost_server.domain.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition with its payload as stored bytes; pausing counts at creation only."""

    spec: JobSpec
    payload: bytes | None = None
    paused: bool = False
    pause_reason: str = ""

    def same_as(self, other: "Definition") -> bool:
        """Whether both describe one version."""
        return self.spec.to_json() == other.spec.to_json() and self.payload == other.payload
