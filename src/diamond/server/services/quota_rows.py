"""The rows of quotas: which limits were set for whom. What they mean is in `quotas`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.quotas import Limits
from diamond.server.store.identity_models import MemberRow, QuotaRow


def set_for(
    session: Session, user_ids: Iterable[str], project_ids: Iterable[str] | None
) -> dict[tuple[str, str], Limits]:
    """The limits that were set for these, by kind and id, and the defaults.

    Args:
        project_ids: None: all in which the users are members.
    """
    asked: dict[str, list[str]] = {"users": list(user_ids)}
    if project_ids is None:
        found = session.execute(_OF_MEMBERS, asked)
    else:
        found = session.execute(_OF_THESE, {**asked, "projects": list(project_ids)})
    return {(str(kind), str(subject)): decode(Limits, limits) for kind, subject, limits in found}


def _query(projects: sa.Select[str] | sa.BindParameter[str]) -> sa.Select[str, str, dict[str, Any]]:
    return sa.select(QuotaRow.kind, QuotaRow.subject_id, QuotaRow.limits).where(
        sa.or_(
            QuotaRow.subject_id == "",
            sa.and_(QuotaRow.kind == "user", QuotaRow.subject_id.in_(_USERS)),
            sa.and_(QuotaRow.kind == "project", QuotaRow.subject_id.in_(projects)),
        )
    )


# Built once: every launch asks, and putting a query together costs more than running it.
_USERS: sa.BindParameter[str] = sa.bindparam("users", expanding=True)
_OF_THESE = _query(sa.bindparam("projects", expanding=True))
_OF_MEMBERS = _query(sa.select(MemberRow.project_id).where(MemberRow.user_id.in_(_USERS)))
