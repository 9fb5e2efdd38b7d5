"""River (Go)."""

import shutil

from benchmarks.compare.tool import HERE, About, External, NotMeasured, run
from benchmarks.measure import CACHE

_SOURCES = HERE / "river"


async def tool() -> External:
    """Ready to run. Raises NotMeasured."""
    if shutil.which("go") is None:
        raise NotMeasured("Go 1.26 is not installed")
    CACHE.mkdir(exist_ok=True)
    program = CACHE / "river"
    module = "github.com/riverqueue/river"
    try:
        await run(["go", "build", "-o", str(program), "."], cwd=_SOURCES)
        version = await run(["go", "list", "-m", "-f", "{{.Version}}", module], cwd=_SOURCES)
    except RuntimeError as error:
        raise NotMeasured(f"go build failed: {error}") from error
    return External(
        about=About(
            name="river",
            version=version.strip().removeprefix("v"),
            history="yes, rows stay for a day",
            fence="no",
            settings="MaxWorkers 500, FetchCooldown 2 ms, FetchPollInterval 20 ms",
        ),
        unfinished=(
            "SELECT EXISTS (SELECT FROM river_job WHERE state NOT IN ('completed', 'cancelled',"
            " 'discarded'))"
        ),
        command=[program],
    )
