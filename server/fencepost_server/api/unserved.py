"""Methods of the contract that this version does not serve."""

from typing import NoReturn

from fencepost_server.errors import NotImplementedYet


def refuse_method(method: str) -> NoReturn:
    """Answers UNIMPLEMENTED. Raises NotImplementedYet."""
    raise NotImplementedYet(f"{method} is not served by this version of the server", method=method)
