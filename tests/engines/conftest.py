"""Fixtures shared by engine tests: trainer processes, the process's engine, models."""

import threading
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from tests.engines.flight import Engines
from tests.engines.tiny_qwen import save, tiny_model
from tests.engines.trainer_layouts import Layout
from tests.engines.trainer_ranks import NARROW, TrainerCase, run_ranks

AnyCase = TypeVar("AnyCase")
TIMEOUT_S = 900
"""Limit for all cases together, on a busy machine."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(*cases): needs the results of rank processes for these cases"
    )


def param_of_ranks(
    *values: Any, cases: Iterable[Any], is_quick: bool, label: str | None = None
) -> Any:
    """Return a parameter whose test needs these cases; it is slow unless `is_quick`."""
    slow = [] if is_quick else [pytest.mark.slow]
    return pytest.param(*values, id=label, marks=[pytest.mark.ranks(*cases), *slow])


def parametrize_layouts(
    *names: str, on: Sequence[Layout], quick: Collection[Layout] = ()
) -> pytest.MarkDecorator:
    """Parametrize a test by layouts of these cases; cases that are not `quick` are slow."""
    params = [
        param_of_ranks(
            layout,
            cases=[TrainerCase(name, layout) for name in names],
            is_quick=layout in quick,
            label=layout.label,
        )
        for layout in on
    ]
    return pytest.mark.parametrize("layout", params)


def list_cases(request: pytest.FixtureRequest, kind: type[AnyCase]) -> list[AnyCase]:
    """Return the distinct cases of a kind that this session's tests use."""
    marks = [mark for item in request.session.items for mark in item.iter_markers("ranks")]
    distinct_cases = dict.fromkeys(case for mark in marks for case in mark.args)
    return [case for case in distinct_cases if isinstance(case, kind)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_model(tied=True, seed=0, kv_heads=2), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def one_kv_head_path(folder: Path) -> str:
    """Save a model with a single key-value head, so that some matrices are not square."""
    return save(tiny_model(tied=True, seed=0), folder / NARROW)


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest, model_path: str, one_kv_head_path: str, folder: Path
) -> dict[str, list[Any]]:
    """Run all cases that tests use; return results by case, a list with an entry per rank."""
    return run_ranks(
        list_cases(request, TrainerCase), model_path=model_path, folder=folder, timeout_s=TIMEOUT_S
    )


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """Provide this process's only engine, shared by the tests of an xdist group.

    Closes the engine at the end: other packages must not find vLLM's environment and process group.
    """
    model = tiny_model(tied=False, seed=1)
    provider = Engines(save(model, tmp_path_factory.mktemp("untied")))
    yield provider
    await provider.close()


@pytest_asyncio.fixture(loop_scope="session")
async def no_engine(engines: Engines) -> None:
    """Close the shared engine, so that a test can start its own."""
    await engines.close()
    for thread in threading.enumerate():
        if thread.name == "vllm-engine":  # a failed engine, whose thread has yet to end
            thread.join(timeout=60)
