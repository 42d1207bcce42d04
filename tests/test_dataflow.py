"""Dataflow graph: validation, edges between calls, unrolled steps."""

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.run_config import load_config
from streamrl.dataflow import (
    EMA_REFERENCE,
    EPISODES,
    GENERATE_CALL,
    POLICY,
    SERVING_ROLES,
    SOURCE_CALLS,
    CallKind,
    Dataflow,
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
    "ppo_arithmetic": (PPO, {("train", "generate")}),
    "remax_arithmetic": (REMAX, {("train", "generate"), ("train", "greedy")}),
    "safe_rlhf_toy": (
        SAFE_RLHF,
        {("train", "generate")},
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
    assert set(gated.graph) == set(ungated.graph)
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


def test_the_generator_produces_what_training_replays():
    columns = (*ROLLOUT, "scores", "values", "sampling_mask")
    flow = build_dataflow(columns, source=EPISODES, has_filter=True)
    assert "sampling_mask" in flow.calls[0].produces
    readers = [call.stage for call in flow.calls if "sampling_mask" in call.needs]
    assert sorted(readers) == ["train", "train_critic"]
    assert "sampling_mask" not in build_dataflow(ROLLOUT).calls[0].produces


def test_samples_of_an_episode_are_known_where_it_is_scored_and_trained():
    columns = (*ROLLOUT, "scores", "values", "episode")
    flow = build_dataflow(columns, source=EPISODES)
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


def unroll_steps(flow: Dataflow, steps: int, max_staleness: int) -> "nx.DiGraph[tuple[int, str]]":
    """Return the waits of some steps: data within a step, training in order, versions in time."""
    waits: nx.DiGraph[tuple[int, str]] = nx.DiGraph()
    for i in range(steps):
        waits.add_nodes_from((i, stage) for stage in flow.graph)
        waits.add_edges_from(((i, a), (i, b)) for a, b in flow.graph.edges)
        trained = [call.stage for call in flow.select_calls(CallKind.TRAIN)]
        waits.add_edges_from(((i - 1, stage), (i, stage)) for stage in trained if i)
        waits.add_edges_from(
            ((i - 1 - max_staleness, trainer.stage), (i, call.stage))
            for trainer, call in flow.version_edges
            if i > max_staleness
        )
    return waits


@given(dataflows(), st.integers(1, 7), st.integers(0, 8))
def test_no_call_uses_a_version_beyond_max_staleness(
    flow: Dataflow, steps: int, max_staleness: int
):
    waits = unroll_steps(flow, steps, max_staleness)
    assert nx.is_directed_acyclic_graph(waits)
    followed = {call.stage: call.followed_role for call in flow.calls}
    for step, stage in waits:
        before = nx.ancestors(waits, (step, stage))
        if role := followed[stage]:
            # Training at step v makes version v + 1.
            trained = [i for i, name in before if name == f"train_{role}"]
            assert step - (max(trained, default=-1) + 1) <= max_staleness


def test_every_role_of_a_stage_has_its_facts():
    assert {call.role for call in SOURCE_CALLS} == SERVING_ROLES.keys()


def test_ranks_that_train_a_model_score_with_it():
    columns = (*ROLLOUT, "scores", "values", "ref_logprobs")
    flow = build_dataflow(columns, hosts={"value": "critic", "reference": POLICY})
    stages = {role: [call.stage for call in calls] for role, calls in flow.calls_by_role.items()}
    assert stages["critic"] == ["train_critic", "value"]
    assert stages[POLICY] == ["train", "reference"]
    assert flow.followed_roles == {POLICY}
    assert flow.version_edges == [(flow.select_calls(CallKind.TRAIN)[0], GENERATE_CALL)]
