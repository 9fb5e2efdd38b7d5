"""pg-boss (Node)."""

from benchmarks.compare import node_packages
from benchmarks.compare.tool import About, External


async def tool() -> External:
    """Ready to run. Raises NotMeasured."""
    node, folder = await node_packages.install()
    return External(
        about=About(
            name="pg-boss",
            version=node_packages.version("pg-boss"),
            history="yes, until its retention",
            fence="no",
            settings="batchSize 1,000, localConcurrency 4, burstWhenBatchFull; notify",
        ),
        unfinished="SELECT EXISTS (SELECT FROM pgboss.job WHERE state < 'completed')",
        command=[node, folder / "pg-boss.mjs"],
    )
