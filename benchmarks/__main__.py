"""Runs the measurements that take minutes, one process after the other; `history` and `forecast`
fill large tables first and are started by their own names. So are `idle`, `steady`, `long_runs`,
`growth` and `bloat`, which take from ten minutes to an hour each, and `compare`, which installs
other queues.
"""

import subprocess
import sys

for name in ("cron", "firing", "enqueue", "delivery", "latency", "caps", "writes"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
