"""Types that travel between the stages: prompts, rollouts, leases and the columns of a group.

A group is the rollouts of one prompt. The queue stores a prompt, `GroupInfo` (sizes and versions)
and named columns. Columns are flat numpy arrays, because Ray passes arrays between processes
without a copy. A column has one entry per token of the group, per turn, per rollout, or any length
(`ColumnAxis`). A token column is the concatenation of the rollouts; `lengths` tells them apart.
A turn column is the concatenation of the turns of all rollouts; `num_turns` tells them apart.
A rollout is an episode, unless the column `episode` gives several rollouts to one.

Example: rollouts of 3 and 2 tokens give lengths = [3, 2] and token_ids of 5 entries.

Per-group types are msgspec.Structs: compared with a frozen dataclass, construction takes a fifth
of the time and pickling half of it.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import ContractError

ROLLOUTS, TARGETS, PAIRS = "rollouts", "targets", "pairs"
"""What is trained on: rollouts, or completions, or pairs of them, that rows of the data give."""
Array = npt.NDArray[Any]
Columns = Mapping[str, Array]


class ColumnAxis(Enum):
    """Number of entries of a column: per token, turn or rollout, or any number per group.

    TEXT is a group's text in bytes, about as long as its tokens.
    """

    TOKEN = "token"
    TURN = "turn"
    ROLLOUT = "rollout"
    GROUP = "group"
    TEXT = "text"


@dataclass(frozen=True)
class ColumnSpec:
    """Type of a column. A wide one has several entries per token, as many for each of a group."""

    dtype: str
    axis: ColumnAxis
    description: str
    is_wide: bool = False


COLUMN_SPECS: Mapping[str, ColumnSpec] = {
    "token_ids": ColumnSpec(
        "int32", ColumnAxis.TOKEN, "prompt and completion, as the generator saw them"
    ),
    "loss_mask": ColumnSpec("bool", ColumnAxis.TOKEN, "true where the policy sampled the token"),
    "generator_logprobs": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "logprob when sampled; 0 elsewhere"
    ),
    "policy_version": ColumnSpec(
        "int32", ColumnAxis.TOKEN, "version that sampled it; -1 elsewhere"
    ),
    "lengths": ColumnSpec("int32", ColumnAxis.ROLLOUT, "tokens of each rollout, prompt included"),
    "finish_reason": ColumnSpec("int8", ColumnAxis.ROLLOUT, "code of FinishReason"),
    "scores": ColumnSpec("float32", ColumnAxis.ROLLOUT, "the combined reward of a rollout"),
    "token_scores": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "the same by token, where its parts fall; sums to scores"
    ),
    "pass_rate": ColumnSpec(
        "float32", ColumnAxis.GROUP, "share of right rollouts, for data.sampling=difficulty"
    ),
    "score_norms": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "squared norm of the gradient of its logprob, about"
    ),
    "answers": ColumnSpec(
        "int64", ColumnAxis.ROLLOUT, "equal for equal answers; 0 where there is none"
    ),
    "costs": ColumnSpec("float32", ColumnAxis.ROLLOUT, "the combined cost of a rollout"),
    "greedy_ids": ColumnSpec(
        "int32", ColumnAxis.GROUP, "the prompt's likeliest completion, as it came"
    ),
    "baseline_scores": ColumnSpec(
        "float32", ColumnAxis.ROLLOUT, "the combined reward of greedy_ids"
    ),
    "values": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "the critic's value before each token; 0 elsewhere"
    ),
    "cost_values": ColumnSpec("float32", ColumnAxis.TOKEN, "the same of the critic of costs"),
    "ref_logprobs": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "logprob under the reference; 0 elsewhere"
    ),
    "ref_top_ids": ColumnSpec(
        "int32", ColumnAxis.TOKEN, "ids of the reference's likeliest words", is_wide=True
    ),
    "ref_top_logprobs": ColumnSpec(
        "float32", ColumnAxis.TOKEN, "their logprobs under the reference", is_wide=True
    ),
    "token_source": ColumnSpec("int8", ColumnAxis.TOKEN, "code of TokenSource"),
    "num_turns": ColumnSpec("int32", ColumnAxis.ROLLOUT, "turns of the policy in each rollout"),
    "turn_ends": ColumnSpec(
        "int32", ColumnAxis.TURN, "end of the turn's sampled tokens, as an offset in its rollout"
    ),
    "turn_rewards": ColumnSpec("float32", ColumnAxis.TURN, "the environment's reward of a turn"),
    "turn_states": ColumnSpec(
        "int64", ColumnAxis.TURN, "equal for turns in equal states of the environment; 0: no state"
    ),
    "turn_outcomes": ColumnSpec("int8", ColumnAxis.TURN, "code of TurnOutcome"),
    "num_calls": ColumnSpec("int32", ColumnAxis.ROLLOUT, "tool calls in each rollout"),
    "num_invalid_calls": ColumnSpec(
        "int32", ColumnAxis.ROLLOUT, "calls that do not parse, name no tool, or do not fit it"
    ),
    "environment_scores": ColumnSpec(
        "float32", ColumnAxis.ROLLOUT, "the environment's score of a rollout"
    ),
    "conversations": ColumnSpec(
        "uint8", ColumnAxis.TEXT, "chat messages of each episode, as compressed JSON"
    ),
    "sampling_mask": ColumnSpec(
        "int32",
        ColumnAxis.TOKEN,
        "ids of the words that the token was sampled from; only -1: from all",
        is_wide=True,
    ),
    "routed_experts": ColumnSpec(
        "uint8",
        ColumnAxis.TOKEN,
        "experts of each layer that the generator chose; 255: unknown",
        is_wide=True,
    ),
    "episode": ColumnSpec(
        "int32", ColumnAxis.ROLLOUT, "index of the episode that the rollout is a sample of"
    ),
}
ROLLOUT_TOKEN_COLUMNS = ("token_ids", "loss_mask", "generator_logprobs", "policy_version")
"""The arrays of a `Rollout`."""
ROLLOUT_COLUMNS = (*ROLLOUT_TOKEN_COLUMNS, "lengths", "finish_reason")
EPISODE_COLUMNS = (
    "token_source",
    "num_turns",
    "turn_ends",
    "turn_rewards",
    "turn_outcomes",
    "num_calls",
    "num_invalid_calls",
    "environment_scores",
    "conversations",
)
"""Further columns of the rollouts of an environment."""
EPISODE_COLUMN = "episode"
"""Column of groups whose episodes may consist of several samples, which are rollouts of the group.

Samples of an episode follow each other in the order in which they were sampled. A sampled token has
`loss_mask` true in one of them. Their finish reason and scores are those of the episode. Without
the column each rollout is an episode.
"""
STATE_COLUMN = "turn_states"
"""Further column of episodes, which the rewards do not read: runs of earlier versions lack it."""
TURN_COLUMN = "turn_ends"
"""Column that tells the turns of an episode apart."""
TOKEN_SCORES = "token_scores"
SCORE_NORMS = "score_norms"
REF_TOP_IDS, REF_TOP_LOGPROBS = "ref_top_ids", "ref_top_logprobs"
OPTIONAL_COLUMNS = (TOKEN_SCORES, SCORE_NORMS)
"""Columns that a group may lack: without token_scores, scores fall on last tokens; score_norms are
never in the queue, because the trainer computes them.
"""
COMPONENT_PREFIX = "reward/"
COST_PREFIX = "cost/"
COMPONENT_COLUMN_SPEC = ColumnSpec(
    "float32", ColumnAxis.ROLLOUT, "one named reward, or cost, of those combined"
)


NO_ENTRY = np.int64(-1)
"""Fill of a wide column where a token has fewer entries, or none; 255 in uint8."""


def is_component_column(name: str) -> bool:
    return name.startswith((COMPONENT_PREFIX, COST_PREFIX))


def get_column_spec(name: str) -> ColumnSpec:
    """Return dtype, axis and description of a column. Raises KeyError for an unknown column.

    Names like `reward/<name>` and `cost/<name>` are columns of reward and cost components.
    """
    return COMPONENT_COLUMN_SPEC if is_component_column(name) else COLUMN_SPECS[name]


class FinishReason(Enum):
    """Reason why a rollout ended; the value is its code in the `finish_reason` column.

    ABORT marks a partial rollout: sampling was interrupted and can be resumed.
    """

    STOP = 0
    """The policy or the environment ended the rollout."""
    LENGTH = 1
    """The last turn reached the limit of its length or of the model's context."""
    ABORT = 2
    TURNS = 3
    """The episode reached the limit of its turns."""
    TOKENS = 4
    """The episode reached the limit of its tokens."""
    TIMEOUT = 5
    """The episode reached the limit of its time."""


TRUNCATIONS = (FinishReason.LENGTH, FinishReason.TURNS, FinishReason.TOKENS)
"""Reasons of rollouts that reached a limit of tokens or turns."""


class TokenSource(IntEnum):
    """Origin of a token of an episode."""

    PROMPT = 0
    SAMPLED = 1
    SCAFFOLD = 2
    """Written by the chat template between two turns."""
    OBSERVATION = 3
    """Written by the environment."""


class TurnOutcome(IntEnum):
    """Outcome of a turn of the policy; of several calls, the worst."""

    SPOKE = 0
    """Without a tool call."""
    CALLED = 1
    MALFORMED = 2
    """A call could not be parsed, or names no tool, or its arguments do not fit."""
    TOOL_ERROR = 3
    TIMED_OUT = 4


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt as admitted: input of the generator and of the rewards.

    `uid` is unique in a run and encodes epoch, row and attempt (`make_uid`).
    `token_ids` is int32 [P], the rendered chat template.
    `row_location` is the file and row number of the data row; the remaining fields are copied
    from that row. `is_chat` is false for a plain-text prompt, which becomes one user message.
    `environment` names the environment of the prompt's episodes; "" if it needs no name.
    `targets` has the completions that the data gives, as bytes: int32 token ids, and a bool for
    each whether it is in the loss mask. They need no generator.
    """

    uid: str
    token_ids: Array
    messages: Sequence[Mapping[str, Any]] = ()
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = msgspec.field(default_factory=dict)
    row_location: str = ""
    is_chat: bool = True
    environment: str = ""
    targets: Sequence[tuple[bytes, bytes]] = ()

    def __post_init__(self) -> None:
        tokens = self.token_ids
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
            actual = type(tokens).__name__
            if isinstance(tokens, np.ndarray):
                actual = f"{tokens.dtype}{list(tokens.shape)}"
            raise ContractError(f"prompt {self.uid}: token_ids are {actual}, wanted int32 [P]")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, with those of its longest target."""
        return len(self.token_ids) + max((len(mask) for _, mask in self.targets), default=0)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling the array itself takes ten times as long as the rest of a prompt.
        uid, tokens, *rest = msgspec.structs.astuple(self)
        return prompt_from_parts, (uid, tokens.tobytes(), *rest)


def make_target_columns(prompt: Prompt, version: int) -> dict[str, Array]:
    """Return the columns of the targets of a prompt, whose score is 1; a pair is an episode.

    `version` stands for that which sampled them; their logprobs are unknown, and 0.
    """
    start, rollouts = np.zeros(len(prompt.token_ids), np.bool_), []
    for ids, mask in prompt.targets:
        token_ids = np.concatenate([prompt.token_ids, np.frombuffer(ids, np.int32)])
        loss_mask = np.concatenate([start, np.frombuffer(mask, np.bool_)])
        versions = np.where(loss_mask, version, -1).astype(np.int32)
        zeros = np.zeros(len(token_ids), np.float32)
        rollouts.append(Rollout(token_ids, loss_mask, zeros, versions, FinishReason.STOP))
    columns = {**rollouts_to_columns(rollouts), "scores": np.ones(len(rollouts), np.float32)}
    if len(rollouts) > 1:
        columns[EPISODE_COLUMN] = np.zeros(len(rollouts), np.int32)
    return columns


def describe_prompt(prompt: Prompt) -> str:
    """Return the prompt's row location and uid, for an error message."""
    return (
        f"{prompt.row_location} (uid {prompt.uid})" if prompt.row_location else f"uid {prompt.uid}"
    )


def prompt_from_parts(uid: str, tokens: bytes, *rest: Any) -> Prompt:
    """Build a prompt from its fields in order; `tokens` are the bytes of int32 [P]."""
    return Prompt(uid, np.frombuffer(tokens, np.int32), *rest)


def make_uid(epoch: int, index: int, attempt: int = 0) -> str:
    """Return the uid of a prompt: `index` of its data row, `epoch`, and `attempt`.

    A re-admission of the prompt has the next attempt.
    """
    return f"{epoch}:{index}:{attempt}"


def parse_uid(uid: str) -> tuple[int, int, int]:
    """Return (epoch, row index, attempt) of a uid."""
    epoch, index, attempt = uid.split(":")
    return int(epoch), int(index), int(attempt)


def make_retry_uid(uid: str) -> str:
    """Return the uid of the next attempt at a prompt."""
    epoch, index, attempt = parse_uid(uid)
    return make_uid(epoch, index, attempt + 1)


FIRST_REPLAY_ATTEMPT = 1000
"""Replays of a group have attempts from here on, which differ by multiples of it."""


def make_replay_uid(uid: str, slot: int) -> str:
    """Return the uid of a replay of a group; `slot` is the number of its admission in the run."""
    epoch, index, attempt = parse_uid(uid)
    return make_uid(epoch, index, (slot + 1) * FIRST_REPLAY_ATTEMPT + attempt)


def find_replayed_uid(uid: str) -> str | None:
    """Return the uid of the group that a group is a replay of; None if it is no replay."""
    prompt, _, attempt = uid.rpartition(":")
    if not attempt.isdecimal() or int(attempt) < FIRST_REPLAY_ATTEMPT:
        return None
    return f"{prompt}:{int(attempt) % FIRST_REPLAY_ATTEMPT}"


@dataclass(frozen=True, eq=False)
class Rollout:
    """A prompt and its completion with the sampling record. All arrays are [T], prompt included.

    Multi-turn rollouts fit: tokens written by a tool or an environment lie between sampled tokens
    with loss_mask false, logprob 0 and version -1. `wide` holds wide columns [T, width] by name.
    """

    token_ids: Array
    loss_mask: Array
    generator_logprobs: Array
    policy_version: Array
    finish_reason: FinishReason
    wide: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = (self.loss_mask, self.generator_logprobs, self.policy_version)
        if any(array.shape != self.token_ids.shape for array in arrays):
            raise ValueError(f"rollout arrays differ in length: {[a.shape for a in arrays]}")
        if not self.loss_mask.any() and self.finish_reason is not FinishReason.ABORT:
            raise ValueError("a rollout that ended needs at least one token the policy sampled")
        if (self.policy_version[self.loss_mask] < 0).any():
            raise ValueError("a sampled token has no policy_version")

    @classmethod
    def from_single_turn(
        cls,
        prompt_ids: Array,
        completion_ids: Sequence[int],
        *,
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: FinishReason,
    ) -> "Rollout":
        """Build a rollout from a prompt [P] and a completion [C]; T = P + C."""
        total = len(prompt_ids) + len(completion_ids)
        generator_logprobs = np.zeros(total, np.float32)
        policy_version = np.full(total, -1, np.int32)
        loss_mask = np.zeros(total, np.bool_)
        generator_logprobs[len(prompt_ids) :] = logprobs
        policy_version[len(prompt_ids) :] = versions
        loss_mask[len(prompt_ids) :] = True
        token_ids = np.concatenate([prompt_ids, np.asarray(completion_ids)]).astype(np.int32)
        return cls(token_ids, loss_mask, generator_logprobs, policy_version, finish_reason)

    @property
    def completion_ids(self) -> Array:
        """Tokens after the initial prompt, int32 [C]: policy turns and tool output between them."""
        if not self.loss_mask.any():
            return self.token_ids[:0]
        return self.token_ids[int(np.argmax(self.loss_mask)) :]


def make_empty_rollout(prompt_ids: Array) -> Rollout:
    """Return a rollout of tokens that the policy did not sample, such as a prompt, int32 [P]."""
    return Rollout.from_single_turn(
        prompt_ids, [], logprobs=[], versions=[], finish_reason=FinishReason.ABORT
    )


def extend_wide(
    wide: Mapping[str, Array], added: Mapping[str, Array], num_tokens: int
) -> dict[str, Array]:
    """Return the wide columns of a rollout that has grown to `num_tokens`.

    The rows of `added` belong to its last tokens; where they have an entry, they replace rows.
    """
    columns: dict[str, Array] = {}
    for name, like in {**wide, **added}.items():
        empty = NO_ENTRY.astype(like.dtype)
        columns[name] = np.full((num_tokens, like.shape[1]), empty)
        if name in wide:
            columns[name][: len(wide[name])] = wide[name]
        if name in added:
            rows = added[name]
            has_entry = (rows != empty).any(1, keepdims=True)
            np.copyto(columns[name][num_tokens - len(rows) :], rows, where=has_entry)
    return columns


def derive_seed(text: str, *, digest_size: int = 4) -> int:
    """Return a seed that depends on the text only; with a digest of 4 bytes, 0 to 2^31 - 1."""
    digest = hashlib.blake2b(text.encode(), digest_size=digest_size).digest()
    return int.from_bytes(digest, "big") >> 1


def make_rollout_seeds(run_seed: int, uid: str, count: int) -> list[int]:
    """Return `count` sampling seeds in [0, 2^31), one per rollout of the prompt `uid`.

    Weights, prompt and seed determine a rollout.
    """
    return [derive_seed(f"{run_seed}/{uid}/{i}") for i in range(count)]


def derive_continuation_seed(seed: int, num_existing: int) -> int:
    """Derive the seed for sampling further tokens of a rollout that has `num_existing` new tokens.

    The original seed would repeat the random numbers of the first tokens. The derived seed, 0 to
    2^63 - 1, depends only on that seed and `num_existing`, so resuming at the same token is
    reproducible.
    """
    return derive_seed(f"{seed}/{num_existing}", digest_size=8) if num_existing else seed


def rollouts_to_columns(rollouts: Sequence[Rollout]) -> dict[str, Array]:
    """Concatenate the rollouts of a group into ROLLOUT_COLUMNS."""
    columns: dict[str, Array] = {
        name: np.concatenate([getattr(rollout, name) for rollout in rollouts])
        for name in ROLLOUT_TOKEN_COLUMNS
    }
    columns["lengths"] = np.array([len(r.token_ids) for r in rollouts], np.int32)
    for name, like in {name: rows for r in rollouts for name, rows in r.wide.items()}.items():
        # A rollout without sampled tokens has none.
        rows = [extend_wide({name: like[:0]}, r.wide, len(r.token_ids))[name] for r in rollouts]
        columns[name] = np.concatenate(rows).ravel()
    columns["finish_reason"] = np.array([r.finish_reason.value for r in rollouts], np.int8)
    return columns


def split_token_column(column: Array, lengths: Array) -> list[Array]:
    """Split a token column [sum(lengths)] into one view per rollout."""
    return np.split(column, np.cumsum(lengths)[:-1])


def get_token_rows(name: str, column: Array, num_tokens: int) -> Array:
    """Return a token column with a row per token: [T, width] if it is wide, else [T] as it is."""
    return column.reshape(num_tokens, -1) if get_column_spec(name).is_wide else column


def columns_to_rollouts(columns: Columns) -> list[Rollout]:
    """Split the ROLLOUT_COLUMNS of a group into rollouts, whose arrays are views of the columns."""
    lengths = columns["lengths"]
    total, wide = int(lengths.sum()), [n for n in columns if get_column_spec(n).is_wide]
    parts = {
        name: split_token_column(get_token_rows(name, columns[name], total), lengths)
        for name in (*ROLLOUT_TOKEN_COLUMNS, *wide)
    }
    return [
        Rollout(
            **{name: parts[name][i] for name in ROLLOUT_TOKEN_COLUMNS},
            finish_reason=FinishReason(int(columns["finish_reason"][i])),
            wide={name: parts[name][i] for name in wide},
        )
        for i in range(len(lengths))
    ]


def extract_completions(columns: Columns) -> list[Array]:
    """Return the tokens after the prompt of each rollout of a group, int32 [C] each, as views.

    Equal to `Rollout.completion_ids`, at a tenth of the cost of `columns_to_rollouts`.
    """
    token_ids, loss_mask = columns["token_ids"], columns["loss_mask"]
    completions, start = [], 0
    for end in np.cumsum(columns["lengths"]).tolist():
        mask = loss_mask[start:end]
        first = int(mask.argmax()) if mask.size else 0
        has_sampled = bool(mask.size and mask[first])
        completions.append(token_ids[start + first : end] if has_sampled else token_ids[:0])
        start = end
    return completions


class GroupInfo(msgspec.Struct, frozen=True):
    """Sizes and versions of a group; the coordinator sees these and never the tokens.

    `version_tokens` counts the sampled tokens per policy_version, ascending by version.
    `num_turns` counts the turns of all rollouts; 0 for rollouts without an environment.
    `samples` counts the rollouts of each episode; () if each rollout is an episode.
    `pass_rate` is the share of right rollouts; None before scoring and without its column.
    """

    lengths: tuple[int, ...]
    num_loss_tokens: int
    version_tokens: tuple[tuple[int, int], ...]
    num_turns: int = 0
    samples: tuple[int, ...] = ()
    pass_rate: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the group, prompts included."""
        return sum(self.lengths)

    @property
    def min_version(self) -> int:
        """Oldest version that sampled a token of the group."""
        return self.version_tokens[0][0]

    @classmethod
    def from_columns(cls, columns: Columns) -> "GroupInfo":
        """Compute sizes and versions of a group from its ROLLOUT_COLUMNS.

        Reads the columns `episode` and `num_turns` if they exist. Raises ContractError if column
        lengths differ.
        """
        versions, mask = columns["policy_version"], columns["loss_mask"]
        if versions.size != mask.size:
            sizes = f"policy_version[{versions.size}], loss_mask[{mask.size}]"
            raise ContractError(f"columns of one group differ in length: {sizes}")
        sampled = versions[mask]
        return cls(
            lengths=tuple(columns["lengths"].tolist()),
            num_loss_tokens=sampled.size,
            version_tokens=tuple(_count_versions(sampled)),
            num_turns=int(columns["num_turns"].sum()) if "num_turns" in columns else 0,
            samples=tuple(count_samples(columns).tolist()) if EPISODE_COLUMN in columns else (),
        )


def _count_versions(sampled: Array) -> Iterator[tuple[int, int]]:
    """Yield (version, number of sampled tokens), ascending by version."""
    # Fast path: most groups come from one version, and comparing bytes is faster than sorting.
    raw = sampled.tobytes()
    if raw and raw == raw[: sampled.itemsize] * sampled.size:
        yield int(sampled[0]), sampled.size
    else:
        versions, counts = np.unique(sampled, return_counts=True)
        yield from zip(versions.tolist(), counts.tolist(), strict=True)


def measure_columns(columns: Columns) -> dict[str, int]:
    """Return the number of entries of each column.

    Raises ContractError for an unknown column, a wrong dtype, or a value that is not a flat array.
    """
    for name, column in columns.items():
        if not (name in COLUMN_SPECS or is_component_column(str(name))):
            raise ContractError(f"column {name}: there is no such column")
        if not isinstance(column, np.ndarray):
            raise ContractError(f"column {name}: {type(column).__name__}, wanted an array")
        if column.ndim != 1:
            raise ContractError(f"column {name}: shape {list(column.shape)}, wanted one dimension")
        if column.dtype != (wanted := _get_column_dtype(name)):
            raise ContractError(f"column {name}: {column.dtype}, wanted {wanted}")
    return {name: column.size for name, column in columns.items()}


@functools.cache
def _get_column_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(get_column_spec(name).dtype)


def check_column_sizes(sizes: Mapping[str, int], info: GroupInfo) -> None:
    """Raise ContractError unless each column has an entry per token, turn or rollout of a group."""
    expected = {
        ColumnAxis.TOKEN: info.num_tokens,
        ColumnAxis.TURN: info.num_turns,
        ColumnAxis.ROLLOUT: len(info.lengths),
    }
    for name, entries in sizes.items():
        spec = get_column_spec(name)
        wanted = expected.get(spec.axis, entries)
        if entries % wanted if spec.is_wide and wanted else entries != wanted:
            several = " or a multiple" if spec.is_wide else ""
            raise ContractError(
                f"column {name}: {spec.dtype}[{entries}], wanted {spec.dtype}[{wanted}]{several}"
            )


class GroupLease(msgspec.Struct, frozen=True, weakref=True):
    """The right of `holder` to work on a group for a stage. Times: s of the shard's clock.

    `token` identifies the lease; it is unique among all leases of a shard, also across its
    restarts. `attempt` is 1 plus the number of failed attempts of the stage at the group.
    `expires_at` is the expiry at grant time; renewals move the expiry on the shard only.
    """

    token: int
    uid: str
    stage: str
    attempt: int
    expires_at: float
    holder: str = ""
    granted_at: float = 0.0


@dataclass(frozen=True)
class FilteredGroup:
    """Verdict of a stage that rejects a group, returned in place of columns."""

    reason: str
    pass_rate: float | None = None


@dataclass(frozen=True)
class GroupOutcome:
    """Reason why a group ends untrained. `cause` is the name of its counter (drops/<cause>)."""

    cause: str
    reason: str = ""
    filtered: bool = False
    pass_rate: float | None = None


class Experience(msgspec.Struct, frozen=True, eq=False):
    """A leased group as a stage sees it: the prompt and the requested columns.

    `admitted_version`: version at admission; no token was sampled by an older version.
    `info`: present once the group is generated.
    `ready_version`: version in training when the group became ready for its step.
    `outcome`: set if the group ended untrained; only the coordinator leases such groups.
    `partial_rollouts`: incomplete columns that an earlier holder of this stage saved.
    """

    lease: GroupLease
    admitted_version: int
    prompt: Prompt | None = None
    columns: Columns = msgspec.field(default_factory=dict)
    info: GroupInfo | None = None
    ready_version: int | None = None
    outcome: GroupOutcome | None = None
    partial_rollouts: Columns | None = None

    @classmethod
    def make_unqueued(
        cls, columns: Columns, prompt: Prompt | None = None, version: int = 0
    ) -> "Experience":
        """Wrap a group that is not in the queue, for a scorer; its lease never expires."""
        uid = prompt.uid if prompt else ""
        return cls(GroupLease(0, uid, "", 0, float("inf")), version, prompt, columns)

    @property
    def uid(self) -> str:
        return self.lease.uid


def count_samples(columns: Columns) -> Array:
    """Return the number of rollouts of each episode of a group, int64 [E]."""
    if EPISODE_COLUMN not in columns:
        return np.ones(len(columns["lengths"]), np.int64)
    return np.bincount(columns[EPISODE_COLUMN])


def find_first_samples(samples: Array) -> Array:
    """Return the index of each episode's first rollout, given `count_samples`: int64 [E]."""
    firsts: Array = np.cumsum(samples) - samples
    return firsts


def sum_over_samples(column: Array, samples: Array) -> Array:
    """Return the sum of a column [R] over the samples of each episode: [E]."""
    sums: Array = np.add.reduceat(column, find_first_samples(samples))
    return sums


SCORE_TOLERANCE = 1e-6
"""Some float32 roundings: ten times 0.1 exceeds 1 by 1.2e-7."""


def has_equal_scores(lowest: Any, highest: Any) -> Any:
    """Return whether scores from `lowest` to `highest` differ by no more than float32 rounding.

    One rule for the group filter and for the baselines of a group. Takes numbers, arrays or
    tensors: highest - lowest <= 1e-6 (1 + |highest|).
    """
    return highest - lowest <= SCORE_TOLERANCE * (1 + abs(highest))


def check_samples(columns: Columns) -> None:
    """Raise ContractError unless episodes are numbered from 0, their samples next to each other."""
    if EPISODE_COLUMN not in columns:
        return
    episodes, num_rollouts = columns[EPISODE_COLUMN], len(columns["lengths"])
    steps = np.diff(episodes, prepend=-1)
    is_in_order = np.isin(steps, (0, 1)).all() and (episodes >= 0).all()
    if len(episodes) != num_rollouts or not is_in_order:
        raise ContractError(
            f"column {EPISODE_COLUMN}: {episodes.tolist()[:16]} for {num_rollouts} rollouts; must"
            " number the episodes from 0, samples of an episode next to each other"
        )


def check_loss_mask(columns: Columns) -> None:
    """Raise ContractError if loss_mask is true for a token that the policy did not sample.

    For the rollouts of an environment, which have `token_source`. Training on the environment's
    words also raises the reward, by less, so that no metric shows the mistake.
    """
    if "token_source" not in columns:
        return
    loss_mask, source = columns["loss_mask"], columns["token_source"]
    if loss_mask.size != source.size:
        sizes = f"loss_mask[{loss_mask.size}], token_source[{source.size}]"
        raise ContractError(f"columns of one group differ in length: {sizes}")
    wrong = np.flatnonzero(loss_mask & (source != TokenSource.SAMPLED))
    if wrong.size:
        first = int(wrong[0])
        raise ContractError(
            f"column loss_mask: true for token {first} of the group, which the policy did not"
            f" sample: its token_source is {TokenSource(int(source[first])).name}"
        )
