"""What tests of trainers share: the processes that trained, and the model they began with."""

from pathlib import Path

import pytest

from tests.engines.tiny_qwen import save, tiny_model
from tests.engines.trainer_layouts import LAYOUTS, Layout
from tests.engines.trainer_ranks import run_ranks

PAIRS = [layout for layout in LAYOUTS if layout.world_size == 2]
SAVED = [layout for layout in LAYOUTS if layout.world_size == 2 or layout.zero_stage == 2]
SEVERAL_ON = [layout for layout in LAYOUTS if layout.backend == "torch" or layout.zero_stage == 3]
ROWS_ON = [Layout("torch", 1, 1), Layout("torch", 1, 2)]
LATE = Layout("deepspeed", 1, 2)
TIMEOUT_S = 400


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save(tiny_model(tied=True, seed=0, kv_heads=2), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def seen(model_path, folder):
    """What the ranks saw, by case: a list with one entry per rank."""
    single = [("same_update", layout) for layout in LAYOUTS if layout.world_size == 1]
    single += [("save_and_go_on", layout) for layout in SAVED if layout.world_size == 1]
    single += [("several_updates", layout) for layout in SEVERAL_ON if layout.world_size == 1]
    single += [
        (case, layout)
        for case in ("critic_updates", "pretraining_updates", "two_headed_updates")
        for layout in SEVERAL_ON
        if layout.world_size == 1
    ]
    single.append(("other_settings", Layout("deepspeed", 1, 1)))
    single += [("every_row", layout) for layout in ROWS_ON if layout.world_size == 1]
    together = [
        (case, layout)
        for case in ("same_update", "save_and_go_on", "steps_that_do_not_count")
        for layout in PAIRS
    ]
    together += [("every_row", layout) for layout in ROWS_ON if layout.world_size == 2]
    together += [
        (case, layout)
        for case in (
            *("several_updates", "critic_updates"),
            *("pretraining_updates", "two_headed_updates"),
        )
        for layout in SEVERAL_ON
        if layout.world_size == 2
    ]
    together.sort(key=lambda case: case[1].backend, reverse=True)
    return run_ranks(
        [[*together, *single[rank::2], ("come_late", LATE)] for rank in range(2)],
        model_path=model_path,
        folder=folder,
        timeout_s=TIMEOUT_S,
    )
