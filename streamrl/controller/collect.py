"""What comes back from the ranks: padding is taken off, and no row passes for another's.

Every rank's rows are checked against those it got. Padding counts nowhere: of rows it is taken off
where they came from, and a number in which it would count is refused, unless the method knows how
many of its rows are real.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.controller.batches import BatchRef
from streamrl.controller.transfer_protocols import (
    AnswerKind,
    CallArguments,
    RankCalls,
    TransferProtocol,
)

PADDING_REMEDY = "give rows that divide, or have the method take `*, real`, how many are no padding"


@dataclass(frozen=True)
class RankInput:
    """The rows a rank was called with, the last `num_padding` of them put there to fit.

    is_rows: whether it was given any batch at all.
    """

    num_rows: int = 0
    num_padding: int = 0
    has_batch: bool = False

    @classmethod
    def from_call(cls, call: CallArguments | None) -> "RankInput":
        """Those of a call. Raises ValueError if batches of it are padded and not as long."""
        batches = [value for value in call or () if isinstance(value, BatchRef)]
        lengths = {len(batch) for batch in batches}
        padding = max((batch.num_padding for batch in batches), default=0)
        if padding and len(lengths) > 1:
            raise ValueError(f"batches of {sorted(lengths)} rows in one call, some of them padded")
        return cls(max(lengths, default=0), padding, bool(batches))

    @property
    def num_real(self) -> int:
        """How many of its first rows are no padding."""
        return self.num_rows - self.num_padding


def make_rank_inputs(
    handed: RankCalls, protocol: TransferProtocol, method: str, *, knows: bool
) -> list[RankInput]:
    """What each rank was given. Raises ValueError as `Given.of`, or if padding would count in
    figures.

    `knows` is whether the method is told how many rows are real.
    """
    try:
        found = [RankInput.from_call(call) for call in handed.calls]
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None
    padding = sum(each.num_padding for each in found)
    if padding and protocol.answer_kind == AnswerKind.METRICS and not knows:
        raise ValueError(
            f"{method}: {padding} of {sum(each.num_rows for each in found)} rows are padding, which"
            f" would count in the figures of {len(found)} ranks: {PADDING_REMEDY}"
        )
    return found


class RankAnswers(Sequence[Any]):
    """One answer of each rank; looked at, and its padding taken off, once it is asked for.

    A row may have become several, as a prompt its group of rollouts, but as many on every rank. A
    method that `knows` its padding answers for itself. Asking raises ValueError for rows that are
    not those of their rank, and for numbers in which padding counts.
    """

    def __init__(
        self,
        answers: Sequence[Any],
        given: Sequence[RankInput],
        kind: AnswerKind,
        names: Sequence[str],
        *,
        knows: bool = False,
    ) -> None:
        """`names` are those of the calls, as in `CriticWorker-1.compute_values`."""
        self._answers, self._inputs, self._names = answers, given, names
        self._kind, self._knows_padding = kind, knows
        self._row_multiple: int | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(len(self)))]
        answer, given = self._answers[rank], self._inputs[rank]
        if self._knows_padding or not given.has_batch:
            return answer
        if not isinstance(answer, BatchRef):
            if given.num_padding:
                raise ValueError(
                    f"{self._names[rank]}: {given.num_padding} of its {given.num_rows} rows"
                    f" are padding,"
                    f" which counts in what it answered: {PADDING_REMEDY}"
                )
            return answer
        if self._kind != AnswerKind.ROWS and not given.num_padding:
            return answer
        return answer.slice_rows(0, self._compute_row_multiple(rank, len(answer)) * given.num_real)

    def _compute_row_multiple(self, rank: int, count: int) -> int:
        """How many rows each row of a rank has become."""
        rows = self._inputs[rank].num_rows
        times, rest = divmod(count, rows) if rows else (1, count)
        if rest or not times:
            raise ValueError(
                f"{self._names[rank]}: {count} rows came back for {rows}: must be as many, or as"
                " many times more on every rank, unless the method takes `*, real`"
            )
        if rows and self._row_multiple not in (None, times):
            raise ValueError(
                f"{self._names[rank]}: {times} rows came back for each, from another rank"
                f" {self._row_multiple}: must be as many on every rank"
            )
        self._row_multiple = times if rows else self._row_multiple
        return times
