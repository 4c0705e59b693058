"""Entries of the audit log in words: `task.created` becomes "launched task tsk_…". What is not known here is shown as
it is."""

from __future__ import annotations

from diamond.core.audit import AuditEntry

# What somebody did, after their name. `{object}` is its id, `{…}` a field of the entry's data.
_WORDS = {
    "access.refused": "was refused {method} {path}",
    "audit.exported": "exported the audit log",
    "endpoint.code_made": "made an enrolment code for endpoint {name}",
    "endpoint.created": "made endpoint {name}",
    "endpoint.enrolled": "enrolled the agent of endpoint {name}",
    "endpoint.policy_changed": "has an agent that obeys other rules at endpoint {name}: {rules}",
    "endpoint.removed": "removed endpoint {name}",
    "endpoint.revoked": "revoked the token of endpoint {name}",
    "endpoint.rotated": "got a new token for endpoint {name}",
    "endpoint.rotation_asked": "asked endpoint {name} for a new token",
    "endpoint.approval_ended": "ended the approval of endpoint {endpoint} in project {project}: {why}",
    "endpoint.share_approved": "approved of endpoint {endpoint} of {owner} in project {project}",
    "endpoint.share_declined": "declined endpoint {endpoint} of {owner} in project {project}",
    "endpoint.shared": "offered endpoint {endpoint} to project {project}",
    "endpoint.transferred": "gave endpoint {name} of {owner} to {to}",
    "endpoint.unshared": "shared endpoint {endpoint} with project {project} no more",
    "identity.linked": "linked {label} at {provider} to the account",
    "identity.unlinked": "unlinked {label} at {provider} from the account",
    "image.building": "had image {name} built",
    "image.removed": "removed image {name}",
    "image.shared": "changed who sees image {name}",
    "image.transferred": "gave image {name} of {owner} to {to}",
    "invitation.accepted": "accepted an invitation",
    "invitation.made": "invited {name}",
    "invitation.withdrawn": "withdrew an invitation",
    "keys.pruned": "dropped old keys that secrets are sealed with",
    "keys.rotated": "made a new key that secrets are sealed with",
    "login.approved": "let a terminal act for them",
    "login.refused": "refused a terminal",
    "notice_rule.changed": "changed a notification rule",
    "notice_rule.created": "asked to be told by {channel} at {target}",
    "notice_rule.removed": "removed the notification rule for {target}",
    "notice_rule.tested": "sent a test message to {target}",
    "pool.changed": "changed pool {name}",
    "pool.closed": "closed pool {name}",
    "pool.created": "made pool {name} at endpoint {endpoint}",
    "project.changed": "changed the title of project {object}",
    "project.created": "made project {name}",
    "project.member": "made {user} {role} of project {project}",
    "project.member_added": "came into a project as {role}",
    "project.member_removed": "removed {user} from project {project}",
    "project.removed": "removed project {name}",
    "project.transferred": "gave project {name} to {to}",
    "quota.cleared": "let the default limits hold for {kind} {name}",
    "quota.set": "set the limits of {kind} {name}",
    "secret.delivered": "got secrets for a job",
    "secret.removed": "removed secret {name}",
    "secret.set": "set secret {name}",
    "session.began": "signed in ({method})",
    "session.ended": "signed a browser out",
    "session.refused": "failed to sign in ({method})",
    "setup.code_made": "made a code for the first administrator",
    "shell.closed": "closed a shell in task {object}",
    "shell.opened": "opened a shell in task {object}",
    "task.cancel_requested": "asked for task {object} to be stopped",
    "task.created": "launched task {object}",
    "task.shared": "made task {object} visible to: {visibility}",
    "task.transferred": "gave task {object} of {owner} to {to}",
    "token.all_revoked": "revoked all tokens of account {object}",
    "token.created": "made token {name}",
    "token.revoked": "revoked token {name}",
    "user.changed": "changed their profile",
    "user.created": "made account {name}",
    "user.disabled": "closed account {name}",
    "user.enabled": "opened account {name}",
    "user.handed_over": "handed what {user} had to {to}",
    "user.made_administrator": "made {name} an administrator",
    "user.made_ordinary": "made {name} an ordinary user",
    "user.password_changed": "changed the password of the account",
    "user.reset_made": "made a link for a new password of {name}",
}
NOUNS = tuple(sorted({action.partition(".")[0] for action in _WORDS}))


class _Said(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return str(self["object"]) if key == "name" else "?"


def sentence_of(entry: AuditEntry) -> str:
    """What was done, to follow the name of who did it."""
    words = _WORDS.get(entry.action)
    if words is None:
        noun, _, verb = entry.action.partition(".")
        return f"{noun.replace('_', ' ')} {verb.replace('_', ' ')}: {entry.object}"
    said = _Said({key: str(value)[:200] for key, value in entry.data.items()})
    said["object"] = entry.object
    if entry.action == "invitation.made":  # whoever accepts chooses a name; none need be suggested
        said["name"] = said["name"] if entry.data.get("name") else "somebody"
    return words.format_map(said)


def who_did(entry: AuditEntry) -> str:
    """Whose name stands before the sentence."""
    return entry.user or "somebody who is not signed in"
