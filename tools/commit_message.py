"""Checks the message of a commit: `python tools/commit_message.py FILE`, a hook of `.pre-commit-config.yaml`.

A subject of at most 72 characters begins with one imperative verb and has no ";". A body says why. Messages that git
writes itself (merges, reverts, fixups) are not checked. Prints a line for each problem, and exits with status 1 if
there is any.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MOST_CHARACTERS = 72
BY_GIT = ("Merge branch ", "Merge pull request ", "Merge remote-", 'Revert "', "fixup! ", "squash! ", "amend! ")
SCISSORS = re.compile(r"^# -+ >8 -+$", re.MULTILINE)
TRAILER = re.compile(r"[A-Z][A-Za-z-]+: \S")
# A simple check: a list of English verbs would need a dictionary.
NO_VERB = frozenset(
    "A All An And Another Bug Code Docs Documentation Each Every For In It More New No Now On One Other Some That The "
    "This Various With".split()
)
ENDINGS = ("ing", "ed", "ly", "s")
VERBS_WITH_ENDINGS = frozenset("Apply Bring Embed Feed Focus Multiply Need Proceed Reply Seed Speed".split())


def problems(message: str) -> list[str]:
    """Returns why the message is not accepted."""
    text = SCISSORS.split(message)[0]
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    subject, _, rest = without_comments.strip().partition("\n")
    body = rest.splitlines()
    if subject.startswith(BY_GIT):
        return []
    lines = []
    if not subject or len(subject) > MOST_CHARACTERS:
        accepted = f"(accepted: 1 to {MOST_CHARACTERS})"
        lines.append(f"the subject has {len(subject)} characters {accepted}: {subject}")
    if ";" in subject:
        lines.append(f'the subject has a ";" (accepted: one thing, the rest in another commit): {subject}')
    if not is_verb(first := subject.partition(" ")[0]):
        lines.append(f"the subject begins with {first!r} (accepted: an imperative verb, such as Add or Merge)")
    if body and body[0].strip():
        lines.append(f"the second line is {body[0]!r} (accepted: an empty line)")
    if not any(line.strip() and not TRAILER.match(line) for line in body):
        lines.append("there is no body (accepted: why, and the figure if there is one)")
    return lines


def is_verb(word: str) -> bool:
    """Whether the word may be an imperative: capitalized, not an article or the like, not inflected."""
    if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", word) or word in NO_VERB:
        return False
    return word in VERBS_WITH_ENDINGS or word.endswith("ss") or not word.endswith(ENDINGS)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(f"got {len(arguments)} arguments (accepted: the file that holds the message)")
        return 2
    lines = problems(Path(arguments[0]).read_text(encoding="utf-8"))
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
