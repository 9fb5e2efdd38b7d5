"""What a worker gets with a run: assignments, and the batches that carry them, written as bytes.

One is written for every run. Message objects cost several times as much as joining what a
version of a job always says, encoded once, with the few fields that differ from run to run.
"""

from binascii import hexlify
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from fencepost.v1 import payload_pb2, run_pb2, run_service_pb2, worker_pb2
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fencepost_server.api.wire_time import to_duration
from fencepost_server.clock import SECOND, Duration, Instant, format_instant
from fencepost_server.domain.names import format_job, format_queue
from fencepost_server.engine.claims import Claimed
from fencepost_server.engine.specs import RunSpec, SpecKey

_VARINT, _BYTES = 0, 2


def _varint(number: int) -> bytes:
    """Base 128, lowest group first, as protobuf writes numbers that are not negative."""
    if number < 0x80:
        return bytes((number,))
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


# Two groups at once: of numbers below 128 * 128, as they end, and as they go on.
_SMALL = [_varint(number) for number in range(1 << 14)]
_LOW = [bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(1 << 14)]

_DIGITS = [b"%03d" % number for number in range(1000)]


def _number(number: int) -> bytes:
    """As `_varint`, for numbers that differ from run to run."""
    if number < 1 << 14:
        return _SMALL[number]
    if number < 1 << 28:
        return _LOW[number & 0x3FFF] + _SMALL[number >> 14]
    if number < 1 << 42:
        return _LOW[number & 0x3FFF] + _LOW[number >> 14 & 0x3FFF] + _SMALL[number >> 28]
    return _varint(number)


def _tag(message: type[Message], field: str, wire_type: int) -> bytes:
    number = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | wire_type)


def _field(tag: bytes, body: bytes) -> bytes:
    return tag + _number(len(body)) + body


_ASSIGNMENT = worker_pb2.Assignment
_RUN = _tag(_ASSIGNMENT, "run", _BYTES)
_ATTEMPT = _tag(_ASSIGNMENT, "attempt", _VARINT)
_PAYLOAD = _tag(_ASSIGNMENT, "payload", _BYTES)
_LEASE_REMAINING = _tag(_ASSIGNMENT, "lease_remaining", _BYTES)
_FAILURE_COUNT = _tag(_ASSIGNMENT, "failure_count", _VARINT)
_PROGRESS = _tag(_ASSIGNMENT, "progress", _BYTES)
_LAST_FAILURE = _tag(_ASSIGNMENT, "last_failure", _BYTES)
_TRACE_CONTEXT = _tag(_ASSIGNMENT, "trace_context", _BYTES)
_TRACEPARENT = _tag(payload_pb2.TraceContext, "traceparent", _BYTES)
_SCHEDULED_AT = _tag(run_pb2.RunKey, "scheduled_at", _BYTES)
_NANOS = _tag(Timestamp, "nanos", _VARINT)
_RUNS = _tag(run_service_pb2.WorkResponse, "runs", _BYTES)
_BATCH_SEQ = _tag(worker_pb2.RunBatch, "batch_seq", _VARINT)
_BATCH_RUNS = _tag(worker_pb2.RunBatch, "runs", _BYTES)

_FIRST_ATTEMPT = _ATTEMPT + _number(1)
# In front of a header, which is always 55 characters long.
_TRACE_HEAD = b"%b\x39%b\x3700-" % (_TRACE_CONTEXT, _TRACEPARENT)


def write_batch(batch_seq: int, assignments: Sequence[bytes]) -> bytes:
    """A WorkResponse with a RunBatch of encoded assignments."""
    parts = [_BATCH_SEQ, _number(batch_seq)]
    for each in assignments:
        parts += (_BATCH_RUNS, _number(len(each)), each)
    return _field(_RUNS, b"".join(parts))


class Assignments:
    """Writes assignments, and keeps what is the same for the `size` versions used last."""

    def __init__(self, *, size: int = 10_000) -> None:
        self._size = size
        self._templates: OrderedDict[SpecKey, _Template] = OrderedDict()

    def write(self, run: Claimed, *, now: Instant) -> worker_pb2.Assignment:
        """Everything the handler needs; `now` is when the message is about to be written."""
        (encoded,) = self.encode([run], now=now)
        return worker_pb2.Assignment.FromString(encoded)

    def encode(self, runs: Sequence[Claimed], *, now: Instant) -> list[bytes]:
        """As `write`, serialized, for many runs."""
        written: list[bytes] = []
        # Neighbours mostly share these.
        spec: RunSpec | None = None
        template: _Template | None = None
        seconds: _Seconds | None = None
        lease_until, remaining = -1, b""
        for run in runs:
            (_, at), attempt = run.key, run.attempt
            if template is None or run.spec is not spec:
                template, spec = self._template(run), run.spec
            second, micros = divmod(at, SECOND)
            if seconds is None or second != seconds.second:
                seconds = _Seconds(second)
            if run.lease_until != lease_until:
                lease_until = run.lease_until
                remaining = _remaining(lease_until - now)
            if micros:
                stamp = seconds.stamp + _NANOS + _number(micros * 1000)
                digits = _DIGITS[micros // 1000] + _DIGITS[micros % 1000]
                key = b"".join((template.job_id, seconds.text, b".", digits, b"Z/"))
            else:
                stamp = seconds.stamp
                key = b"".join((template.job_id, seconds.text, b"Z/"))
            is_plain = attempt == 1 and run.payload is None and run.labels is None
            written.append(
                b"".join(
                    (
                        _RUN,
                        # The key is shorter than 128 bytes, and so is its instant.
                        _SMALL[template.key_bytes + len(stamp)],
                        template.key,
                        _SMALL[len(stamp)],
                        stamp,
                        template.plain if is_plain else template.of(run),
                        remaining,
                        _TRACE_HEAD,
                        # The ids of domain/run.py.
                        hexlify(sha256(key + b"trace").digest()[:16]),
                        b"-",
                        hexlify(sha256(key + b"%d" % attempt).digest()[:8]),
                        b"-01",
                    )
                )
            )
        return written

    def _template(self, run: Claimed) -> "_Template":
        key = SpecKey(run.key.job_id, run.version)
        found = self._templates.get(key)
        if found is None:
            found = self._templates[key] = _Template(run)
            if len(self._templates) > self._size:
                self._templates.popitem(last=False)
        else:
            self._templates.move_to_end(key)
        return found


class _Template:
    """What is the same for all runs of a version."""

    __slots__ = ("_fields", "_labels", "_payload", "job_id", "key", "key_bytes", "plain")

    def __init__(self, run: Claimed) -> None:
        spec = run.spec
        self.job_id = b"%b/" % run.key.job_id.encode()
        # Of the run key, up to the length of its instant.
        self.key = run_pb2.RunKey(job_id=run.key.job_id).SerializeToString() + _SCHEDULED_AT
        self.key_bytes = len(self.key) + 1
        self._fields = _fields(run)
        self._payload = b"" if spec.payload is None else _field(_PAYLOAD, spec.payload)
        self._labels = _labels(spec.spec.labels)
        # Of a first attempt with the payload and labels of the job.
        self.plain = _FIRST_ATTEMPT + self._fields + self._payload + self._labels

    def of(self, run: Claimed) -> bytes:
        """All of a run but its key, its lease and its trace."""
        parts = [
            _ATTEMPT,
            _number(run.attempt),
            self._fields,
            self._payload if run.payload is None else _field(_PAYLOAD, run.payload),
            self._labels if run.labels is None else _labels(run.labels),
        ]
        if run.failure_count:
            parts += (_FAILURE_COUNT, _number(run.failure_count))
        if run.progress is not None:
            parts.append(_field(_PROGRESS, run.progress))
        if run.last_failure is not None:
            parts.append(_field(_LAST_FAILURE, run.last_failure))
        return b"".join(parts)


class _Seconds:
    """A whole second as part of a timestamp and of a run key in text."""

    __slots__ = ("second", "stamp", "text")

    def __init__(self, second: int) -> None:
        self.second = second
        self.stamp = Timestamp(seconds=second).SerializeToString()
        self.text = format_instant(second * SECOND)[:-1].encode()


def _remaining(left: Duration) -> bytes:
    return _field(_LEASE_REMAINING, to_duration(max(0, left)).SerializeToString())


def _labels(labels: Mapping[str, str]) -> bytes:
    return _ASSIGNMENT(labels=labels).SerializeToString()


def _fields(run: Claimed) -> bytes:
    spec, limits = run.spec.spec, run.spec.spec.limits
    message = _ASSIGNMENT(
        queue=format_queue(run.spec.tenant, spec.target.queue_name),
        kind=spec.target.kind,
        job=format_job(run.spec.tenant, run.spec.job_name),
        start_mode=int(limits.start_mode),  # type: ignore[arg-type]
        lease_uncertain_action=int(limits.lease_uncertain_action),  # type: ignore[arg-type]
        max_failures=spec.retry_policy.max_failures,
        lease_ttl=to_duration(run.lease_ttl),
        attempt_timeout=to_duration(limits.attempt_timeout),
        cancel_grace=to_duration(limits.cancel_grace),
    )
    return message.SerializeToString()
