"""procrastinate (Python)."""

from benchmarks.compare import python_packages
from benchmarks.compare.tool import HERE, About, External


async def tool() -> External:
    """Ready to run. Raises NotMeasured."""
    python = await python_packages.install()
    return External(
        about=About(
            name="procrastinate",
            version=await python_packages.version("procrastinate"),
            history="yes, rows stay, with an event per change",
            fence="no",
            settings="concurrency 30, notifications",
        ),
        unfinished=(
            "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))"
        ),
        command=[python, HERE / "python" / "procrastinate_program.py"],
    )
