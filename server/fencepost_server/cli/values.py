"""Reads what people type: durations, instants, labels, payloads, names."""

import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from fencepost_server.cli.failure import CliError, ExitCode, usage

PAYLOAD_BYTES_MAX = 256 * 1024

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_DURATION_MAX = timedelta(days=36_600)


def parse_duration(flag: str, text: str) -> timedelta:
    """A duration such as 90s, 5m, 1h30m or 2d."""
    position, total = 0, timedelta()
    try:
        while position < len(text):
            match = _DURATION.match(text, position)
            if match is None:
                break
            total += float(match[1]) * _UNITS[match[2]]
            position = match.end()
    except OverflowError:
        total = _DURATION_MAX + timedelta(days=1)
    if not text or position != len(text) or total > _DURATION_MAX:
        raise usage(
            f"{flag} {text!r} is not a duration",
            why="it is a number with a unit, ms, s, m, h or d, or several: 90s, 5m, 1h30m",
        )
    return total


def parse_instant(flag: str, text: str) -> datetime:
    """An instant with its offset, such as 2027-03-28T09:00:00Z."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise usage(
            f"{flag} {text!r} is not an instant",
            why="it is a date, a time and an offset: 2027-03-28T09:00:00Z or ...+02:00",
        )
    return at


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels typed as key=value."""
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise usage(f"--label {text!r} is not a label", why="it is key=value: --label team=web")
        if key in labels:
            raise usage(f"--label {key} comes twice", why="a label has one value")
        labels[key] = value
    return labels


def read_payload(text: str) -> str:
    """JSON as typed, or of a file with @path, or of standard input with @-; kept byte for byte."""
    if text.startswith("@"):
        text = read_text(text[1:], what="the payload")
    if len(text.encode()) > PAYLOAD_BYTES_MAX:
        raise usage(
            f"--payload of {len(text.encode())} bytes is too large",
            why=f"at most {PAYLOAD_BYTES_MAX} bytes are kept",
            hint="store the data elsewhere and send where it is",
        )
    try:
        json.loads(text)
    except ValueError as error:
        raise usage(
            "--payload is not JSON",
            why=str(error),
            hint="""quote it for the shell: --payload '{"region": "eu"}', or give a file: @f""",
        ) from error
    return text


def read_text(path: str, *, what: str) -> str:
    """A file, or standard input for -. Raises CliError, with `what` it was to be."""
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise CliError(
            f"cannot read {what} from {path}",
            why=error.strerror or str(error),
            exit_code=ExitCode.USAGE,
        ) from error
    except UnicodeDecodeError as error:
        raise usage(f"cannot read {what} from {path}", why=f"it is not UTF-8: {error}") from error


def job_path(tenant: str, text: str) -> str:
    """Resource name of a job given by name, id or resource name."""
    return text if text.startswith("tenants/") else f"tenants/{tenant}/jobs/{text}"


def run_path(tenant: str, text: str) -> str:
    """Resource name of a run given as JOB/SCHEDULED_AT or by resource name."""
    if text.startswith("tenants/"):
        return text
    job, slash, scheduled_at = text.rpartition("/")
    if not slash or not job:
        raise usage(
            f"{text!r} is not the name of a run",
            why="it is JOB/SCHEDULED_AT, as the first column of fencepost runs list shows it",
        )
    return f"tenants/{tenant}/jobs/{job}/runs/{scheduled_at}"


def operation_path(tenant: str, text: str) -> str:
    """Resource name of an operation given by id or resource name."""
    return text if text.startswith("tenants/") else f"tenants/{tenant}/operations/{text}"


def tenant_path(text: str) -> str:
    """Resource name of a tenant given by name or resource name."""
    return text if text.startswith("tenants/") else f"tenants/{text}"


def queue_path(tenant: str, text: str) -> str:
    """Resource name of a queue given by name or resource name."""
    return text if text.startswith("tenants/") else f"tenants/{tenant}/queues/{text}"


def calendar_path(tenant: str, text: str) -> str:
    """Resource name of a calendar given by name or resource name."""
    return text if text.startswith("tenants/") else f"tenants/{tenant}/calendars/{text}"


def short_run(name: str) -> str:
    """A run's resource name as people type it: JOB/SCHEDULED_AT."""
    parts = name.split("/")
    return f"{parts[3]}/{parts[5]}" if len(parts) == 6 else name


def last_part(name: str) -> str:
    """The last part of a resource name."""
    return name.rpartition("/")[2]
