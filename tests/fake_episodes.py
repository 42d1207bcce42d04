"""Generator whose rollouts are episodes: the real driver with a fake engine and environment."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.environments.episodes.driver import make_environment_seed
from streamrl.environments.interface import EnvironmentStep, EpisodeSummary, Reply, ResetResult
from streamrl.errors import EpisodeError, EpisodeOutageError
from streamrl.messages import (
    Array,
    Columns,
    Prompt,
    Rollout,
    make_rollout_seeds,
)
from streamrl.stream.protocols import FinishedCallback, SampleFunction, StageContext
from tests.environments.episodes.scripted import make_driver
from tests.fakes import FakeGenerator, Plan, SampledToken, check_service
from tests.rollouts import make_rollout

SLOW_S = 60.0
"""Time that the environment takes for each turn of `Plan.slow_prompt`, s."""
ATTEMPTS = 2
MAX_TURN_TOKENS = 3


class FakeEpisodeGenerator(FakeGenerator):
    """Generator that samples episodes turn by turn, each token with the version served then.

    Fewer turns are sampled at a time than episodes are open. waits: uid, start and end of each time
    that an episode waited for its environment.
    """

    paused_s = 0.0

    def __init__(self, plan: Plan, rng: random.Random, generated: Counter[str]) -> None:
        super().__init__(plan, rng, generated)
        self.waits: list[tuple[str, float, float]] = []
        self._driver = make_driver(
            self,
            self,
            slots=plan.group_size,
            attempts=ATTEMPTS,
            max_turns=plan.max_turns,
            max_turn_tokens=MAX_TURN_TOKENS,
            episode_timeout_s=1e6,
        )

    def make_sample_function(self, stage: StageContext) -> SampleFunction:
        """Return a function that runs the episodes of a group; it holds the lease per turn."""
        plan = self._plan

        async def run_episodes(
            prompt: Prompt, partials: Columns | None, finished: FinishedCallback
        ) -> Columns:
            assert partials is None, "an interrupted episode begins anew"
            self._generated[prompt.uid] += 1
            return await self._driver.run_group(
                prompt,
                seeds=make_rollout_seeds(plan.seed, prompt.uid, plan.group_size),
                environment_seed=make_environment_seed(plan.seed, prompt.uid),
                compute=stage.hold_devices,
                on_finished=finished,
            )

        return run_episodes

    async def read_partials(self) -> Mapping[str, Columns]:
        """Return none: an interrupted episode begins anew."""
        return {}

    async def generate(
        self, prompt_ids: Array, *, seeds: Sequence[int], max_new_tokens: int, **options: Any
    ) -> list[Rollout]:
        """Sample a turn; the environment's first words name the prompt."""
        named = re.search(r"\d+:\d+:\d+", "".join(map(chr, prompt_ids)))
        assert named is not None
        uid, (seed,) = named.group(), seeds
        rng = random.Random(seed)
        turn = [rng.randint(ord("a"), ord("z")) for _ in range(rng.randint(1, MAX_TURN_TOKENS))]
        versions: list[int] = []
        for _ in turn[:max_new_tokens]:
            await asyncio.sleep(self._rng.uniform(*self._plan.generate_s) / MAX_TURN_TOKENS)
            versions.append(self.version)
            now = asyncio.get_running_loop().time()
            self.sampled.append(SampledToken(uid, len(versions), self.version, now))
        return [make_rollout(prompt_ids, turn[: len(versions)], versions=versions)]

    def open_session(self, prompt: Prompt, *, seed: int) -> "FakeSession":
        return FakeSession(self, self._plan, self._rng, prompt.uid, seed)

    async def close(self) -> None:
        pass


class FakeSession:
    """Environment that takes its time, sometimes fails, and ends after a number of turns."""

    def __init__(
        self, generator: FakeEpisodeGenerator, plan: Plan, rng: random.Random, uid: str, seed: int
    ) -> None:
        self._generator = generator
        self._plan = plan
        self._rng = rng
        self._uid = uid
        self._turns_left = random.Random(seed).randint(1, plan.max_turns)

    async def reset(self) -> ResetResult:
        check_service(self._plan.tool_outages, EpisodeOutageError("http://tools: refused"))
        return ResetResult([{"role": "user", "content": self._uid}])

    async def step(self, reply: Reply) -> EnvironmentStep:
        clock = asyncio.get_running_loop().time
        started = clock()
        is_slow = self._uid == self._plan.slow_prompt
        await asyncio.sleep(SLOW_S if is_slow else self._rng.uniform(*self._plan.environment_s))
        self._generator.waits.append((self._uid, started, clock()))
        check_service(self._plan.tool_outages, EpisodeOutageError("http://tools: refused"))
        if self._rng.random() < self._plan.environment_fail_rate:
            raise EpisodeError("the environment's process ended")
        self._turns_left -= 1
        observation = [{"role": "user", "content": "x"}]
        return EnvironmentStep(observation, reward=1.0, done=not self._turns_left)

    async def score(self, episode: EpisodeSummary) -> float:
        return sum(episode.rewards)

    async def close(self) -> None:
        pass
