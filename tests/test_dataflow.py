"""Dataflow graph: validation, edges between calls, unrolled steps."""

import re
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.run_config import load_config
from streamrl.dataflow import (
    EMA_REFERENCE,
    GENERATE_CALL,
    POLICY,
    REWARD_CALL,
    CallKind,
    Dataflow,
    EdgeKind,
    ModelCall,
    build_dataflow,
)
from streamrl.messages import ROLLOUT_COLUMNS

CONFIGS = Path(__file__).parents[1] / "configs"
ROLLOUT = list(ROLLOUT_COLUMNS)
SEQUENCES = ["token_ids", "loss_mask", "lengths"]
GRPO = {
    ("generate", "reward"): ROLLOUT,
    ("generate", "train"): ROLLOUT,
    ("reward", "train"): ["scores"],
}
PPO = GRPO | {
    ("generate", "reference"): SEQUENCES,
    ("generate", "value"): SEQUENCES,
    ("generate", "train_critic"): ROLLOUT,
    ("reward", "train_critic"): ["scores"],
    ("reference", "train"): ["ref_logprobs"],
    ("reference", "train_critic"): ["ref_logprobs"],
    ("value", "train"): ["values"],
    ("value", "train_critic"): ["values"],
}
REMAX = GRPO | {
    ("generate", "baseline"): ["lengths"],
    ("greedy", "baseline"): ["greedy_ids"],
    ("baseline", "train"): ["baseline_scores"],
}
SAFE_RLHF = PPO | {
    ("generate", "cost"): ROLLOUT,
    ("generate", "cost_value"): SEQUENCES,
    ("cost", "train"): ["costs"],
    ("cost", "train_critic"): ["costs"],
    ("cost_value", "train"): ["cost_values"],
    ("cost_value", "train_critic"): ["cost_values"],
    ("generate", "train_cost_critic"): ROLLOUT,
    ("reward", "train_cost_critic"): ["scores"],
    ("cost", "train_cost_critic"): ["costs"],
    ("reference", "train_cost_critic"): ["ref_logprobs"],
    ("value", "train_cost_critic"): ["values"],
    ("cost_value", "train_cost_critic"): ["cost_values"],
}
GOLDEN = {
    "grpo_arithmetic": (GRPO, {("train", "generate")}),
    "dapo_arithmetic": (GRPO, {("train", "generate")}),
    "ppo_arithmetic": (PPO, {("train", "generate"), ("train_critic", "value")}),
    "remax_arithmetic": (REMAX, {("train", "generate"), ("train", "greedy")}),
    "safe_rlhf_toy": (
        SAFE_RLHF,
        {("train", "generate"), ("train_critic", "value"), ("train_cost_critic", "cost_value")},
    ),
}


def score(
    stage: str, needs: tuple[str, ...], produces: tuple[str, ...], **settings: str
) -> ModelCall:
    return ModelCall(
        stage, settings.pop("role", stage), CallKind.SCORE, needs, produces, **settings
    )


def train(*needs: str, stage: str = "train", role: str = POLICY) -> ModelCall:
    return ModelCall(stage, role, CallKind.TRAIN, needs, ())


def flow_of(recipe: str) -> Dataflow:
    return load_config(CONFIGS / f"{recipe}.yaml").dataflow


def edges(flow: Dataflow) -> dict[tuple[str, str], list[str]]:
    graph = flow.graph
    return {(a, b): graph.edges[a, b]["columns"] for a, b in graph.edges}


@pytest.mark.parametrize("recipe", GOLDEN)
def test_edges_of_known_algorithms(recipe: str):
    flow = flow_of(recipe)
    data, versions = GOLDEN[recipe]
    assert edges(flow) == data
    assert {(a.stage, b.stage) for a, b in flow.version_edges} == versions


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        (
            [GENERATE_CALL, REWARD_CALL, score("judge", (), ("scores",)), train()],
            "column scores is produced twice: by reward and judge",
        ),
        ([GENERATE_CALL, GENERATE_CALL, train()], "stage generate is declared 2 times"),
        (
            [GENERATE_CALL, train(), train(stage="train_again")],
            "role policy is trained twice: by train and train_again",
        ),
        ([GENERATE_CALL, train("scores")], "stage train needs column scores: no stage produces it"),
        ([GENERATE_CALL, REWARD_CALL], "stage generate follows policy: no stage trains it"),
        (
            [score("reference", (), (), followed_role=EMA_REFERENCE), train(role="critic")],
            "stage reference follows reference: no stage trains it",
        ),
        (
            [score("a", ("y",), ("x",)), score("b", ("x",), ("y", "z")), score("c", ("z",), ())],
            "the stages wait for each other in a cycle: a makes x for b; b makes y for a",
        ),
        (
            [score("a", ("x",), ("x",))],
            "the stages wait for each other in a cycle: a makes x for a",
        ),
    ],
)
def test_invalid_graph_raises_with_its_stage(calls: list[ModelCall], line: str):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        Dataflow(calls)


def test_unused_columns_are_reported_and_legal():
    flow = build_dataflow(("token_ids", "scores"))
    # The reward reads all rollout columns; without a reward most columns are unused.
    assert flow.unused_columns == []
    without_reward = build_dataflow(("token_ids",))
    assert without_reward.unused_columns == [
        ("generate", c) for c in ROLLOUT_COLUMNS if c != "token_ids"
    ]


def test_calls_after_a_filter_wait_for_its_decision():
    columns = (*ROLLOUT, *("scores", "values", "ref_logprobs", "costs", "cost_values"))
    columns = (*columns, "baseline_scores")
    ungated, gated = (
        build_dataflow(columns, has_filter=has_filter) for has_filter in (False, True)
    )
    assert set(gated.stages) == set(ungated.stages)
    for call in gated.calls:
        (before,) = [candidate for candidate in ungated.calls if candidate.stage == call.stage]
        waits = call.stage in ("greedy", "baseline", "cost", "reference", "value", "cost_value")
        assert call.needs == ((*before.needs, "scores") if waits else before.needs)
        assert (call.produces, call.followed_role) == (before.produces, before.followed_role)
    assert list(gated.graph.predecessors("reward")) == ["generate"]
    for edge in (("reward", "greedy"), ("reward", "value")):
        assert gated.graph.edges[edge]["columns"] == ["scores"]
    # Scorers that follow a role wait for its version.
    versions = {(a.stage, b.stage) for a, b in gated.version_edges}
    assert versions == {
        ("train", "generate"),
        ("train_critic", "value"),
        ("train_cost_critic", "cost_value"),
    }


def test_samples_of_an_episode_are_known_where_it_is_scored_and_trained():
    columns = (*ROLLOUT, "scores", "values", "episode")
    flow = build_dataflow(columns, has_episodes=True)
    assert set(flow.graph["generate"]) == {"reward", "value", "train", "train_critic"}
    readers = [call.stage for call in flow.calls if "episode" in call.needs]
    assert sorted(readers) == ["reward", "train", "train_critic"]
    with pytest.raises(ValueError, match="needs column episode: no stage produces it"):
        build_dataflow(columns)


def test_shared_critic_and_ema_reference_follow_the_policy():
    columns = (*ROLLOUT, "scores", "values", "ref_logprobs")
    flow = build_dataflow(columns, shares_critic=True, moves_reference=True)
    followers = {(a.stage, b.stage, b.followed_role) for a, b in flow.version_edges}
    assert followers == {
        ("train", "generate", POLICY),
        ("train", "reference", EMA_REFERENCE),
        ("train", "value", POLICY),
    }


def test_only_the_first_call_of_a_role_waits_for_the_version():
    first = score("draft", (), ("x",), role="writer", followed_role=POLICY)
    later = score("final", ("x",), ("y",), role="writer", followed_role=POLICY)
    beside = score("other", (), ("z",), role="writer", followed_role=POLICY)
    flow = Dataflow([first, later, beside, train("y", "z")])
    assert [call for _, call in flow.version_edges] == [first, beside]


def test_grpo_unrolled_over_three_steps_with_staleness_one():
    graph = flow_of("grpo_arithmetic").unroll_steps(3, 1)
    assert set(graph) == {(i, s) for i in range(3) for s in ("generate", "reward", "train")}
    edges_by_kind: dict[EdgeKind, set[object]] = {kind: set() for kind in EdgeKind}
    for a, b in graph.edges:
        edges_by_kind[graph.edges[a, b]["kind"]].add((a, b))
    assert edges_by_kind[EdgeKind.DATA] == {((i, a), (i, b)) for i in range(3) for a, b in GRPO}
    assert edges_by_kind[EdgeKind.ORDER] == {((i, "train"), (i + 1, "train")) for i in range(2)}
    assert edges_by_kind[EdgeKind.VERSION] == {((0, "train"), (2, "generate"))}
    assert graph.edges[(0, "train"), (2, "generate")]["role"] == POLICY
    assert graph.edges[(2, "reward"), (2, "train")] == {"kind": "data", "columns": ["scores"]}
    assert graph.nodes[2, "generate"]["call"] == GENERATE_CALL


@pytest.mark.parametrize(
    ("steps", "max_staleness", "line"),
    [(0, 0, "steps=0: must be at least 1"), (1, -1, "max_staleness=-1: must be 0 or more")],
)
def test_unroll_rejects_zero_steps_and_negative_staleness(
    steps: int, max_staleness: int, line: str
):
    with pytest.raises(ValueError, match=f"^{line}$"):
        flow_of("grpo_arithmetic").unroll_steps(steps, max_staleness)


RECIPES = {recipe: flow_of(recipe) for recipe in GOLDEN}


@st.composite
def dataflows(draw: st.DrawFn) -> Dataflow:
    """Draw stages that need columns of earlier stages; some follow trained roles."""
    trained = draw(st.lists(st.sampled_from(["p", "q"]), min_size=1, max_size=2, unique=True))
    follows = {role: draw(st.sampled_from(["", *trained])) for role in "abc"}
    calls: list[ModelCall] = []
    for i in range(draw(st.integers(1, 6))):
        needs = (
            draw(st.lists(st.sampled_from([f"x{k}" for k in range(i)]), unique=True)) if i else []
        )
        role = draw(st.sampled_from("abc"))
        call = score(f"s{i}", tuple(needs), (f"x{i}",), role=role, followed_role=follows[role])
        calls.append(call)
    columns = [f"x{i}" for i in range(len(calls))]
    for role in trained:
        needs = draw(st.lists(st.sampled_from(columns), unique=True))
        calls.append(train(*needs, stage=f"train_{role}", role=role))
    return Dataflow(draw(st.permutations(calls)))


@given(dataflows(), st.integers(1, 7), st.integers(0, 8))
def test_no_call_uses_a_version_beyond_max_staleness(
    flow: Dataflow, steps: int, max_staleness: int
):
    graph = flow.unroll_steps(steps, max_staleness)
    assert nx.is_directed_acyclic_graph(graph)
    for step, stage in graph:
        call = graph.nodes[step, stage]["call"]
        before = nx.ancestors(graph, (step, stage))
        if call.followed_role:
            # Training at step v makes version v + 1.
            trained = [i for i, name in before if name == f"train_{call.followed_role}"]
            version = max(trained, default=-1) + 1
            assert step - version <= max_staleness
        if call.kind is CallKind.TRAIN and step:
            assert (step - 1, stage) in before
        assert all(earlier <= step for earlier, _ in before)


@given(dataflows(), st.integers(1, 5), st.integers(0, 5))
def test_larger_max_staleness_only_removes_edges(flow: Dataflow, steps: int, max_staleness: int):
    single_step = flow.unroll_steps(1, max_staleness)
    assert {(a, b) for (_, a), (_, b) in single_step.edges} == set(flow.graph.edges)
    tight, loose = (flow.unroll_steps(steps, bound) for bound in (max_staleness, max_staleness + 1))
    other_edges = [set(g.edges) - _of_kind(g, EdgeKind.VERSION) for g in (tight, loose)]
    assert other_edges[0] == other_edges[1]
    assert len(_of_kind(loose, EdgeKind.VERSION)) <= len(_of_kind(tight, EdgeKind.VERSION))
    for node in tight:
        assert nx.ancestors(loose, node) <= nx.ancestors(tight, node)


def _of_kind(graph: "nx.DiGraph[tuple[int, str]]", kind: EdgeKind) -> set[object]:
    return {(a, b) for a, b in graph.edges if graph.edges[a, b]["kind"] == kind}
