"""Check that a trainer's model computes the same each time, as the model that samples does."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.distributed.devices import get_local_device
from streamrl.engines.models.packed_rows import RowLayout, unwrap_engine
from streamrl.errors import ConfigError

NUM_TOKENS = 32
MAX_RELATIVE_DIFFERENCE = 1e-3
"""Mean difference of two passes over the mean logit. Equal operations give equal bits; the bound is
for kernels of a GPU that have no deterministic variant."""


def check_repeatable(model: Callable[..., Any], *, section: str) -> None:
    """Raise ConfigError unless two forward passes, in the mode of updates, agree.

    `model` is a transformers model or a DeepSpeed engine of one; `section` names it in the error.
    Dropout, a router's noise and skipped layers make passes differ. Collective.
    """
    module = unwrap_engine(model)
    size = module.config.get_text_config().vocab_size
    ids = (torch.arange(NUM_TOKENS, device=get_local_device()) * 7 % size)[None]
    mask = torch.ones_like(ids, dtype=torch.bool)

    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = RowLayout(model, ids, mask).run_model().logits
        return logits.float()

    with _deterministic_kernels():
        first, second = run(), run()
        limit = MAX_RELATIVE_DIFFERENCE * first.abs().mean()
        # NaN is for the checks of values to report.
        if not (first - second).abs().mean() > limit:
            return
        source = _find_source(module, run)
    raise ConfigError(
        f"the {section}'s model gives other logits each time that it computes the same tokens, in"
        f" evaluation mode, too: {source} adds noise, which rollouts would not have"
    )


def _find_source(module: nn.Module, run: Callable[[], Tensor]) -> str:
    """Return name and class of the first module whose output two passes differ in."""
    passes: list[dict[str, Tensor]] = []
    names = {part: name for name, part in module.named_modules()}

    def record(part: nn.Module, _: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor):
            passes[-1][f"{names[part]} ({type(part).__name__})"] = value.detach().clone()

    hooks = [part.register_forward_hook(record) for part in names]
    for _ in range(2):
        passes.append({})
        run()
    for hook in hooks:
        hook.remove()
    first, second = passes
    differing = (name for name, value in first.items() if not torch.equal(value, second[name]))
    return next(differing, type(module).__name__)


@contextmanager
def _deterministic_kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
