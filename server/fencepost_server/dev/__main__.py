"""`python -m fencepost_server.dev`: what the command `fencepost dev` becomes."""

import argparse
import os
import sys

from fencepost_server.dev.development import Development
from fencepost_server.dev.errors import DevError


def main() -> int:
    """Run until stopped; returns the exit code."""
    parser = argparse.ArgumentParser(prog="fencepost dev")
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--reset", action="store_true")
    parser.add_argument("--listen", default=os.environ.get("FENCEPOST_LISTEN", "127.0.0.1:7600"))
    given = parser.parse_args()
    try:
        Development(listen=given.listen, demo=given.demo, reset=given.reset).run()
    except DevError as error:
        print(f"error: {error.what}", file=sys.stderr)
        print(f"  why:    {error.why}", file=sys.stderr)
        print(f"  try:    {error.hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the log has left; all parts are stopped by now.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
