"""`python -m fencepost_server.cli` is the command `fencepost`."""

import sys

from fencepost_server.cli.main import main

sys.exit(main())
