"""`streamrl wandb-workspace`: make a workspace and a report in a project of Weights & Biases."""

import argparse

from streamrl.cli.arguments.arg_types import parse_nonempty
from streamrl.errors import ConfigError
from streamrl.files.optional_package import import_optional
from streamrl.telemetry.progress_line import show_progress
from streamrl.telemetry.wandb_workspace import SECTIONS, make_report, make_workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "streamrl wandb-workspace PROJECT [--entity NAME] [--dry-run]"
    parser.add_argument("project", type=parse_nonempty, metavar="PROJECT", help="wandb project")
    parser.add_argument(
        "--entity", default="", metavar="NAME", help="user or team (default: the account's)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list sections and panels; needs no account"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        for name, panels in SECTIONS.items():
            print(f"{name}: {', '.join(panel.title for panel in panels)}")
        return 0
    import_optional("wandb_workspaces", extra="wandb_workspaces", setting="wandb-workspace")
    import wandb

    try:
        with show_progress("saving workspace and report"):
            entity = str(arguments.entity or wandb.Api().default_entity)
            workspace = make_workspace(entity, arguments.project).save()
            report = make_report(entity, arguments.project).save(draft=True)
    except (wandb.Error, ValueError, OSError) as error:
        raise ConfigError(
            f"wandb-workspace {arguments.project}: {' '.join(str(error).split()).rstrip('.')};"
            " an account is needed: run `wandb login`, or set WANDB_API_KEY"
        ) from None
    print(f"workspace {workspace.url}\nreport    {report.url}")
    return 0
