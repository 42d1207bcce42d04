"""Reader of completion files for `streamrl score`: joins completions with rows of a prompt file."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.data.classify_rows import make_prompt
from streamrl.data.files import DataFile
from streamrl.data.prompt_file import load_data_rows
from streamrl.data.reading.formats import JsonLines, parse_text_row
from streamrl.errors import ConfigError
from streamrl.files.bounded_read import open_regular_file
from streamrl.messages import Prompt


@dataclass(frozen=True)
class CompletionGroup:
    """A prompt row and its completions in the JSONL file of `streamrl score`, with line indices."""

    prompt: Prompt
    line_indices: Sequence[int]
    completions: Sequence[str]


def read_completion_groups(file: DataFile, completions: str) -> list[CompletionGroup]:
    """Read a completion file and group its completions by prompt row, in order of first appearance.

    file: prompt file with the rows. completions: path of the JSONL completion file. Raises
    ConfigError, with file and line, for a malformed record or an index without a row.
    """
    records = list(_read_completions(completions))
    rows = load_data_rows(file)
    wanted = {index for _, index, _ in records}
    # Rewards read only the messages, so one dummy token will do.
    prompts = {row.index: make_prompt(row, [0]) for row in rows if row.index in wanted}
    lines_by_index: dict[int, list[int]] = {}
    for line, (where, index, _) in enumerate(records):
        if index not in prompts:
            raise ConfigError(
                f"{where}: index={index}: {file.path} has no such row; rows count from 0"
            )
        lines_by_index.setdefault(index, []).append(line)
    return [
        CompletionGroup(prompts[index], lines, [records[line][2] for line in lines])
        for index, lines in lines_by_index.items()
    ]


def _read_completions(path: str) -> Iterator[tuple[str, int, str]]:
    """Yield (location for errors, row index, completion text) of each line of a completion file."""
    is_empty = True
    try:
        with open_regular_file(path) as file:
            for index, _, line in JsonLines().iter_rows(file):
                is_empty, where = False, f"{path} line {index + 1}"
                record = parse_text_row(JsonLines(), line, where)
                if isinstance(record, ConfigError):
                    raise record
                yield (where, *_parse_completion(record, where))
    except OSError as error:
        raise ConfigError(f"--completions {path}: cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--completions {path}: {error}") from None
    if is_empty:
        raise ConfigError(f"--completions {path}: the file contains no completions")


def _parse_completion(record: Any, where: str) -> tuple[int, str]:
    if not isinstance(record, dict):
        kind_name = "null" if record is None else type(record).__name__
        raise ConfigError(f"{where}: expected a JSON object, got {kind_name}")
    for key, kind, rule in (
        ("index", int, "the number of a row, from 0"),
        ("completion", str, "text"),
    ):
        if key not in record:
            raise ConfigError(f"{where}: no key {key!r}; the keys are: {', '.join(record) or '-'}")
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise ConfigError(f"{where}: {key}={json.dumps(record[key])}: must be {rule}")
    return record["index"], record["completion"]
