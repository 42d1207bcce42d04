"""The state of a trainer on disk, for any backend and any number of ranks to go on from.

<trainer>/trainer.json                    updates made, and what it was written with
          state_00000_000.safetensors     rank 0's parts of parameters and of their moments
          rng_00000.safetensors           the random numbers of rank 0

Every part says which of its tensor's elements it has, as a Shard: a rank reads those that meet its
own, whoever wrote them. Parameters are those that the optimizer updates, its float32 ones where it
has some. To the same layout everything comes back to the last bit. Nothing is pickled.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import parse_json, read_small_json
from streamrl.resharding import TensorBox, TensorShard
from streamrl.resharding.boxes import subtract_boxes
from streamrl.resharding.layouts import ShardPiece

FORMAT_VERSION = 2
PROGRESS_FILE = "trainer.json"
VALUE_KIND, MOMENT_KINDS = "value", ("exp_avg", "exp_avg_sq")
MAX_FILE_BYTES = 256 << 20
"""Size at which another file is begun: so much of a state is in memory twice while it is saved."""
_SHARDS_KEY = "shards"


@dataclass(frozen=True)
class ParameterFragment:
    """A part of a parameter as a rank's optimizer has it.

    It is `shard.numel` elements of the optimizer's own tensor `owner`, from `start` on. `is_copy`:
    another rank saves the same.
    """

    shard: TensorShard
    optimizer_tensor: Tensor
    offset: int = 0
    is_copy: bool = False

    def slice_block(self, block: Tensor) -> Tensor:
        """Its elements [n] of a tensor that lies as the owner does."""
        return block.detach().view(-1).narrow(0, self.offset, self.shard.numel)


@dataclass(frozen=True)
class TrainerProgress:
    """How far a trainer has come. `step` is its optimizer's, 0 before the first.

    `layout` is what it was written with, in words; `adapters` what another run has to have alike.
    """

    num_updates: int
    step: int
    layout: str
    adapters: str


def save_state(
    directory: Path,
    rank: int,
    fragments: Iterable[ParameterFragment],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Write what a rank has of the state; returns the optimizer's step."""
    steps = {0}
    with _StateWriter(directory, f"state_{rank:05d}") as files:
        for fragment in fragments:
            state = optimizer.state.get(fragment.optimizer_tensor, {})
            steps.add(int(state.get("step", 0)))
            if fragment.is_copy:
                continue
            blocks = {
                VALUE_KIND: fragment.optimizer_tensor,
                **{m: state[m] for m in MOMENT_KINDS if m in state},
            }
            for kind, block in blocks.items():
                files.add_shard(kind, fragment.shard, fragment.slice_block(block))
    return max(steps)


def load_state(
    directory: Path,
    step: int,
    fragments: Iterable[ParameterFragment],
    optimizer: torch.optim.Optimizer,
    placed: Iterable[tuple[str, Tensor, TensorShard]],
) -> None:
    """Fill a rank's optimizer from what any ranks saved, and the parameters computed with.

    Raises CheckpointError if a part of them was not saved.
    """
    with StateReader(directory) as files:
        for fragment in fragments:
            files.fill_shard(
                VALUE_KIND, fragment.shard, fragment.slice_block(fragment.optimizer_tensor)
            )
            if not step:
                continue
            state = optimizer.state[fragment.optimizer_tensor]
            if not state:
                own = fragment.optimizer_tensor.detach()
                state |= {kind: torch.zeros_like(own) for kind in MOMENT_KINDS}
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
            for kind in MOMENT_KINDS:
                files.fill_shard(kind, fragment.shard, fragment.slice_block(state[kind]))
        for _, tensor, shard in placed:
            files.fill_shard(VALUE_KIND, shard, tensor.detach().view(-1)[: shard.numel])


def write_progress(directory: Path, progress: TrainerProgress) -> None:
    """Write what one rank knows for all."""
    text = json.dumps({"format": FORMAT_VERSION, **vars(progress)}, indent=1)
    (directory / PROGRESS_FILE).write_text(text + "\n")


def read_progress(directory: Path) -> TrainerProgress:
    """Read what `write_progress` wrote. Raises CheckpointError for anything else."""
    path = directory / PROGRESS_FILE
    try:
        found = read_small_json(path)
        if found.pop("format") != FORMAT_VERSION:
            raise CheckpointError(f"{path}: not a trainer's state of format {FORMAT_VERSION}")
        progress = TrainerProgress(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error!r}: cannot be read") from error
    if not all(isinstance(n, int) and n >= 0 for n in (progress.num_updates, progress.step)):
        raise CheckpointError(f"{path}: num_updates and step must be whole numbers")
    return progress


def save_rng(directory: Path, rank: int) -> None:
    """Write where this rank's random numbers are."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    _make_rng_path(directory, rank).write_bytes(to_safetensors(found))


def restore_rng(directory: Path, rank: int) -> None:
    """Go on with them; a rank that was not there when they were saved keeps its own."""
    path = _make_rng_path(directory, rank)
    if not path.is_file():
        return
    found = _read_rng(path)
    torch.set_rng_state(found["cpu"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def _read_rng(path: Path) -> dict[str, Tensor]:
    """Read where a rank's random numbers are. Raises CheckpointError for what is no such state."""
    with _open_safetensors(path) as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    now, then = torch.get_rng_state(), found.get("cpu")
    if then is None or (then.dtype, then.shape) != (now.dtype, now.shape):
        raise CheckpointError(f"{path}: not a state of random numbers")
    return found


def check_saved_state(directory: Path) -> TrainerProgress:
    """Check, of large files by their headers, that a state is whole, or raise CheckpointError."""
    progress = read_progress(directory)
    with StateReader(directory) as files:
        files.check_complete(MOMENT_KINDS if progress.step else ())
    for path in sorted(directory.glob("rng_*.safetensors")):
        _read_rng(path)
    return progress


class StateReader:
    """The parts that all ranks saved, by kind and tensor. A context: its files are mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[tuple[str, str], list[tuple[TensorShard, Any]]] = {}
        self._exit_stack = ExitStack()

    def __enter__(self) -> "StateReader":
        with ExitStack() as unless_done:
            unless_done.push(self._exit_stack)
            paths = sorted(self._directory.glob("state_*.safetensors"))
            if not paths:
                raise CheckpointError(f"{self._directory} holds no state of a trainer")
            for path in paths:
                self._index_parts(path, unless_done.enter_context(_open_safetensors(path)))
            self._exit_stack = unless_done.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    def _index_parts(self, path: Path, file: Any) -> None:
        try:
            shards = parse_json((file.metadata() or {})[_SHARDS_KEY])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                shard = _decode_shard(name, shards[name])
                if file.get_slice(key).get_shape() != [shard.numel]:
                    raise ValueError(f"{key}: not as many elements as its shard")
                entry = (shard, partial(file.get_tensor, key))
                self._parts.setdefault((kind, name), []).append(entry)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a trainer's state: {error!r}") from error

    def fill_shard(self, kind: str, shard: TensorShard, target: Tensor) -> None:
        """Fill what a rank stores of a tensor, [n], from all parts that have some of it."""
        missing = shard.boxes
        for part, read in self._parts.get((kind, shard.tensor), ()):
            common = [
                (piece.narrow_to(box), own.narrow_to(box))
                for piece in part.pieces
                for own in shard.pieces
                if (box := piece.box.intersect(own.box))
            ]
            if not common or not missing:
                continue
            source = read()
            for piece, own in common:
                _view_piece(target, own).copy_(_view_piece(source, piece))
            missing = subtract_boxes(missing, [piece.box for piece, _ in common])
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {kind} of {shard.tensor}{missing[0]}: it was written for"
                " another model, or is not whole"
            )

    def check_complete(self, kinds: Iterable[str]) -> None:
        """Raise CheckpointError unless the parts of each tensor make up all of it."""
        names = [name for kind, name in self._parts if kind == VALUE_KIND]
        for kind in (VALUE_KIND, *kinds):
            for name in names:
                found = [
                    box for shard, _ in self._parts.get((kind, name), ()) for box in shard.boxes
                ]
                # A tensor ends where the farthest part of it does.
                stops = zip(*(box.stop for box in self._iter_boxes(name)), strict=True)
                whole = TensorBox.from_shape(tuple(map(max, stops)))
                if missing := subtract_boxes([whole], found):
                    raise CheckpointError(f"{self._directory} lacks {kind} of {name}{missing[0]}")

    def _iter_boxes(self, name: str) -> Iterator[TensorBox]:
        for shard, _ in self._parts.get((VALUE_KIND, name), ()):
            yield from (box for box, _ in shard.box_origins)


@dataclass
class _StateWriter:
    """The files that one rank writes, each of bounded size."""

    directory: Path
    stem: str
    _num_files: int = 0
    _pending_bytes: int = 0
    _pending_tensors: dict[str, Tensor] = field(default_factory=dict)
    _pending_shards: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> "_StateWriter":
        return self

    def add_shard(self, kind: str, shard: TensorShard, elements: Tensor) -> None:
        """Take a part; it is copied."""
        self._pending_tensors[f"{kind}/{shard.tensor}"] = elements.to("cpu", copy=True)
        self._pending_shards[shard.tensor] = _encode_shard(shard)
        self._pending_bytes += elements.nbytes
        if self._pending_bytes >= MAX_FILE_BYTES:
            self._write_file()

    def _write_file(self) -> None:
        path = self.directory / f"{self.stem}_{self._num_files:03d}.safetensors"
        path.write_bytes(
            to_safetensors(self._pending_tensors, {_SHARDS_KEY: json.dumps(self._pending_shards)})
        )
        self._pending_tensors, self._pending_shards = {}, {}
        self._num_files, self._pending_bytes = self._num_files + 1, 0

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._pending_tensors:
            self._write_file()


def _view_piece(stored: Tensor, piece: ShardPiece) -> Tensor:
    offset = int(stored.storage_offset()) + piece.offset
    return stored.as_strided(piece.box.shape, piece.strides, offset)


def _encode_shard(shard: TensorShard) -> list[Any]:
    parts = [[box.start, box.stop, at] for box, at in shard.box_origins]
    return [shard.shape, parts, shard.flat_range]


def _decode_shard(name: str, written: Any) -> TensorShard:
    shape, parts, run = written
    found = tuple((TensorBox(tuple(start), tuple(stop)), tuple(at)) for start, stop, at in parts)
    shard = TensorShard(name, tuple(shape), found, None if run is None else (run[0], run[1]))
    if shard.numel != sum(box.numel for box in shard.boxes):
        raise ValueError(f"{name}: its parts are not what it stores")
    return shard


def _make_rng_path(directory: Path, rank: int) -> Path:
    return directory / f"rng_{rank:05d}.safetensors"


def _open_safetensors(path: Path) -> Any:
    """A safetensors file; raises CheckpointError unless it is a whole one."""
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors, on the CPU, into one file."""
    path.write_bytes(to_safetensors({n: t.contiguous() for n, t in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, as tensors of their own. Raises CheckpointError."""
    with _open_safetensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
