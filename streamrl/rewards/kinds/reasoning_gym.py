"""Kind `reasoning_gym`: judge of the dataset of the package reasoning-gym that made the row."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from streamrl.data.config import REASONING_GYM, ReasoningGymTasks
from streamrl.data.reasoning_gym_table import CACHED_DATASETS, create_dataset
from streamrl.errors import ConfigError, RewardError
from streamrl.files.optional_package import import_optional
from streamrl.messages import Prompt
from streamrl.rewards.interface.answers import AnswerPattern, PatternTimeoutError
from streamrl.rewards.interface.reward import CompletionWorkerReward, RewardSpec, WorkerOptions
from streamrl.user_code.checks import format_value, to_finite_float
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

_SETTING = f"rewards.kind={REASONING_GYM}"
_CACHED_TASKS = 64

JudgeRequest = tuple[str, int, str, str]
"""Tasks as text, index of the task, its question, and the policy's answer."""


@dataclass
class ReasoningGymOptions(WorkerOptions):
    """Options of kind reasoning_gym.

    pattern: regular expression of the answer: first group of the last match; empty: the whole
        completion is the answer.
    pass_score: lowest score that passes.
    timeout_s: deadline of one completion, s; after two timeouts the outcome is timeout.
    """

    pattern: str = ""
    pass_score: float = 1.0
    timeout_s: float | None = 20.0
    memory_gib: float = 2.0


class ReasoningGymReward(CompletionWorkerReward):
    """Scores answers with the `score_answer` of the dataset, in worker processes.

    A worker makes the row's task again, from seed and index, as its metadata may be of any type.
    """

    def __init__(self, spec: RewardSpec[ReasoningGymOptions]) -> None:
        handler = "streamrl.rewards.kinds.reasoning_gym:make_reasoning_gym_handler"
        options = spec.options
        super().__init__(handler, options.pass_score, spec)
        self._pattern = AnswerPattern(options.pattern)

    def validate_prompt(self, prompt: Prompt) -> None:
        if REASONING_GYM not in prompt.extra_info:
            raise RewardError(
                f"the row is no task of reasoning-gym; data of kind {REASONING_GYM} makes such rows"
            )

    async def run_preflight(self) -> str:
        await asyncio.to_thread(
            import_optional, "reasoning_gym", setting=_SETTING, extra=REASONING_GYM
        )
        return ""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> Sequence[RewardResult]:
        self.validate_prompt(prompt)
        return await asyncio.gather(*(self._score_text(prompt, text) for text in completions))

    async def _score_text(self, prompt: Prompt, completion: str) -> RewardResult:
        try:
            answer = await asyncio.to_thread(self._pattern.find_answer, completion)
        except PatternTimeoutError as error:
            return RewardResult(0.0, RewardOutcome.TIMEOUT, detail=str(error))
        if answer is None:
            return RewardResult.from_correctness(False)
        task, question = prompt.extra_info[REASONING_GYM], prompt.messages[-1]["content"]
        request: JudgeRequest = (task["tasks"], task["index"], question, answer)
        return await self.judge_completion(request)


def make_reasoning_gym_handler(pass_score: float) -> Callable[[JudgeRequest], RewardResult | str]:
    """Return the handler of a worker: JudgeRequest to a result, or to an error that is final."""
    # Imported here so that the slow import does not count toward the first call's deadline.
    import_optional("reasoning_gym", setting=_SETTING, extra=REASONING_GYM)

    load_dataset = lru_cache(CACHED_DATASETS)(create_dataset)

    @lru_cache(_CACHED_TASKS)
    def make_task(tasks: str, index: int) -> Any:
        return load_dataset(tasks, setting="data")[index]

    def handle_request(request: JudgeRequest) -> RewardResult | str:
        tasks, index, question, answer = request
        try:
            dataset = load_dataset(tasks, setting="data")
        except ConfigError as error:
            return str(error)
        task = make_task(tasks, index)
        if task["question"] != question:
            return (
                f"{ReasoningGymTasks.from_text(tasks).dataset} task {index}: made again, it asks"
                " another question; seed and index have to determine a task"
            )
        return judge_answer(dataset, task, answer, pass_score=pass_score)

    return handle_request


def judge_answer(
    dataset: Any, task: dict[str, Any], answer: str, *, pass_score: float
) -> RewardResult | str:
    """Score an answer with the dataset's judge; return a text if the score is not a number.

    A judge that raises on the answer, but not on the task's own, cannot read what the policy wrote:
    the answer is wrong. Raises the judge's error if it fails on both.
    """
    try:
        value = dataset.score_answer(answer, copy.deepcopy(task))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the package's code may raise anything
        dataset.score_answer(task["answer"], copy.deepcopy(task))
        detail = f"the judge cannot read it: {type(error).__name__}: {error}"
        return RewardResult.from_correctness(False, answer, detail=detail)
    score = to_finite_float(value)
    if score is None:
        return f"the judge returned {format_value(value)}, not a finite number"
    return RewardResult.from_correctness(score >= pass_score, answer, score=score)
