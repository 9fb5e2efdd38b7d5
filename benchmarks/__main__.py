"""Runs the measurements that take minutes, one process after the other; `history` and `forecast`
fill large tables first and are started by their own names.
"""

import subprocess
import sys

for name in ("cron", "firing", "enqueue", "delivery", "latency", "caps"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
