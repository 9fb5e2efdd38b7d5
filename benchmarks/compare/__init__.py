"""The same work through other queues on Postgres, ours beside them: see `__main__`."""
