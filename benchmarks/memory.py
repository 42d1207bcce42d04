"""Peak memory of a micro-batch: `python -m benchmarks.memory` prints one JSON object.

Bytes of live tensors beside the parameters, GiB, of a forward pass, its loss and its backward pass:

policy     log-probabilities and entropies, with activation checkpointing and MLPs in chunks
critic     values of the same shape
reference  log-probabilities without a gradient

counted    of fake tensors, which have sizes and no data, for models of the shapes --shapes (7B with
           16,384 tokens, 32B with 32,768). A parameter's gradient is dropped once it is whole, as a
           ZeRO-3 rank does.
measured   of a small model that runs, with the growth of the process's resident memory beside it;
           `shared` is one of --ranks ranks that share the tokens (sequence parallelism)

`offload` is the same with the inputs of layers in host memory, which is not counted; `full_logits`
the same as `chunks` with all logits at a time and the softmax in chunks. --layers 0 shows the head
alone.
"""

import argparse
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from streamrl.algorithms.math.losses import entropy_from_logits
from streamrl.engines.memory.peak_memory import (
    PeakMemoryTracker,
    release_freed_memory,
    release_large_blocks_eagerly,
)
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.forward import compute_token_logprobs, compute_token_values
from streamrl.engines.models.model_shapes import MODEL_SHAPES
from streamrl.engines.models.packed_rows import enable_packing, join_sequence_group, share_tokens

GIB = 1 << 30
TOKENS = {"qwen2.5-7b": 16_384, "qwen2.5-32b": 32_768}
"""Tokens of the micro-batch of each shape that is counted."""
ROW_TOKENS = 4096
SOFTMAX_TOKENS = 2048
"""Tokens at a time of the softmax over all logits."""
SMALL = Qwen2Config(
    vocab_size=32_000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
Loss = Callable[[PreTrainedModel, Tensor], Tensor]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations return until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._is_paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the storages of the operations in the context."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not self._is_paused:
                self._count(leaf)
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.live -= size


@contextmanager
def offload_uncounted(counter: LiveBytes) -> Iterator[None]:
    """Replace transformers' copies of layer inputs to a GPU's host by copies that do not count."""

    def copy_away(tensor: Tensor) -> Tensor:
        with counter.pause():
            return tensor.clone()

    def offload(**_: Any) -> saved_tensors_hooks:
        return saved_tensors_hooks(copy_away, torch.clone)

    with mock.patch("transformers.modeling_utils.save_on_cpu", offload):
        yield


def make_config(shape: str, layers: int | None) -> Qwen2Config:
    sizes = MODEL_SHAPES[shape]
    return Qwen2Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers if layers is None else layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        tie_word_embeddings=sizes.has_tied_embeddings,
    )


def make_model(
    config: Qwen2Config, dtype: torch.dtype, *, is_critic: bool, offload: bool = False
) -> PreTrainedModel:
    """Build a model whose parameters' gradients are dropped as soon as they are whole."""
    auto_class = AutoModelForTokenClassification if is_critic else AutoModelForCausalLM
    config.num_labels = 1
    model: PreTrainedModel = auto_class.from_config(config, dtype=dtype).train()
    checkpoint_layers(model, offload=offload, chunk_mlps=True)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def score_in_chunks(model: PreTrainedModel, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids, dtype=torch.bool)
    scores = compute_token_logprobs(model, ids, mask, temperature=1.0, entropy_mode="value")
    return scores.logprobs.sum() + scores.entropy.sum()


def score_full_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Score all logits, in chunks of softmax that the backward pass computes once more."""
    logits = model(input_ids=ids, use_cache=False).logits
    width = max(1, SOFTMAX_TOKENS // len(ids))
    chunks = zip(logits.split(width, 1), ids.roll(-1, 1).split(width, 1), strict=True)
    sums = [checkpoint(_score_softmax, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()


def _score_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    scaled = logits.float() / 1.0
    chosen = scaled.gather(-1, targets[..., None])[..., 0] - scaled.logsumexp(-1)
    with torch.no_grad():
        entropy = entropy_from_logits(scaled)
    return chosen.sum() + entropy.sum()


def compute_values(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return compute_token_values(model, ids, torch.ones_like(ids, dtype=torch.bool)).sum()


class MemoryCase(NamedTuple):
    loss: Loss
    has_offload: bool = False
    is_shared: bool = False


CASES: dict[str, dict[str, MemoryCase]] = {
    "policy": {
        "chunks": MemoryCase(score_in_chunks),
        "offload": MemoryCase(score_in_chunks, has_offload=True),
        "full_logits": MemoryCase(score_full_logits),
    },
    "reference": {
        "chunks": MemoryCase(score_in_chunks),
        "full_logits": MemoryCase(score_full_logits),
    },
    "critic": {
        "values": MemoryCase(compute_values),
        "offload": MemoryCase(compute_values, has_offload=True),
        "shared": MemoryCase(compute_values, is_shared=True),
    },
}


def run_case(model: PreTrainedModel, ids: Tensor, loss: Loss, *, has_grad: bool) -> None:
    with torch.set_grad_enabled(has_grad):
        result = loss(model, ids)
    if has_grad:
        result.backward()


def count_peaks(config: Qwen2Config, tokens: int) -> dict[str, dict[str, float]]:
    """Count the peak of every case on fake tensors, GiB."""
    peaks: dict[str, dict[str, float]] = {}
    for role, cases in CASES.items():
        for name, (loss, has_offload, is_shared) in cases.items():
            if is_shared:
                continue  # packing depends on the values of a mask
            with (
                torch.autograd.set_multithreading_enabled(False),
                FakeTensorMode(),
                LiveBytes() as counter,
                offload_uncounted(counter),
            ):
                is_critic = role == "critic"
                model = make_model(config, torch.bfloat16, is_critic=is_critic, offload=has_offload)
                ids = torch.zeros(max(1, tokens // ROW_TOKENS), min(tokens, ROW_TOKENS)).long()
                gc.collect()
                before = counter.peak = counter.live
                run_case(model, ids, loss, has_grad=role != "reference")
            peaks.setdefault(role, {})[name] = round((counter.peak - before) / GIB, 3)
            report_progress(f"{role}, {name}: {peaks[role][name]} GiB")
    return peaks


def share_with_others(model: PreTrainedModel, ranks: int) -> None:
    """Make the model that of the first of `ranks` ranks; what the others send has no values."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    enable_packing(model)
    share_tokens(model, join_sequence_group(world_size=ranks, size=ranks, tensor_parallel=1))


def measure_peaks(tokens: int, ranks: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure and count the peak of every case of a small model that runs in float32, GiB."""
    peaks: dict[str, dict[str, dict[str, float]]] = {}
    release_large_blocks_eagerly()
    ids = torch.randint(SMALL.vocab_size, (max(1, tokens // 512), min(tokens, 512)))
    for role, cases in CASES.items():
        model = make_model(SMALL, torch.float32, is_critic=role == "critic")
        for name, (loss, has_offload, is_shared) in cases.items():
            if has_offload:
                continue  # host memory is resident memory, too
            if is_shared:
                share_with_others(model, ranks)
            run_case(model, ids[:1], loss, has_grad=role != "reference")
            release_freed_memory()
            tracker = PeakMemoryTracker()
            tracker.record_phase("before")
            run_case(model, ids, loss, has_grad=role != "reference")
            tracker.record_phase("case")
            resident = tracker.drain_peaks()
            with LiveBytes() as counter:
                run_case(model, ids, loss, has_grad=role != "reference")
            peaks.setdefault(role, {})[name] = {
                "counted": round(counter.peak / GIB, 3),
                "resident": round((resident["case"] - resident["before"]) / 1024, 3),
            }
            report_progress(f"{role}, {name}: {peaks[role][name]}")
    return peaks


def measure(arguments: argparse.Namespace) -> Mapping[str, Any]:
    counted = {}
    for shape in arguments.shapes:
        report_progress(shape)
        config = make_config(shape, arguments.layers)
        tokens = arguments.tokens or TOKENS.get(shape, 16_384)
        counted[shape] = {"tokens": tokens, **count_peaks(config, tokens)}
    measured = measure_peaks(arguments.measured_tokens, arguments.ranks)
    return {"counted": counted, "measured": {"tokens": arguments.measured_tokens, **measured}}


def make_parser() -> BenchmarkParser:
    parser = BenchmarkParser("memory", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=MODEL_SHAPES, default=list(TOKENS))
    parser.add_argument("--layers", type=at_least(0), help="instead of the shape's own")
    parser.add_argument("--tokens", type=at_least(1), help="of the counted micro-batches")
    parser.add_argument("--ranks", type=at_least(2), default=4, help="that share the tokens")
    parser.add_argument("--measured-tokens", type=at_least(1), default=8192)
    parser.set_quick(shapes=["qwen2.5-7b"], layers=1, tokens=4096, measured_tokens=256)
    return parser


if __name__ == "__main__":
    run_benchmark(make_parser(), measure)
