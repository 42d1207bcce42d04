"""Kind `model`: score of a sequence-classification model for prompt and completion."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from omegaconf import MISSING

from streamrl.data.chat_template import (
    Conversation,
    get_frame_tokens,
    load_chat_template,
    render_text,
)
from streamrl.data.config import MODEL_TEMPLATE
from streamrl.errors import ConfigError, RewardError, RewardTimeoutError
from streamrl.files.typed_settings import at_least, one_of
from streamrl.messages import Prompt
from streamrl.rewards.interface.completion import LAST_TURN, Completion
from streamrl.rewards.interface.reward import RetryOptions, Reward, RewardSpec, retry_infra_errors
from streamrl.user_code.reward_result import RewardResult

if TYPE_CHECKING:
    from streamrl.rewards.kinds.classifier import ClassifierFiles, SequenceClassifier


TokenRow = Sequence[int]
RowLogits = Sequence[float]


def plan_batches(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Sort rows by length, longest first, and cut them into batches; return row indices per batch.

    A batch padded to its longest row has at most `max_tokens` tokens, and at most `max_rows` rows.
    Every length must be at most `max_tokens`. Example: lengths [2, 5, 4], max_tokens 10 gives [[1,
    2], [0]].
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    while order:
        size = min(max_rows, max_tokens // lengths[order[0]])
        batches.append(order[:size])
        order = order[size:]
    return batches


class MicroBatcher:
    """Batches the token rows of concurrent callers for forward passes of a reward model.

    Batches run in sequence; rows that arrive meanwhile wait and are batched together next.
    compute: returns the logits of each row of a batch.
    max_tokens, max_rows: limits of a batch; tokens include padding.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[TokenRow]], Awaitable[Sequence[RowLogits]]],
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._compute = compute
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._pending_rows: list[tuple[TokenRow, asyncio.Future[RowLogits]]] = []
        self._batch_task: asyncio.Task[None] | None = None
        self._open_futures: set[asyncio.Future[RowLogits]] = set()

    async def compute_rows(self, rows: Sequence[TokenRow]) -> list[RowLogits]:
        """Return the logits of each nonempty row of token ids. Raises the errors of `compute`."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in rows]
        self._pending_rows += zip(rows, futures, strict=True)
        self._open_futures.update(futures)
        if self._batch_task is None or self._batch_task.done():
            self._batch_task = asyncio.create_task(self._run_batches())
        try:
            return await asyncio.gather(*futures)
        finally:
            self._open_futures.difference_update(futures)
            for future in futures:
                future.cancel()

    async def _run_batches(self) -> None:
        while self._pending_rows:
            waiting, self._pending_rows = self._pending_rows, []
            lengths = [len(row) for row, _ in waiting]
            for indices in plan_batches(lengths, self._max_tokens, self._max_rows):
                # Skip rows whose caller was cancelled or failed with an earlier batch.
                batch = [waiting[i] for i in indices if not waiting[i][1].done()]
                if batch:
                    await self._run_batch(batch)

    async def _run_batch(
        self, batch: Sequence[tuple[TokenRow, "asyncio.Future[RowLogits]"]]
    ) -> None:
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
        for future in self._open_futures:
            future.cancel()


T = TypeVar("T")

DTYPES = ("auto", "float32", "bfloat16")
LONG_TEXT_POLICIES = ("error", "truncate")


@dataclass
class ModelOptions(RetryOptions):
    """Options of kind model; timeout_s is the deadline of one forward pass.

    path: directory of a sequence-classification model and its tokenizer.
    label: label with the score as its probability, by name or index; for models with several
        labels.
    sigmoid: apply the logistic function to the logit: scores between 0 and 1.
    pass_score: lowest score that passes; null: 0 for a logit, 0.5 for a probability.
    max_length: limit of prompt and completion, tokens; null: the limit of the model, the tokenizer
        and batch_tokens.
    on_long_text: longer texts: error, or truncate (keep the end).
    batch_tokens: limit of a forward pass including padding, tokens.
    dtype: auto (bfloat16 on a GPU, else float32), float32 or bfloat16.
    threads: CPU threads of the model.
    """

    path: str = MISSING
    label: str = ""
    sigmoid: bool = False
    pass_score: float | None = None
    max_length: Annotated[int | None, at_least(1)] = None
    on_long_text: Annotated[str, one_of(*LONG_TEXT_POLICIES)] = "error"
    batch_tokens: Annotated[int, at_least(1)] = 16384
    dtype: Annotated[str, one_of(*DTYPES)] = "auto"
    threads: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length > self.batch_tokens:
            raise ConfigError(
                f"max_length={self.max_length}: must be at most batch_tokens={self.batch_tokens}"
            )


class ModelReward(Reward):
    """Runs a reward model in a thread, batching the completions of several groups.

    Input text: prompt and completion (as the assistant's turn) in the model's chat template, or the
    whole conversation of an episode. For a model without a template: the contents before the
    completion joined by newlines, then the completion.

    Raises ConfigError unless option `path` is the directory of a complete classification model, and
    for a label or max_length that the model does not have.
    """

    def __init__(self, spec: RewardSpec[ModelOptions]) -> None:
        from streamrl.rewards.kinds.classifier import read_classifier

        super().__init__()
        options = spec.options
        self._options = options
        self._files = files = read_classifier(options.path)
        self._label_index = _find_label_index(options, files.labels)
        self._max_length = _resolve_max_length(options, files)
        self._keeps_layers_on_host = spec.context.scorer.offload
        self._timeout_s = options.timeout_s or spec.context.scorer.timeout_s
        is_logit = len(files.labels) == 1 and not options.sigmoid
        default_pass_score = 0.0 if is_logit else 0.5
        self._pass_score = default_pass_score if options.pass_score is None else options.pass_score
        self._tokenizer = files.tokenizer
        self._template = load_chat_template(MODEL_TEMPLATE, files.tokenizer)
        self._encoder = self._template.get_encoder(files.tokenizer)
        # A chat template already contains the special tokens.
        is_bare = self._template.source is None
        self._frame = get_frame_tokens(files.tokenizer) if is_bare else ([], [])
        self._model_thread = ThreadPoolExecutor(1)
        # Separate, so that texts are tokenized for the next batch during a forward pass.
        self._tokenizer_thread = ThreadPoolExecutor(1)
        self._model: SequenceClassifier | None = None
        self._batcher = MicroBatcher(
            self._compute_logits,
            max_tokens=options.batch_tokens,
            # Without a padding token transformers reads the logit of the last column, which is
            # padding for shorter rows: one row per batch.
            max_rows=options.batch_tokens if files.pad_id is not None else 1,
        )
        self.model_bytes = files.weight_bytes

    def validate_prompt(self, prompt: Prompt) -> None:
        self._render_text(Completion.from_text("").get_messages(prompt, LAST_TURN))

    async def run_preflight(self) -> str:
        if self._files.pad_id is None:
            return f"{self._files.path}: no padding token; texts are scored one at a time"
        return ""

    async def start(self) -> None:
        from streamrl.rewards.kinds.classifier import SequenceClassifier

        options, loop = self._options, asyncio.get_running_loop()
        load = partial(
            SequenceClassifier,
            self._files,
            dtype=options.dtype,
            threads=options.threads,
            keeps_layers_on_host=self._keeps_layers_on_host,
        )
        self._model = await loop.run_in_executor(self._model_thread, load)

    async def score_completions(
        self, prompt: Prompt, completions: Sequence[Completion], part: str
    ) -> Sequence[RewardResult]:
        """Score each completion.

        Raises RewardError for a logit not finite, and for a text too long unless truncated.
        """
        texts = [
            self._render_text(completion.get_messages(prompt, part)) for completion in completions
        ]
        return await retry_infra_errors(lambda: self._score_texts(texts), self._options.attempts)

    async def _score_texts(self, texts: Sequence[str]) -> list[RewardResult]:
        rows = await self._run_with_timeout(
            self._tokenizer_thread, lambda: self._tokenize_texts(texts)
        )
        logits = await self._batcher.compute_rows(rows)
        return [self._to_result(row, i) for i, row in enumerate(logits)]

    def _render_text(self, messages: list[dict[str, Any]]) -> str:
        """Render messages to text, in which none of them writes a control token."""
        if self._template.source is None:
            contents = [self._encoder.guard(message["content"]) for message in messages]
            return "\n".join(contents[:-1]) + contents[-1]
        conversation = Conversation("the reward model's input", messages)
        try:
            return render_text(self._tokenizer, conversation, self._template, is_closed=True)
        except ConfigError as error:
            raise RewardError(str(error)) from error

    def _tokenize_texts(self, texts: Sequence[str]) -> list[list[int]]:
        first, last = self._frame
        rows = [self._encoder.encode(text) for text in texts]
        if self._options.on_long_text == "truncate":
            most = self._max_length - len(first) - len(last)
            rows = [row[max(0, len(row) - most) :] for row in rows]
        rows = [[*first, *row, *last] for row in rows]
        for i, row in enumerate(rows):
            if not 1 <= len(row) <= self._max_length:
                raise RewardError(
                    f"prompt and completion {i} have {len(row)} tokens, the reward model takes 1 to"
                    f" {self._max_length} (on_long_text=truncate keeps the end of a longer text)"
                )
        return rows

    async def _compute_logits(self, rows: Sequence[TokenRow]) -> Sequence[RowLogits]:
        model = self._model
        assert model is not None
        return await self._run_with_timeout(self._model_thread, lambda: model.compute_logits(rows))

    async def _run_with_timeout(self, thread: ThreadPoolExecutor, function: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(thread, function)
        except TimeoutError:
            raise RewardTimeoutError(f"the model took more than {self._timeout_s:g} s") from None

    def _to_result(self, logits: RowLogits, index: int) -> RewardResult:
        if not all(math.isfinite(logit) for logit in logits):
            raise RewardError(f"{self._files.path} gives {list(logits)} for completion {index}")
        score = logits_to_score(logits, self._label_index, sigmoid=self._options.sigmoid)
        return RewardResult.from_correctness(score >= self._pass_score, score=score)

    async def close(self) -> None:
        self._batcher.close()
        for thread in (self._model_thread, self._tokenizer_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        self._model = None


def logits_to_score(logits: RowLogits, label: int, *, sigmoid: bool) -> float:
    """Convert the logits of a text to its score.

    The score is the logit of a model with a single label, else the softmax probability of `label`,
    an index. sigmoid: return the logistic function of the label's logit instead (multi-label
    models).
    """
    if sigmoid:
        # tanh form: exp(-logit) would overflow for very negative logits.
        return 0.5 * (1.0 + math.tanh(0.5 * logits[label]))
    if len(logits) == 1:
        return logits[0]
    highest = max(logits)
    return math.exp(logits[label] - highest) / sum(math.exp(logit - highest) for logit in logits)


def _find_label_index(options: ModelOptions, labels: Sequence[str]) -> int:
    label_indices = {
        **{str(i): i for i in range(len(labels))},
        **{name: i for i, name in enumerate(labels)},
    }
    if options.label in label_indices:
        return label_indices[options.label]
    if options.label or len(labels) > 1:
        raise ConfigError(
            f"rewards.label={options.label}: must be one of the model's {len(labels)} labels,"
            f" {', '.join(labels[:10])}"
        )
    return 0


def _resolve_max_length(options: ModelOptions, files: "ClassifierFiles") -> int:
    limit = files.max_tokens or options.batch_tokens
    if options.max_length is None:
        return int(min(limit, files.tokenizer.model_max_length, options.batch_tokens))
    if options.max_length > limit:
        raise ConfigError(
            f"rewards.max_length={options.max_length}: {files.path} takes at most {limit} tokens"
        )
    return options.max_length
