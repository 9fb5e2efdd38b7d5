"""Runs every measurement, one process after the other."""

import subprocess
import sys

for name in ("cron", "firing", "delivery", "latency"):
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
