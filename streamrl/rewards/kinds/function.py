"""Kind `function`, and rewards of a user's own kind: Python code in worker processes."""

from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from streamrl.rewards.interface.reward import RewardSpec, WorkerOptions, WorkerReward
from streamrl.rewards.user_code.user_function import FunctionCallSpec, FunctionSource


@dataclass
class FunctionOptions(WorkerOptions):
    """Options of a reward that is a Python function.

    path: the Python file.
    function: the function's name in it; empty: the reward's own name.
    kwargs: more arguments for every call, by name.
    """

    path: str = ""
    function: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)


class FunctionReward(WorkerReward):
    """Calls the function once per completion, or once per group where its style says so.

    A plain function runs in the main thread of a worker, one group at a time; an async one has
    the calls of a group, and of several groups, side by side.
    """

    def __init__(self, source: FunctionSource, given: RewardSpec[FunctionOptions]) -> None:
        super().__init__(
            "streamrl.rewards.user_code.worker_entry:make_reward_handler", source, given
        )
        self._call_spec: FunctionCallSpec | None = None

    async def run_preflight(self) -> str:
        """Import the user's file in a worker. Raises ConfigError as `Source.load` does."""
        self._call_spec = await self.probe_worker()
        return ""

    def validate_prompt(self, prompt: Prompt) -> None:
        """Raise RewardError if the function wants a column the prompt's row does not have."""
        assert self._call_spec is not None, "preflight comes first"
        self._call_spec.build_arguments(prompt, [""])


def build_function_reward(given: RewardSpec[FunctionOptions]) -> FunctionReward:
    """Kind `function`. The file is not loaded yet: that happens in workers alone."""
    options = given.options
    if not options.path:
        raise ConfigError("rewards.path: missing; kind function needs it")
    kwargs = tuple(options.kwargs.items())
    return FunctionReward(
        FunctionSource(options.path, options.function or given.name, kwargs), given
    )


def build_registered_reward(kind: str, given: RewardSpec[FunctionOptions]) -> FunctionReward:
    """A kind of a user's own: registered in the file `path`, or by an installed package."""
    options = given.options
    kwargs = tuple(options.kwargs.items())
    return FunctionReward(FunctionSource(options.path, kind, kwargs, is_registered=True), given)
