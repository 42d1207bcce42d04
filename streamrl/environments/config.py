"""Config section `environment`: the environment of a run's episodes, and their limits."""

import math
from dataclasses import dataclass

from streamrl.errors import ConfigError

TIMEOUT_ACTIONS = ("mask", "score")


@dataclass
class EnvironmentConfig:
    """Environment of a run. Without a path every rollout is a single turn.

    path: file of the environment, as file.py or file.py:Class.
    max_turns: most turns of an episode.
    max_tokens: most tokens of an episode besides the row's prompt: sampled tokens, observations,
        what the chat template writes between turns, and the schemas of tools.
    turn_timeout_s: deadline of `reset`, of `step` and of `score`, each, s. Starting a process has a
        deadline of its own, because the file may import torch.
    call_timeout_s: deadline of a tool call, s. The policy reads that the call timed out.
    episode_timeout_s: most time of an episode in the engine and in its environment, s. Waits for a
        decode slot do not count, suspensions on shared devices do. Below pipeline.stall_s.
    open_episodes: episodes that a generator keeps open, those that wait for their environment
        included; null: generator.max_concurrent_rollouts.
    processes: processes of each generator that run the environment's code and share the open
        episodes. With `isolate`, processes kept ready for the next episodes.
    isolate: run each episode in a process of its own, which is killed with the episode.
    memory_gib: memory limit of a host process including its children, GiB.
    call_format: format of the policy's tool calls; auto: that of the model's chat template.
    call_pattern: regular expression of a call, for call_format: regex.
    parallel_calls: calls of a turn that run concurrently, on the same environment object.
    max_reply_chars: longest reply of a tool; the middle of a longer one is cut out.
    max_malformed: turns in a row whose calls are all invalid, after which an episode ends.
    attempts: attempts at an episode whose environment fails.
    min_episodes: least episodes with which a group is trained if the environment fails for the
        others; null: all.
    on_timeout: treatment of an episode at episode_timeout_s: mask (its tokens are not trained) or
        score.
    """

    path: str = ""
    max_turns: int = 8
    max_tokens: int = 1024
    turn_timeout_s: float = 60.0
    call_timeout_s: float = 30.0
    episode_timeout_s: float = 240.0
    open_episodes: int | None = None
    processes: int = 2
    isolate: bool = False
    memory_gib: float = 4.0
    call_format: str = "auto"
    call_pattern: str = ""
    parallel_calls: int = 1
    max_reply_chars: int = 2000
    max_malformed: int = 3
    attempts: int = 3
    min_episodes: int | None = None
    on_timeout: str = "mask"

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"environment.{key}={value}: must be above 0")
        if not math.isfinite(self.episode_timeout_s + self.turn_timeout_s + self.call_timeout_s):
            raise ConfigError(
                "environment.turn_timeout_s, call_timeout_s, episode_timeout_s: must be finite"
            )
        if self.on_timeout not in TIMEOUT_ACTIONS:
            raise ConfigError(
                f"environment.on_timeout={self.on_timeout}: must be one of "
                + ", ".join(TIMEOUT_ACTIONS)
            )
        if self.call_pattern and self.call_format != "regex":
            raise ConfigError(
                f"environment.call_pattern: needs environment.call_format=regex, not"
                f" {self.call_format}"
            )

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def is_enabled(self) -> bool:
        return bool(self.path)
