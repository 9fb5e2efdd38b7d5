"""`python -m fencepost_server`: one server process, configured by FENCEPOST_* variables."""

import sys

import uvloop

from fencepost_server.app import StartError, serve
from fencepost_server.config import ConfigError, load_config
from fencepost_server.telemetry import configure_logging


def main() -> int:
    """The exit code: 0 after a drain, 1 if it cannot start, 2 for settings that do not pass."""
    try:
        config = load_config()
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - logging is not configured yet
        return 2
    configure_logging(level=config.log_level, style=config.log_format)
    try:
        uvloop.run(serve(config))
    except StartError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for the person who started it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
