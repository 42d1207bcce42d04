"""Four ranks that split the layers, or share the tokens, of models of many families.

Runs in child processes, because torch.distributed must not be initialized in pytest's process.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from streamrl.distributed.devices import get_local_device
from streamrl.distributed.process_group import join_process_group
from streamrl.engines.models.activation_checkpointing import checkpoint_layers
from streamrl.engines.models.chunked_head import run_scoring_forward
from streamrl.engines.models.forward import (
    compute_token_logprobs,
    compute_token_values,
    load_two_headed_model,
    load_value_model,
    shift_right,
    shift_scores,
)
from streamrl.engines.models.packed_rows import enable_packing, join_sequence_group, share_tokens
from streamrl.engines.models.tensor_parallel import VOCABULARY_ROWS, parallelize_layers
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training.training_backend import TrainingBackend, make_backend
from streamrl.resharding.storage import view_piece
from tests.engines.tiny_families import WidestTensor, make_model, make_rows

WORLD = 4
LR = 1e-4
MICRO_BATCHES = ((3, 24), (1, 9), (17, 17), (2, 30))
"""Lengths of the rows of micro-batches, some above the sliding window; two per update."""
WIDE_FAMILIES = ("qwen3", "qwen3_moe")
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4}


class SplitCase(NamedTuple):
    """A family, with changes of its config, and the trainer's settings."""

    family: str
    tensor: int = 1
    sequence: int = 1
    zero_stage: int = 3
    backend: str = "torch"
    recomputes: bool = False
    kind: str = "policy"
    dtype: str = "float32"
    changes: tuple[tuple[str, Any], ...] = ()
    world: int = WORLD

    @property
    def label(self) -> str:
        sizes = {"tensor": self.tensor, "sequence": self.sequence, "zero": self.zero_stage}
        text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        changes = "".join(f" {name}={value}" for name, value in self.changes)
        model = self.family + changes + f" {self.kind}" * (self.kind != "policy")
        model += " in bfloat16" * (self.dtype == "bfloat16")
        return f"{model}; {self.backend}: {text}{', recomputed' * self.recomputes}"

    def make_config(self) -> TrainerConfig:
        return TrainerConfig(
            backend=self.backend,
            world_size=self.world,
            tensor_parallel=self.tensor,
            sequence_parallel=self.sequence,
            zero_stage=self.zero_stage,
            dtype=self.dtype,
        )


def run_rank(rank: int, port: int, case: SplitCase) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    module, config = load(case.family, case.changes, case.kind), case.make_config()
    join_process_group(rank=rank, world_size=case.world, timeout_s=60.0)
    module.to(get_local_device())
    if case.sequence > 1:
        group = join_sequence_group(
            world_size=case.world, size=case.sequence, tensor_parallel=case.tensor
        )
        share_tokens(module, group)
    if case.recomputes:
        checkpoint_layers(module, offload=False, chunk_mlps=case.tensor == 1)
    return train(rank, module, config)


def run_alone(family: str, changes: tuple[tuple[str, Any], ...], kind: str) -> dict[str, Any]:
    module = load(family, changes, kind).to(get_local_device())
    return train(0, module, TrainerConfig(world_size=1, backend="torch"))


def count_on_one_of_two(family: str, words: int, tokens: int) -> dict[str, int]:
    """Score tokens as one of two tensor-parallel ranks.

    Returns the collectives of each pass, and the elements of the largest tensor of an operation.
    """
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    module = make_model(family, vocab_size=words)
    parallelize_layers(module, init_device_mesh("cpu", (2,)), "trainer")
    ids, mask = make_rows((tokens,), seed=0)
    with WidestTensor() as widest:
        with CommDebugMode() as forward:
            scores = compute_token_logprobs(
                module, ids, mask, temperature=0.7, entropy_mode="gradient"
            )
        with CommDebugMode() as backward:
            (scores.logprobs + scores.entropy).sum().backward()
    counts = {"widest": widest.elements}
    for name, mode in (("forward", forward), ("backward", backward)):
        counts[name] = sum(mode.get_comm_counts().values())
    return counts


def load(family: str, changes: tuple[tuple[str, Any], ...], kind: str) -> PreTrainedModel:
    module = make_model(family, **(WIDE if family in WIDE_FAMILIES else {}), **dict(changes))
    if kind != "policy":
        torch.manual_seed(2)
        with tempfile.TemporaryDirectory() as folder:
            module.save_pretrained(folder)
            loader = load_value_model if kind == "critic" else load_two_headed_model
            module = loader(folder, dtype=torch.float32)
        torch.nn.init.normal_(module.get_parameter("score.weight"), std=0.1)
    if family == "gpt_oss":
        module.set_attn_implementation("eager")  # others ignore its attention sinks
    enable_packing(module)
    return module


def train(rank: int, module: PreTrainedModel, config: TrainerConfig) -> dict[str, Any]:
    """Train two updates of two micro-batches each, dealt to the data-parallel ranks.

    In a third one the gradient is not finite.
    """
    join_process_group(rank=rank, world_size=config.world_size, timeout_s=60.0)
    backend = make_backend(module, config)
    results: dict[str, Any] = {"scores": {}, "norms": []}
    work = list(enumerate(MICRO_BATCHES))
    for update in (work[:2], work[2:]):
        own = update[config.get_dp_rank(rank) :: config.dp_size]
        for index, lengths in own:
            ids, mask = (row.to(get_local_device()) for row in make_rows(lengths, seed=index))
            logprobs, entropy = score(module, backend.forward, ids, mask)
            results["scores"][index] = torch.stack((logprobs, entropy)).detach()
            weights = torch.arange(1, ids.numel() + 1, device=ids.device).view_as(ids) / ids.numel()
            backend.backward((weights * logprobs + weights.flip(0) * entropy).sum())
        results["norms"].append(backend.update(divisor=40.0, lr=LR))
    full_state = {name: tensor.clone() for name, tensor in backend.full_state()}
    results["parameters"] = full_state
    logprobs, _ = score(module, backend.forward, ids, mask)
    backend.backward(logprobs.sum() * torch.nan)
    results["norms"].append(backend.update(divisor=40.0, lr=LR))
    results["unchanged"] = all(full_state[n].equal(tensor) for n, tensor in backend.full_state())
    shards = list(backend.iter_shards())
    results["misplaced"] = find_misplaced(backend, full_state)
    results["kept_bytes"] = sum(tensor.nbytes for _, tensor, _ in shards)
    blocks = [tensor.untyped_storage() for _, tensor, _ in shards]
    results["memory_bytes"] = sum({b.data_ptr(): b.nbytes() for b in blocks}.values())
    results["masters"] = [
        (fragment.shard.tensor, piece.box.slices, view_piece(block, piece).clone())
        for fragment in backend.iter_fragments()
        for block in [fragment.slice_block(fragment.optimizer_tensor)]
        for piece in fragment.shard.pieces
    ]
    backend.close()
    return results


def compare_with_single_rank(
    case: SplitCase, single: dict[str, Any], splits: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Compare the results of all ranks with those of a single one; `ok` if they are the same.

    scores: largest difference, absolute or relative. norms: largest relative difference.
    updates_in_lr: largest difference of a parameter. updates_off: largest share of a parameter's
    elements that are a tenth of a learning rate away, without those whose gradient is rounding.
    """
    is_rounded, parameters = case.dtype == "bfloat16", single["parameters"]
    pairs = [
        (split["scores"][index], single["scores"][index])
        for split in splits
        for index in split["scores"]
    ]
    scores = max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs)
    norms = max(
        abs(norm / expected - 1)
        for split in splits
        for norm, expected in zip(split["norms"][:-1], single["norms"][:-1], strict=True)
    )
    results: dict[str, Any] = {
        "scores": scores,
        "norms": norms,
        "misplaced": [name for split in splits for name in split["misplaced"]],
        "skips_bad_update": all(
            split["unchanged"] and not math.isfinite(split["norms"][-1]) for split in splits
        ),
        **(
            compare_masters(parameters, splits)
            if is_rounded
            else compare_updates(parameters, splits)
        ),
    }
    ok = results["skips_bad_update"] and not results["misplaced"]
    if is_rounded:
        # The passes in bfloat16 move the gradient's norm by some percent. An update is smaller than
        # a bfloat16's last bit: without master weights it is lost.
        ok &= norms < 0.05 and results["are_published"] and results["updates_in_lr"] <= 4
        return {**results, "ok": ok and results["mean_update_in_lr"] < 1}
    has_all = {index for split in splits for index in split["scores"]} == set(single["scores"])
    ok &= has_all and scores < 2e-4 and norms < 1e-4
    if case.tensor > 1 and case.zero_stage == 0:
        # No memory of other ranks' shards.
        ok &= all(split["memory_bytes"] == split["kept_bytes"] for split in splits)
    return {**results, "ok": ok and results["updates_in_lr"] <= 4 and results["updates_off"] < 0.01}


def compare_updates(
    expected: dict[str, Tensor], splits: Sequence[dict[str, Any]]
) -> dict[str, float]:
    off = worst = 0.0
    for split in splits:
        assert list(split["parameters"]) == list(expected)
        for name, parameter in expected.items():
            difference = (split["parameters"][name] - parameter).abs() / LR
            worst = max(worst, float(difference.max()))
            # Adam makes full steps of gradients that are rounding.
            if not name.endswith(("k_proj.bias", "query_key_value.bias")):
                off = max(off, float((difference > 0.1).double().mean()))
    return {"updates_in_lr": worst, "updates_off": off}


def compare_masters(
    expected: dict[str, Tensor], splits: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Compare float32 master weights, and the published ones, which the forward pass uses."""
    worst = mean = 0.0
    are_published = True
    for split in splits:
        for name, box, masters in split["masters"]:
            assert masters.dtype == torch.float32
            are_published &= torch.equal(split["parameters"][name][box], masters.bfloat16())
            difference = (masters - expected[name][box]).abs() / LR
            worst, mean = max(worst, float(difference.max())), max(mean, float(difference.mean()))
    return {
        "updates_in_lr": worst,
        "mean_update_in_lr": mean,
        "are_published": are_published,
    }


def find_misplaced(backend: TrainingBackend, full_state: dict[str, Tensor]) -> list[str]:
    """Return parameters whose shards differ from the full tensor."""
    return [
        name
        for name, local, shard in backend.iter_forward_shards()
        for piece in shard.pieces
        if not view_piece(local, piece).equal(full_state[name][piece.box.slices])
    ]


def score(
    module: PreTrainedModel, forward: Callable[..., Any], ids: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies; values of a critic; of two heads, the sum of both.

    Entropies have the logprobs added, scored again as further words where ranks can.
    """
    if module.get_output_embeddings() is None:
        values = compute_token_values(forward, ids, mask)
        return values, values
    # Ranks that share the vocabulary score no further words.
    words = None if VOCABULARY_ROWS in vars(module) else ids[..., None]
    scores = run_scoring_forward(
        forward, ids, mask, temperature=0.7, entropy_mode="gradient", words=words
    )
    logprobs, entropy, further, *_ = shift_scores(scores, mask)
    entropy = entropy + (logprobs if further is None else further[..., 0])
    if scores.state_values is not None:
        entropy = entropy + shift_right(scores.state_values, mask)
    return logprobs, entropy
