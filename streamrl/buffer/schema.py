"""Declared columns of the stages, checked on every lease request and commit."""

from collections.abc import Mapping, Sequence

from streamrl.buffer.config import StageSchema
from streamrl.buffer.encoding.wire_types import ColumnCommit
from streamrl.errors import ContractError
from streamrl.messages import ColumnAxis, GroupInfo, check_column_sizes, get_column_spec


class ColumnContract:
    """Checks that each stage requests and commits only columns that it declares.

    All methods raise ContractError.
    """

    def __init__(self, stages: Mapping[str, StageSchema]) -> None:
        self._required_columns = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._produced_columns = {
            stage: frozenset(ports.produces) for stage, ports in stages.items()
        }
        all_columns = frozenset[str]().union(*self._produced_columns.values())
        self._foreign_columns = {
            stage: all_columns - produced for stage, produced in self._produced_columns.items()
        }

    def check_request(self, stage: str, columns: Sequence[str]) -> None:
        """Check that a stage requests only columns that it declares as needed."""
        if undeclared := set(columns) - self._get_columns(self._required_columns, stage):
            raise ContractError(
                f"stage {stage} requests {sorted(undeclared)}: not among the columns it needs"
            )

    def check_commit(self, commit: ColumnCommit, info: GroupInfo | None) -> None:
        """Check that a commit has all columns its stage declares, no others', in the right sizes.

        info: sizes of the group; None before its rollouts exist.
        """
        stage, uid, names = commit.lease.stage, commit.lease.uid, commit.column_sizes.keys()
        if not names >= self._get_columns(self._produced_columns, stage):
            missing = sorted(self._produced_columns[stage] - names)
            raise ContractError(f"stage {stage} committed {uid} without {missing}")
        if not names.isdisjoint(self._foreign_columns[stage]):
            foreign = sorted(names & self._foreign_columns[stage])
            raise ContractError(
                f"stage {stage} committed {foreign} for {uid}: another stage produces them"
            )
        if info is None:
            if early := sorted(n for n in names if get_column_spec(n).axis is not ColumnAxis.GROUP):
                raise ContractError(
                    f"stage {stage} committed {early} for {uid} before its rollouts exist"
                )
            return
        if not info.version_tokens:
            raise ContractError(f"group {uid}: no token of it was sampled (loss_mask)")
        if info.min_version < 0:
            raise ContractError(f"group {uid}: a sampled token has no policy_version")
        if min(info.lengths, default=0) < 1:
            shortest = min(info.lengths, default=0)
            raise ContractError(f"group {uid}: a rollout of {shortest} tokens (lengths)")
        check_column_sizes(commit.column_sizes, info)

    def _get_columns(self, columns: Mapping[str, frozenset[str]], stage: str) -> frozenset[str]:
        if stage not in columns:
            raise ContractError(f"unknown stage {stage}: this queue has {', '.join(columns)}")
        return columns[stage]
