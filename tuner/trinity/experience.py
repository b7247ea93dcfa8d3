"""From a rollout's calls to the sequences that Trinity-RFT trains on.

Trinity-RFT's experience is one sequence: a prompt, then tokens of which a mask says which ones the
model sampled. For two calls where the second continues the first, each completion in brackets,

    1 2 [3 4]              calls      two sequences:  1 2 | 3 4              mask 1 1
    1 2 3 4 5 [6 7]                                   1 2 3 4 5 | 6 7        mask 1 1
                           merged     one sequence:   1 2 | 3 4 5 6 7        mask 1 1 0 1 1

Every sampled token is in the mask of exactly one sequence. Two calls that sampled the very same
token after the same prefix are two samples: the later one keeps a sequence of its own. Tokens that
the workflow masked are in no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.traces import Call


@dataclass(frozen=True)
class TrainedSequence:
    """One sequence to train on.

    Attributes:
        tokens: Prompt and response, shape [L].
        prompt_length: How many of them are the prompt, at least 1.
        logprobs: Log-probs of the response's sampled tokens, 0 where none was sampled,
            shape [L - prompt_length].
        action_mask: Which tokens of the response are trained, shape [L - prompt_length].
        calls: The calls whose tokens are trained here, in the order they were made.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float, ...]
    action_mask: tuple[bool, ...]
    calls: tuple[Call, ...]


def one_per_call(calls: Sequence[Call]) -> list[TrainedSequence]:
    """Each call as a sequence of its own, in their order."""
    return [_sequence([call]) for call in calls if call.stretches]


def merged(calls: Sequence[Call]) -> list[TrainedSequence]:
    """The fewest sequences that train each call's tokens once, in the order of their last calls.

    A call joins the longest sequence so far that is a prefix of its prompt. Where another call has
    continued that sequence already, the prefix is context here, and is trained there.
    """
    whole = [call.prompt_ids + call.completion_ids for call in calls]
    chains: list[list[int]] = []
    # Shorter prompts first, so that the order in which parallel calls arrive changes nothing.
    for place in sorted(range(len(calls)), key=lambda place: len(calls[place].prompt_ids)):
        prompt = calls[place].prompt_ids
        fitting = [one for one in chains if prompt[: len(whole[one[-1]])] == whole[one[-1]]]
        if fitting:
            max(fitting, key=lambda chain: len(whole[chain[-1]])).append(place)
        else:
            chains.append([place])
    chains.sort(key=max)
    found = [_sequence([calls[place] for place in chain]) for chain in chains]
    return [sequence for sequence in found if any(sequence.action_mask)]


def _sequence(chain: Sequence[Call]) -> TrainedSequence:
    """A sequence from calls each of which has the one before it as a prefix of its prompt."""
    first, last = chain[0], chain[-1]
    tokens = last.prompt_ids + last.completion_ids
    start = len(first.prompt_ids)
    logprobs = [0.0] * (len(tokens) - start)
    mask = [False] * (len(tokens) - start)
    for call in chain:
        at = len(call.prompt_ids) - start
        logprobs[at : at + len(call.logprobs)] = call.logprobs
        for begin, end in call.stretches:
            mask[at + begin : at + end] = [True] * (end - begin)
    return TrainedSequence(tokens, start, tuple(logprobs), tuple(mask), tuple(chain))
