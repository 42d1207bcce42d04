"""`streamrl view`: serve the page of runs on this machine, and follow those under way."""

import argparse

from streamrl.cli.arguments.arg_types import parse_path
from streamrl.planner.calibration.advice import BottleneckText
from streamrl.run_dir.run_config_file import check_run_dir
from streamrl.telemetry.page.page import PageServer, RunPage
from streamrl.telemetry.page.run_record import RunReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl view RUN [RUN ...] [--port N]"
    parser.add_argument(
        "run_dirs", type=parse_path, nargs="+", metavar="RUN", help="run directory; several overlay"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: a free one)"
    )


def run(arguments: argparse.Namespace) -> int:
    for run_dir in arguments.run_dirs:
        check_run_dir(run_dir)
    page = RunPage([RunReader(path) for path in arguments.run_dirs], BottleneckText())
    server = PageServer(page, port=arguments.port)
    print(f"open {server.address}", flush=True)
    print("Only this machine can open it, and only with that token. Ctrl-C ends.", flush=True)
    server.serve_forever()
    return 0
