"""The one way danlu says no.

A message answers five questions in a fixed order: what is wrong, where, what was seen, what is legal, and what to do
about it (the ``hint:`` line). `UserError` ends a command with exit code 2 (the input is wrong), `RunError` with exit
code 1 (the input was fine, the run failed). Anything else that escapes is a bug and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DanluError(Exception):
    """An error whose text is meant for the user; ``exit_code`` is what the process returns."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        seen: object | None = None,
        legal: str | Iterable[object] | None = None,
        hint: str | None = None,
    ) -> None:
        """Build the message.

        Args:
            what: the rule that is broken, as a sentence without a full stop.
            where: file, ``section.key`` or ``file:line`` that is to blame.
            seen: the offending value.
            legal: what would have been accepted, as text or as the list of choices.
            hint: one thing to try.
        """
        self.what, self.where, self.hint = what, where, hint
        lines = [f"{where}: {what}" if where else what]
        if seen is not None:
            lines.append(f"  seen:  {seen}")
        if legal is not None:
            lines.append(f"  legal: {legal if isinstance(legal, str) else ', '.join(str(choice) for choice in legal)}")
        if hint is not None:
            lines.append(f"  hint:  {hint}")
        super().__init__("\n".join(lines))


class UserError(DanluError):
    """The user's input (config, file, argument) is wrong; raised before any expensive work."""

    exit_code = 2


class RunError(DanluError):
    """The input was accepted but the run failed (disk full, a non-finite loss, a rank that died)."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that ``name`` was probably meant to be, or None where nothing is close."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def unknown_name(kind: str, name: str, choices: Iterable[str], *, where: str | None = None) -> UserError:
    """Return the error for a name that is not among ``choices``, with the nearest legal one as its hint."""
    legal = sorted(choices)
    close = nearest(name, legal)
    return UserError(
        f"unknown {kind}", where=where, seen=name, legal=legal, hint=f"did you mean {close!r}?" if close else None
    )
