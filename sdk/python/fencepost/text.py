"""Text cut to the protocol's bounds and repaired where it is not valid UTF-8."""

from __future__ import annotations

_MARK = "\n... cut ...\n"


def repair(text: str) -> str:
    """Valid UTF-8 without NUL, whatever came in."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def cut(text: str, max_bytes: int) -> str:
    """Repaired, and its end cut off beyond `max_bytes` of UTF-8."""
    raw = repair(text).encode()
    return raw[:max_bytes].decode("utf-8", "ignore") if len(raw) > max_bytes else raw.decode()


def cut_middle(text: str, max_bytes: int) -> str:
    """Repaired, and its middle cut out beyond `max_bytes`: both ends of a trace matter."""
    raw = repair(text).encode()
    if len(raw) <= max_bytes:
        return raw.decode()
    half = (max_bytes - len(_MARK)) // 2
    head, tail = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return head + _MARK + tail
