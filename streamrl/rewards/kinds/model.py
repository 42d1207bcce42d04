"""Kind `model`: score of a sequence-classification model for prompt and completion."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from omegaconf import MISSING

from streamrl.data.chat_template import (
    Conversation,
    get_text_frame,
    load_chat_template,
    load_tokenizer,
    render_closed_text,
)
from streamrl.data.config import MODEL_TEMPLATE
from streamrl.engines.trainer_config import RankLayout, TrainerConfig
from streamrl.errors import (
    ConfigError,
    RewardError,
    RewardMemoryError,
    RewardTimeoutError,
    extend_errors,
    get_first_line,
)
from streamrl.files.hf_config import (
    is_trusted,
    list_weight_files,
    read_model_config,
    read_stored_shapes,
)
from streamrl.files.typed_settings import at_least, one_of
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import LAST_TURN, Completion
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.user_code.reward_result import RewardOutcome, RewardResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from streamrl.engines.training.model_rank import ModelRank

TokenRow = Sequence[int]


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sort rows by length, longest first, and cut them into batches; return row indices per batch.

    A batch padded to its longest row has at most `max_tokens` tokens. Every length must be at most
    `max_tokens`. Example: lengths [2, 5, 4], max_tokens 10 gives [[1, 2], [0]].
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    while order:
        size = max_tokens // lengths[order[0]]
        batches.append(order[:size])
        order = order[size:]
    return batches


class MicroBatcher:
    """Batches the token rows of concurrent callers for forward passes of a reward model.

    Batches run in sequence; rows that arrive meanwhile wait and are batched together next.
    compute: returns the logit of each row of a batch.
    max_tokens: limit of a batch, including padding.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[TokenRow]], Awaitable[Sequence[float]]],
        *,
        max_tokens: int,
    ) -> None:
        self._compute = compute
        self._max_tokens = max_tokens
        self._rows: list[tuple[TokenRow, asyncio.Future[float]]] = []
        self._batch_task: asyncio.Task[None] | None = None

    async def compute_rows(self, rows: Sequence[TokenRow]) -> list[float]:
        """Return the logit of each nonempty row of token ids. Raises the errors of `compute`."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        self._rows += zip(rows, futures, strict=True)
        if self._batch_task is None or self._batch_task.done():
            self._batch_task = asyncio.create_task(self._run_batches())
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    async def _run_batches(self) -> None:
        while waiting := [(row, future) for row, future in self._rows if not future.done()]:
            self._rows = waiting.copy()
            lengths = [len(row) for row, _ in waiting]
            for indices in plan_batches(lengths, self._max_tokens):
                # Skip rows whose caller was cancelled or failed with an earlier batch.
                batch = [waiting[i] for i in indices if not waiting[i][1].done()]
                if batch:
                    await self._run_batch(batch)

    async def _run_batch(self, batch: Sequence[tuple[TokenRow, "asyncio.Future[float]"]]) -> None:
        # return_exceptions: any error, CancelledError included, goes to the waiting callers.
        (logits,) = await asyncio.gather(
            self._compute([row for row, _ in batch]), return_exceptions=True
        )
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if isinstance(logits, BaseException):
                future.set_exception(logits)
            else:
                future.set_result(logits[i])

    def close(self) -> None:
        if self._batch_task is not None:
            self._batch_task.cancel()
        for _, future in self._rows:
            future.cancel()


T = TypeVar("T")


@dataclass
class ModelOptions(RankLayout, RetryOptions):
    """Options of kind model; timeout_s is the deadline of one forward pass.

    path: directory of a sequence-classification model with one label, and its tokenizer.
    sigmoid: apply the logistic function to the logit: scores between 0 and 1.
    pass_score: lowest score that passes; null: 0 for a logit, 0.5 with sigmoid.
    step_end: text that ends a step of the completion, such as two newlines: a process reward model,
        which scores the text up to the end of each step. Empty: one score for the whole.
    on_long_text: texts longer than model, tokenizer or batch_tokens allow: error, or truncate (keep
        the end).
    batch_tokens: limit of a forward pass including padding, tokens.
    dtype: auto (bfloat16 on a GPU, else float32), float32 or bfloat16.
    """

    path: str = MISSING
    sigmoid: bool = False
    pass_score: float | None = None
    step_end: str = ""
    on_long_text: Annotated[str, one_of("error", "truncate")] = "error"
    batch_tokens: Annotated[int, at_least(1)] = 16384
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16")] = "auto"

    def to_ranks_config(self, key: str) -> TrainerConfig:
        """Return the settings of the ranks that hold the model; `key` is the reward's."""
        return self.to_trainer_config(TrainerConfig(dtype=self.dtype), key)


def load_rank(spec: RewardSpec[ModelOptions], rank: int = 0) -> "ModelRank":
    """Load a rank of a reward's model. Raises ConfigError."""
    from streamrl.engines.models.forward import ModelLoadOptions
    from streamrl.engines.training.model_rank import ModelRank
    from streamrl.engines.training.tasks import RewardModelTask

    offload, key = spec.context.scorer.offload, f"{spec.key}.path"
    options = ModelLoadOptions(keeps_layers_on_host=offload, key=key)
    task = RewardModelTask(spec.options.path, options=options)
    return ModelRank(task, config=spec.options.to_ranks_config(spec.key), rank=rank)


def compute_logits(rank: "ModelRank", rows: Sequence[TokenRow]) -> list[float]:
    """Return the logit of each row of token ids. Raises RewardMemoryError."""
    from torch import OutOfMemoryError

    try:
        return rank.compute_logits(rows)
    except OutOfMemoryError as error:
        shape = f"{len(rows)} texts of up to {max(map(len, rows))} tokens"
        raise RewardMemoryError(f"{shape}: {get_first_line(error)}") from error


def read_classifier(path: str, setting: str) -> tuple["PreTrainedTokenizerBase", int | None]:
    """Return tokenizer and longest input of the model in directory `path`, without loading weights.

    The input is None if the config does not limit its length.
    setting: config key that names the directory, for messages. Raises ConfigError unless the
    directory holds a complete model with classification head and tokenizer. A language model is
    refused: transformers would initialize its head randomly.
    """
    with extend_errors(f"{setting}="):
        tokenizer, config = load_tokenizer(path), read_model_config(path)
    _check_head(path, setting, config)
    if config.num_labels != 1:
        raise _make_config_error(
            path, setting, f"the model has {config.num_labels} labels, a reward model has one"
        )
    settings = config.get_text_config().to_dict()
    vocab_size = settings["vocab_size"]
    max_id = max(tokenizer.get_vocab().values())
    if max_id >= vocab_size:
        raise _make_config_error(
            path,
            setting,
            f"the tokenizer has token id {max_id}, the model's vocab_size is {vocab_size}:"
            " tokenizer and model do not match",
        )
    return tokenizer, settings.get("max_position_embeddings")


def _make_config_error(path: str, setting: str, reason: object) -> ConfigError:
    return ConfigError(f"{setting}={path}: {' '.join(str(reason).split())[:500]}")


def _check_head(path: str, setting: str, config: Any) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            skeleton = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=is_trusted(path)
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise _make_config_error(path, setting, error) from None
    body = f"{skeleton.base_model_prefix}."
    parameters = skeleton.state_dict().items()
    head = {name: tuple(value.shape) for name, value in parameters if not name.startswith(body)}
    stored = read_stored_shapes(Path(path), setting)
    for name, shape in head.items():
        if name not in stored:
            kind = (config.architectures or ["a model"])[0]
            raise _make_config_error(
                path,
                setting,
                f"{kind} without a classification head (the files lack {name}): a reward model must"
                " be trained as a sequence-classification model",
            )
        if stored[name] != shape:
            raise _make_config_error(
                path, setting, f"{name} has shape {stored[name]}, config.json says {shape}"
            )


def _join_steps(steps: Sequence[tuple[int, RewardResult]]) -> RewardResult:
    """Return the sum of the scores of a completion's steps, given with their ends.

    Each falls on its step. The completion passes if all steps do. A single step is the completion.
    """
    if len(steps) == 1:
        return steps[0][1]
    starts = [0, *(end for end, _ in steps)]
    spans = [(start, end, r.score) for start, (end, r) in zip(starts, steps, strict=False)]
    passes = all(result.outcome is RewardOutcome.PASS for _, result in steps)
    total = RewardResult.from_correctness(passes, score=math.fsum(score for *_, score in spans))
    return replace(total, span_scores=tuple(spans))


class ModelReward(Reward):
    """Runs a reward model in a thread, batching the completions of several groups.

    Input text: prompt and completion (as the assistant's turn) in the model's chat template, or the
    whole conversation of an episode. For a model without a template: the contents before the
    completion joined by newlines, then the completion.

    Raises ConfigError unless option `path` is the directory of a complete classification model.
    """

    def __init__(self, spec: RewardSpec[ModelOptions]) -> None:
        from streamrl.engines.models.tensor_parallel_support import check_trainer_split

        super().__init__()
        options = spec.options
        self._options = options
        self._tokenizer, max_tokens = read_classifier(options.path, f"{spec.key}.path")
        check_trainer_split(options.path, options.to_ranks_config(spec.key))
        limits = {
            f"{spec.key}.batch_tokens": options.batch_tokens,
            "the model's max_position_embeddings": max_tokens,
            "the tokenizer's model_max_length": self._tokenizer.model_max_length,
        }
        self._max_length, self._limit = min((size, name) for name, size in limits.items() if size)
        self._timeout_s = options.timeout_s or spec.context.scorer.timeout_s
        default_pass_score = 0.5 if options.sigmoid else 0.0
        self._pass_score = default_pass_score if options.pass_score is None else options.pass_score
        self._template = load_chat_template(MODEL_TEMPLATE, self._tokenizer)
        self._encoder = self._template.get_encoder(self._tokenizer)
        # A chat template already contains the special tokens.
        self._frame = get_text_frame(self._tokenizer, self._template)
        self._model_thread = ThreadPoolExecutor(1)
        # Separate, so that texts are tokenized for the next batch during a forward pass.
        self._tokenizer_thread = ThreadPoolExecutor(1)
        whole = replace(spec, options=replace(options, **vars(RankLayout())))
        self._load_rank = partial(load_rank, whole)
        self._rank: ModelRank | None = None
        self._on_ranks = spec.context.compute_logits if options.world_size > 1 else None
        self._batcher = MicroBatcher(self._compute_logits, max_tokens=options.batch_tokens)
        weight_files = list_weight_files(Path(options.path))
        self.model_bytes = sum(file.stat().st_size for file in weight_files)

    def validate_prompt(self, prompt: Prompt) -> None:
        text = self._render_text(Completion.from_text("").get_messages(prompt, LAST_TURN))
        # A token has at least a byte, so that most prompts need not be tokenized.
        if len(text.encode()) > self._max_length:
            self._tokenize_texts([text], "the prompt alone has")

    async def start(self) -> None:
        if self._on_ranks is None:
            loop = asyncio.get_running_loop()
            self._rank = await loop.run_in_executor(self._model_thread, self._load_rank)

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        """Score each completion.

        Raises RewardError for a logit not finite, and for a text too long unless truncated.
        """
        steps = [[(0, completion)] for completion in completions]
        if self._options.step_end:
            steps = [
                list(self._iter_steps(completion.get_part(part))) for completion in completions
            ]
        texts = [
            self._render_text(completion.get_messages(prompt, part))
            for of_completion in steps
            for _, completion in of_completion
        ]
        score = partial(self._score_texts, texts)
        results = iter(await retry_infra_errors(score, self._options.attempts))
        return [_join_steps([(end, next(results)) for end, _ in ends]) for ends in steps]

    def _iter_steps(self, text: str) -> Iterator[tuple[int, Completion]]:
        """Yield the end of each step in the text, and the completion up to there."""
        ends = [match.end() for match in re.finditer(re.escape(self._options.step_end), text)]
        for end in dict.fromkeys((*ends, len(text))):
            yield end, Completion.from_text(text[:end])

    async def _score_texts(self, texts: Sequence[str]) -> list[RewardResult]:
        loop = asyncio.get_running_loop()
        rows = await self._limit_time(
            loop.run_in_executor(self._tokenizer_thread, self._tokenize_texts, texts)
        )
        logits = await self._batcher.compute_rows(rows)
        return [self._to_result(logit, i) for i, logit in enumerate(logits)]

    def _render_text(self, messages: list[dict[str, Any]]) -> str:
        """Render messages to text, in which none of them writes a control token."""
        conversation = Conversation("the reward model's input", messages)
        try:
            return render_closed_text(self._tokenizer, conversation, self._template)
        except ConfigError as error:
            raise RewardError(str(error)) from error

    def _tokenize_texts(
        self, texts: Sequence[str], subject: str = "prompt and completion {} have"
    ) -> list[list[int]]:
        first, last = self._frame
        rows = [self._encoder.encode(text) for text in texts]
        if self._options.on_long_text == "truncate":
            most = self._max_length - len(first) - len(last)
            rows = [row[max(0, len(row) - most) :] for row in rows]
        rows = [[*first, *row, *last] for row in rows]
        for i, row in enumerate(rows):
            if not 1 <= len(row) <= self._max_length:
                raise RewardError(
                    f"{subject.format(i)} {len(row)} tokens, the reward model takes 1 to"
                    f" {self._max_length}, by {self._limit} (on_long_text=truncate keeps the end of"
                    " a longer text)"
                )
        return rows

    async def _compute_logits(self, rows: Sequence[TokenRow]) -> Sequence[float]:
        if self._on_ranks is not None:
            return await self._limit_time(self._on_ranks(rows))
        rank, loop = self._rank, asyncio.get_running_loop()
        assert rank is not None
        return await self._limit_time(
            loop.run_in_executor(self._model_thread, compute_logits, rank, rows)
        )

    async def _limit_time(self, result: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await result
        except TimeoutError:
            raise RewardTimeoutError(f"the model took more than {self._timeout_s:g} s") from None

    def _to_result(self, logit: float, index: int) -> RewardResult:
        if not math.isfinite(logit):
            raise RewardError(f"{self._options.path} gives {logit} for completion {index}")
        # tanh form: exp(-logit) would overflow for very negative logits.
        score = 0.5 * (1.0 + math.tanh(0.5 * logit)) if self._options.sigmoid else logit
        return RewardResult.from_correctness(score >= self._pass_score, score=score)

    async def close(self) -> None:
        self._batcher.close()
        for thread in (self._model_thread, self._tokenizer_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        self._rank = None
