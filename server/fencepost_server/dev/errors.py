"""What can go wrong on the way to a running development set-up, told so that a person can act."""


class DevError(Exception):
    """Something could not be started: what failed, why, and what to try."""

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why
        self.hint = hint
