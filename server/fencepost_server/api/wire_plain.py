"""Batches of plain enqueues in bytes, read without a message object per run and field, and
answered without one: those would cost more than all else that the server does for a run.

Only what is written as protobuf libraries write it is read here (fields in order, each once,
lengths as short as can be), so that it means the same as the message, and the hash of a run's
bytes is the hash of its message.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from fencepost_server.api.validate import BATCH_ENTRIES_MAX, REQUEST_ID_CHARS_MAX
from fencepost_server.api.wire_run import write_run
from fencepost_server.clock import SECOND, Instant, format_instant
from fencepost_server.domain.names import format_job, parse_job, parse_tenant
from fencepost_server.engine.plain_enqueue import JOBS_MAX, PlainMade, PlainRuns
from fencepost_server.errors import FencepostError, InvalidField
from fencepost_server.store.runs import RunRecord

# Tags of BatchEnqueueRunsRequest, EnqueueRunRequest, and of the first field of their parts.
_PARENT, _ENTRY, _FIRST = 0x0A, 0x12, 0x0A
_PAYLOAD, _UNIQUE_KEY, _REQUEST_ID = 0x12, 0x1A, 0x4A

# EnqueueRunResponse.run.key.scheduled_at, 12 bytes long; the part from the fifth byte on is
# scheduled_at as a field of RunKey.
_NOTE_HEAD = b"\x0a\x10\x12\x0e\x12\x0c\x08"
_RUN_KEY_HEAD = b"\x12\x34\x0a\x24"
_TRACE_HEAD = b"\xea\x01\x39\x0a\x3700-"
_UNIQUE_HEAD = b"\x82\x01"
_RUN_KEY_SIZE, _TRACE_SIZE = 2 + 52, 3 + 57


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBatch:
    """A call whose runs are all plain, and the bytes it came as."""

    tenant: str
    runs: PlainRuns
    raw: bytes


def read_plain(raw: bytes) -> PlainBatch | None:
    """The call, or None when it is not plain, or not even a message."""
    try:
        return _read(raw)
    except (IndexError, UnicodeDecodeError, FencepostError):
        # Whatever is wrong with it, reading it as a message finds it, and says what it is.
        return None


def _read(raw: bytes) -> PlainBatch | None:
    size = len(raw)
    if raw[0] != _PARENT or raw[1] > 127:
        return None
    at = 2 + raw[1]
    tenant = parse_tenant(raw[2:at].decode(), field="parent")
    jobs: dict[bytes, int] = {}
    number, last_job = 0, b""
    numbers: list[int] = []
    payloads: list[bytes | None] = []
    keys: list[str | None] = []
    request_ids: list[str] = []
    hashes: list[bytes] = []
    while at < size:
        if raw[at] != _ENTRY:
            return None
        length = raw[at + 1]
        at += 2
        if length > 127:
            if not 0 < raw[at] < 128:
                return None
            length += (raw[at] << 7) - 128
            at += 1
        begin, stop = at, at + length
        if raw[at] != _FIRST or raw[at + 1] > 127:
            return None
        end = at + 2 + raw[at + 1]
        job = raw[at + 2 : end]
        if job != last_job:
            number = jobs.get(job) or _add_job(jobs, job, tenant)
            last_job = job
        at = end
        payload = key = None
        tag = raw[at] if at < stop else 0
        if tag == _PAYLOAD:
            length = raw[at + 1]
            at += 2
            if length > 127:
                if not 0 < raw[at] < 128:
                    return None
                length += (raw[at] << 7) - 128
                at += 1
            end = at + length
            # No more than `json`: then these bytes are the stored form, too.
            length, text = raw[at + 1], at + 2
            if length > 127:
                if not 0 < raw[text] < 128:
                    return None
                length += (raw[text] << 7) - 128
                text += 1
            if raw[at] != _FIRST or text + length != end:
                return None
            raw[text:end].decode()
            payload = raw[at:end]
            at = end
            tag = raw[at] if at < stop else 0
        if tag == _UNIQUE_KEY:
            length = raw[at + 3]
            if raw[at + 1] != length + 2 or raw[at + 2] != _FIRST or not 0 < length < 126:
                return None
            end = at + 4 + length
            key = raw[at + 4 : end].decode()
            if "\x00" in key:
                return None
            at = end
            tag = raw[at] if at < stop else 0
        if tag == _REQUEST_ID:
            end = at + 2 + raw[at + 1]
            request_id = raw[at + 2 : end].decode()
            if not _is_request_id(request_id):
                return None
            request_ids.append(request_id)
            hashes.append(sha256(raw[begin:at], usedforsecurity=False).digest())
            at = end
        if at != stop:
            return None
        numbers.append(number)
        payloads.append(payload)
        keys.append(key)
    if at != size or not 1 <= len(numbers) <= BATCH_ENTRIES_MAX or len(jobs) > JOBS_MAX:
        return None
    if request_ids and len(set(request_ids)) != len(numbers):
        return None
    named = [each for each in zip(numbers, keys, strict=True) if each[1] is not None]
    if len(set(named)) != len(named):
        return None
    return PlainBatch(
        tenant=tenant,
        runs=PlainRuns(
            jobs=[name.rpartition(b"/")[2].decode() for name in jobs],
            numbers=numbers if len(jobs) > 1 else (),
            payloads=payloads,
            unique_keys=keys if named else (),
            request_ids=request_ids,
            body_hashes=hashes,
        ),
        raw=raw,
    )


def _is_request_id(text: str) -> bool:
    return 0 < len(text) <= REQUEST_ID_CHARS_MAX and text.isascii() and text.isprintable()


def _add_job(jobs: dict[bytes, int], name: bytes, tenant: str) -> int:
    if parse_job(name.decode(), field="job").tenant != tenant:
        raise InvalidField("job: of another tenant", field="job")
    jobs[name] = len(jobs) + 1
    return len(jobs)


def notes_of(ats: Sequence[Instant]) -> list[bytes]:
    """What request ids remember of a run besides its job, by its instant."""
    notes: list[bytes] = []
    known, head = -1, b""
    for at in ats:
        second, micros = divmod(at, SECOND)
        if second != known:
            known, head = second, _NOTE_HEAD + _five_bytes(second) + b"\x10"
        notes.append(head + _five_bytes(micros * 1000))
    return notes


def _five_bytes(number: int) -> bytes:
    """A varint of always the same length."""
    return (
        number & 0x7F
        | (number & 0x3F80) << 1
        | (number & 0x1FC000) << 2
        | (number & 0xFE00000) << 3
        | (number & 0x7F0000000) << 4
        | 0x80808080
    ).to_bytes(5, "little")


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


def write_plain(made: PlainMade, runs: PlainRuns) -> bytes:
    """A BatchEnqueueRunsResponse whose outcomes are all new runs.

    A message may be written in parts: what all runs of a job share comes first in each.
    """
    templates = [_Template(record) for record in made.records]
    numbers: Iterable[int] = runs.numbers or (1 for _ in made.ats)
    keys: Iterable[str | None] = runs.unique_keys or (None for _ in made.ats)
    parts: list[bytes] = []
    for at, note, number, key in zip(made.ats, made.notes, numbers, keys, strict=True):
        template = templates[number - 1]
        second, micros = divmod(at, SECOND)
        if second != template.second:
            template.begin(second)
        digits = b"%06dZ" % micros
        text = template.key_text + digits
        unique = b"" if key is None else key.encode()
        parts += (
            template.heads.get(len(unique)) or template.add_head(len(unique)),
            unique,
            template.name,
            digits,
            template.key,
            note[4:],
            _TRACE_HEAD,
            sha256(text + b"/trace", usedforsecurity=False).hexdigest()[:32].encode(),
            b"-",
            sha256(text + b"/0", usedforsecurity=False).hexdigest()[:16].encode(),
            b"-01",
        )
    return b"".join(parts)


class _Template:
    """What the answers about runs of one job have in common."""

    def __init__(self, record: RunRecord) -> None:
        run = write_run(record, full=False)
        run.ClearField("name")
        run.ClearField("key")
        run.trace_context.ClearField("traceparent")
        self._common = run.SerializeToString()
        self._job = format_job(record.tenant, record.job_name)
        self._job_id = record.key.job_id
        self.key = _RUN_KEY_HEAD + self._job_id.encode()
        self.heads: dict[int, bytes] = {}
        self.second = -1
        self.name = self.key_text = b""

    def begin(self, second: int) -> None:
        """Runs of a second follow."""
        instant = format_instant(second * SECOND)[:-1] + "."
        self.second = second
        self.key_text = f"{self._job_id}/{instant}".encode()
        name = f"{self._job}/runs/{instant}".encode()
        self.name = b"\x0a" + _varint(len(name) + 7) + name
        self.heads.clear()

    def add_head(self, key_size: int) -> bytes:
        """All before the unique key of a run, or before its name when it has none."""
        unique = _UNIQUE_HEAD + _varint(key_size) if key_size else b""
        size = (
            len(self._common)
            + len(unique)
            + key_size
            + len(self.name)
            + 7
            + _RUN_KEY_SIZE
            + _TRACE_SIZE
        )
        head = self._common + unique
        size -= len(head)
        for _ in ("run", "response", "outcome"):
            head = b"\x0a" + _varint(size + len(head)) + head
        self.heads[key_size] = head
        return head
