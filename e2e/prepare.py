"""`make prepare`: build and cache, with progress, what the demo and the tests would otherwise build on the way."""

import sys

from e2e.cluster import ClusterError, Progress, binaries, preflight
from e2e.cluster.layout import Layout
from e2e.cluster.network import Network
from e2e.cluster.recipes import TOOLSETS
from e2e.demo.engine_side import EngineBuild, engine_needs
from e2e.demo.errors import DemoError
from e2e.images.engine import MODELS, ensure_model, ensure_next
from e2e.images.engine_bundle import EngineError

PROGRAMS = tuple(program for toolset in TOOLSETS for program in toolset.programs)


def main() -> None:
    """Everything, or the reason why not and exit status 1."""
    progress = Progress()
    try:
        to_build = binaries.missing(PROGRAMS)
        needs = engine_needs(beside=preflight.BUILD_SPACE_GIB * 2**30 if to_build else 0)
        preflight.check(Layout.configured(), Network.configured(), to_build, progress.say, needs)
        with EngineBuild(progress.say) as engine:  # downloads, beside the compiler
            binaries.ensure(PROGRAMS, progress)
            engine.result()
        for model in MODELS:
            ensure_model(model, progress.say)
        ensure_next(progress.say)
    except (ClusterError, DemoError, EngineError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
