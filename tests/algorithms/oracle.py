"""A whole training step in Python's floats and loops, by the papers' formulas; no code of streamrl.

A rollout holds its sampled tokens alone: padding and observations do not exist here. What has no
gradient is computed from `Token.logprob`; only the argument `now` of a loss is differentiated.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, stdev
from typing import Any

EPS, WHITEN_EPS = 1e-6, 1e-8
STEP_WIDTH = 1e-6
"""Distance of the two points of a finite difference from the middle."""


@dataclass
class Token:
    """Numbers of a sampled token: `columns` of the batch, and the trained policy's."""

    columns: Mapping[str, Any]
    logprob: float
    entropy: float
    #: Filled in by `credit` and `mask`.
    advantage: float = 0.0
    returns: float = 0.0
    cost_returns: float = 0.0
    chosen: bool = False
    likelihood: float = 0.0
    near: bool = True
    is_uncertain: bool = True

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("columns", ()):
            return self.columns[name]
        raise AttributeError(name)


@dataclass
class Rollout:
    """A rollout: numbers of its own, and its sampled tokens."""

    columns: Mapping[str, Any]
    group: int
    tokens: list[Token]
    is_masked: bool
    is_excluded: bool
    score: float = 0.0
    rewards: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    mean_weight: float = 1.0

    @property
    def trained(self) -> list[Token]:
        return [] if self.is_masked else self.tokens

    @property
    def turns(self) -> list[list[int]]:
        """Indices of the tokens of each turn, in order."""
        by_end: dict[int, list[int]] = {}
        for i, token in enumerate(self.tokens):
            by_end.setdefault(token.turn_ends, []).append(i)
        return list(by_end.values())


Rollouts = Sequence[Rollout]


def ratio(x: float) -> float:
    """Return exp(x); its tangent beyond 20."""
    return math.exp(x) if x <= 20 else math.exp(20) * (1 + x - 20)


def divergence(x: float, kind: str) -> float:
    """Return the KL estimate at the log-ratio x of policy to reference."""
    values = {"k1": x, "k2": x * x / 2, "k3": ratio(-x) + x - 1, "abs": abs(x)}
    return values[kind.rstrip("+*")]


def clamp(x: float, low: float | None, high: float | None) -> float:
    return min(max(x, -math.inf if low is None else low), math.inf if high is None else high)


def is_inside(x: float, low: float | None, high: float | None) -> bool:
    return clamp(x, low, high) == x


# Credit: from scores to advantages.


def credit(name: str, settings: Any, rollouts: Rollouts) -> None:
    """Fill in advantages, returns and chosen tokens of all rollouts of a step."""
    included = [r for r in rollouts if not r.is_excluded]
    for rollout in included:
        shape_rewards(rollout, settings)
    groups: dict[int, list[Rollout]] = {}
    for rollout in included:
        groups.setdefault(rollout.group, []).append(rollout)
    for group in groups.values():
        for rollout, advantages in zip(
            group, ADVANTAGES.get(name, by_group)(group, included, settings), strict=True
        ):
            for token, advantage in zip(rollout.tokens, advantages, strict=True):
                token.advantage = advantage
    trained = [token for rollout in included for token in rollout.trained]
    if settings.whiten_advantages:
        values = [token.advantage for token in trained]
        spread = math.sqrt((stdev(values) ** 2 if len(values) > 1 else 0.0) + WHITEN_EPS)
        for token in trained:
            token.advantage = (token.advantage - mean(values)) / spread
    choose_by_covariance(name, trained, settings.params)


def shape_rewards(rollout: Rollout, settings: Any) -> None:
    """Fill in the score and the rewards and costs of tokens, with penalties."""
    tokens, columns = rollout.tokens, rollout.columns
    rollout.score = columns["scores"]
    rollout.rewards = [t.columns.get("token_scores", 0.0) for t in tokens]
    if "token_scores" not in tokens[0].columns:
        rollout.rewards[-1] = rollout.score
    rollout.costs = [0.0] * (len(tokens) - 1) + [columns["costs"]]
    if settings.overlong_buffer:
        over = len(tokens) - (settings.max_length - settings.overlong_buffer)
        fine = settings.overlong_factor * clamp(over / settings.overlong_buffer, 0, 1)
        rollout.score -= fine
        rollout.rewards[-1] -= fine
    if settings.kl_coef and settings.kl_in == "reward":
        for i, token in enumerate(tokens):
            x = token.generator_logprobs - token.ref_logprobs
            penalty = settings.kl_coef * divergence(x, settings.kl_kind)
            rollout.score -= penalty
            rollout.rewards[i] -= penalty
            rollout.costs[i] += penalty


def on_tokens(group: Rollouts, advantages: Iterable[float]) -> list[list[float]]:
    return [[a] * len(r.tokens) for r, a in zip(group, advantages, strict=True)]


def snap(values: Sequence[float]) -> list[float]:
    """Return scores; if they are equal but for rounding, the first in place of all."""
    is_equal = max(values) - min(values) <= 1e-6 * (1 + abs(max(values)))
    return [values[0]] * len(values) if is_equal else list(values)


def relative(values: Sequence[float], scale: str, single: str, batch: Sequence[float]) -> list:
    """Return values minus their mean, over a divisor."""
    if len(values) == 1:
        divisor = 1 + EPS if scale == "std" else 1
        return [values[0] / divisor if single == "keep" else 0.0]
    values = snap(values)
    middle = mean(values)
    if scale == "mean" and middle <= 0:
        return [0.0] * len(values)
    divisors = {
        "std": lambda: stdev(values) + EPS,
        "batch": lambda: stdev(batch) + EPS,
        "mean": lambda: middle + EPS,
        "none": lambda: 1.0,
    }
    return [(x - middle) / divisors[scale]() for x in values]


def by_group(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    scores, batch = [r.score for r in group], [r.score for r in step]
    return on_tokens(
        group, relative(scores, settings.advantage_scale, settings.single_rollout, batch)
    )


def by_teacher(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    return [
        [
            t.ref_logprobs - t.generator_logprobs + settings.params["task_weight"] * a
            for t, a in zip(r.tokens, task, strict=True)
        ]
        for r, task in zip(group, by_group(group, step, settings), strict=True)
    ]


def by_weight(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    return on_tokens(group, [r.score for r in group])


def by_weighted_task(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    weight = settings.params["task_weight"]
    return [[weight * a for a in task] for task in by_group(group, step, settings)]


def by_others(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    scores = snap([r.score for r in group])
    if len(group) == 1:
        return on_tokens(group, scores if settings.single_rollout == "keep" else [0.0])
    return on_tokens(group, [sum(x - y for y in scores) / (len(scores) - 1) for x in scores])


def by_length(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    if len(group) == 1:
        return by_others(group, step, settings)
    lengths = [len(r.tokens) for r in group]
    scores = snap([r.score for r in group])
    leads = [sum(n * (x - y) for n, y in zip(lengths, scores, strict=True)) for x in scores]
    return on_tokens(group, [lead / sum(lengths) for lead in leads])


def by_best(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    scores = snap([r.score for r in group])
    ordered = sorted(scores)
    lead = ordered[-1] - ordered[-2] if len(group) > 1 else 0.0
    if len(group) > 1 and settings.advantage_scale == "std":
        lead /= stdev(scores) + EPS
    return on_tokens(group, [lead if x == ordered[-1] else 0.0 for x in scores])


def by_gpg(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    factor = len(step) / max(sum(r.score != 0 for r in step), 1)
    plain = relative([r.score for r in group], "none", settings.single_rollout, [])
    return on_tokens(group, [factor * a for a in plain])


def by_reward(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    sums = [0.0] * len(group)
    for name, weight in settings.reward_weights.items():
        values = [r.columns[f"reward/{name}"] for r in group]
        parts = relative(values, "std", "zero", [])
        sums = [a + weight * part for a, part in zip(sums, parts, strict=True)]
    return on_tokens(group, sums)


def list_moments(rollout: Rollout, time_step: str) -> list[list[int]]:
    """Return the tokens of each step of time."""
    return rollout.turns if time_step == "turn" else [[i] for i in range(len(rollout.tokens))]


def to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards)))
        for t in range(len(rewards))
    ]


def spread(rollout: Rollout, moments: Sequence[Sequence[int]], values: Sequence[float]) -> list:
    result = [0.0] * len(rollout.tokens)
    for moment, value in zip(moments, values, strict=True):
        for i in moment:
            result[i] = value
    return result


def returns_to_go(rollout: Rollout, settings: Any, time_step: str) -> tuple[list, list[float]]:
    moments = list_moments(rollout, time_step)
    rewards = [sum(rollout.rewards[i] for i in moment) for moment in moments]
    return moments, to_go(rewards, settings.gamma)


def by_return(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    return [spread(r, *returns_to_go(r, settings, settings.time_step)) for r in group]


def by_greedy(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    returns = by_return(group, step, settings)
    return [
        [x - r.columns["baseline_scores"] for x in g] for r, g in zip(group, returns, strict=True)
    ]


def by_turn(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    """Return each turn's return minus the group's mean, in which ended episodes count 0."""
    pairs = [returns_to_go(r, settings, "turn") for r in group]
    longest = max(len(returns) for _, returns in pairs)
    padded = [[*returns, *[0.0] * (longest - len(returns))] for _, returns in pairs]
    columns = [
        relative(list(c), settings.advantage_scale, "zero", []) for c in zip(*padded, strict=True)
    ]
    return [
        spread(r, moments, [columns[k][i] for k in range(len(moments))])
        for i, (r, (moments, _)) in enumerate(zip(group, pairs, strict=True))
    ]


def by_anchor(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    """Return GiGPO's: of the episode, plus of the turn among the turns in an equal state."""
    anchors: dict[int, list[tuple[int, int, float]]] = {}
    moments = [r.turns for r in group]
    for i, r in enumerate(group):
        for k, value in enumerate(returns_to_go(r, settings, "turn")[1]):
            state = r.tokens[moments[i][k][0]].turn_states
            anchors.setdefault(state, []).append((i, k, value))
    by_step = {}
    for state, members in anchors.items():
        values = [value for *_, value in members]
        parts = relative(values, settings.advantage_scale, "zero", [])
        for (i, k, _), part in zip(members, parts, strict=True):
            by_step[i, k] = part if state else 0.0
    weight = settings.params["turn_weight"]
    episodes = by_group(group, step, settings)
    return [
        spread(r, m, [episodes[i][0] + weight * by_step[i, k] for k in range(len(m))])
        for i, (r, m) in enumerate(zip(group, moments, strict=True))
    ]


def by_history(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    """Return HGPO's: in groups of turns that share 0, 1, ... states before the turn's own."""
    moments = [r.turns for r in group]
    turns = [
        (i, k, value)
        for i, r in enumerate(group)
        for k, value in enumerate(returns_to_go(r, settings, "turn")[1])
    ]
    states = [
        [r.tokens[moment[0]].turn_states for moment in m]
        for r, m in zip(group, moments, strict=True)
    ]
    sums: dict[tuple[int, int], tuple[float, float]] = {(i, k): (0.0, 0.0) for i, k, _ in turns}
    for depth in range(settings.params["history"] + 1):
        for i, k, _ in turns:
            window = states[i][k - depth : k + 1]
            if k < depth or 0 in window:
                continue
            peers = [
                (j, m, value)
                for j, m, value in turns
                if m >= depth and states[j][m - depth : m + 1] == window
            ]
            if len(peers) > 1:
                values = [value for *_, value in peers]
                parts = relative(values, settings.advantage_scale, "zero", [])
                weight = (depth + 1) ** settings.params["weight_power"]
                part = parts[[(j, m) for j, m, _ in peers].index((i, k))]
                sums[i, k] = sums[i, k][0] + weight * part, sums[i, k][1] + weight
    return [
        spread(r, m, [sums[i, k][0] / (sums[i, k][1] or 1.0) for k in range(len(m))])
        for i, (r, m) in enumerate(zip(group, moments, strict=True))
    ]


def by_energy(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    """Return returns minus the group's mean by the norms of the scores up to the token."""
    if len(group) == 1 and settings.single_rollout == "zero":
        return [[0.0] * len(group[0].tokens)]
    returns = [returns_to_go(r, settings, "token")[1] for r in group]
    energies = [
        [sum(t.score_norms for t in r.tokens[: i + 1]) for i in range(len(r.tokens))] for r in group
    ]
    result: list[list[float]] = [[] for _ in group]
    for i in range(max(map(len, returns))):
        there = [k for k, values in enumerate(returns) if len(values) > i]
        values = [returns[k][i] for k in there]
        weights = [energies[k][i] for k in there]
        level = 0.0
        if len(there) > 1:
            values = snap(values)
            level = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
        for k, value in zip(there, values, strict=True):
            result[k].append(value - level)
    return result


def estimate(
    rollout: Rollout,
    rewards: Sequence[float],
    values: str,
    settings: Any,
    lam: Callable[[int], float] | None = None,
) -> tuple[list[float], list[float]]:
    """Return generalized advantages and returns of all tokens: sums of discounted deltas."""
    moments = list_moments(rollout, settings.time_step)
    states = [rollout.tokens[moment[0]].columns[values] for moment in moments]
    gained = [sum(rewards[i] for i in moment) for moment in moments]
    deltas = [
        r + settings.gamma * after - v
        for r, v, after in zip(gained, states, [*states[1:], 0.0], strict=True)
    ]
    decay = lam(len(moments)) if lam else settings.params["lam"]
    advantages = to_go(deltas, settings.gamma * decay)
    targets = [a + v for a, v in zip(advantages, states, strict=True)]
    return spread(rollout, moments, advantages), spread(rollout, moments, targets)


def by_critic(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    result = []
    for r in group:
        advantages, returns = estimate(r, r.rewards, "values", settings)
        for token, target in zip(r.tokens, returns, strict=True):
            token.returns = target
        result.append(advantages)
    return result


def by_two_critics(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    bound, weight = settings.params["token_clip"], settings.params["lagrange"]
    result = []
    for r in group:
        gains = [clamp(x, -bound, bound) for x in r.rewards]
        costs = [clamp(x, -bound, bound) for x in r.costs]
        of_gains, returns = estimate(r, gains, "values", settings)
        of_costs, cost_returns = estimate(r, costs, "cost_values", settings)
        for token, a, b in zip(r.tokens, returns, cost_returns, strict=True):
            token.returns, token.cost_returns = a, b
        result.append(
            [(a - weight * c) / (1 + weight) for a, c in zip(of_gains, of_costs, strict=True)]
        )
    return result


def by_length_and_critic(group: Rollouts, step: Rollouts, settings: Any) -> list[list[float]]:
    params = settings.params
    right = [r for r in step if r.score > params["right_above"]]
    counts = [sum(len(r.trained) for r in rollouts) for rollouts in (step, right)]
    result = []
    for r in group:
        _, returns = estimate(r, r.rewards, "values", settings, lambda n: 1.0)
        for token, target in zip(r.tokens, returns, strict=True):
            token.returns = target
            token.likelihood = counts[0] / counts[1] if r in right and counts[1] else 0.0
        shorten = lambda n: max(0.0, 1 - 1 / (params["alpha"] * n))  # noqa: E731
        result.append(estimate(r, r.rewards, "values", settings, shorten)[0])
    return result


ADVANTAGES: dict[str, Callable[[Rollouts, Rollouts, Any], list[list[float]]]] = {
    "ppo": by_critic,
    "vapo": by_length_and_critic,
    "grpo_turn": by_turn,
    "gigpo": by_anchor,
    "hgpo": by_history,
    "otb": by_energy,
    "rloo": by_others,
    "remax": by_greedy,
    "safe_rlhf": by_two_critics,
    "opo": by_length,
    "pass_at_k": by_best,
    "gpg": by_gpg,
    "gdpo": by_reward,
    "reinforce_pp": by_return,
    "distill": by_teacher,
    "sft": by_weight,
    "reward_model": by_weight,
    "gkd": by_weighted_task,
}
"""Those that are not `by_group`."""


def choose_by_covariance(name: str, trained: Sequence[Token], params: Mapping[str, float]) -> None:
    """Mark the tokens of the step that Clip-Cov leaves out or KL-Cov penalizes.

    Clip-Cov's choice is random unless the fraction allows all candidates.
    """
    if name not in ("clip_cov", "kl_cov") or not trained:
        return
    middle = mean(t.generator_logprobs for t in trained)
    middle_advantage = mean(t.advantage for t in trained)
    size = max(1, int(params["covariance_fraction"] * len(trained)))
    pairs = [
        ((t.advantage - middle_advantage) * (t.generator_logprobs - middle), t) for t in trained
    ]
    if name == "kl_cov":
        for _, token in sorted(pairs, key=lambda pair: -pair[0])[:size]:
            token.chosen = True
        return
    band = [t for c, t in pairs if params["covariance_low"] < c < params["covariance_high"]]
    assert len(band) <= size, "the choice is random"
    for token in band:
        token.chosen = True


# Off-policy correction.


def proximal(token: Token, settings: Any, version: int) -> float:
    """Return the logprob under the policy at the start of the step."""
    if settings.correction.proximal == "interpolated":
        # The trained policy will be the next version.
        age = max(version - token.policy_version, 0)
        share = age / (age + 1)
        return token.generator_logprobs + share * (token.logprob - token.generator_logprobs)
    return token.columns.get("proximal_logprobs", token.logprob)


def drift(rollout: Rollout, settings: Any, version: int) -> list[float]:
    return [proximal(t, settings, version) - t.generator_logprobs for t in rollout.trained]


def importance(xs: Sequence[float], correction: Any) -> list[float]:
    if correction.weights == "none":
        return [1.0] * len(xs)
    levels = {"token": xs, "sequence": [sum(xs)] * len(xs), "geometric": [mean(xs)] * len(xs)}
    weights = [ratio(x) for x in levels[correction.weights]]
    bounds = correction.weight_low, correction.weight_high
    if correction.weight_mode == "truncate":
        return [clamp(w, *bounds) for w in weights]
    return [w if is_inside(w, *bounds) else 0.0 for w in weights]


def bernoulli(p: float, q: float) -> float:
    """Return the KL divergence of two coins."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def is_near(xs: Sequence[float], tokens: Sequence[Token], correction: Any) -> list[bool]:
    """Return which tokens `reject` keeps."""
    kind, level = correction.reject, correction.reject_level
    if kind == "none":
        return [True] * len(xs)
    bounds = correction.reject_low, correction.reject_high
    is_ratio = kind == "k1"
    if kind == "binary_kl":
        quantities = []
        for x, t in zip(xs, tokens, strict=True):
            p, q = (
                clamp(math.exp(y), 1e-6, 1 - 1e-6)
                for y in (t.generator_logprobs + x, t.generator_logprobs)
            )
            quantities.append(max(bernoulli(p, q), bernoulli(q, p)))
    else:
        quantities = list(xs) if is_ratio else [divergence(-x, kind) for x in xs]

    def finish(x: float) -> float:
        return ratio(x) if is_ratio else x

    if level in ("sum", "mean"):
        whole = sum(quantities) if level == "sum" else mean(quantities)
        return [is_inside(finish(whole), *bounds)] * len(xs)
    inside = [is_inside(finish(q), *bounds) for q in quantities]
    return inside if level == "token" else [all(inside)] * len(xs)


def mask_far_tokens(settings: Any, rollouts: Rollouts, version: int) -> None:
    """Do what precedes the first update: mark tokens that are not near, and exclude rollouts
    without near ones; find the mean weight of the step.
    """
    pairs: list[tuple[float, Token]] = []
    for r in rollouts:
        xs = drift(r, settings, version)
        keeps = is_near(xs, r.trained, settings.correction) if xs else []
        for token, x, near in zip(r.trained, xs, keeps, strict=True):
            token.near = near
            pairs.append((x * x, token))
    if settings.correction.normalize_weights:
        by_rollout = [
            importance(drift(r, settings, version), settings.correction)
            for r in rollouts
            if r.trained
        ]
        if settings.correction.weights != "token":
            by_rollout = [weights[:1] for weights in by_rollout]
        counted = [w for weights in by_rollout for w in weights]
        for r in rollouts:
            r.mean_weight = mean(counted) if any(counted) else 1.0
    if settings.top_entropy is not None:
        ranked = sorted((t for r in rollouts for t in r.trained), key=lambda t: -t.entropy)
        for token in ranked[1 + int(settings.top_entropy * (len(ranked) - 1) + 1e-9) :]:
            token.is_uncertain = False
    threshold = settings.correction.second_moment_threshold
    pairs.sort(key=lambda pair: pair[0])
    while threshold is not None and pairs and mean(square for square, _ in pairs) >= threshold:
        pairs.pop()[1].near = False
    for r in rollouts:
        r.is_excluded |= bool(r.trained) and not any(t.near for t in r.trained)


# Token losses: (token, differentiated logprob, that clipped against, settings) -> loss, and whether
# the gradient counts as clipped. Those of a whole rollout take lists.

Numbers = Sequence[float]
Losses = list[tuple[float, bool]]


def is_outside(r: float, a: float, s: Any) -> bool:
    return (a > 0 and r > 1 + s.clip_high) or (a < 0 and r < 1 - s.clip_low)


def surrogate(r: float, a: float, s: Any) -> float:
    loss = max(-a * r, -a * clamp(r, 1 - s.clip_low, 1 + s.clip_high))
    return min(loss, -s.dual_clip * a) if s.dual_clip is not None and a < 0 else loss


def lose_clipped(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    r = ratio(x - y)
    return surrogate(r, t.advantage, s), is_outside(r, t.advantage, s)


def lose_weighted(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    weight = clamp(ratio(t.logprob - y), 1 - s.clip_low, 1 + s.clip_high)
    return -weight * t.advantage * x, False


def lose_softly(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    tau = s.params[f"temperature_{'positive' if t.advantage > 0 else 'negative'}"]
    gate = 1 / (1 + math.exp(-tau * (ratio(x - y) - 1)))
    return -t.advantage * gate * 4 / tau, False


def lose_unchosen(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    return (0.0, True) if t.chosen else lose_clipped(t, x, y, s)


def lose_with_penalty(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    penalty = s.params["covariance_coef"] * abs(x - y) if t.chosen else 0.0
    return -t.advantage * ratio(x - y) + penalty, False


def lose_by_variation(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    return lose_near(t, x, y, s, abs(math.exp(t.logprob) - math.exp(y)))


def lose_by_divergence(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    p, q = math.exp(t.logprob), math.exp(y)
    far = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return lose_near(t, x, y, s, far)


def lose_near(t: Token, x: float, y: float, s: Any, far: float) -> tuple[float, bool]:
    a = t.advantage
    leaves = a * (t.logprob - y) > 0 and far > (s.clip_high if a > 0 else s.clip_low)
    return -min(ratio(t.logprob - y), s.params["ratio_cap"]) * a * x * (not leaves), leaves


def lose_score(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    return -t.advantage * x, False


def lose_by_sequence(tokens: Sequence[Token], now: Numbers, old: Numbers, s: Any) -> Losses:
    middle = mean(t.logprob - y for t, y in zip(tokens, old, strict=True))
    result = []
    for t, x in zip(tokens, now, strict=True):
        loss = surrogate(ratio(middle + x - t.logprob), t.advantage, s)
        result.append((loss, is_outside(ratio(middle), t.advantage, s)))
    return result


def lose_geometric(tokens: Sequence[Token], now: Numbers, old: Numbers, s: Any) -> Losses:
    logs, clipped = [], []
    for t, x, y in zip(tokens, now, old, strict=True):
        sign = math.copysign(1, t.advantage) if t.advantage else 0
        logs.append(sign * min(sign * (x - y), sign * clamp(x - y, -s.clip_low, s.clip_high)))
        clipped.append(sign * (x - y) > (s.clip_high if sign > 0 else s.clip_low) and sign != 0)
    loss = -mean(t.advantage for t in tokens) * math.exp(mean(logs))
    return [(loss, is_clipped) for is_clipped in clipped]


def lose_by_gamma(tokens: Sequence[Token], now: Numbers, old: Numbers, s: Any) -> Losses:
    w = math.exp(sum(t.logprob - y for t, y in zip(tokens, old, strict=True)))
    result = []
    for t, x in zip(tokens, now, strict=True):
        sign = "positive" if t.advantage >= 0 else "negative"
        power, decay = s.params[f"power_{sign}"], s.params[f"decay_{sign}"]
        result.append((-(w**power) * math.exp(decay - decay * w) * t.advantage * x, False))
    return result


def lose_pair(tokens: Sequence[Token], now: Numbers, old: Numbers, s: Any) -> Losses:
    """Return minus the log-probability that the first is preferred to the second, on the first."""
    chosen, rejected = now[0], now[1] if len(now) > 1 else 0.0
    preference = 1 / (1 + math.exp(rejected - chosen))
    loss = -math.log(preference) + s.params["center_coef"] * (chosen + rejected) ** 2
    return [(loss if i == 0 else 0.0, False) for i in range(len(now))]


def lose_quadratic(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    return -t.advantage * x + s.params["penalty_coef"] * (x - y) ** 2 / 2, False


def lose_with_likelihood(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    loss, is_clipped = lose_clipped(t, x, y, s)
    return loss - s.params["likelihood_coef"] * t.likelihood * x, is_clipped


def diverge(words: Numbers, teachers: Numbers, beta: float) -> float:
    """Return GKD's divergence of two policies by the logprobs of some words; the rest is a word."""
    policy, teacher = ([math.exp(x) for x in xs] for xs in (words, teachers))
    policy, teacher = ([*ps, max(1 - sum(ps), 1e-6)] for ps in (policy, teacher))

    def kl(ps: Numbers, qs: Numbers) -> float:
        return sum(p * math.log(p / q) for p, q in zip(ps, qs, strict=True))

    if beta == 0:
        return kl(teacher, policy)
    if beta == 1:
        return kl(policy, teacher)
    middle = [beta * t + (1 - beta) * p for t, p in zip(teacher, policy, strict=True)]
    return beta * kl(teacher, middle) + (1 - beta) * kl(policy, middle)


def lose_with_divergence(t: Token, x: float, y: float, s: Any) -> tuple[float, bool]:
    loss, is_clipped = lose_clipped(t, x, y, s)
    return loss + diverge(t.word_logprobs, t.ref_top_logprobs, s.params["beta"]), is_clipped


OF_TOKENS: dict[str, Callable[[Token, float, float, Any], tuple[float, bool]]] = {
    "vapo": lose_with_likelihood,
    "cispo": lose_weighted,
    "sapo": lose_softly,
    "clip_cov": lose_unchosen,
    "kl_cov": lose_with_penalty,
    "dppo_tv": lose_by_variation,
    "dppo_kl": lose_by_divergence,
    "gpg": lose_score,
    "sft": lose_score,
    "dro": lose_quadratic,
    "gkd": lose_with_divergence,
}
OF_ROLLOUTS = {
    "gspo": lose_by_sequence,
    "luspo": lose_by_sequence,
    "gmpo": lose_geometric,
    "vespo": lose_by_gamma,
    "reward_model": lose_pair,
}


def lose_tokens(
    name: str, tokens: Sequence[Token], now: Numbers, old: Numbers, settings: Any
) -> Losses:
    if name in OF_ROLLOUTS:
        return OF_ROLLOUTS[name](tokens, now, old, settings)
    lose = OF_TOKENS.get(name, lose_clipped)
    return [lose(t, x, y, settings) for t, x, y in zip(tokens, now, old, strict=True)]


# The loss of a step.


def share(settings: Any, rollouts: Rollouts) -> list[list[float]]:
    """Return the factor of each trained token's loss in the loss of the step."""
    mode = settings.loss_aggregation
    group_tokens: dict[int, int] = {}
    for r in rollouts:
        group_tokens[r.group] = group_tokens.get(r.group, 0) + len(r.trained)
    num_rollouts = sum(bool(r.trained) for r in rollouts)
    num_turns = sum(len(r.turns) for r in rollouts if r.trained)
    factors: dict[str, Callable[[Rollout, Token], float]] = {
        "token-mean": lambda r, t: 1 / sum(group_tokens.values()),
        "token-sum": lambda r, t: 1,
        "seq-mean-token-sum": lambda r, t: 1 / num_rollouts,
        "seq-mean-token-mean": lambda r, t: 1 / num_rollouts / len(r.trained),
        "seq-mean-token-sum-norm": lambda r, t: 1 / num_rollouts / settings.max_length,
        "prompt-mean": lambda r, t: (
            1 / sum(n > 0 for n in group_tokens.values()) / group_tokens[r.group]
        ),
        "turn-mean": lambda r, t: (
            1 / num_turns / sum(other.turn_ends == t.turn_ends for other in r.trained)
        ),
    }
    return [[factors[mode](r, t) for t in r.trained] for r in rollouts]


@dataclass
class Result:
    """Loss of a step, its gradients by logprob and entropy of each trained token, and sums."""

    loss: float
    gradient: list[float]
    entropy_gradient: list[float]
    sums: dict[str, float]


def train(name: str, settings: Any, rollouts: Rollouts, version: int) -> Result:
    """Return the result of a step whose `credit` is filled in."""
    result = Result(0.0, [], [], {})
    for r, factors in zip(rollouts, share(settings, rollouts), strict=True):
        if not factors:
            continue
        lose = make_loss(name, settings, r, factors, version)
        now = [t.logprob for t in r.trained]
        entropy = [t.entropy for t in r.trained]
        result.loss += lose(now, entropy)
        result.gradient += differentiate(partial(swap, lose, entropy), now)
        result.entropy_gradient += differentiate(partial(lose, now), entropy)
    result.sums = add_up(name, settings, rollouts, version)
    return result


def swap(function: Callable[[Numbers, Numbers], float], second: Numbers, first: Numbers) -> float:
    return function(first, second)


def differentiate(function: Callable[[list[float]], float], point: Sequence[float]) -> list[float]:
    """Return the gradient of a function by central differences."""
    result = []
    for i in range(len(point)):
        ahead, behind = list(point), list(point)
        ahead[i], behind[i] = ahead[i] + STEP_WIDTH, behind[i] - STEP_WIDTH
        result.append((function(ahead) - function(behind)) / (2 * STEP_WIDTH))
    return result


def judge(name: str, settings: Any, r: Rollout, version: int) -> tuple[list[float], list[bool]]:
    """Return importance weights of the trained tokens, and which of them are kept."""
    xs, correction = drift(r, settings, version), settings.correction
    kept = [
        n and t.near for n, t in zip(is_near(xs, r.trained, correction), r.trained, strict=True)
    ]
    bound = correction.off_policy_threshold
    if bound is not None and mean(t.logprob - t.generator_logprobs for t in r.trained) < -bound:
        kept = [k and t.advantage >= 0 for k, t in zip(kept, r.trained, strict=True)]
    return [w / r.mean_weight for w in importance(xs, correction)], kept


def list_old(settings: Any, r: Rollout, version: int) -> list[float]:
    """Return the logprobs that the loss clips against."""
    if settings.correction.proximal == "generator":
        return [t.generator_logprobs for t in r.trained]
    return [proximal(t, settings, version) for t in r.trained]


def make_loss(
    name: str, settings: Any, r: Rollout, factors: Numbers, version: int
) -> Callable[[Numbers, Numbers], float]:
    """Return the loss of a rollout as a function of logprobs and entropies."""
    weights, kept = judge(name, settings, r, version)
    old = list_old(settings, r, version)

    def lose(now: Numbers, entropy: Numbers) -> float:
        losses, total = lose_tokens(name, r.trained, now, old, settings), 0.0
        for i, token in enumerate(r.trained):
            part = (
                token.is_uncertain * weights[i] * losses[i][0] - settings.entropy_coef * entropy[i]
            )
            if settings.kl_coef and settings.kl_in == "loss":
                weight = settings.kl_coef
                if settings.kl_kind.endswith("*"):
                    weight *= math.exp(now[i] - token.generator_logprobs)
                part += weight * penalize(token, now[i], settings.kl_kind)
            total += kept[i] * factors[i] * part
        return total

    return lose


def penalize(token: Token, now: float, kind: str) -> float:
    """Return a KL estimate; with + the value of one and the gradient of k2."""
    if not kind.endswith("+"):
        return divergence(now - token.ref_logprobs, kind)
    held = token.logprob - token.ref_logprobs
    moved = divergence(now - token.ref_logprobs, "k2") - divergence(held, "k2")
    return divergence(held, kind) + moved


def differentiate_words(
    name: str, settings: Any, rollouts: Rollouts, version: int
) -> list[list[float]]:
    """Return the gradient of the step's loss by the logprobs of each trained token's words."""
    result = []
    for r, factors in zip(rollouts, share(settings, rollouts), strict=True):
        if not factors:
            continue
        weights, kept = judge(name, settings, r, version)
        for token, factor, weight, is_kept in zip(r.trained, factors, weights, kept, strict=True):
            teachers, beta = token.ref_top_logprobs, settings.params["beta"]
            slopes = differentiate(
                partial(diverge, teachers=teachers, beta=beta), token.word_logprobs
            )
            share_of_token = token.is_uncertain * is_kept * factor * weight
            result.append([share_of_token * slope for slope in slopes])
    return result


def add_up(name: str, settings: Any, rollouts: Rollouts, version: int) -> dict[str, float]:
    """Return the sums that metrics are made of."""
    trained = [r for r in rollouts if r.trained]
    sums = {
        "num_tokens": float(sum(len(r.trained) for r in trained)),
        "num_sampled": float(sum(len(r.trained) for r in trained)),
        "num_rollouts": len(trained),
        "num_sequences": len(trained),
        "num_groups": len({r.group for r in trained}),
        "entropy_sum": sum(t.entropy for r in trained for t in r.trained),
    }
    names = ("num_kept", "weight_sum", "clipped_sum", "ratio_sum", "ratio_squared_sum")
    sums |= dict.fromkeys((*names, "log_ratio_sum", "sequence_ratio_squared_sum"), 0.0)
    for r in trained:
        weights, kept = judge(name, settings, r, version)
        now, xs = [t.logprob for t in r.trained], drift(r, settings, version)
        losses = lose_tokens(name, r.trained, now, list_old(settings, r, version), settings)
        sums["num_kept"] += sum(kept)
        sums["weight_sum"] += sum(w for w, k in zip(weights, kept, strict=True) if k)
        sums["clipped_sum"] += sum(c and k for (_, c), k in zip(losses, kept, strict=True))
        sums["ratio_sum"] += sum(ratio(x) for x in xs)
        sums["ratio_squared_sum"] += sum(ratio(x) ** 2 for x in xs)
        sums["log_ratio_sum"] += sum(xs)
        sums["sequence_ratio_squared_sum"] += ratio(sum(xs)) ** 2
    if settings.kl_coef or name in ("distill", "gkd"):
        sums["kl_ref_sum"] = sum(
            divergence(t.logprob - t.ref_logprobs, settings.kl_kind)
            for r in trained
            for t in r.trained
        )
    if settings.loss_aggregation == "turn-mean":
        sums["num_turns"] = sum(len(r.turns) for r in trained)
    return sums


def lose_value(
    settings: Any, rollouts: Rollouts, now: Sequence[Numbers], clip: float | None
) -> tuple[float, list[float]]:
    """Return the value loss of the included rollouts' tokens, and its gradient."""
    loss, gradient = 0.0, []
    for r, factors, values in zip(rollouts, share(settings, rollouts), now, strict=True):
        if r.is_excluded or not factors:
            gradient += [0.0] * len(factors)
            continue

        def lose(values: Numbers, r: Rollout = r, factors: Numbers = factors) -> float:
            total = 0.0
            for t, factor, value in zip(r.trained, factors, values, strict=True):
                old = t.columns["values"]
                held = value if clip is None else clamp(value, old - clip, old + clip)
                total += factor * max((value - t.returns) ** 2, (held - t.returns) ** 2) / 2
            return total

        loss += lose(values)
        gradient += differentiate(lose, values)
    return loss, gradient
