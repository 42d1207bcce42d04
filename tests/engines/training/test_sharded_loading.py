"""Loading and saving without a whole model on any rank, with the bits of from_pretrained."""

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.engines.checkpoint import sharded_state
from streamrl.engines.models.forward import ModelLoadOptions, load_model
from streamrl.engines.models.stored_weights import StoredWeights
from streamrl.engines.training.model_trainer import write_hf_model
from streamrl.files.hf_config import WEIGHTS_FILE, WEIGHTS_INDEX, list_weight_files
from tests import forked
from tests.engines.fake_ranks import measure_rank
from tests.engines.loading_ranks import LAYOUTS, LOADERS, WORLD, load_rank
from tests.engines.test_architectures import make_model as make_architecture
from tests.engines.tiny_families import QUICK, SLOW
from tests.engines.tiny_qwen import save, tiny_model
from tests.engines.trainer_ranks import find_free_ports

pytestmark = pytest.mark.xdist_group("ranks")


def write_variants(folder: Path) -> list[str]:
    """Write a tied model, one in several files, and one whose files store the tied weight twice."""
    tied, in_files, twice = (folder / name for name in ("tied", "in_files", "twice"))
    for path in (tied, twice):
        save(tiny_model(tied=True, seed=1), path)
    save(tiny_model(tied=False, seed=1), in_files)
    (in_files / WEIGHTS_FILE).unlink()
    tiny_model(tied=False, seed=1).save_pretrained(in_files, max_shard_size="20KB")
    assert (in_files / WEIGHTS_INDEX).is_file()
    tensors = load_file(twice / WEIGHTS_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, twice / WEIGHTS_FILE, {"format": "pt"})
    return list(map(str, (tied, in_files, twice)))


def check_equal(paths: list[str], layout: str, *, kind: str = "policy", lora_rank: int = 0) -> None:
    ports = find_free_ports(len(paths))
    arguments = [(rank, ports, paths, layout, kind, lora_rank) for rank in range(WORLD)]
    for results in forked.run(load_rank, arguments, timeout_s=300):
        for path, (sharded, whole) in zip(paths, results, strict=True):
            assert sharded.keys() == whole.keys(), path
            for name, tensor in whole.items():
                assert sharded[name].dtype == tensor.dtype
                assert torch.equal(sharded[name], tensor), f"{path}: {name}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "policy")) for kind in LOADERS],
)
def test_ranks_load_the_bits_of_from_pretrained(kind: str, layout: str, tmp_path: Path):
    check_equal(write_variants(tmp_path), layout, kind=kind, lora_rank=2)


@pytest.mark.parametrize(
    ("layout", "architectures"),
    [
        ("fsdp", QUICK),
        pytest.param("zero3", QUICK, marks=pytest.mark.slow),
        pytest.param("fsdp", SLOW, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "zero3", "fsdp of all"],
)
def test_ranks_load_all_architectures(
    layout: str, architectures: dict[str, object], tmp_path: Path
):
    for name in architectures:
        make_architecture(name, tmp_path / name, seed=1)
    check_equal([str(tmp_path / name) for name in architectures], layout)


def test_a_checkpoint_larger_than_a_file_has_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sharded_state, "MAX_FILE_BYTES", 50_000)
    save(tiny_model(tied=True, seed=1), tmp_path / "base")
    base = load_model(str(tmp_path / "base"), dtype=torch.float32)
    for _ in range(2):  # The second time over the first one's files.
        write_hf_model(
            tmp_path / "saved",
            base,
            base.named_parameters(),
            tokenizer_from=str(tmp_path / "base"),
            dtype=torch.bfloat16,
        )
    files = list_weight_files(tmp_path / "saved")
    assert len(files) > 1 and all(file.stat().st_size < 60_000 for file in files)
    assert not list((tmp_path / "saved").glob("*.partial"))
    saved = load_model(str(tmp_path / "saved"), dtype=torch.float32)
    assert saved.config.dtype == torch.float32  # the dtype asked for
    assert '"dtype": "bfloat16"' in (tmp_path / "saved" / "config.json").read_text()
    for name, parameter in base.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("model", "world_size", "tensor_parallel", "number"),
    [
        *(("7B", 8, 1, 0), ("7B", 8, 2, 0)),
        *(("70B in two layers", *sizes) for sizes in ((32, 8, 9), (128, 8, 70))),
    ],
)
def test_no_rank_ever_holds_the_whole_model(
    model: str, world_size: int, tensor_parallel: int, number: int
):
    arguments = [(model, world_size, tensor_parallel, number)]
    (rank,) = forked.run(measure_rank, arguments, timeout_s=600)
    assert rank["misshapen"] == []
    assert rank["share"] < rank["whole"] / 3
    assert rank["share"] <= rank["loading"] <= rank["share"] + rank["largest"]
    # Columns of a matrix arrive as chunks, which are then concatenated.
    assert rank["share"] <= rank["publishing"] <= rank["share"] + 2.5 * rank["largest"]


def test_one_converted_tensor_is_in_memory_at_a_time_although_all_are_listed(tmp_path: Path):
    make_architecture("qwen3_moe", tmp_path, seed=1)
    module = load_model(str(tmp_path), dtype=torch.float32, options=ModelLoadOptions(on_meta=True))
    converted: list[weakref.ref[torch.UntypedStorage]] = []
    for stored in list(StoredWeights(module, str(tmp_path)).iter_tensors()):
        converted.append(weakref.ref(stored.read().untyped_storage()))
        converted = [ref for ref in converted if ref() is not None]
        assert len(converted) <= 1
    # The last experts stay for a further box.
    assert len(converted) == 1
