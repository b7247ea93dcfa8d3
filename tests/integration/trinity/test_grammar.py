"""vLLM's backend `guidance` lets the same tokens follow as our own grammars, all along."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, _get_llg_tokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, validate_guidance_grammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tests.integration.trinity.conftest import TINY
from tuner.engines.grammar import Grammars
from tuner.engines.grammar_text import with_head
from tuner.gateway.families.grammars import Constraints, ToolChoice, grammar_of
from tuner.trinity.endpoints import ENGINE_ARGS

OBJECT = (
    '%json {"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},'
    '"required":["a","b"],"additionalProperties":false}'
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def forced_tool(tokenizer):
    vocabulary = tokenizer.get_vocab()
    tool = {"type": "function", "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}},
                       "required": ["n"], "additionalProperties": False}}}  # fmt: skip
    constraints = Constraints(tools=[tool], tool_choice=ToolChoice(mode="required"))
    return grammar_of(
        constraints,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        opened=False,
        token_id=vocabulary.get,
    )


@pytest.mark.parametrize("form", ["object", "tool"])
def test_both_allow_the_same_tokens_all_along(tokenizer, form):
    grammar = f"start: {OBJECT}\n" if form == "object" else forced_tool(tokenizer)
    size = len(tokenizer) + 7  # a model may have more logits than the tokenizer has tokens
    settings = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    backend = GuidanceBackend(
        SimpleNamespace(structured_outputs_config=settings), tokenizer=tokenizer, vocab_size=size
    )
    theirs = backend.compile_grammar(StructuredOutputOptions.GRAMMAR, with_head(grammar))
    ours = Grammars(tokenizer, [tokenizer.eos_token_id])
    state = ours.start(grammar)
    rng, bits = random.Random(0), backend.allocate_token_bitmask(1)
    sampled = []
    while len(sampled) < 80 and tokenizer.eos_token_id not in sampled:
        bits.fill_(-1)
        theirs.fill_bitmask(bits, 0)
        allowed = flags(bits[0].numpy().view(np.uint8), size)
        assert np.array_equal(allowed, flags(state.mask(size), size)), sampled
        sampled.append(int(rng.choice(np.nonzero(allowed)[0])))
        if sampled[-1] != tokenizer.eos_token_id:
            assert theirs.accept_tokens("request", [sampled[-1]])
            state.advance(sampled[-1])
    assert len(sampled) > 5
    ours.replay(grammar, sampled, size)


def flags(mask, size):
    found = np.unpackbits(mask, bitorder="little")[:size].astype(bool)
    return np.pad(found, (0, size - len(found)))


def test_vllm_takes_the_form_when_it_is_started_as_we_start_it(tokenizer):
    """With its default backend it would read the same text as another dialect, or refuse it."""
    assert ENGINE_ARGS == {"structured_outputs_config": {"backend": "guidance"}}
    asked = SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar=with_head(forced_tool(tokenizer)))
    )
    validate_guidance_grammar(asked, tokenizer=_get_llg_tokenizer(tokenizer))
