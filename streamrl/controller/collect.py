"""Answers of ranks: check their rows against the input rows, and cut off padding.

Padding must never count. Rows made from padding are cut off the answers. Metrics over padding are
refused, unless the method takes the number of real rows (`*, real`).
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

PADDING_REMEDY = (
    "pass a row count that divides evenly, or let the method take `*, real`: its unpadded rows"
)


@dataclass(frozen=True)
class RankInput:
    """Number of rows in a call of a rank; the last `num_padding` of them are padding.

    has_batch: whether any argument of the call is a batch.
    """

    num_rows: int = 0
    num_padding: int = 0
    has_batch: bool = False

    @classmethod
    def from_call(cls, call: CallArguments | None) -> "RankInput":
        """Count the rows of a call's batches; a rank that is not called (None) has no rows.

        Raises ValueError if padded batches of the call differ in length.
        """
        batches = [value for value in call or () if isinstance(value, BatchRef)]
        lengths = {len(batch) for batch in batches}
        padding = max((batch.num_padding for batch in batches), default=0)
        if padding and len(lengths) > 1:
            raise ValueError(
                f"padded batches of different lengths in a call: {sorted(lengths)} rows"
            )
        return cls(max(lengths, default=0), padding, bool(batches))

    @property
    def num_real(self) -> int:
        """Number of rows before the padding."""
        return self.num_rows - self.num_padding


def make_rank_inputs(
    rank_calls: RankCalls, protocol: TransferProtocol, method: str, *, knows_padding: bool
) -> list[RankInput]:
    """Return the number of rows and of padding rows in the call of every rank.

    Raises ValueError if the called method returns metrics and its padding rows would count in them.
    knows_padding: the method receives the number of real rows and can leave the padding out.
    """
    try:
        inputs = [RankInput.from_call(call) for call in rank_calls.calls]
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None
    padding = sum(rank_input.num_padding for rank_input in inputs)
    if padding and protocol.answer_kind == AnswerKind.METRICS and not knows_padding:
        num_rows = sum(rank_input.num_rows for rank_input in inputs)
        raise ValueError(
            f"{method}: {padding} of {num_rows} rows are padding, which would count in the metrics"
            f" of {len(inputs)} ranks: {PADDING_REMEDY}"
        )
    return inputs


class RankAnswers(Sequence[Any]):
    """Answers of a method by rank; reading an answer checks its rows and cuts off padding.

    A method may return several rows per input row (a prompt gives a group of rollouts), as many on
    every rank. Answers of a method with knows_padding are not changed. Reading raises ValueError
    for a number of rows that does not fit the input, and for metrics over padded rows.
    """

    def __init__(
        self,
        answers: Sequence[Any],
        inputs: Sequence[RankInput],
        kind: AnswerKind,
        names: Sequence[str],
        *,
        knows_padding: bool = False,
    ) -> None:
        """Wrap the answers of all ranks.

        inputs: rows of each rank's call. kind: relation of the answers to these rows.
        names: name of each call for errors, such as `CriticWorker-1.compute_values`.
        knows_padding: the method received the number of real rows.
        """
        self._answers, self._inputs, self._names = answers, inputs, names
        self._kind, self._knows_padding = kind, knows_padding
        self._row_multiple: int | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(len(self)))

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[index] for index in range(*rank.indices(len(self)))]
        answer, rank_input = self._answers[rank], self._inputs[rank]
        if self._knows_padding or not rank_input.has_batch:
            return answer
        if not isinstance(answer, BatchRef):
            if rank_input.num_padding:
                raise ValueError(
                    f"{self._names[rank]}: {rank_input.num_padding} of its {rank_input.num_rows}"
                    f" rows are padding, which would count in its answer: {PADDING_REMEDY}"
                )
            return answer
        if self._kind != AnswerKind.ROWS and not rank_input.num_padding:
            return answer
        return answer.slice_rows(
            0, self._compute_row_multiple(rank, len(answer)) * rank_input.num_real
        )

    def _compute_row_multiple(self, rank: int, count: int) -> int:
        """Return how many rows a rank returned per input row. Raises ValueError if ranks differ.

        count: rows that the rank returned.
        """
        num_rows = self._inputs[rank].num_rows
        multiple, remainder = divmod(count, num_rows) if num_rows else (1, count)
        if remainder or not multiple:
            raise ValueError(
                f"{self._names[rank]}: {count} rows returned for {num_rows}: must be a multiple,"
                " the same on every rank, unless the method takes `*, real`"
            )
        if num_rows and self._row_multiple not in (None, multiple):
            raise ValueError(
                f"{self._names[rank]}: {multiple} rows returned per input row, but"
                f" {self._row_multiple} by another rank: must be the same on every rank"
            )
        self._row_multiple = multiple if num_rows else self._row_multiple
        return multiple
