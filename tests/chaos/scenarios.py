"""Chaos scenarios: roles, five fault points of each, and scenarios derived from a seed.

Two further scenarios have an environment: they kill a generator and a host process in mid-episode.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRANSPORT = "weights.transport"
FAULT_POINTS = ("before_take", "after_take", "mid_compute", "mid_put", "mid_checkpoint")
ON_POLICY: dict[str, Any] = {"pipeline.max_staleness": 0}
AT_THE_END_S = 60.0
"""Sentinel delay: kill when the work is done and before its result is returned."""


@dataclass(frozen=True)
class FaultPoint:
    """Work of a role during which a kill may happen.

    min_hits: how often every run starts this work before its last step.
    delays_s: possible times from its start to the kill, s.
    """

    text: str
    min_hits: int
    delays_s: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Role:
    """Kind of process: names of its actors, and whether a run heals the death of an actor."""

    actors: tuple[str, ...]
    heals: bool
    points: Mapping[str, FaultPoint]


ROLES: Mapping[str, Role] = {
    "generator": Role(
        ("generator-0",),
        heals=True,
        points={
            "before_take": FaultPoint("it requests prompts", 4),
            "after_take": FaultPoint("it has leased prompts", 4),
            "mid_compute": FaultPoint("it samples", 16, (0.0, 0.005, 0.02, AT_THE_END_S)),
            "mid_put": FaultPoint("its commit is under way", 4, (0.0, 0.002, AT_THE_END_S)),
            "mid_checkpoint": FaultPoint("a checkpoint is being written", 2, (0.0, 0.02)),
        },
    ),
    "scorer": Role(
        ("reward-0",),
        heals=True,
        points={
            "before_take": FaultPoint("it requests groups", 4),
            "after_take": FaultPoint("it has leased groups", 4),
            "mid_compute": FaultPoint("it scores", 4, (0.0, 0.001, AT_THE_END_S)),
            "mid_put": FaultPoint("its commit is under way", 4, (0.0, 0.002, AT_THE_END_S)),
            "mid_checkpoint": FaultPoint("a checkpoint is being written", 2, (0.0, 0.02)),
        },
    ),
    "shard": Role(
        ("shard-0", "shard-1"),
        heals=True,
        points={
            "before_take": FaultPoint("it gets a request for groups", 12),
            "after_take": FaultPoint("it has leased groups, and the response is not sent", 8),
            "mid_compute": FaultPoint("it has read columns, and the response is not sent", 4),
            "mid_put": FaultPoint("half of a commit is in its journal", 4),
            "mid_checkpoint": FaultPoint("half of its snapshot is written", 2),
        },
    ),
    "coordinator": Role(
        ("coordinator",),
        heals=False,
        points={
            "before_take": FaultPoint("it requests groups to train", 6),
            "after_take": FaultPoint("it has leased groups to train", 3),
            "mid_compute": FaultPoint("a micro-batch is trained", 10, (0.0, 0.005, AT_THE_END_S)),
            "mid_put": FaultPoint("a step is in the run log, and its groups are in the shards", 5),
            "mid_checkpoint": FaultPoint("a checkpoint is renamed", 2, (0.0, AT_THE_END_S)),
        },
    ),
    "trainer": Role(
        ("trainer-0",),
        heals=False,
        points={
            "before_take": FaultPoint("it requests the columns of a micro-batch", 10),
            "after_take": FaultPoint("it has the columns of a micro-batch", 10),
            "mid_compute": FaultPoint("forward and backward are under way", 10, (0.0, 0.005)),
            "mid_put": FaultPoint("it has updated, or gathers a version", 5, (0.0, AT_THE_END_S)),
            "mid_checkpoint": FaultPoint("it writes its part of a checkpoint", 2, (0.0, 0.005)),
        },
    ),
}


HOST = "host"
"""Role of the process that runs the environment: no actor, and its generator starts another."""
EPISODES: dict[str, Any] = {
    **ON_POLICY,
    "environment.path": str(Path(__file__).with_name("three_turns.py")),
    "environment.max_turns": 3,
    "environment.max_tokens": 48,
    "environment.processes": 1,
    # A digit ends a turn: the random model seldom samples EOS.
    "generator.stop_token_ids": "[3,4,5,6,7,8,9,10,11,12]",
    "rewards": "[{kind: environment}]",
}
"""Settings of a run with an environment."""
MIN_STEPS_OF_EPISODES = 60
"""How often every run with an environment calls `step` before its last training step."""


@dataclass(frozen=True)
class Scenario:
    """Run with a single kill.

    stored: put columns of any size into the object store.
    settings: run settings on top of the bench's defaults.
    """

    role: str
    point: str
    actor: str
    hit: int
    delay_s: float = 0.0
    stored: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def name(self) -> str:
        """Name for the option --only."""
        return f"{self.role}:{self.point}"

    @property
    def heals(self) -> bool:
        """Whether the run continues after the kill; otherwise the bench resumes it."""
        return self.role == HOST or ROLES[self.role].heals

    @property
    def is_on_policy(self) -> bool:
        """Whether metrics are independent of timing and of the kill."""
        # A retried episode writes other words.
        return not self.settings["pipeline.max_staleness"] and self.role != HOST

    def __str__(self) -> str:
        ends = {0.0: "", AT_THE_END_S: ", at its end"}
        delay = ends.get(self.delay_s, f", after {self.delay_s * 1000:g} ms")
        shown = {k: v for k, v in self.settings.items() if k in ON_POLICY or k not in EPISODES}
        facts = [f"{key.partition('.')[2]}={value}" for key, value in shown.items()]
        facts += ["stored"] * self.stored
        return f"{self.actor} as {self.text} (no. {self.hit}{delay}; {' '.join(facts)})"

    def plan(self, run_dir: Path, marker: Path) -> dict[str, Any]:
        """Return the plan that the injected `PlannedFault` reads."""
        return {**asdict(self), "run_dir": str(run_dir), "marker": str(marker)}


TRANSPORTS = {
    "generator": "collective",
    "scorer": "store",
    "shard": "store",
    "coordinator": "shared_memory",
    "trainer": "shared_memory",
}
"""Weights transport by role, so that all are covered; metrics do not depend on the transport."""

WITH_CRITIC = {
    "algorithm.name": "ppo",
    "algorithm.epochs": 2,
    "algorithm.mini_batches": 2,
    "algorithm.correction.proximal": "trainer",
}


def make_scenario(role: str, point: str, seed: int) -> Scenario:
    """Make the scenario of a fault point; it depends only on the seed."""
    draw = random.Random(f"{seed}:{role}:{point}")
    work = ROLES[role].points[point]
    # An update is a collective: with two ranks, the other rank waits for the dead one.
    ranks = 2 if (role, point) == ("trainer", "mid_put") else 1
    actors = ("trainer-0", "trainer-1") if ranks > 1 else ROLES[role].actors
    # Train two models, each with several updates per step.
    has_critic = (role, point) == ("trainer", "mid_compute")
    actors = ("trainer-0", "critic-0") if has_critic else actors
    return Scenario(
        role=role,
        point=point,
        actor=draw.choice(actors),
        hit=draw.randint(1, work.min_hits),
        delay_s=draw.choice(work.delays_s),
        stored=draw.choice((False, True)),
        settings={
            "pipeline.max_staleness": draw.choice((0, 1)),
            TRANSPORT: TRANSPORTS[role],
            **({"trainer.world_size": ranks, "trainer.zero_stage": 3} if ranks > 1 else {}),
            **(WITH_CRITIC if has_critic else {}),
        },
        text=work.text,
    )


def make_episode_scenario(role: str, actor: str, seed: int) -> Scenario:
    """Make a scenario that kills a process in mid-episode, during a `step` of the environment."""
    draw = random.Random(f"{seed}:{role}:mid_episode")
    hit, delay_s = draw.randint(1, MIN_STEPS_OF_EPISODES), draw.choice((0.0, 0.01, AT_THE_END_S))
    text = "an episode is between two turns"
    return Scenario(role, "mid_episode", actor, hit, delay_s, settings=EPISODES, text=text)


def episode_scenarios(seed: int) -> list[Scenario]:
    return [
        make_episode_scenario("generator", "generator-0", seed),
        make_episode_scenario(HOST, "the environment's process", seed),
    ]


def all_scenarios(seed: int) -> list[Scenario]:
    """Return a scenario per role and fault point, and those with an environment."""
    table = [make_scenario(role, point, seed) for role in ROLES for point in FAULT_POINTS]
    return [*table, *episode_scenarios(seed)]


def short_scenarios(seed: int) -> list[Scenario]:
    """Return a scenario per role, and those with an environment; fault points rotate."""
    points = [FAULT_POINTS[(seed + i) % len(FAULT_POINTS)] for i in range(len(ROLES))]
    table = [make_scenario(role, point, seed) for role, point in zip(ROLES, points, strict=True)]
    return [*table, *episode_scenarios(seed)]
