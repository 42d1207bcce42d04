"""Kind `function`: user-defined Python functions in worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import Completion
from streamrl.rewards.interface.reward import RewardSpec, WorkerOptions, WorkerReward
from streamrl.user_code.reward_function import (
    DETAIL_PARAMETERS,
    FunctionCallSpec,
    FunctionSource,
)
from streamrl.user_code.reward_result import RewardResult


@dataclass
class FunctionOptions(WorkerOptions):
    """Options of a reward that is a Python function.

    path: the Python file.
    function: name of the function in that file; empty: the reward's name.
    kwargs: constant keyword arguments of every call.
    """

    path: str = MISSING
    function: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)


class FunctionReward(WorkerReward):
    """Calls the user's function once per completion, or once per group, depending on its signature.

    A sync function runs in the main thread of a worker, a group at a time. Calls of an async
    function run concurrently, within a group and across groups. Only workers import the file.
    """

    def __init__(self, spec: RewardSpec[FunctionOptions]) -> None:
        options = spec.options
        if not options.path:
            raise ConfigError(f"{spec.key}.path: missing")
        kwargs = tuple(options.kwargs.items())
        source = FunctionSource(options.path, options.function or spec.name, kwargs, spec.key)
        super().__init__("streamrl.user_code.reward_function:make_reward_handler", source, spec)
        self._call_spec: FunctionCallSpec | None = None

    async def run_preflight(self) -> str:
        self._call_spec = await self.probe_worker()
        return ""

    def validate_prompt(self, prompt: Prompt) -> None:
        assert self._call_spec is not None, "call run_preflight first"
        details: dict[str, list[list[int]]] = {name: [[]] for name in DETAIL_PARAMETERS}
        self._call_spec.build_arguments(prompt, [""], details)

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        texts = [completion.get_part(part) for completion in completions]
        ids = [completion.get_part_ids(part) for completion in completions]
        details = {
            "completion_ids": None if None in ids else ids,
            "completion_turns": [list(completion.turns) for completion in completions],
        }
        return await self.score_request((prompt, texts, details))
