"""Stop strings in tokens, wherever the tokens happen to end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.models import make_tokenizer
from tests.kit.examples import few
from tuner.engines.stop_strings import StopStrings


def tokens_until_stop(ids, *stops):
    watcher = StopStrings(make_tokenizer(), stops)
    for count, token in enumerate(ids, 1):
        if watcher.push(token):
            return count
    return None


def encode(text):
    return make_tokenizer().encode(text, add_special_tokens=False)


@settings(max_examples=few(200), deadline=None)
@given(
    st.text(alphabet="haltHALT the 12,é😀", max_size=30),
    st.lists(st.text(alphabet="halt he1é😀", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stops_at_the_first_token_that_completes_a_stop_string(text, stops):
    ids = encode(text)
    decode = make_tokenizer().decode
    wanted = next(
        (n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None
    )
    assert tokens_until_stop(ids, *stops) == wanted


def test_a_stop_string_inside_one_token_and_across_several():
    ids = encode("the answer")
    assert len(ids) < len("the answer")
    assert tokens_until_stop(ids, "h") == 1
    assert tokens_until_stop(ids, "e a") is not None


def test_a_special_token_is_text_too():
    end = make_tokenizer().eos_token_id
    assert tokens_until_stop([*encode("one"), end], "<|end|>") == len(encode("one")) + 1


def test_a_stop_string_after_bytes_that_are_no_text():
    broken = encode("😀")[:1] * 12
    assert tokens_until_stop([*broken, *encode("halt")], "halt") == 12 + len(encode("halt"))
