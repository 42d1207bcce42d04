"""The endless stream of prompts, resumable to the row.

Own code rather than torchdata's StatefulDataLoader: the rows are tokenized and in memory, so there
is nothing for its workers or collation to do, and a sampler of our own would hold all that is below
anyway (its built-in shuffling does not resume exactly into the next epoch, and its state is neither
JSON nor two numbers). What is left is a permutation per epoch and a position in it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamrl.errors import ConfigError
from streamrl.messages import Prompt, make_uid, parse_uid


class PromptStream(Iterator[Prompt]):
    """Every prompt once per epoch, for ever; `prompts` is what `load_prompts` returned.

    The order is a pure function of (seed, epoch). A prompt goes out with uid (epoch, index, 0),
    index being that of the uid it was loaded with.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        self._prompts = {parse_uid(prompt.uid)[1]: prompt for prompt in prompts}
        if not prompts or len(self._prompts) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(self._prompts)} different indices")
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._start_at(epoch=0, position=0)

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def __next__(self) -> Prompt:
        """The next prompt; there always is one."""
        if self._position == len(self):
            self._start_at(epoch=self._epoch + 1, position=0)
        index = self._order[self._position]
        self._position += 1
        return self.prompt(make_uid(self._epoch, index))

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [next(self) for _ in range(count)]

    def prompt(self, uid: str) -> Prompt:
        """The prompt of a uid this stream gave out, now or before a resume; the place is kept.

        Any attempt will do. Raises ValueError for a uid whose index is not in the data.
        """
        _, index, _ = parse_uid(uid)
        if index not in self._prompts:
            raise ValueError(f"uid {uid}: no prompt with index {index} among the {len(self)}")
        return replace(self._prompts[index], uid=uid)

    def retry(self, uid: str) -> Prompt:
        """The prompt of a dropped uid under the uid of its next attempt."""
        epoch, index, attempt = parse_uid(uid)
        return self.prompt(make_uid(epoch, index, attempt + 1))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON: `position` prompts of `epoch` have been given out."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the stream that wrote `state` stood.

        Raises ConfigError if that stream had other prompts or another order: some rows of the
        epoch would be lost and others trained twice.
        """
        for name, now in self._identity().items():
            if state[name] != now:
                raise ConfigError(
                    f"cannot resume the data stream: {_IDENTITY[name]} was {state[name]} when the "
                    f"checkpoint was written and is {now} now; use the same, or start a new run"
                )
        self._start_at(epoch=state["epoch"], position=state["position"])

    def _start_at(self, *, epoch: int, position: int) -> None:
        if epoch < 0 or not 0 <= position <= len(self):
            raise ValueError(f"epoch {epoch} position {position} of {len(self)} prompts")
        self._epoch = epoch
        self._position = position
        indices = list(self._prompts)
        if self._shuffle:
            indices = [indices[i] for i in _permutation(len(indices), self._seed, epoch)]
        self._order = indices

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self),
            "fingerprint": self._fingerprint,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }


#: What must be the same on resume, in words for the user.
_IDENTITY = {
    "num_prompts": "the number of prompts in data.train",
    "fingerprint": "the content of data.train as tokens (fingerprint)",
    "shuffle": "data.shuffle",
    "seed": "the seed of the data order",
}


def _permutation(size: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(size) by (seed, epoch), the same under every version of numpy.

    numpy keeps the raw numbers of a bit generator stable between versions, but not what
    `Generator.permutation` makes of them; sorting the raw numbers is stable too.
    """
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order: list[int] = np.argsort(raw, kind="stable").tolist()
    return order


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of what a run learns from: index, tokens, source and ground truth of every prompt."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        facts = (parse_uid(prompt.uid)[1], prompt.data_source, prompt.ground_truth)
        digest.update(repr((facts, len(prompt.token_ids))).encode("utf-8", "backslashreplace"))
        digest.update(prompt.token_ids.astype(np.int32).tobytes())
    return digest.hexdigest()
