"""Open a run: refuse early mistakes, start its processes and their watchdog, choose its folder; close it in order."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.hub import check_model_in_cache, use_cache_if_hub_is_unreachable
from unsloth_ddp.data.sources.revisions import pin_revisions
from unsloth_ddp.distributed.exit_codes import forget_exit_code
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.run.file_checks import check_files
from unsloth_ddp.run.folder import check_run_folder, choose_run_folder
from unsloth_ddp.run.outcomes import RunEnd


@dataclass
class Run:
    """One run from its settings to its result.

    Args:
        folder: of the run, <output_dir>/<run_name>/.
        node_folder: shared by the ranks of a node, removed at the end.
        stop: requests to stop.
        began: time.perf_counter() when the run was opened.
        identity: what a checkpoint keeps of the run, and a resume compares; it grows as the stages learn more.
    """

    settings: Settings
    runtime: Runtime
    folder: Path
    node_folder: Path
    stop: StopRequest
    began: float
    identity: dict[str, Any] = field(default_factory=dict)
    # The user gave the run's name, so that the same command finds it again.
    named: bool = True
    # Rows have images, which is known once they are read.
    images: bool = False

    def identify(self, **facts: Any) -> None:
        self.identity |= facts


@contextlib.contextmanager
def open_run(settings: Settings, ranks: Ranks) -> Iterator[Run]:
    """Bring a run up, and take its processes down in order; a RunEnd leaves it as a finished run does.

    Raises:
        UserError: the settings, files, devices or the run's folder do not fit; alike on every rank.
        RunEnd: as raised by the run.
    """
    began, named = time.perf_counter(), settings.run_name is not None
    forget_exit_code()
    stop = StopRequest(ranks.is_main)
    stop.listen(settings.max_time)
    # First, because the checks of files import a library of the Hub.
    use_cache_if_hub_is_unreachable(settings, check_model=ranks.nodes == 1)
    if ranks.nodes == 1:
        check_files(settings, ranks.world_size)
        check_run_folder(settings)
    # Imported here, so that a mistake above is reported before the seconds that torch takes to load.
    from unsloth_ddp.data.node_folder import node_folder
    from unsloth_ddp.distributed.runtime import started
    from unsloth_ddp.distributed.watch.watchdog import watched
    from unsloth_ddp.model.backend import decide_backend
    from unsloth_ddp.run.upload import check_upload

    ended: RunEnd | None = None
    with started(settings, ranks) as runtime, watched(settings, runtime) as end_process, node_folder(runtime) as shared:
        stop.end_process = end_process
        if ranks.nodes > 1:
            # Each node may lack something else, which is raised on all of them.
            runtime.on_every_rank(lambda: check_files(settings, ranks.world_size))
            runtime.on_every_rank(lambda: check_model_in_cache(settings))
        decide_backend(settings, runtime)
        # Before the folder is chosen: its settings name the commits that the run there was made with.
        settings = pin_revisions(settings, runtime)
        folder = choose_run_folder(settings, runtime)
        settings = dataclasses.replace(settings, run_name=folder.name)
        runtime.on_main(lambda: check_upload(settings))
        try:
            yield Run(settings, runtime, folder, shared, stop, began, named=named)
        except RunEnd as end:
            if end.alone:
                raise
            # Every rank is here. Its frames hold the model, which has to go before the process group does.
            ended = end.with_traceback(None)
    if ended is not None:
        raise ended
