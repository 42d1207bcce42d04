"""Log-probabilities and entropies of tokens through the output head, chunk by chunk.

Logits take tokens x vocabulary elements: 9.3 GiB in bfloat16 for 32,768 tokens and 152k words, and
as much again for their gradient. So head and softmax see `HEAD_CHUNK_TOKENS` tokens at a time, and
the backward pass computes each chunk once more. A custom autograd function does that: it sums the
head's gradient in float32, where torch's checkpoint per chunk would sum in the parameters' dtype.

The loop runs within one call of the head module, within one call of the model. DeepSpeed's and
FSDP2's hooks therefore gather the head's parameters once per pass, however many chunks there are.

If tensor-parallel ranks share the vocabulary, a chunk's logits are those of a rank's words.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.engines.models.packed_rows import RowLayout, unwrap_engine
from streamrl.engines.models.router_replay import Routing, begin_routing
from streamrl.engines.models.tensor_parallel import (
    VOCABULARY_ROWS,
    WHOLE_LOGITS,
    VocabularyRows,
    find_head_name,
)
from streamrl.engines.trainer_config import HEAD_CHUNK_TOKENS

EntropyMode = Literal["none", "value", "gradient", "collision"]
ChunkScorer = Callable[[Tensor, Tensor], Tensor]
"""Function from the head's inputs [N, H] and words [N, 1 + W + K] to scores [S, N].

Words are the next token, W further words to score and K words of the token's sampling mask. Scores
are the logprobs of the first 1 + W words, then logprobs and ids of the likeliest words, if wanted,
and last the entropy.
"""


class TopWords(NamedTuple):
    """How many of the likeliest words to find per token, among the first ids of the vocabulary."""

    num_words: int
    vocab_size: int


class NextTokenScores(NamedTuple):
    """Logprob of the token after each position, and entropy of its distribution, float32 [B, T].

    In the mode "collision", the sum of the distribution's squared probabilities takes the place of
    the entropy. state_values: values, float32 [B, T], of a model with two heads. word_logprobs:
    logprobs of the given words, or of the likeliest, and word_ids: ids of the likeliest, [W, B, T].
    """

    logprobs: Tensor
    entropy: Tensor
    state_values: Tensor | None
    word_logprobs: Tensor | None = None
    word_ids: Tensor | None = None


@dataclass
class ScoringOutput(ModelOutput):
    """Logits [B, T, V], or scores [S, B, T] (`ChunkScorer`); values [B, T, 1] of a second head.

    The scores are one tensor, because DeepSpeed's ZeRO 3 runs a hook for each tensor with a
    gradient and all ranks must run as many, whether their entropies have one or not. A ModelOutput
    is a dataclass and a dict: FSDP registers its gradient hooks on dataclass fields, DeepSpeed on
    dict entries.
    """

    logits: Tensor | None = None
    scores: Tensor | None = None
    state_values: Tensor | None = None


def run_scoring_forward(  # noqa: PLR0913
    model: Callable[..., Any],
    token_ids: Tensor,
    attention_mask: Tensor,
    *,
    temperature: float,
    entropy_mode: EntropyMode,
    sampling_mask: Tensor | None = None,
    words: Tensor | TopWords | None = None,
    routing: Routing | None = None,
) -> NextTokenScores:
    """Run a causal model on right-padded token ids, int64 [B, T], and score the next tokens.

    `model` is a transformers model or a DeepSpeed engine of one. `attention_mask` bool [B, T] is
    False for padding. The last position of a row and the padding are meaningless. Logits are
    divided by `temperature`. Entropies are 0 for mode "none" and carry a gradient only for mode
    "gradient". `sampling_mask` [B, T, K] has ids of words, or NO_ENTRY: logprob and entropy of a
    token are those among its words, of all words if it has none. `words`, int [B, T, W], are scored
    in the place of each token like the token itself, or are the likeliest. Ranks must not share the
    vocabulary for either. `routing` replays or records experts, until the next call.
    """
    module = unwrap_engine(model)
    head, name = module.get_output_embeddings(), find_head_name(module)
    vocabulary: VocabularyRows | None = vars(module).get(VOCABULARY_ROWS)
    num_words = 1 + (words.shape[-1] if isinstance(words, Tensor) else 0)
    num_scores = num_words + (entropy_mode == "gradient")
    finish = functools.partial(
        _score_logits,
        temperature=temperature,
        entropy_mode=entropy_mode,
        vocabulary=vocabulary,
        num_words=num_words,
        top_words=words if isinstance(words, TopWords) else None,
    )
    rows = RowLayout(model, token_ids, attention_mask)
    begin_routing(module, rows, routing)
    targets = rows.next_token_ids[..., None]
    for further in (words, sampling_mask):
        if isinstance(further, Tensor):
            ids = rows.arrange(further.roll(-1, dims=1)).long()
            targets = torch.cat((targets, ids), dim=-1)
    if name is None:
        output = rows.run_model()
        scores = _score_in_chunks(finish, output.logits, targets, num_scores)
    else:
        apply_head = head.forward
        if vocabulary is not None:
            apply_head = functools.partial(vocabulary.apply_head, head)

        def score_chunk(inputs: Tensor, chunk_targets: Tensor) -> Tensor:
            logits = _postprocess_logits(module, name, inputs, apply_head(inputs))
            return finish(logits, chunk_targets)

        def score(inputs: Tensor) -> Tensor:
            parameters = head.parameters()
            if vocabulary is not None:
                inputs = vocabulary.share_inputs(inputs)
            return _score_in_chunks(score_chunk, inputs, targets, num_scores, *parameters)

        with _replace_head(module, head, score):
            output = rows.run_model()
        scores = output.scores
    logprobs, *word_scores, entropy = rows.restore(scores)
    if entropy_mode != "gradient":
        entropy = entropy.detach()
    values = output.get("state_values")
    if values is not None:
        values = rows.restore(values[..., 0].float())
    # Of the likeliest words, logprobs and ids.
    found = torch.stack(word_scores).chunk(1 + isinstance(words, TopWords)) if word_scores else ()
    return NextTokenScores(logprobs, entropy, values, *found)


@contextlib.contextmanager
def _replace_head(
    module: nn.Module, head: nn.Module, score: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Make the model's forward pass return the result of `score` in place of the head's.

    Hooks of the head that are registered already see the scores: DeepSpeed's gather the head's
    parameters for the backward pass of a module's outputs. The rest of the model's forward pass
    gets a placeholder for logits. Hooks of the model then see its scores as outputs.
    """
    scores: list[Tensor] = []

    def take_scores(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        scores.append(output)
        return output[0].detach()[..., None]

    def return_scores(_: nn.Module, __: Any, ___: Any) -> Any:
        return ScoringOutput(scores=scores.pop())

    handles = [
        head.register_forward_hook(take_scores),
        module.register_forward_hook(return_scores, prepend=True),
    ]
    own_forward = vars(head).get("forward")
    vars(head)["forward"] = score
    try:
        yield
    finally:
        del vars(head)["forward"]
        if own_forward is not None:
            vars(head)["forward"] = own_forward
        for handle in handles:
            handle.remove()


def mark_whole_logits(module: PreTrainedModel) -> None:
    """Note in a causal model why only logits of all tokens at once can score them, if so.

    Tries on two tokens what a chunk of tokens takes, so the parameters must be whole.
    """
    vars(module)[WHOLE_LOGITS] = _explain_whole_logits(module)


def _explain_whole_logits(module: PreTrainedModel) -> str:
    name = find_head_name(module)
    if name is None:
        return "transformers knows no output head of this class apart from its base"
    weight: Any = module.get_output_embeddings().weight
    inputs, logits = (weight.new_zeros(2, size) for size in reversed(weight.shape))
    try:
        with torch.device(weight.device), torch.no_grad():
            shape = _postprocess_logits(module, name, inputs, logits).shape
    except Exception as error:  # noqa: BLE001 - a family's own code raises any type
        return f"its code behind the base does not run alone: {type(error).__name__}: {error}"
    return "" if shape[:-1] == logits.shape[:-1] else f"two tokens have logits {tuple(shape)}"


def _postprocess_logits(
    module: nn.Module, head_name: str, inputs: Tensor, head_output: Tensor
) -> Tensor:
    """Apply the steps of the model's forward after the head to the head's output [N, V].

    Soft-capping and scaling are written in each family's forward. A shallow copy of the model,
    whose base and head return the given tensors, runs that code.
    """
    # FSDP2's classes cannot be copied by copy.copy.
    shell: Any = object.__new__(type(module))
    vars(shell).update(vars(module))
    base = _ComputedModule(getattr(module, shell.base_model_prefix), _BaseOutput((inputs[None],)))
    vars(shell)[shell.base_model_prefix] = base
    vars(shell)[head_name] = _ComputedModule(getattr(module, head_name), head_output[None])
    logits: Tensor = type(module).forward(shell, inputs_embeds=inputs[None], use_cache=False).logits
    return logits[0]


class _ComputedModule:
    """A module whose result is there; so is that of its children, such as the decoder of OPT."""

    def __init__(self, module: nn.Module, output: Any) -> None:
        self._module, self._output = module, output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _ComputedModule(value, self._output) if isinstance(value, nn.Module) else value


class _BaseOutput(tuple[Tensor]):
    """Output of a base: the hidden states. Its other fields, of whatever family, are None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _score_logits(  # noqa: PLR0913
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_mode: EntropyMode,
    vocabulary: VocabularyRows | None,
    num_words: int,
    top_words: TopWords | None,
) -> Tensor:
    """Return the scores of a `ChunkScorer` for logits [N, V]; num_words: 1 + W."""
    scaled = logits.float() / temperature
    targets, mask = targets[..., :num_words], targets[..., num_words:]
    if vocabulary is not None:
        assert targets.shape[-1] == 1 and top_words is None, "refused in RunConfig"
        chosen, entropy = vocabulary.score(scaled, targets[..., 0], mode=entropy_mode)
        return torch.stack((chosen, entropy if entropy_mode == "gradient" else entropy.detach()))
    if mask.shape[-1]:
        scaled = scaled.masked_fill(~_select_words(mask, scaled.shape[-1]), -torch.inf)
    total = scaled.logsumexp(-1, keepdim=True)
    scores = [scaled.gather(-1, targets.clamp(min=0)) - total]
    if top_words is not None:
        top = scaled[:, : top_words.vocab_size].topk(top_words.num_words)
        # A float32 holds each id below 2^24.
        scores += [top.values - total, top.indices.float()]
    with torch.set_grad_enabled(entropy_mode == "gradient" and torch.is_grad_enabled()):
        if entropy_mode == "none":
            entropy = torch.zeros_like(total[..., 0])
        elif entropy_mode == "collision":
            entropy = scaled.softmax(-1).square().sum(-1)
        else:
            entropy = entropy_from_logits(scaled)
    return torch.cat((*scores, entropy[..., None]), dim=-1).T


def _select_words(words: Tensor, vocabulary_size: int) -> Tensor:
    """Return which words are among `words` [..., K], bool [..., V]; all where those are none."""
    shape = (*words.shape[:-1], 1 + vocabulary_size)
    is_kept = torch.zeros(shape, dtype=torch.bool, device=words.device)
    is_kept = is_kept.scatter_(-1, words + 1, value=True)[..., 1:]
    return is_kept | ~is_kept.any(-1, keepdim=True)


def _score_in_chunks(
    score_chunk: ChunkScorer,
    inputs: Tensor,
    targets: Tensor,
    num_scores: int,
    *parameters: Tensor,
) -> Tensor:
    """Score inputs [B, T, H] in chunks, with gradients of inputs and of the head's `parameters`.

    targets: words [B, T, 1 + W + K] of a `ChunkScorer`. Returns its scores, [S, B, T], of which
    `num_scores` have a gradient.
    """
    scores: Tensor = _ChunkedScores.apply(
        score_chunk, num_scores, inputs.flatten(0, 1), targets.flatten(0, 1), *parameters
    )
    # FSDP2 warns of outputs that are views.
    return scores.view(-1, *targets.shape[:2]).clone()


class _ChunkedScores(torch.autograd.Function):
    """Scores [S, N] of inputs [N, H]; the backward pass computes the chunks again."""

    @staticmethod
    def forward(
        ctx: Any,
        score_chunk: ChunkScorer,
        num_scores: int,
        inputs: Tensor,
        targets: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.score_chunk, ctx.num_scores = score_chunk, num_scores
        ctx.save_for_backward(inputs, targets, *parameters)
        chunks = zip(inputs.split(HEAD_CHUNK_TOKENS), targets.split(HEAD_CHUNK_TOKENS), strict=True)
        return torch.cat([score_chunk(*chunk) for chunk in chunks], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        inputs, targets, *parameters = ctx.saved_tensors
        # Other gradients of scores are of entropies without one.
        grads_by_token = grad_scores[: ctx.num_scores].T

        def score_tokens(chunk_targets: Tensor, chunk: Tensor) -> Tensor:
            scores: Tensor = ctx.score_chunk(chunk, chunk_targets)
            return scores[: ctx.num_scores].T

        grad_inputs = torch.empty_like(inputs)
        chunks = (
            (functools.partial(score_tokens, chunk_targets), chunk, grads)
            for chunk_targets, chunk, grads in zip(
                *(tensor.split(HEAD_CHUNK_TOKENS) for tensor in (targets, inputs, grads_by_token)),
                strict=True,
            )
        )
        grads = compute_chunk_gradients(chunks, grad_inputs.split(HEAD_CHUNK_TOKENS), parameters)
        return None, None, grad_inputs, None, *grads


def compute_chunk_gradients(
    chunks: Iterable[tuple[Callable[[Tensor], Tensor], Tensor, Tensor]],
    grad_inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> list[Tensor | None]:
    """Run each chunk forward and backward; return the gradients of `parameters`.

    `chunks` are (function, inputs, gradient of the function's output); `grad_inputs` receive the
    gradients of the inputs. Gradients of parameters are summed in float32 and returned in their
    dtype, None for frozen ones.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    totals = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in trained]
    for (run, inputs, grad_outputs), grad_chunk in zip(chunks, grad_inputs, strict=True):
        leaf = inputs.detach().requires_grad_()
        with torch.enable_grad():
            outputs = run(leaf)
        grads = torch.autograd.grad(outputs, (leaf, *trained), grad_outputs)
        del outputs
        grad_chunk.copy_(grads[0])
        for total, grad in zip(totals, grads[1:], strict=True):
            total += grad
    sums = {id(p): total.to(p.dtype) for p, total in zip(trained, totals, strict=True)}
    return [sums.get(id(parameter)) for parameter in parameters]
