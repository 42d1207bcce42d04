"""Prompts in memory as a stream reads them, some of which may be no use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from streamrl.data.classify_rows import ClassifiedRow, RowStatus
from streamrl.data.interleave import StreamFile
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError
from streamrl.messages import Prompt, make_uid, parse_uid


def prompts(size: int, step: int = 1) -> list[Prompt]:
    return [
        Prompt(make_uid(0, i * step), np.array([i, 7], np.int32), ground_truth=str(i))
        for i in range(size)
    ]


@dataclass(frozen=True)
class Listed:
    """What a stream reads of TrainingFiles, from prompts in memory.

    mix: number of prompts and share of each file. fates: status by index of rows without a prompt.
    """

    prompts: Sequence[Prompt]
    mix: Sequence[tuple[int, float]] = ()
    fates: Mapping[int, RowStatus] = field(default_factory=dict)
    fingerprint: str = "0"
    is_fully_classified: bool = True

    @property
    def stream_files(self) -> list[StreamFile]:
        rest = iter([parse_uid(prompt.uid)[1] for prompt in self.prompts])
        files = self.mix or [(len(self.prompts), 1.0)]
        return [
            StreamFile(np.array([next(rest) for _ in range(size)]), share, partial(examine, self))
            for size, share in files
        ]


def examine(data: Listed, indices: Sequence[int]) -> list[ClassifiedRow]:
    by_index = {parse_uid(prompt.uid)[1]: prompt for prompt in data.prompts}
    return [_examined(data, by_index[index], index) for index in indices]


def _examined(data: Listed, prompt: Prompt, index: int) -> ClassifiedRow:
    fate = data.fates.get(index, RowStatus.KEPT)
    if fate is RowStatus.KEPT:
        return ClassifiedRow(fate, index, 2, prompt)
    problem = ConfigError(f"row {index}: no good") if fate is RowStatus.BAD else None
    return ClassifiedRow(fate, index, problem=problem)


def stream_of(
    items: Sequence[Prompt],
    *,
    seed: int,
    mix: Sequence[tuple[int, float]] = (),
    fates: Mapping[int, RowStatus] | None = None,
    fingerprint: str = "0",
    **settings: Any,
) -> PromptStream:
    data: Any = Listed(items, mix, fates or {}, fingerprint)
    return PromptStream(data, seed=seed, **{"reads_ahead": False, **settings})
