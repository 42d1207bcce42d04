"""Kind `function`: user-defined Python functions in worker processes."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from streamrl.rewards.interface.reward import RewardSpec, WorkerOptions, WorkerReward
from streamrl.user_code.reward_function import FunctionCallSpec, FunctionSource


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
        self._call_spec.build_arguments(prompt, [""])
