"""Kills of a process: roles, five moments of each, and scenarios that follow from a seed."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRANSPORT = "weights.transport"
MOMENTS = ("before_take", "after_take", "mid_compute", "mid_put", "mid_checkpoint")
ON_POLICY: dict[str, Any] = {"pipeline.max_staleness": 0}
AT_THE_END_S = 60.0
"""A delay that means: when the work is done and not yet reported."""


@dataclass(frozen=True)
class Moment:
    """Work of a role.

    passages: how often every run starts this work before its last step.
    delays_s: possible times from its start to the kill, s.
    """

    text: str
    passages: int
    delays_s: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Role:
    """A kind of process: the names of its actors, and whether a run survives the death of one."""

    actors: tuple[str, ...]
    heals: bool
    moments: Mapping[str, Moment]


ROLES: Mapping[str, Role] = {
    "generator": Role(
        ("generator-0",),
        heals=True,
        moments={
            "before_take": Moment("it asks for prompts", 4),
            "after_take": Moment("it has leased prompts", 4),
            "mid_compute": Moment("it samples", 16, (0.0, 0.005, 0.02, AT_THE_END_S)),
            "mid_put": Moment("its commit is under way", 4, (0.0, 0.002, AT_THE_END_S)),
            "mid_checkpoint": Moment("a checkpoint is being written", 2, (0.0, 0.02)),
        },
    ),
    "scorer": Role(
        ("reward-0",),
        heals=True,
        moments={
            "before_take": Moment("it asks for groups", 4),
            "after_take": Moment("it has leased groups", 4),
            "mid_compute": Moment("it scores", 4, (0.0, 0.001, AT_THE_END_S)),
            "mid_put": Moment("its commit is under way", 4, (0.0, 0.002, AT_THE_END_S)),
            "mid_checkpoint": Moment("a checkpoint is being written", 2, (0.0, 0.02)),
        },
    ),
    "shard": Role(
        ("shard-0", "shard-1"),
        heals=True,
        moments={
            "before_take": Moment("it gets a request for groups", 12),
            "after_take": Moment("it has leased groups, and the answer is not sent", 8),
            "mid_compute": Moment("it has read columns, and the answer is not sent", 4),
            "mid_put": Moment("half of a commit is in its journal", 4),
            "mid_checkpoint": Moment("half of its snapshot is written", 2),
        },
    ),
    "coordinator": Role(
        ("coordinator",),
        heals=False,
        moments={
            "before_take": Moment("it asks for groups to train", 6),
            "after_take": Moment("it has leased groups to train", 6),
            "mid_compute": Moment("a micro-batch is trained", 10, (0.0, 0.005, AT_THE_END_S)),
            "mid_put": Moment("a step is in the run log, and its groups are in the shards", 5),
            "mid_checkpoint": Moment("a checkpoint gets its name", 2, (0.0, AT_THE_END_S)),
        },
    ),
    "trainer": Role(
        ("trainer-0",),
        heals=False,
        moments={
            "before_take": Moment("it asks for the columns of a micro-batch", 10),
            "after_take": Moment("it has the columns of a micro-batch", 10),
            "mid_compute": Moment("forward and backward are under way", 10, (0.0, 0.005)),
            "mid_put": Moment("it has updated, or gathers a version", 5, (0.0, AT_THE_END_S)),
            "mid_checkpoint": Moment("it writes its part of a checkpoint", 2, (0.0, 0.005)),
        },
    ),
}


@dataclass(frozen=True)
class Scenario:
    """One kill in one run.

    `stored`: columns of any size go through the object store. `settings` of the run are added to
    those of the bench.
    """

    role: str
    moment: str
    actor: str
    passage: int
    delay_s: float = 0.0
    stored: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        """Name for the option --only."""
        return ":".join(filter(None, (self.role, self.moment, self.variant)))

    @property
    def heals(self) -> bool:
        """Whether the run goes on by itself; otherwise it ends and is resumed."""
        return self.role in ROLES and ROLES[self.role].heals

    @property
    def is_on_policy(self) -> bool:
        """Whether the metrics are independent of timing."""
        return not self.settings["pipeline.max_staleness"]

    def __str__(self) -> str:
        ends = {0.0: "", AT_THE_END_S: ", at its end"}
        delay = ends.get(self.delay_s, f", after {self.delay_s * 1000:g} ms")
        facts = [f"{key.partition('.')[2]}={value}" for key, value in self.settings.items()]
        facts += ["stored"] * self.stored
        return f"{self.actor} as {self.text} (no. {self.passage}{delay}; {' '.join(facts)})"

    def plan(self, run_dir: Path, marker: Path) -> dict[str, Any]:
        """Return the description that the injected fault reads."""
        return {**asdict(self), "run_dir": str(run_dir), "marker": str(marker)}


TRANSPORTS = {
    "generator": "collective",
    "scorer": "store",
    "shard": "delta",
    "coordinator": "disk",
    "trainer": "shared_memory",
}
"""Weights transport in the scenarios of a role; it has no effect on the metrics."""

WITH_CRITIC = {
    "algorithm.name": "ppo",
    "algorithm.epochs": 2,
    "algorithm.mini_batches": 2,
    "algorithm.correction.proximal": "trainer",
}


def scenario(role: str, moment: str, seed: int) -> Scenario:
    """Make the scenario of one moment, which depends on the seed only."""
    draw = random.Random(f"{seed}:{role}:{moment}")
    work = ROLES[role].moments[moment]
    # In an update the ranks wait for each other.
    ranks = 2 if (role, moment) == ("trainer", "mid_put") else 1
    actors = ("trainer-0", "trainer-1") if ranks > 1 else ROLES[role].actors
    # Two models in training, each updated several times in a step.
    has_critic = (role, moment) == ("trainer", "mid_compute")
    actors = ("trainer-0", "critic-0") if has_critic else actors
    return Scenario(
        role=role,
        moment=moment,
        actor=draw.choice(actors),
        passage=draw.randint(1, work.passages),
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


def all_scenarios(seed: int) -> list[Scenario]:
    return [scenario(role, moment, seed) for role in ROLES for moment in MOMENTS]


def short_scenarios(seed: int) -> list[Scenario]:
    """Return every role once, at moments that rotate with the seed."""
    moments = [MOMENTS[(seed + i) % len(MOMENTS)] for i in range(len(ROLES))]
    return [scenario(role, moment, seed) for role, moment in zip(ROLES, moments, strict=True)]


def more_scenarios(seed: int) -> list[Scenario]:
    """Return scenarios outside the table: other placements, processes and narrower moments."""
    draw = random.Random(f"{seed}:more")
    sequential = {**ON_POLICY, "placement.mode": "sequential"}
    colocated = {"pipeline.max_staleness": 1, "placement.mode": "colocated"}
    evaluated = {**ON_POLICY, "evaluation.at_start": "true"}
    pulled = {**ON_POLICY, TRANSPORT: draw.choice(sorted(TRANSPORTS.values()))}
    delay_s = draw.choice((0.0, 0.002, 0.01, AT_THE_END_S))

    def kill(role: str, moment: str, passes: tuple[int, int], text: str, **more: Any) -> Scenario:
        actor = draw.choice(ROLES[role].actors) if role in ROLES else role
        more = {"settings": ON_POLICY, **more}
        return Scenario(role, moment, actor, draw.randint(*passes), text=text, **more)

    in_turn: dict[str, Any] = {"settings": sequential, "variant": "in_turn"}
    in_place: dict[str, Any] = {"settings": colocated, "variant": "in_place"}
    leased = "it has leased groups, and waits for the device lease"
    fetched = "its answer is there, and the columns it owns are not fetched"
    updated = "it has updated the weights where its generator has them"
    paused = "forward and backward are under way, and its generator is paused"
    loaded = "it has loaded the model, before the run is under way"
    pulls = "it fetches a version, or has fetched it"
    on_policy = {"settings": {**colocated, **ON_POLICY}}
    return [
        kill("generator", "mid_compute", (1, 16), "it samples under the device lease", **in_turn),
        kill("scorer", "after_take", (1, 4), leased, **in_turn),
        kill("generator", "mid_evaluation", (1, 8), "it samples to evaluate", settings=evaluated),
        kill("scorer", "mid_evaluation", (1, 8), "it scores to evaluate", settings=evaluated),
        kill("generator", "mid_pull", (2, 5), pulls, delay_s=delay_s, settings=pulled),
        kill("shard", "mid_fetch", (1, 3), fetched, stored=True),
        kill("trainer", "at_start", (1, 1), loaded),
        kill("trainer", "mid_put", (2, 5), updated, **{**in_place, **on_policy}),
        kill("trainer", "mid_compute", (1, 10), paused, **in_place),
        kill("driver", "mid_step", (1, 5), "it takes the row of a step"),
    ]
