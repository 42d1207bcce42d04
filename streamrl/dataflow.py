"""An algorithm as data: model calls and the columns that flow between them.

This module is pure: executors read the declaration; nothing here runs anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import networkx as nx

from streamrl.messages import (
    EPISODE_COLUMN,
    EPISODE_COLUMNS,
    REF_TOP_IDS,
    REF_TOP_LOGPROBS,
    ROLLOUT_COLUMNS,
    STATE_COLUMN,
)


class CallKind(Enum):
    GENERATE = "generate"
    READ = "read"
    SCORE = "score"
    TRAIN = "train"


@dataclass(frozen=True)
class ModelCall:
    """A call of a model in the dataflow: stage, called role, required and produced columns.

    A stage leases a group once all columns in `needs` exist; the call need not read all of them.
    `followed_role` is the trained role that publishes the weights of `role`; "" for fixed weights.
    All calls of a role run on the same actors. A scoring call of a trained role is computed by the
    ranks that train it, with the version that they hold.
    """

    stage: str
    role: str
    kind: CallKind
    needs: tuple[str, ...]
    produces: tuple[str, ...]
    followed_role: str = ""

    @property
    def model_role(self) -> str:
        """Role that owns the model: the trained role for followers, such as the generator."""
        return self.followed_role or self.role


POLICY = "policy"
"""Role that generators sample from."""
CRITIC = "critic"
"""Role that the value stage follows."""
COST_CRITIC = "cost_critic"
"""Critic of the cost columns (constrained RL)."""
EMA_REFERENCE = "reference"
"""Pseudo-role followed by an EMA reference; the policy's trainer publishes it."""
CRITIC_BY_COLUMN = {"values": CRITIC, "cost_values": COST_CRITIC}
"""Critic trained to predict each value column."""
RETURNS_BY_CRITIC = {CRITIC: "returns", COST_CRITIC: "cost_returns"}
"""Column of regression targets that an algorithm spec derives for each critic."""
CRITIC_ROLES = tuple(RETURNS_BY_CRITIC)
"""Trained roles besides the policy."""
SEQUENCE_COLUMNS = ("token_ids", "loss_mask", "lengths")
GENERATE_CALL = ModelCall("generate", "generator", CallKind.GENERATE, (), ROLLOUT_COLUMNS, POLICY)
ROWS_CALL = ModelCall("rows", "coordinator", CallKind.READ, (), (*ROLLOUT_COLUMNS, "scores"))
"""Takes the place of generation and reward: rows of the data are the rollouts."""
GENERATOR, EPISODES, ROWS = "generator", "episodes", "rows"
"""Sources of rollouts: the generator, alone or with an environment, or rows of the data."""
GREEDY_CALL = ModelCall("greedy", "generator", CallKind.GENERATE, (), ("greedy_ids",), POLICY)
REWARD_CALL = ModelCall("reward", "reward", CallKind.SCORE, ROLLOUT_COLUMNS, ("scores",))
BASELINE_CALL = ModelCall(
    "baseline", "reward", CallKind.SCORE, ("greedy_ids", "lengths"), ("baseline_scores",)
)
COST_CALL = ModelCall("cost", "cost", CallKind.SCORE, ROLLOUT_COLUMNS, ("costs",))
REF_LOGPROBS = "ref_logprobs"
TOP_COLUMNS = (REF_TOP_IDS, REF_TOP_LOGPROBS)
"""Further columns of the reference's call, if they are needed."""
REFERENCE_CALL = ModelCall(
    "reference", "reference", CallKind.SCORE, SEQUENCE_COLUMNS, (REF_LOGPROBS,)
)
VALUE_CALL = ModelCall("value", "value", CallKind.SCORE, SEQUENCE_COLUMNS, ("values",), CRITIC)
"""Forward passes only: a follower of the critic's trainer computes the values."""
COST_VALUE_CALL = ModelCall(
    "cost_value", "cost_value", CallKind.SCORE, SEQUENCE_COLUMNS, ("cost_values",), COST_CRITIC
)


class ServingRole(NamedTuple):
    """Facts of a role whose actors serve stages and may be scaled during a run.

    replicas: setting that determines the number of its actors.
    label: name of the option of `streamrl scale`, and in its answers.
    is_reward: scores by rewards of the config, which may be rules without a model.
    ranks: setting that determines over how many actors each replica's model is split; empty if
    none does.
    """

    replicas: str
    label: str
    is_reward: bool = False
    ranks: str = ""


SERVING_ROLES = {
    GENERATE_CALL.role: ServingRole("generator.replicas", "generators"),
    REFERENCE_CALL.role: ServingRole(
        "reference.replicas", "reference", ranks="reference.world_size"
    ),
    REWARD_CALL.role: ServingRole("scorer.replicas", "scorers", is_reward=True),
    COST_CALL.role: ServingRole("scorer.replicas", "cost", is_reward=True),
    VALUE_CALL.role: ServingRole("critic.replicas", "value", ranks="critic.shadow.world_size"),
    COST_VALUE_CALL.role: ServingRole(
        "critic.replicas", "cost_value", ranks="critic.shadow.world_size"
    ),
}
REWARD_ROLES = tuple(role for role, facts in SERVING_ROLES.items() if facts.is_reward)
WIDE_COLUMNS = ("sampling_mask", "routed_experts")
"""Further columns of generation, for training that replays choices of the generator."""
FILTER_COLUMN = "scores"
"""Column that exists only for groups the filter keeps."""
FILTER_CALLS = (GENERATE_CALL, REWARD_CALL)
"""Calls that the filter's decision depends on; all further calls can wait for the decision."""
SOURCE_CALLS = (
    GENERATE_CALL,
    GREEDY_CALL,
    REWARD_CALL,
    BASELINE_CALL,
    COST_CALL,
    REFERENCE_CALL,
    VALUE_CALL,
    COST_VALUE_CALL,
)


class Dataflow:
    """The model calls of an algorithm, with the columns that connect them (`build_dataflow`).

    A stage occurs once, a column has one producer, and a role one training. Raises ValueError
    naming a stage and a column that no stage produces.
    """

    def __init__(self, calls: Iterable[ModelCall]) -> None:
        self.calls = tuple(calls)
        self._producers = {column: call for call in self.calls for column in call.produces}
        for call in self.calls:
            for column in call.needs:
                if column not in self._producers:
                    raise ValueError(
                        f"stage {call.stage} needs column {column}: no stage produces it"
                    )

    @property
    def queue_calls(self) -> list[ModelCall]:
        """Calls that lease groups from the queue: all but the training of critics.

        The coordinator hands the policy's groups to the critics' trainers.
        """
        return [c for c in self.calls if c.kind is not CallKind.TRAIN or c.role == POLICY]

    @property
    def calls_by_role(self) -> dict[str, list[ModelCall]]:
        """Calls of each role in the order of the dataflow; of a trained role first its training.

        The coordinator, which reads rows, is no role.
        """
        calls: dict[str, list[ModelCall]] = {}
        for call in self.ordered_calls:
            if call.kind is not CallKind.READ:
                calls.setdefault(call.role, []).append(call)
        for of_role in calls.values():
            of_role.sort(key=lambda call: call.kind is not CallKind.TRAIN)
        return calls

    @property
    def trained_roles(self) -> list[str]:
        return [call.role for call in self.select_calls(CallKind.TRAIN)]

    @property
    def followed_roles(self) -> set[str]:
        """Roles whose versions other actors load."""
        return {call.followed_role for call in self.calls if call.followed_role}

    @property
    def graph(self) -> "nx.DiGraph[str]":
        """Graph with stages as nodes and, on each edge, the `columns` that flow along it."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(call.stage for call in self.calls)
        for call in self.calls:
            for column in call.needs:
                source = self._producers[column].stage
                if not graph.has_edge(source, call.stage):
                    graph.add_edge(source, call.stage, columns=[])
                graph.edges[source, call.stage]["columns"].append(column)
        return graph

    @cached_property
    def ordered_calls(self) -> tuple[ModelCall, ...]:
        """Calls in topological order; ties keep the order of declaration."""
        by_stage = {call.stage: call for call in self.calls}
        order = list(by_stage).index
        stages = nx.lexicographical_topological_sort(self.graph, key=order)
        return tuple(by_stage[stage] for stage in stages)

    def select_calls(self, kind: CallKind) -> list[ModelCall]:
        return [call for call in self.ordered_calls if call.kind is kind]

    @property
    def unused_columns(self) -> list[tuple[str, str]]:
        """(stage, column) pairs that are produced and stored but needed by no stage.

        Unused columns are legal: an algorithm spec may train on a subset of a stage's output.
        """
        needed = {column for call in self.calls for column in call.needs}
        return [
            (c.stage, column)
            for c in self.ordered_calls
            for column in c.produces
            if column not in needed
        ]

    @property
    def version_edges(self) -> list[tuple[ModelCall, ModelCall]]:
        """Pairs of a call that trains a model and a call that follows the model's weights.

        Only the first call of a following role counts: later calls run after the first, with the
        same version.
        """
        trainers = {call.role: call for call in self.select_calls(CallKind.TRAIN)}
        graph, holds = self.graph, {c.stage: (c.role, c.followed_role) for c in self.calls}
        # The policy's trainer publishes the moving reference, too.
        publishers = {EMA_REFERENCE: POLICY}
        return [
            (trainers[publishers.get(call.followed_role, call.followed_role)], call)
            for call in self.ordered_calls
            if call.followed_role
            and all(holds[s] != holds[call.stage] for s in nx.ancestors(graph, call.stage))
        ]


def build_dataflow(
    columns: Iterable[str],
    *,
    shares_critic: bool = False,
    moves_reference: bool = False,
    has_filter: bool = False,
    source: str = GENERATOR,
    hosts: Mapping[str, str] = MappingProxyType({}),
) -> Dataflow:
    """Build the dataflow that trains a policy on `columns`, with no more calls than necessary.

    If a critic's values are among the columns, a critic trains on the same groups, or as a head of
    the policy with `shares_critic`. With `moves_reference` the reference follows the policy. With
    `has_filter` every call outside FILTER_CALLS waits for the filter: a rejected group then costs
    only its generation and its reward. With the source EPISODES generation also produces the
    columns of episodes, which the reward stage reads; with EPISODE_COLUMN among `columns` an
    episode may have several samples. From ROWS come rollouts with their scores. `hosts` maps a
    scoring role to the trained role whose ranks compute its columns: their model is the one that
    scores. Raises ValueError for a column that no call
    produces.
    """
    needs = tuple(columns)
    train = [ModelCall("train", POLICY, CallKind.TRAIN, needs, ())]
    for column, role in CRITIC_BY_COLUMN.items():
        if column in needs and not shares_critic:
            train.append(ModelCall(f"train_{role}", role, CallKind.TRAIN, needs, ()))
    wanted = {*needs, *((FILTER_COLUMN,) if has_filter else ())}
    calls: list[ModelCall] = []
    sources: tuple[ModelCall, ...] = SOURCE_CALLS
    if source == ROWS:
        pairs = (EPISODE_COLUMN,) if EPISODE_COLUMN in needs else ()
        rows = replace(ROWS_CALL, produces=(*ROWS_CALL.produces, *pairs))
        made = {*rows.produces}
        sources = (rows, *(call for call in SOURCE_CALLS if made.isdisjoint(call.produces)))
    while True:
        missing = [c for c in sources if c not in calls and wanted.intersection(c.produces)]
        if not missing:
            break
        calls += missing
        wanted.update(column for call in missing for column in call.needs)
    ordered = [call for call in sources if call in calls]
    if shares_critic:
        ordered = [replace(c, followed_role=POLICY) if c == VALUE_CALL else c for c in ordered]
    if moves_reference:
        ordered = [
            replace(c, followed_role=EMA_REFERENCE) if c == REFERENCE_CALL else c for c in ordered
        ]
    ordered = [
        replace(c, role=hosts[c.role], followed_role="") if c.role in hosts else c for c in ordered
    ]
    if has_filter:
        ordered = [
            c if c in FILTER_CALLS else replace(c, needs=(*c.needs, FILTER_COLUMN)) for c in ordered
        ]
    if source == EPISODES:
        episode = (EPISODE_COLUMN,) if EPISODE_COLUMN in needs else ()
        ordered = [_add_columns(call, (*EPISODE_COLUMNS, *episode)) for call in ordered]
    further = {GENERATE_CALL.stage: WIDE_COLUMNS, REFERENCE_CALL.stage: TOP_COLUMNS}
    ordered = [
        replace(c, produces=(*c.produces, *(n for n in further.get(c.stage, ()) if n in needs)))
        for c in ordered
    ]
    return Dataflow([*ordered, *train])


def _add_columns(call: ModelCall, episode_columns: Sequence[str]) -> ModelCall:
    """Return a call that also produces, or reads, the columns of episodes."""
    if call.stage == GENERATE_CALL.stage:
        return replace(call, produces=(*call.produces, *episode_columns, STATE_COLUMN))
    if call.stage in (REWARD_CALL.stage, COST_CALL.stage):
        return replace(call, needs=(*call.needs, *episode_columns))
    return call
