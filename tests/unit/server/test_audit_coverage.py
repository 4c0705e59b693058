"""Everything that changes something is in the audit log, or there is a reason why not: one row for each.

A new function of the services that opens a write transaction fails this suite until it has a row.
"""

from __future__ import annotations

import ast
from pathlib import Path

from diamond.server.store import audit_chain

SERVICES = Path(audit_chain.__file__).parents[1] / "services"

# What enters the log when it is called.
AUDITED = {
    "accounts.accept_invitation": "invitation.accepted",
    "accounts.change": "user.changed",
    "accounts.change_password": "user.password_changed",
    "accounts.create": "user.created",
    "accounts.setup": "user.made_administrator",
    "accounts.sign_in": "session.began",
    "accounts.use_reset": "user.password_changed",
    "audit.export": "audit.exported",
    "audit.refuse": "access.refused",
    "bootstrap.prepare": "token.created",
    "bootstrap.prepare_multi_user": "setup.code_made",
    "endpoint_shares.approve": "endpoint.share_approved",
    "endpoint_shares.decline": "endpoint.share_declined",
    "endpoint_shares.share": "endpoint.shared",
    "endpoint_shares.unshare": "endpoint.unshared",
    "endpoints._create": "endpoint.created",
    "endpoints.remove": "endpoint.removed",
    "enrolment.confirm_token": "endpoint.rotated",
    "enrolment.exchange": "endpoint.enrolled",
    "enrolment.renew_code": "endpoint.code_made",
    "enrolment.revoke": "endpoint.revoked",
    "enrolment.rotate": "endpoint.rotation_asked",
    "federation.come_in": "session.began",
    "federation.link": "identity.linked",
    "federation.unlink": "identity.unlinked",
    "image_builds.build": "image.building",
    "image_copies.copy": "image.building",
    "image_copies.export": "task.created",
    "image_copies.import_image": "image.building",
    "image_copies.prune": "task.created",
    "image_copies.remove": "image.removed",
    "images.share": "image.shared",
    "invitations.invite": "invitation.made",
    "invitations.withdraw": "invitation.withdrawn",
    "logins.approve": "login.approved",
    "logins.refuse": "login.refused",
    "loopback.begin_by_token": "session.began",
    "notices.begin_test": "notice_rule.tested",
    "notices.change": "notice_rule.changed",
    "notices.create": "notice_rule.created",
    "notices.remove": "notice_rule.removed",
    "ownership.change_task": "task.shared",
    "ownership.hand_over": "user.handed_over",
    "ownership.stop_any": "task.cancel_requested",
    "ownership.transfer_endpoint": "endpoint.transferred",
    "ownership.transfer_image": "image.transferred",
    "ownership.transfer_project": "project.transferred",
    "ownership.transfer_task": "task.transferred",
    "templates.change": "template.changed",
    "templates.create": "template.created",
    "templates.remove": "template.removed",
    "pools.change": "pool.changed",
    "pools.close": "pool.closed",
    "pools.create": "pool.created",
    "projects.change": "project.changed",
    "projects.create": "project.created",
    "projects.remove": "project.removed",
    "projects.remove_member": "project.member_removed",
    "projects.set_member": "project.member",
    "quotas.clear": "quota.cleared",
    "quotas.set_limits": "quota.set",
    "removals.remove": "task.removed",
    "resealing.prune": "keys.pruned",
    "resealing.rotate": "keys.rotated",
    "secrets.deliver": "secret.delivered",
    "secrets.put": "secret.set",
    "secrets.remove": "secret.removed",
    "sessions.end": "session.ended",
    "shells._record": "shell.opened",
    "tasks._create_all": "task.created",
    "tasks.cancel": "task.cancel_requested",
    "tokens.create": "token.created",
    "tokens.revoke": "token.revoked",
    "users._stop_tasks": "task.cancel_requested",
    "users.disable": "user.disabled",
    "users.enable": "user.enabled",
    "users.reset": "user.reset_made",
    "users.set_admin": "user.made_ordinary",
}
NOT_AUDITED = {
    "agents.desired": "an agent asks what to do",
    "agents.goodbye": "what an agent observes is an event",
    "agents.hello": "what an agent observes is an event",
    "agents.report": "what an agent observes is an event",
    "bootstrap._ensure_embedded": "the server prepares itself",
    "bootstrap.note_accounts": "the server prepares itself",
    "collection._let_go": "what nothing refers to any more; the removal of what did is",
    "enrolment.accept_token": "`confirm_token` is, once the token was used",
    "federation.begin": "somebody goes to sign in; how that ends is",
    "federation.take": "somebody comes back from there; how that ends is",
    "holdings.give": "somebody uploaded a file; what is done with it is",
    "image_drafts.create": "drafts are seen by their owner alone, and do nothing",
    "image_drafts.remove": "drafts are seen by their owner alone, and do nothing",
    "image_drafts.save": "drafts are seen by their owner alone, and do nothing",
    "image_drafts.submit": "the build is",
    "image_settling.settle": "what became of a build is an event",
    "kept.recount": "counting",
    "kept.weigh": "counting; where it is too much, what the job's own agent sent is thinned",
    "logins.begin": "a terminal asks; who approves or refuses is",
    "logins.poll": "the terminal takes what was approved",
    "loopback.begin": "a way in was made on this machine; its use is",
    "outbox.claim": "notices on their way",
    "outbox.match": "notices on their way",
    "outbox.settle": "notices on their way",
    "outbox.sweep": "notices on their way",
    "outbox.tell_silence": "what is observed is an event",
    "planning._rescue": "the server's own decisions are events",
    "planning.run_due": "the server's own decisions are events",
    "pool_rounds._one": "the server's own decisions are events",
    "resealing._reseal": "`rotate` is",
    "sessions.authenticate": "when a session was last used",
    "tokens._note_use": "when a token was last used",
    "usage.charge_ended": "counting",
    "usage.note_stored": "counting",
    "withdrawals.run": "the server's own decisions are events",
}


def writers() -> set[str]:
    found = set()
    for path in SERVICES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "db.write()" in ast.unparse(node):
                found.add(f"{path.stem}.{node.name}")
    return found


def test_every_change_is_audited_or_says_why_not() -> None:
    assert not set(AUDITED) & set(NOT_AUDITED)
    known = set(AUDITED) | set(NOT_AUDITED)
    assert writers() - known == set(), "write down by which action it is audited, or why it is not"
    assert known - writers() == set(), "there is no such function any more"


def test_every_action_is_really_written_somewhere() -> None:
    """Either as an event that the log takes by itself, or by a call that says so."""
    source = "\n".join(path.read_text() for path in SERVICES.parent.rglob("*.py") if path.name != "audit_chain.py")
    for action in {*AUDITED.values(), *audit_chain.ACTIONS}:
        assert f'"{action}"' in source, action
