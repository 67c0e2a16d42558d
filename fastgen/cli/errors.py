"""Exit statuses of the commands, and the one exception that means: what the user gave cannot be used."""

FAILED = 1
UNUSABLE = 2


class InputError(Exception):
    """A flag, file or model that cannot be used. The message names it, the value given, and what would be accepted.

    Commands print the message as one line and end with status 2.
    """

    def __str__(self) -> str:
        """The message on one line, whatever line breaks it took over from a library's own message."""
        return " ".join(super().__str__().split())
