"""Settings of DeepSpeed that depend on the model."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from streamrl.distributed import devices
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.engines.training import training_backend
from streamrl.engines.training.training_backend import make_deepspeed_config
from tests.engines.tiny_qwen import tiny_model


def test_models_with_a_text_config_have_its_hidden_size_as_threshold():
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 16}
    vision = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1}
    with torch.device("meta"):
        module = Gemma3ForConditionalGeneration(
            Gemma3Config(text_config=sizes, vision_config=vision)
        )
    settings = make_deepspeed_config(module, TrainerConfig(zero_stage=3, world_size=2))
    assert settings["zero_optimization"]["stage3_param_persistence_threshold"] == 10 * 24


@pytest.mark.parametrize("on_gpu", [True, False])
def test_reductions_overlap_on_gpus_from_stage_2_on(on_gpu: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training_backend, "has_local_gpu", lambda: on_gpu)
    module = tiny_model(tied=True, seed=0)
    settings = [make_deepspeed_config(module, TrainerConfig(zero_stage=z)) for z in (1, 2, 3)]
    overlaps = [config["zero_optimization"]["overlap_comm"] for config in settings]
    assert overlaps == [False, on_gpu, on_gpu]


@pytest.mark.parametrize(
    ("cores", "gpus", "set_threads", "threads"),
    [(96, 8, None, 8), (16, 4, None, 4), (2, 8, None, 1), (16, 0, None, 8), (96, 8, 3, 3)],
)
def test_a_rank_on_a_gpu_has_its_share_of_the_nodes_cores(
    cores: int,
    gpus: int,
    set_threads: int | None,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for i in range(gpus):
        (tmp_path / f"0000:{i}").mkdir()
    monkeypatch.setattr(devices, "GPU_LIST", str(tmp_path if gpus else tmp_path / "none"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    config = TrainerConfig(threads=set_threads)
    assert config.resolve_threads(on_gpu=True) == threads
    assert config.resolve_threads(on_gpu=False) == (set_threads or 1)
