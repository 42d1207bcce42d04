"""An algorithm as data: its model calls and the columns that flow between them.

Pure: executors (the pipelined run, others later) read this declaration; nothing here runs anything.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property

import networkx as nx

from streamrl.messages import ROLLOUT_COLUMNS


class CallKind(Enum):
    """What a call does with its model."""

    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"


class EdgeKind(StrEnum):
    """Why a stage at a step waits for one at that step or an earlier one: the kind of an edge."""

    DATA = "data"
    VERSION = "version"
    ORDER = "order"


StepNode = tuple[int, str]
"""A step, counted from 0, and a stage at it."""


@dataclass(frozen=True)
class ModelCall:
    """One model call: the stage it runs in, the role it calls, the columns in and out.

    A stage takes a group once all columns it `needs` are there, those it only waits for among them.
    `followed_role` is the trained role whose weights the called one holds, where they are not its
    own for good. Several calls of one role are served by the same actors.
    """

    stage: str
    role: str
    kind: CallKind
    needs: tuple[str, ...]
    produces: tuple[str, ...]
    followed_role: str = ""


POLICY = "policy"
"""The role whose weights the generators sample from."""
CRITIC = "critic"
"""The role whose weights the value stage follows."""
COST_CRITIC = "cost_critic"
"""The critic of costs, likewise."""
EMA_REFERENCE = "reference"
"""What a reference follows that is moved after the policy, and published by its trainer."""
CRITIC_BY_COLUMN = {"values": CRITIC, "cost_values": COST_CRITIC}
"""Who is trained to predict what a column holds."""
RETURNS_BY_CRITIC = {CRITIC: "returns", COST_CRITIC: "cost_returns"}
"""What a row derives for a critic to learn."""
SEQUENCE_COLUMNS = ("token_ids", "loss_mask", "lengths")
GENERATE_CALL = ModelCall("generate", "generator", CallKind.GENERATE, (), ROLLOUT_COLUMNS, POLICY)
GREEDY_CALL = ModelCall("greedy", "generator", CallKind.GENERATE, (), ("greedy_ids",), POLICY)
REWARD_CALL = ModelCall("reward", "reward", CallKind.SCORE, ROLLOUT_COLUMNS, ("scores",))
BASELINE_CALL = ModelCall(
    "baseline", "reward", CallKind.SCORE, ("greedy_ids", "lengths"), ("baseline_scores",)
)
COST_CALL = ModelCall("cost", "cost", CallKind.SCORE, ROLLOUT_COLUMNS, ("costs",))
REFERENCE_CALL = ModelCall(
    "reference", "reference", CallKind.SCORE, SEQUENCE_COLUMNS, ("ref_logprobs",)
)
VALUE_CALL = ModelCall("value", "value", CallKind.SCORE, SEQUENCE_COLUMNS, ("values",), CRITIC)
"""The critic as a shadow of its trainer: it follows the versions, and only computes forward."""
COST_VALUE_CALL = ModelCall(
    "cost_value", "cost_value", CallKind.SCORE, SEQUENCE_COLUMNS, ("cost_values",), COST_CRITIC
)
FILTER_COLUMN = "scores"
"""The column that only groups have which the filter keeps."""
FILTER_CALLS = (GENERATE_CALL, REWARD_CALL)
"""What the filter's verdict on a group is made of; all else can wait for it."""
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
    """A checked set of calls. Raises ValueError naming the column or stage that is wrong."""

    def __init__(self, calls: Iterable[ModelCall]) -> None:
        self.calls = tuple(calls)
        for stage, count in Counter(call.stage for call in self.calls).items():
            if count > 1:
                raise ValueError(f"stage {stage} is declared {count} times")
        self._producers: dict[str, ModelCall] = {}
        for call in self.calls:
            for column in call.produces:
                if column in self._producers:
                    rivals = f"{self._producers[column].stage} and {call.stage}"
                    raise ValueError(f"column {column} is produced twice: by {rivals}")
                self._producers[column] = call
        self._trainers: dict[str, ModelCall] = {}
        for call in (call for call in self.calls if call.kind is CallKind.TRAIN):
            if call.role in self._trainers:
                rivals = f"{self._trainers[call.role].stage} and {call.stage}"
                raise ValueError(f"role {call.role} is trained twice: by {rivals}")
            self._trainers[call.role] = call
        self._check_dependencies()

    def _check_dependencies(self) -> None:
        for call in self.calls:
            for column in call.needs:
                if column not in self._producers:
                    raise ValueError(f"stage {call.stage} needs column {column}: nobody makes it")
            if (
                call.followed_role
                and _get_publishing_role(call.followed_role) not in self._trainers
            ):
                raise ValueError(
                    f"stage {call.stage} follows {call.followed_role}: nobody trains it"
                )
        graph = self.graph
        if not nx.is_directed_acyclic_graph(graph):
            links = [
                f"{source} makes {', '.join(graph.edges[source, target]['columns'])} for {target}"
                for source, target in nx.find_cycle(graph)
            ]
            raise ValueError(f"the stages wait for each other in a circle: {'; '.join(links)}")

    @property
    def queue_calls(self) -> list[ModelCall]:
        """The calls that take groups from the queue: all, but of the trainers only the policy's.

        The others train what it was given.
        """
        return [c for c in self.calls if c.kind is not CallKind.TRAIN or c.role == POLICY]

    @property
    def calls_by_role(self) -> dict[str, list[ModelCall]]:
        """The calls of each role, both in flow order."""
        found: dict[str, list[ModelCall]] = {}
        for call in self.ordered_calls:
            found.setdefault(call.role, []).append(call)
        return found

    @property
    def trained_roles(self) -> list[str]:
        """The roles whose models are trained."""
        return [call.role for call in self.select_calls(CallKind.TRAIN)]

    @property
    def graph(self) -> "nx.DiGraph[str]":
        """Stages as nodes; an edge per pair of stages, with the columns that flow along it."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((call.stage, {"call": call}) for call in self.calls)
        for call in self.calls:
            for column in call.needs:
                source = self._producers[column].stage
                if not graph.has_edge(source, call.stage):
                    graph.add_edge(source, call.stage, columns=[])
                graph.edges[source, call.stage]["columns"].append(column)
        return graph

    @property
    def stages(self) -> list[str]:
        """Stage names in an order in which data can flow."""
        order = {call.stage: i for i, call in enumerate(self.calls)}
        return list(nx.lexicographical_topological_sort(self.graph, key=order.__getitem__))

    @property
    def ordered_calls(self) -> list[ModelCall]:
        """The calls in flow order."""
        return list(self._ordered_calls)

    @cached_property
    def _ordered_calls(self) -> tuple[ModelCall, ...]:
        by_stage = {call.stage: call for call in self.calls}
        return tuple(by_stage[stage] for stage in self.stages)

    def select_calls(self, kind: CallKind) -> list[ModelCall]:
        """The calls of one kind, in flow order."""
        return [call for call in self._ordered_calls if call.kind is kind]

    @property
    def unused_columns(self) -> list[tuple[str, str]]:
        """The (stage, column) pairs that no stage needs: made, stored, and read by none.

        That is no error: a row may train on a part of what a stage makes anyway.
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
        """Who trains what whom follows: (training call, call), for the first calls of each role.

        First is a call that no other of its role comes before: whoever comes after has waited.
        """
        graph, holds = self.graph, {c.stage: (c.role, c.followed_role) for c in self.calls}
        return [
            (self._trainers[_get_publishing_role(call.followed_role)], call)
            for call in self.ordered_calls
            if call.followed_role
            and all(holds[s] != holds[call.stage] for s in nx.ancestors(graph, call.stage))
        ]

    def unroll_steps(self, steps: int, max_staleness: int) -> "nx.DiGraph[StepNode]":
        """The stages at each step, as nodes (step, stage) with a `call`, and what each waits for.

        An edge's `kind` is a Wait. DATA, within a step, has `columns`. VERSION has a `role`: the
        first call of a role that follows that one waits until it is trained at step
        i - 1 - max_staleness. ORDER: a role is trained at one step after the other. So what works
        at step i has version i - max_staleness or a newer one, if every version is published.

        Raises ValueError for no steps, or a bound below 0.
        """
        if steps < 1:
            raise ValueError(f"steps={steps}: must be at least 1")
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}: must be 0 or more")
        graph: nx.DiGraph[StepNode] = nx.DiGraph()
        calls, flow, versions = self.ordered_calls, self.graph, self.version_edges
        for step in range(steps):
            graph.add_nodes_from(((step, call.stage), {"call": call}) for call in calls)
            for a, b in flow.edges:
                columns = flow.edges[a, b]["columns"]
                graph.add_edge((step, a), (step, b), kind=EdgeKind.DATA, columns=columns)
            for call in self._trainers.values() if step else ():
                graph.add_edge((step - 1, call.stage), (step, call.stage), kind=EdgeKind.ORDER)
            made = step - 1 - max_staleness
            for source, call in versions if made >= 0 else ():
                nodes = (made, source.stage), (step, call.stage)
                graph.add_edge(*nodes, kind=EdgeKind.VERSION, role=call.followed_role)
        return graph


def _get_publishing_role(followed: str) -> str:
    """The trained role whose trainer publishes the versions of what is followed."""
    return POLICY if followed == EMA_REFERENCE else followed


def build_dataflow(
    columns: Iterable[str],
    *,
    shares_critic: bool = False,
    moves_reference: bool = False,
    has_filter: bool = False,
) -> Dataflow:
    """The dataflow that trains a policy on `columns`: the sources they need, and no others.

    Where a critic's values are among them, it is trained beside the policy, on the same groups; or
    it is part of the policy, if the model is shared. A reference may follow the policy. With a
    filter whatever its verdict is not made of waits for it: a group that is taken out costs no more
    than its generation and its reward.

    Raises ValueError if no source makes one of the columns.
    """
    needs = tuple(columns)
    train = [ModelCall("train", POLICY, CallKind.TRAIN, needs, ())]
    for column, role in CRITIC_BY_COLUMN.items():
        if column in needs and not shares_critic:
            train.append(ModelCall(f"train_{role}", role, CallKind.TRAIN, needs, ()))
    wanted = {*needs, *((FILTER_COLUMN,) if has_filter else ())}
    calls: list[ModelCall] = []
    while True:
        missing = [c for c in SOURCE_CALLS if c not in calls and wanted.intersection(c.produces)]
        if not missing:
            break
        calls += missing
        wanted.update(column for call in missing for column in call.needs)
    ordered = [call for call in SOURCE_CALLS if call in calls]
    if shares_critic:
        ordered = [replace(c, followed_role=POLICY) if c == VALUE_CALL else c for c in ordered]
    if moves_reference:
        ordered = [
            replace(c, followed_role=EMA_REFERENCE) if c == REFERENCE_CALL else c for c in ordered
        ]
    if has_filter:
        ordered = [
            c if c in FILTER_CALLS else replace(c, needs=(*c.needs, FILTER_COLUMN)) for c in ordered
        ]
    return Dataflow([*ordered, *train])
