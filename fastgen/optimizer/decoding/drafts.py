"""Drafts: the next tokens of a text that repeats its input, guessed, and checked in one forward.

    text      … the cat sat on the mat .   And then the cat
                ^^^^^^^ last occurrence             ^^^^^^^ suffix     draft: sat on the
    forward   cat sat on the        one step that reads all weights once: the logits after each of these four tokens
    loop      sat                   each token is chosen as without drafts; while it is the draft's, the logits of the
              on                    next one are there already
              a                     the rest of the draft is dropped, its keys are cropped or overwritten

A draft never decides: the loop chooses each token from the model's logits, with all processors and random numbers, as
in a step of one token. So drafts change the time of a call and nothing else. All rows of a batch are checked together:
processors see all rows at once, so the row whose draft ends first ends the draft of all. "Input-guided decoding" (arXiv
2106.04970) does the same for one greedy row.

This module knows no host library, and no model: `Drafts` guesses, and estimates what is worth checking.

Tests: tests/optimizer/decoding/test_drafts.py, tests/optimizer/transformers/test_drafts.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from fastgen.optimizer.decoding.static_kv_cache import MOST_TOKENS

# The most tokens of all rows together whose forward costs little more than reading the weights: 16 take 1.3 to 1.9
# times as long as 4 (skinny GEMM, AMD EPYC, model 17). From six rows on, three tokens per row are more than that.
CHEAP_TOKENS = 16

# Longer matches are not told apart.
LONGEST_MATCH = 16

# Occurrences of a suffix that are compared, the last ones first.
MOST_OCCURRENCES = 32


def sizes_for(rows: int) -> tuple[int, ...]:
    """Returns the numbers of tokens per row of a forward that checks drafts: the last token, and the draft.

    There are few sizes, because each needs a capture of its own.
    """
    return (2, 4, 8, MOST_TOKENS) if rows == 1 else (2, max(3, CHEAP_TOKENS // rows))


class Text:
    """The tokens of one row, its source before them, and the occurrence of its suffix that is followed.

    start: the index of the token that followed that occurrence, the draft's first; None if there is none. length: of
    the match, at most `LONGEST_MATCH`.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.start: int | None = None
        self.length = 0
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # for each token, the indices after occurrences
        for token in tokens:
            self._store(token)
        self._find()

    def append(self, token: int) -> None:
        """Adds a token. If it is the drafted one, the match grows by it; otherwise a new match is searched for."""
        is_drafts = self.start is not None and self.tokens[self.start] == token
        self._store(token)
        if is_drafts and self.start is not None:
            self.start, self.length = self.start + 1, min(self.length + 1, LONGEST_MATCH)
        else:
            self._find()

    def draft(self, count: int) -> list[int]:
        """Returns the `count` tokens after the occurrence; where the text ends, it is repeated from there on."""
        if self.start is None:
            return []
        drafted = self.tokens[self.start : self.start + count]
        period = len(self.tokens) - self.start
        while len(drafted) < count:
            drafted.append(drafted[len(drafted) - period])
        return drafted

    def _store(self, token: int) -> None:
        """Adds a token, which from now on follows the last occurrence of the token before it."""
        if self.tokens:
            self._ends[self.tokens[-1]].append(len(self.tokens))
        self.tokens.append(token)

    def _find(self) -> None:
        """Finds the longest match of the suffix, of equally long ones the last."""
        tokens = self.tokens
        end = len(self.tokens)
        self.start, self.length = None, 0
        starts = self._ends.get(tokens[-1], [])[-MOST_OCCURRENCES:] if tokens else []
        for start in reversed(starts):
            if self.length == LONGEST_MATCH:
                break
            length = 1
            while length < min(start, LONGEST_MATCH) and tokens[start - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > self.length:
                self.start, self.length = start, length


class Drafts:
    """The drafts of all rows of a loop, and the estimate of how many tokens are worth checking.

    texts: one per row. cost: returns what a forward takes, in steps of one token, given its rows and its tokens per
    row. padding: tokens that no forward of several contains, because some models do not count them as positions.
    drafted, accepted: the numbers of tokens checked, and of those that were right, in all rows. saved: the steps that
    were not needed.

    How often a match is right is learned during the call, for each length of a match, from all matches, whether or not
    they were checked. A length with few matches is estimated from all matches of several tokens. Single tokens recur by
    chance, so their matches count as wrong until some were right.
    """

    def __init__(
        self, texts: list[Text], cost: Callable[[int, int], float], padding: frozenset[int] = frozenset()
    ) -> None:
        self.texts, self.cost, self.padding = texts, cost, padding
        self.drafted = self.accepted = self.saved = 0
        self._right, self._seen = [0] * (LONGEST_MATCH + 1), [0] * (LONGEST_MATCH + 1)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds a token to each row."""
        for text, token in zip(self.texts, tokens):
            if text.start is not None:
                self._seen[text.length] += 1
                self._right[text.length] += text.tokens[text.start] == token
            text.append(token)

    def propose(self, most: int, overhead: Callable[[int], float] = lambda size: 1.0) -> list[list[int]]:
        """Returns a draft of each row, all of one length; empty if none is worthwhile.

        most: the most tokens of a row in a forward. overhead: returns a factor of the cost, given the tokens per row.
        The size, of `sizes_for`, is that with the most expected tokens per time.
        """
        if any(text.start is None for text in self.texts):
            return []
        most = min([most, *map(self._tokens_before_padding, self.texts)])
        shares = self._shares()
        best = 0
        best_rate = MIN_GAIN
        expected = 1.0
        likely = 1.0
        checked = 1
        for size in sizes_for(len(self.texts)):
            if size > most:
                break
            for ahead in range(checked - 1, size - 1):
                likely *= math.prod(shares[min(text.length + ahead, LONGEST_MATCH)] for text in self.texts)
                expected += likely
            checked = size
            if (rate := expected / (self.cost(len(self.texts), size) * overhead(size))) > best_rate:
                best, best_rate = size, rate
        return [text.draft(best - 1) for text in self.texts] if best else []

    def _tokens_before_padding(self, text: Text) -> int:
        """Returns how many tokens a forward of this row can have, the newest one first, before one is padding."""
        tokens = [text.tokens[-1], *text.draft(MOST_TOKENS - 1)]
        return next((count for count, token in enumerate(tokens) if token in self.padding), MOST_TOKENS)

    def _shares(self) -> list[float]:
        """Returns the share of right matches for each length."""
        of_several = (sum(self._right[2:]) + 1) / (sum(self._seen[2:]) + 2)
        expected = [0.0, 0.0] + [of_several] * (LONGEST_MATCH - 1)
        return [(right + 2 * share) / (seen + 2) for right, seen, share in zip(self._right, self._seen, expected)]

    def compact(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was; the other rows are dropped. Does nothing if there are no texts yet."""
        self.texts = [self.texts[row] for row in rows] if self.texts else []


# A draft is checked if it is expected to give more tokens than this in the time of one step.
MIN_GAIN = 1.05
