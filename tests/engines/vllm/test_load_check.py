"""Fingerprints of parameters detect missing ones in any layout of an engine."""

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from streamrl.engines.vllm.load_check import LoadCheck, LoadWarningHandler
from streamrl.engines.vllm.rank_loader import ReadRecorder
from streamrl.errors import LogprobCheckError, WeightsError
from streamrl.resharding.boxes import TensorBox
from streamrl.weights import LoadVerification
from streamrl.weights.buckets import publish_version, unpack_tensors
from streamrl.weights.versions import LogprobCheck
from tests.weights.local_transport import LocalWriter

MERGED = {"qkv": ["q", "k", "v"]}
TIED = "head.weight"
"""In the files, but neither published nor served."""


def make_published(*, seed: int) -> dict[str, Tensor]:
    """Return parameters of two layers and an embedding, as in a checkpoint."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"embed.weight": noise(10, 4), TIED: noise(10, 4)}
    for layer in range(2):
        name = f"layers.{layer}"
        tensors |= {f"{name}.{part}.weight": noise(4, 4) for part in "qkv"}
        tensors |= {f"{name}.norm.weight": noise(4)}
        for expert in range(3):
            tensors |= {
                f"{name}.experts.{expert}.{part}.weight": noise(6, 4) for part in ("w1", "w3")
            }
    return tensors


class Served(nn.Module):
    """A model that holds the parameters as an engine might: fused, stacked, transposed, padded."""

    def __init__(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.embed = nn.Module()
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.qkv, layer.norm, layer.experts = nn.Module(), nn.Module(), nn.Module()
            self.layers.append(layer)
        self.take(tensors)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Load other values."""

        def held(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor.to(self.dtype))

        self.embed.weight = held(nn.functional.pad(tensors["embed.weight"], (0, 0, 0, 6)))
        layers: list[Any] = list(self.layers)
        for number, layer in enumerate(layers):
            name = f"layers.{number}"
            qkv = [tensors[f"{name}.{part}.weight"] for part in "qkv"]
            layer.qkv.weight = held(torch.cat(qkv))
            layer.norm.weight = held(tensors[f"{name}.norm.weight"])
            experts = [
                torch.cat([tensors[f"{name}.experts.{i}.{w}.weight"] for w in ("w3", "w1")]).t()
                for i in range(3)
            ]
            layer.experts.packed = held(torch.stack(experts))


def make_check(
    model: nn.Module, stored: Mapping[str, Tensor], merged: Mapping[str, list[str]]
) -> LoadCheck:
    """Return the check of a model that has just read the stored tensors."""
    check = LoadCheck(model, merged)
    check.exclude_changed({n: check.make_fingerprints(tensor) for n, tensor in stored.items()})
    return check


def list_differing_names(
    model: Served, check: LoadCheck, tensors: Mapping[str, Tensor]
) -> list[str]:
    prints = {n: check.make_fingerprints(t) for n, t in tensors.items() if n != TIED}
    return list(check.compare_loaded(prints).differing_names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprints_detect_missing_parameters_in_any_layout(dtype: torch.dtype):
    first, second = make_published(seed=0), make_published(seed=1)
    model = Served(first, dtype=dtype)
    check = make_check(model, first, MERGED)
    assert list_differing_names(model, check, first) == []
    model.take(second)
    assert list_differing_names(model, check, second) == []
    prints = {n: check.make_fingerprints(t) for n, t in first.items() if n != TIED}
    named = r"generator-0 holds parameters that differ .* and \d+ more\. Training"
    with pytest.raises(LogprobCheckError, match=named):
        check.compare_loaded(prints).raise_on_difference("generator-0")
    for missing in ("layers.1.experts.2.w3", "layers.0.norm", "layers.1.k", "embed"):
        name = f"{missing}.weight"
        model.take({**second, name: first[name]})
        differing = list_differing_names(model, check, second)
        assert set(differing) == {
            # A fused parameter counts as one.
            "embed": {"embed.weight"},
            "layers.0.norm": {name},
            "layers.1.k": {f"layers.1.{part}.weight" for part in "qkv"},
        }.get(missing, {f"layers.1.experts.{i}.{w}.weight" for i in range(3) for w in ("w1", "w3")})
    # A training step changes values by about 1e-5.
    small = {n: t * (1 + 1e-5 * torch.sign(first[n])) for n, t in second.items()}
    model.take({**small, "layers.0.experts.0.w1.weight": second["layers.0.experts.0.w1.weight"]})
    assert bool(list_differing_names(model, check, small)) == (dtype == torch.float32)


CHECKSUM, FINGERPRINT, LOGPROBS = "checksum", "fingerprint", "logprobs"


def pack(tensors: Mapping[str, Tensor]):
    return publish_version(tensors.items(), version=1, bucket_bytes=1000, writer=LocalWriter())


def compute_logprobs(tensors: Mapping[str, Tensor]) -> np.ndarray:
    """Return the logprob of each token of a sequence after its predecessor."""
    ids = torch.arange(64) % 7
    hidden = torch.tanh(tensors["embed"][ids] @ tensors["up"].t())
    return (hidden @ tensors["down"].t()).log_softmax(-1)[torch.arange(64), ids.roll(-1)].numpy()


@pytest.mark.parametrize("fault", [CHECKSUM, FINGERPRINT, LOGPROBS])
def test_each_verification_finds_a_fault_that_the_others_pass(fault: str):
    """docs/weights.md, "Three verifications"."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (7, 16), "up": (32, 16), "down": (7, 32)}
    old = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    published = {name: tensor * (1 + 1e-5) for name, tensor in old.items()}
    received = {name: tensor.clone() for name, tensor in published.items()}
    if fault == CHECKSUM:  # the lowest bit of a value flips on the way
        received["up"].view(torch.int32)[3, 3] ^= 1
    loaded = dict(received)
    if fault == FINGERPRINT:  # the engine leaves a tensor out; a step changes little
        loaded["up"] = old["up"]
    if fault == LOGPROBS:  # the engine orders the rows of a tensor by another rule
        loaded["up"] = received["up"].flip(0)

    found = set()
    try:
        unpack_tensors(pack(published), pack(received).handles)
    except WeightsError:
        found.add(CHECKSUM)
    model = nn.ParameterDict(old)
    check = make_check(model, old, {})
    model.update(loaded)
    prints = {name: check.make_fingerprints(tensor) for name, tensor in received.items()}
    if check.compare_loaded(prints).differing_names:
        found.add(FINGERPRINT)
    logprob_check = LogprobCheck([np.zeros(64)], [compute_logprobs(published)], limit=3e-4)
    try:
        logprob_check.compare_logprobs([compute_logprobs(loaded)], "generator-0")
    except LogprobCheckError:
        found.add(LOGPROBS)
    assert found == {fault}


def test_parameters_without_a_counterpart_are_named():
    first = make_published(seed=0)
    first["layers.1.o.bias"] = torch.full((4,), 1e-3)
    model = Served(first, dtype=torch.float32)
    check = make_check(model, first, MERGED)
    assert list_differing_names(model, check, first) == ["layers.1.o.bias"]


def test_parameters_that_vllm_changes_while_loading_are_excluded():
    first, second = make_published(seed=0), make_published(seed=1)

    class Scaled(Served):
        def take(self, tensors: Mapping[str, Tensor]) -> None:
            super().take({**tensors, "layers.0.norm.weight": 1 + tensors["layers.0.norm.weight"]})

    model = Scaled(first, dtype=torch.float32)
    check = make_check(model, first, MERGED)
    model.take(second)
    assert list_differing_names(model, check, second) == []
    model.take({**second, "layers.0.q.weight": first["layers.0.q.weight"]})
    assert "layers.0.q.weight" in list_differing_names(model, check, second)


def test_load_warnings_are_collected_and_counted():
    handler = LoadWarningHandler()
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    other_logger = logging.getLogger("vllm.config.model")
    for vllm_logger in (logger, other_logger):
        vllm_logger.addHandler(handler)
    try:
        for _ in range(3):
            logger.warning("%s: Failed to load weights", "FusedMoE")
        # On GPUs, at every load of a model that is right.
        logger.warning("%s: Failed to load weights", "RotaryEmbedding")
        logger.warning(
            "Attempted to load weight %s with dtype %s into parameter with dtype %s",
            *("norm.weight", torch.float32, torch.bfloat16),
        )
        other_logger.warning("a warning of something else")
    finally:
        for vllm_logger in (logger, other_logger):
            vllm_logger.removeHandler(handler)
    assert handler.drain_warnings() == ("FusedMoE: Failed to load weights",)
    assert handler.drain_warnings() == ()


@pytest.mark.parametrize("num_rows", [0, 3])
def test_rows_that_pad_a_ranks_part_of_a_vocabulary_are_neither_read_nor_compared(num_rows: int):
    model: Any = nn.Module()
    model.embed = nn.Embedding(8, 4)  # whose rows beyond the vocabulary hold anything
    model.embed.shard_indices = SimpleNamespace(num_org_elements=num_rows)
    recorder = ReadRecorder(check := LoadCheck(model, {}))
    published = recorder.watch("embed.weight", torch.randn(10, 4))
    with recorder:
        model.embed.weight.data[:num_rows].copy_(published.narrow(0, 10 - num_rows, num_rows))
    boxes = [TensorBox((10 - num_rows, 0), (10, 4))] if num_rows else []
    assert recorder.sort_boxes() == {"embed.weight": boxes}
    assert check.compare_loaded(recorder.prints) == LoadVerification(1)
    if num_rows:
        model.embed.weight.data[0] += 1
        assert check.compare_loaded(recorder.prints).differing_names == ("embed.weight",)
