"""graphile-worker (Node)."""

from benchmarks.compare import node_packages
from benchmarks.compare.tool import About, External


async def tool() -> External:
    """Ready to run. Raises NotMeasured."""
    node, folder = await node_packages.install()
    return External(
        about=About(
            name="graphile-worker",
            version=node_packages.version("graphile-worker"),
            history="no, the row is deleted",
            fence="no",
            settings="localQueue 500, batched completions, 24 jobs at a time",
        ),
        unfinished="SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
        command=[node, folder / "graphile-worker.mjs"],
    )
