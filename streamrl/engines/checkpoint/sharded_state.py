"""On-disk format of a trainer's state, loadable by any backend and any number of ranks.

<trainer>/trainer.json                    number of updates and adapters
          state_00000_000.safetensors     rank 0's shards of the parameters and AdamW moments
          rng_00000.safetensors           rank 0's random number generators

Every shard records as a TensorShard which elements of its tensor it holds. On loading, a rank reads
all saved shards that overlap its own. Saved parameters are those the optimizer updates: the
float32 master weights if the backend keeps them. Loading into the same layout restores every bit.
The format uses no pickle.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamrl.distributed.devices import GPU, get_gpu_rng_state, set_gpu_rng_state
from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import parse_json, read_small_json
from streamrl.resharding.boxes import TensorBox, subtract_boxes
from streamrl.resharding.layouts import TensorShard
from streamrl.resharding.storage import view_piece

PROGRESS_FILE = "trainer.json"
VALUE_KIND, MOMENT_KINDS = "value", ("exp_avg", "exp_avg_sq")
MUON_MOMENT_KINDS = ("momentum_buffer",)
MAX_FILE_BYTES = 256 << 20
"""Size at which the next file of a checkpoint starts; bounds the memory that writing takes."""
_SHARDS_KEY = "shards"
_Index = tuple[int, ...]
_StoredBox = tuple[_Index, _Index, _Index]
"""Start, stop and origin of a box."""
_StoredShard = tuple[_Index, tuple[_StoredBox, ...], tuple[int, int] | None]
"""A TensorShard without its name, as the files hold it in JSON."""


@dataclass(frozen=True)
class ParameterFragment:
    """The elements of a parameter that the optimizer of one rank updates.

    `shard` says which elements of the full parameter these are. They lie in the flat
    `optimizer_tensor`, `shard.numel` elements from `offset` on. `is_copy` marks a replica of
    elements that another rank saves. `moments`: names of the optimizer's moments of the tensor.
    """

    shard: TensorShard
    optimizer_tensor: Tensor
    offset: int = 0
    is_copy: bool = False
    moments: tuple[str, ...] = MOMENT_KINDS

    def slice_block(self, block: Tensor) -> Tensor:
        """Return the fragment's elements of a parameter or moment, [shard.numel].

        `block` is a tensor laid out like `optimizer_tensor`.
        """
        return block.detach().view(-1).narrow(0, self.offset, self.shard.numel)


@dataclass(frozen=True)
class TrainerProgress:
    """Content of trainer.json: the progress of a saved trainer.

    `num_updates` counts the trainer's updates; `step` is the optimizer's counter, 0 before the
    first.
    `adapters` describes the LoRA settings, which must be equal on loading.
    """

    format: Literal[2]
    num_updates: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=0)]
    adapters: str


def save_state(
    directory: Path,
    rank: int,
    fragments: Iterable[ParameterFragment],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Write a rank's shards of the parameters and of their moments into safetensors files.

    Returns the number of steps that the optimizer has made, 0 before the first.
    """
    kept, steps = list(fragments), {0}
    for fragment in kept:
        steps.add(int(optimizer.state.get(fragment.optimizer_tensor, {}).get("step", 0)))
    saved = {f.shard.tensor: f for f in kept if not f.is_copy}
    blocks = (block for f in saved.values() for block in _copy_blocks(f, optimizer))
    for number, tensors in enumerate(batch_tensors(blocks)):
        names = {key.partition("/")[2] for key in tensors}
        shards = json.dumps({name: _encode_shard(saved[name].shard) for name in names})
        path = directory / f"state_{rank:05d}_{number:03d}.safetensors"
        save_tensors(path, tensors, {_SHARDS_KEY: shards})
    return max(steps)


def _encode_shard(shard: TensorShard) -> _StoredShard:
    boxes = tuple((box.start, box.stop, origin) for box, origin in shard.box_origins)
    return shard.shape, boxes, shard.flat_range


def _copy_blocks(
    fragment: ParameterFragment, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies on the CPU of a fragment's parameter and moments, by kind and name."""
    state = optimizer.state.get(fragment.optimizer_tensor, {})
    moments = {kind: state[kind] for kind in fragment.moments if kind in state}
    for kind, block in {VALUE_KIND: fragment.optimizer_tensor, **moments}.items():
        elements = fragment.slice_block(block)
        yield f"{kind}/{fragment.shard.tensor}", elements.to("cpu", copy=True)


def batch_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield (name, tensor) in dicts for files of MAX_FILE_BYTES; a larger tensor comes alone.

    A dict is emptied before the next one fills, which bounds the memory.
    """
    batch, num_bytes = dict[str, Tensor](), 0
    for name, tensor in tensors:
        if batch and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            yield batch
            batch.clear()
            num_bytes = 0
        batch[name] = tensor
        num_bytes += tensor.nbytes
    if batch:
        yield batch


def load_state(
    directory: Path,
    step: int,
    fragments: Iterable[ParameterFragment],
    optimizer: torch.optim.Optimizer,
    live_shards: Iterable[tuple[str, Tensor, TensorShard]],
) -> None:
    """Fill a rank's optimizer state and parameters from the shards that all ranks saved.

    `step` is the saved optimizer step; with 0 the moments stay unset. `live_shards` are (name,
    tensor, shard) of the parameters that the forward pass reads. Raises CheckpointError if an
    element of these was not saved.
    """
    with open_state(directory) as files:
        for fragment in fragments:
            files.fill_shard(
                VALUE_KIND, fragment.shard, fragment.slice_block(fragment.optimizer_tensor)
            )
            if not step:
                continue
            state = optimizer.state[fragment.optimizer_tensor]
            if not state:
                optimizer_tensor = fragment.optimizer_tensor.detach()
                state |= {kind: torch.zeros_like(optimizer_tensor) for kind in fragment.moments}
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
            for kind in fragment.moments:
                files.fill_shard(kind, fragment.shard, fragment.slice_block(state[kind]))
        for _, tensor, shard in live_shards:
            files.fill_shard(VALUE_KIND, shard, tensor.detach().view(-1)[: shard.numel])


def write_progress(directory: Path, progress: TrainerProgress) -> None:
    (directory / PROGRESS_FILE).write_text(json.dumps(vars(progress), indent=1) + "\n")


def read_progress(directory: Path) -> TrainerProgress:
    """Read trainer.json.

    Raises CheckpointError if the file is missing, damaged or of another format.
    """
    path = directory / PROGRESS_FILE
    try:
        progress = msgspec.convert(read_small_json(path), TrainerProgress)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    # Earlier versions named the layers, too: all of them.
    return replace(progress, adapters=progress.adapters.removesuffix(" lora_targets=[]"))


def save_rng(directory: Path, rank: int) -> None:
    states = {"cpu": torch.get_rng_state()}
    if (gpu_state := get_gpu_rng_state()) is not None:
        states[GPU] = gpu_state
    save_tensors(_make_rng_path(directory, rank), states)


def restore_rng(directory: Path, rank: int) -> None:
    """Restore torch's random number generators of this rank.

    Does nothing if the checkpoint comes from a run with fewer ranks. Raises CheckpointError if the
    file is damaged.
    """
    path = _make_rng_path(directory, rank)
    if path.is_file():
        states = load_tensors(path)
        try:
            torch.set_rng_state(states["cpu"])
        except (KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{path}: not a state of torch's random numbers") from error
        set_gpu_rng_state(states.get(GPU))


@contextmanager
def open_state(directory: Path) -> Iterator["StateReader"]:
    """Open the shards that all ranks saved; their files stay mapped in the context."""
    paths = sorted(directory.glob("state_*.safetensors"))
    if not paths:
        raise CheckpointError(f"{directory} holds no state of a trainer")
    reader = StateReader(directory)
    with ExitStack() as files:
        for path in paths:
            reader.index_parts(path, files.enter_context(_open_safetensors(path)))
        yield reader


class StateReader:
    """Index of the shards that all ranks saved."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[tuple[str, str], list[tuple[TensorShard, Any]]] = {}

    def index_parts(self, path: Path, file: Any) -> None:
        """Add the shards of a file, already opened by safetensors, to the index.

        Raises CheckpointError if the file is not part of a trainer's state.
        """
        try:
            stored = parse_json((file.metadata() or {})[_SHARDS_KEY])
            shards = msgspec.convert(stored, dict[str, _StoredShard])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                shape, boxes, flat_range = shards[name]
                box_origins = tuple((TensorBox(a, b), origin) for a, b, origin in boxes)
                shard = TensorShard(name, shape, box_origins, flat_range)
                if shard.numel != sum(box.numel for box in shard.boxes):
                    raise ValueError(f"{name}: its boxes do not add up to its number of elements")
                if file.get_slice(key).get_shape() != [shard.numel]:
                    raise ValueError(f"{key}: not as many elements as its shard")
                entry = (shard, partial(file.get_tensor, key))
                self._parts.setdefault((kind, name), []).append(entry)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: not a trainer's state: {error!r}") from error

    def fill_shard(self, kind: str, shard: TensorShard, target: Tensor) -> None:
        """Fill `target` [n] with the elements of `shard`, from all saved shards that overlap it.

        `kind` selects the parameter (VALUE_KIND) or an AdamW moment. Shards are sets of boxes
        (TensorBox). Each saved box is intersected with each box of `shard`, the common elements are
        copied, and copied boxes are subtracted from those still missing. Raises CheckpointError if
        boxes remain missing.
        """
        missing = shard.boxes
        for saved_shard, read in self._parts.get((kind, shard.tensor), ()):
            overlaps = [
                (source_piece.narrow_to(box), target_piece.narrow_to(box))
                for source_piece in saved_shard.pieces
                for target_piece in shard.pieces
                if (box := source_piece.box.intersect(target_piece.box))
            ]
            if not overlaps or not missing:
                continue
            source = read()
            for source_piece, target_piece in overlaps:
                view_piece(target, target_piece).copy_(view_piece(source, source_piece))
            missing = subtract_boxes(missing, [source_piece.box for source_piece, _ in overlaps])
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {kind} of {shard.tensor}{missing[0]}: it was written for"
                " another model, or is incomplete"
            )


def _make_rng_path(directory: Path, rank: int) -> Path:
    return directory / f"rng_{rank:05d}.safetensors"


def _open_safetensors(path: Path) -> Any:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write tensors on the CPU into a file, without a second copy of them in memory."""
    path.touch()
    mode = path.stat().st_mode
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata)
    path.chmod(mode)  # `save_file` renames a temporary file that only its owner can read.


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file that `save_tensors` wrote. Raises CheckpointError if the file is damaged."""
    with _open_safetensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
