"""The W3C trace context of a call, taken from its metadata."""

import re
from collections.abc import Mapping
from typing import Any

import grpc.aio

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_BYTES_MAX = {"tracestate": 512, "baggage": 2048}


def read_trace_context(context: "grpc.aio.ServicerContext[Any, Any]") -> Mapping[str, str] | None:
    """The headers that are well-formed; None without a traceparent.

    A trace is a help and never a reason to refuse a call, so anything else is left out.
    """
    sent = dict(context.invocation_metadata() or ())
    parent = sent.get("traceparent", "")
    if not isinstance(parent, str) or _TRACEPARENT.fullmatch(parent) is None:
        return None
    kept = {"traceparent": parent}
    for key, bytes_max in _BYTES_MAX.items():
        value = sent.get(key, "")
        if isinstance(value, str) and 0 < len(value) <= bytes_max and value.isprintable():
            kept[key] = value
    return kept
