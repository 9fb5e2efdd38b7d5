"""pgqueuer (Python)."""

from benchmarks.compare import python_packages
from benchmarks.compare.tool import HERE, About, External


async def tool() -> External:
    """Ready to run. Raises NotMeasured."""
    python = await python_packages.install()
    return External(
        about=About(
            name="pgqueuer",
            version=await python_packages.version("pgqueuer"),
            history="a log row per change of status",
            fence="no",
            settings="asyncpg and uvloop, batch_size 1,000",
        ),
        unfinished="SELECT EXISTS (SELECT FROM pgqueuer)",
        command=[python, HERE / "python" / "pgqueuer_program.py"],
    )
