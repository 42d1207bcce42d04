"""What is killed, and when: roles, five moments of each, and a plan that follows from a seed."""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TRANSPORT = "weights.transport"
MOMENTS = ("before_take", "after_take", "mid_compute", "mid_put", "mid_checkpoint")
ON_POLICY: dict[str, Any] = {"pipeline.max_staleness": 0}
AT_THE_END_S = 60.0
"""A delay that stands for: when the work is done, before anybody hears of it."""


@dataclass(frozen=True)
class Moment:
    """What a role does at a moment.

    passages: how often a run is sure to come by before its last step.
    delays_s: how long the work may have been going on when the kill comes, s.
    """

    text: str
    passages: int
    delays_s: tuple[float, ...] = (0.0,)


@dataclass(frozen=True)
class Role:
    """A kind of process: the names of its actors, and whether a run outlives the death of one."""

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
            "before_take": Moment("it is asked for groups", 12),
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
            "mid_put": Moment("a step is on the books, and its groups are in the shards", 5),
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
            "mid_put": Moment(
                "it has updated, or is gathering a version to publish", 5, (0.0, AT_THE_END_S)
            ),
            "mid_checkpoint": Moment("it writes its part of a checkpoint", 2, (0.0, 0.005)),
        },
    ),
}


@dataclass(frozen=True)
class Scenario:
    """One kill in one run.

    `stored`: columns travel in the object store however small they are. `settings` of the run
    beside those of the bench.
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
        """As --only takes it."""
        return ":".join(filter(None, (self.role, self.moment, self.variant)))

    @property
    def heals(self) -> bool:
        """Whether the run goes on by itself; otherwise it ends and is resumed."""
        return self.role in ROLES and ROLES[self.role].heals

    @property
    def is_on_policy(self) -> bool:
        """Whether the numbers do not depend on who was quick."""
        return not self.settings["pipeline.max_staleness"]

    def __str__(self) -> str:
        ends = {0.0: "", AT_THE_END_S: ", at its end"}
        delay = ends.get(self.delay_s, f", after {self.delay_s * 1000:g} ms")
        facts = [f"{key.partition('.')[2]}={value}" for key, value in self.settings.items()]
        facts += ["stored"] * self.stored
        return f"{self.actor} as {self.text} (no. {self.passage}{delay}; {' '.join(facts)})"

    def plan(self, run_dir: Path, marker: Path) -> dict[str, Any]:
        """What the injected fault is told."""
        return {**asdict(self), "run_dir": str(run_dir), "marker": str(marker)}


TRANSPORTS = {
    "generator": "collective",
    "scorer": "store",
    "shard": "delta",
    "coordinator": "disk",
    "trainer": "shared_memory",
}
"""How the weights travel in the scenarios of a role: the numbers are the same whatever it is."""

WITH_CRITIC = {
    "algorithm.name": "ppo",
    "algorithm.epochs": 2,
    "algorithm.mini_batches": 2,
    "algorithm.correction.proximal": "trainer",
}


def scenario(role: str, moment: str, seed: int) -> Scenario:
    """The scenario of one moment that follows from a seed, whatever others are run."""
    draw = random.Random(f"{seed}:{role}:{moment}")
    found = ROLES[role].moments[moment]
    # An update is where the ranks wait for each other.
    ranks = 2 if (role, moment) == ("trainer", "mid_put") else 1
    actors = ("trainer-0", "trainer-1") if ranks > 1 else ROLES[role].actors
    # Two models in training, each updated several times in a step.
    has_critic = (role, moment) == ("trainer", "mid_compute")
    actors = ("trainer-0", "critic-0") if has_critic else actors
    return Scenario(
        role=role,
        moment=moment,
        actor=draw.choice(actors),
        passage=draw.randint(1, found.passages),
        delay_s=draw.choice(found.delays_s),
        stored=draw.choice((False, True)),
        settings={
            "pipeline.max_staleness": draw.choice((0, 1)),
            TRANSPORT: TRANSPORTS[role],
            **({"trainer.world_size": ranks, "trainer.zero_stage": 3} if ranks > 1 else {}),
            **(WITH_CRITIC if has_critic else {}),
        },
        text=found.text,
    )


def all_scenarios(seed: int) -> list[Scenario]:
    """Every role at every moment."""
    return [scenario(role, moment, seed) for role in ROLES for moment in MOMENTS]


def short_scenarios(seed: int) -> list[Scenario]:
    """Every role once, at moments that rotate with the seed."""
    return [
        scenario(role, MOMENTS[(seed + i) % len(MOMENTS)], seed) for i, role in enumerate(ROLES)
    ]


def more_scenarios(seed: int) -> list[Scenario]:
    """What is beside the table: other placements, other processes, narrower moments."""
    draw = random.Random(f"{seed}:more")
    return [*_other_phases(draw), *_narrower_moments(draw)]


def _other_phases(draw: random.Random) -> list[Scenario]:
    in_turn = {**ON_POLICY, "placement.mode": "sequential"}
    evaluated = {**ON_POLICY, "evaluation.at_start": "true"}
    return [
        Scenario(
            "generator",
            "mid_compute",
            "generator-0",
            draw.randint(1, 16),
            settings=in_turn,
            text="it samples, and has the device lease",
            variant="in_turn",
        ),
        Scenario(
            "scorer",
            "after_take",
            "reward-0",
            draw.randint(1, 4),
            settings=in_turn,
            text="it has leased groups, and waits for the device lease",
            variant="in_turn",
        ),
        Scenario(
            "generator",
            "mid_evaluation",
            "generator-0",
            draw.randint(1, 8),
            settings=evaluated,
            text="it samples for an evaluation",
        ),
        Scenario(
            "scorer",
            "mid_evaluation",
            "reward-0",
            draw.randint(1, 8),
            settings=evaluated,
            text="it scores for an evaluation",
        ),
    ]


def _narrower_moments(draw: random.Random) -> list[Scenario]:
    return [
        Scenario(
            "generator",
            "mid_pull",
            "generator-0",
            draw.randint(2, 5),
            delay_s=draw.choice((0.0, 0.002, 0.01, AT_THE_END_S)),
            settings={**ON_POLICY, TRANSPORT: draw.choice(sorted(TRANSPORTS.values()))},
            text="it fetches a version, or has fetched it",
        ),
        Scenario(
            "shard",
            "mid_fetch",
            draw.choice(ROLES["shard"].actors),
            draw.randint(1, 3),
            stored=True,
            settings=ON_POLICY,
            text="its answer is there, and the columns it owns are not fetched",
        ),
        Scenario(
            "trainer",
            "at_start",
            "trainer-0",
            1,
            settings=ON_POLICY,
            text="it has loaded the model, before the run is under way",
        ),
        Scenario(
            "trainer",
            "mid_put",
            "trainer-0",
            draw.randint(2, 5),
            settings={**ON_POLICY, "placement.mode": "colocated"},
            text="it has updated the weights where its generator has them",
            variant="in_place",
        ),
        Scenario(
            "trainer",
            "mid_compute",
            "trainer-0",
            draw.randint(1, 10),
            settings={"pipeline.max_staleness": 1, "placement.mode": "colocated"},
            text="forward and backward are under way, and its generator stands still",
            variant="in_place",
        ),
        Scenario(
            "driver",
            "mid_step",
            "driver",
            draw.randint(1, 5),
            settings=ON_POLICY,
            text="it takes the row of a step",
        ),
    ]
