"""Error texts answer, in order: what, where, what was seen, what is legal, what to do."""

from __future__ import annotations

from danlu.base.errors import RunError, UserError, nearest, unknown_name


def test_message_holds_every_part_in_order() -> None:
    """All five parts are there, one a line, in the fixed order."""
    error = UserError("too many rows", where="data.toml:3", seen=7, legal=[1, 2], hint="take fewer")
    assert str(error).splitlines() == [
        "data.toml:3: too many rows",
        "  seen:  7",
        "  legal: 1, 2",
        "  hint:  take fewer",
    ]


def test_parts_that_are_not_given_leave_no_line() -> None:
    """A bare message is one line, and a falsy value that was seen still shows."""
    assert str(RunError("it broke")) == "it broke"
    assert str(UserError("no", seen=0)).splitlines() == ["no", "  seen:  0"]


def test_exit_codes_tell_wrong_input_from_a_failed_run() -> None:
    """2 for the user's input, 1 for a run that failed."""
    assert (UserError("x").exit_code, RunError("x").exit_code) == (2, 1)


def test_unknown_name_lists_the_choices_and_names_the_nearest() -> None:
    """A slip of one letter is answered with the right name; nonsense gets no guess."""
    text = str(unknown_name("preset", "qwen-7c", ["llama", "qwen-7b"], where="model.name"))
    assert text.startswith("model.name: unknown preset")
    assert "legal: llama, qwen-7b" in text
    assert "did you mean 'qwen-7b'?" in text
    assert "hint" not in str(unknown_name("preset", "zzz", ["llama"]))
    assert nearest("zzz", ["llama"]) is None
