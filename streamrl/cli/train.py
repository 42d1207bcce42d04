"""`streamrl train`: read the config of a new or resumed run, and train it."""

import argparse

from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.cli.arguments.arg_types import parse_path
from streamrl.cli.main import EXIT_INTERRUPTED
from streamrl.cli.run_setup.resume import RunDirClaim, begin_run, resume_run
from streamrl.telemetry.progress import show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl train CONFIG [key=value ...] | --resume RUN [key=value ...]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG|key=value",
        help="YAML file, then settings that override it, e.g. trainer.lr=1e-4",
    )
    parser.add_argument(
        "--resume",
        type=parse_path,
        metavar="RUN",
        help="resume a run directory from its newest checkpoint, or from the checkpoint named;"
        " with run.name=NEW fork it and leave the original unchanged",
    )


def run(arguments: argparse.Namespace) -> int:
    claim = RunDirClaim()
    try:
        with show_progress("reading config"):
            if arguments.resume is not None:
                config, resume = resume_run(arguments.resume, arguments.words, claim)
            else:
                config, resume = begin_run(arguments.words, claim), None
        with show_progress("loading", mode=config.telemetry.console) as progress:
            # Importing Ray and torch takes seconds; a wrong config needs neither.
            from streamrl.cli.run_setup.training import train

            finish = train(config, resume, RealEngineFactory(), claim, progress)
    finally:
        claim.release()
    return EXIT_INTERRUPTED if finish.is_interrupted else 0
