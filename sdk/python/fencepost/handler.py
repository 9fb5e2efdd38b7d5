"""A handler as registered: its function, how to call it, and the type of its input."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fencepost.context import Context

_KIND = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONTEXT_NAMES = frozenset({"ctx", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """One kind and the function that handles its runs."""

    kind: str
    function: Callable[..., Any]
    is_async: bool
    input_type: Any
    input_at: int | None
    """Position of the input among the arguments; None: the function takes none."""
    context_at: int | None
    """Position of the context; None: the function takes none."""

    def arguments(self, value: object, context: Context) -> tuple[object, ...]:
        """What to call the function with."""
        if self.input_at is None:
            return () if self.context_at is None else (context,)
        if self.context_at is None:
            return (value,)
        return (value, context) if self.input_at == 0 else (context, value)


def make_handler(kind: str, function: Callable[..., Any], input_type: Any = None) -> Handler:
    """A handler of `function`, whose first argument without a Context is the input.

    ValueError for a bad kind, TypeError for a signature that cannot be called.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind must be 1 to 128 of [A-Za-z0-9._-], got {kind!r}")
    if kind.startswith("fencepost."):
        raise ValueError(f"kinds that begin with 'fencepost.' are reserved, got {kind!r}")
    hints = _hints(kind, function, needed=input_type is None)
    input_at = context_at = None
    for at, parameter in enumerate(_positional(kind, function)):
        annotation = hints.get(parameter.name, Any)
        bare = annotation is Any and parameter.name in _CONTEXT_NAMES
        if annotation is Context or bare:
            context_at = at
        elif input_at is None:
            input_at = at
            input_type = input_type if input_type is not None else annotation
        else:
            raise TypeError(f"handler of {kind!r} may take an input and a Context, nothing more")
    return Handler(
        kind=kind,
        function=function,
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        input_type=input_type if input_type is not None else Any,
        input_at=input_at,
        context_at=context_at,
    )


def _positional(kind: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            if parameter.default is parameter.empty or len(found) < 2:
                found.append(parameter)
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise TypeError(f"handler of {kind!r} has a required keyword, {parameter.name!r}")
    return found


def _hints(kind: str, function: Callable[..., Any], *, needed: bool) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        if not needed:
            return {}
        raise TypeError(
            f"an annotation of the handler of {kind!r} cannot be resolved ({error});"
            " define the type at module level or pass input_type="
        ) from error
    except TypeError:
        # Callable objects and partials: their signature is enough.
        return {}
