"""Random agents for property tests: what they send, as ids, in every shape a trace can have."""

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Ids:
    """The part of a call that the token tree reads."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def sequence(self):
        return self.prompt_ids + self.completion_ids


# Few different ids, so that prefixes coincide by chance as well as by design.
token = st.integers(0, 2) | st.sampled_from([255, 256, 2**17, 2**32 - 1])
some_ids = st.lists(token, max_size=4).map(tuple)
MOVES = ["extend", "fork", "parallel", "retry", "sub_agent", "compaction", "rewrite", "overlap"]


@st.composite
def rollouts(draw, max_calls=8):
    """The calls of one rollout, each made from an earlier one by one of MOVES."""
    prompt, completion = draw(some_ids), draw(some_ids)
    calls = [Ids(prompt, completion)]
    for _ in range(draw(st.integers(0, max_calls - 1))):
        before = draw(st.sampled_from(calls))
        move = draw(st.sampled_from(MOVES))
        if move == "extend":
            prompt = calls[-1].sequence + draw(some_ids)
        elif move == "fork":
            prompt = before.sequence + draw(some_ids)
        elif move in ("parallel", "retry"):
            prompt = before.prompt_ids
        elif move == "sub_agent":
            prompt = draw(some_ids)
        elif move == "compaction":
            start = draw(st.integers(0, len(before.sequence)))
            prompt = draw(some_ids) + before.sequence[start:]
        elif move == "rewrite":
            at = draw(st.integers(0, len(before.sequence)))
            prompt = before.sequence[:at] + draw(some_ids) + before.sequence[at + 1 :]
        else:  # another division of the same ids into prompt and completion
            at = draw(st.integers(0, len(before.sequence)))
            prompt = before.sequence[:at]
        if move == "retry":
            completion = before.completion_ids
        elif move == "overlap":
            completion = before.sequence[at:]
        else:
            completion = draw(some_ids)
        calls.append(Ids(prompt, completion))
    return calls


# Several rollouts of the same tasks make a batch; a batch may be empty.
batches = st.lists(rollouts(), max_size=4).map(
    lambda rollouts: [call for calls in rollouts for call in calls]
)
