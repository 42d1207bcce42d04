"""Find the commands that README, docs and examples show, and check that each exists."""

import argparse
import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from streamrl.cli.main import COMMANDS, build_parser
from streamrl.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
)
RECIPE = ROOT / "configs" / "grpo_arithmetic.yaml"
"""Config for a command whose own config is a placeholder."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("", "sh", "bash", "console")
"""Languages of blocks that may hold commands."""
COMMAND = re.compile(r"(?:\$ )?(?:setsid nohup )?(?:\.venv/bin/)?((?:streamrl|python|make) .*)")
UNFINISHED = ("the following arguments are required", "expected one argument", "one of the arg")


class CommandError(Exception):
    """A command that a page shows does not exist, or does not take its arguments."""


@dataclass(frozen=True)
class Command:
    """A command line of a page; a mention, inside a sentence, may leave arguments out."""

    words: tuple[str, ...]
    is_mention: bool = False

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def is_literal(self) -> bool:
        """Whether the command has no placeholder such as RUN, CONFIG or <task>."""
        return not any(re.fullmatch(r"[A-Z]+|.*<\w+>.*", word) for word in self.words)


def find_commands(text: str) -> list[Command]:
    """Return the commands of a Markdown page, each once, in order."""
    commands = []
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            lines = block.replace("\\\n", " ").splitlines()
            matches = (COMMAND.fullmatch(line) for line in lines)
            commands += [Command(split(match[1])) for match in matches if match]
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if match := COMMAND.fullmatch(span):
            commands.append(Command(split(match[1]), is_mention=True))
    return list(dict.fromkeys(commands))


def split(line: str) -> tuple[str, ...]:
    """Split a line as a shell does, up to a pipe; brackets around optional arguments go."""
    optional = re.sub(r"\[(-[^]]*)\]", r"\1", line)
    words = shlex.split(optional, comments=True)
    ends = [words.index(sign) for sign in ("|", ">", ">>", "&&", "&") if sign in words]
    return tuple(words[: min(ends, default=len(words))])


def check(command: Command) -> None:
    """Raise CommandError unless the command exists and takes its arguments."""
    program, *words = command.words
    if program == "streamrl" and words[0] not in COMMANDS:
        raise CommandError(f"{command}: there is no such command")
    if program == "streamrl" and command.is_mention:
        help_words = re.split(r"[\s,|\[\]]+", read_help(words[0]))
        for word in words:
            if word.startswith("-") and word not in help_words:
                raise CommandError(f"{command}: there is no {word}")
    checks = {"streamrl": check_streamrl, "python": check_python, "make": check_make}
    for word in words:
        for path in re.findall(r"(?:^|[:=])((?:configs|examples|benchmarks|docs)/[^:]+)", word):
            # Builds are made by scripts.
            if "/build/" not in path and not list(ROOT.glob(re.sub(r"<\w+>", "*", path))):
                raise CommandError(f"{command}: there is no {path}")
    try:
        checks[program](words)
    except CommandError as error:
        if not (command.is_mention and any(rule in str(error) for rule in UNFINISHED)):
            raise


def check_streamrl(words: Sequence[str]) -> None:
    """Parse the arguments, and load the config with its overrides."""
    parsed = parse(build_parser(words[0]), words)
    config, overrides = vars(parsed).get("config"), vars(parsed).get("overrides", [])
    if words[0] == "train":
        named = parsed.words[:1] if parsed.resume is None else []
        config, overrides = "".join(named), parsed.words[len(named) :]
    path = ROOT / str(config or "")
    try:
        check_config(path if path.is_file() else RECIPE, tuple(overrides))
    except ValueError as error:
        raise CommandError(f"streamrl {' '.join(words)}: {error}") from None


@cache
def check_config(path: Path, overrides: tuple[str, ...]) -> None:
    """Load a config; many commands have the same."""
    load_config(path, overrides, skips_dry_run=True)


@cache
def read_help(name: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        build_parser(name).parse_args([name, "--help"])
    return output.getvalue()


def check_python(words: Sequence[str]) -> None:
    """Find the module or the script, and parse its arguments where it has any."""
    if words[0] != "-m":
        if len(words) > 1:
            raise CommandError(f"python {' '.join(words)}: a script of no known arguments")
        return
    module, *arguments = words[1:]
    room, _, rest = module.partition(".")
    folder = ROOT.joinpath(*module.split("."))
    file = (ROOT / room / rest.replace(".", "/")).with_suffix(".py")
    if room not in ("benchmarks", "examples", "tests") or not (file.exists() or folder.exists()):
        raise CommandError(f"python -m {module}: there is no such module")
    if not arguments:
        return
    if room == "examples":
        command_line = importlib.import_module("examples.own_loop.command_line")
        parser = getattr(importlib.import_module(module), "make_parser", command_line.make_parser)()
        load_config(RECIPE, vars(parse(parser, arguments)).get("overrides", []))
    else:
        main = f"{module}.__main__" if folder.exists() else module
        parse(importlib.import_module(main).make_parser(), arguments)


def check_make(words: Sequence[str]) -> None:
    """Find the targets in the Makefile."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for word in words:
        if "=" not in word and word not in targets:
            raise CommandError(f"make {word}: there is no such target")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse as the command does. Raises CommandError with the parser's message."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            parsed, rest = parser.parse_known_args(list(words))
            late = [word for word in rest if "=" in word and not word.startswith("-")]
            if "overrides" in parsed and late == rest:
                # Settings may stand behind options.
                parsed.overrides += late
            elif rest:
                parser.error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit:
        raise CommandError(message.getvalue().strip().splitlines()[-1]) from None
    return parsed


def all_commands() -> Iterator[tuple[str, Command]]:
    """Yield every command of every page, with the page's path."""
    for page in PAGES:
        for command in find_commands(page.read_text()):
            yield str(page.relative_to(ROOT)), command
