"""An adapter is exchanged under vLLM, and its log-probs are those of the model that is trained."""

import pytest
import torch

from tests.engines.conformance import TOLERANCE, Rig, error, make_rig_model
from tests.engines.models import make_tokenizer, prompt
from tests.integration.vllm.rigs import engine, settings
from tuner.engines import SamplingParams
from tuner.engines.vllm.client import VllmProcess

peft = pytest.importorskip("peft")

# Layers that do not write what the toy's end token looks at.
TARGETS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


@pytest.fixture
def server(toy_folder, tmp_path):
    adapted = settings(toy_folder, model=str(toy_folder), lora_rank=4)
    made = VllmProcess(adapted, log=tmp_path / "log.txt")
    yield made
    made.stop()


async def test_an_adapter_is_exchanged_and_no_old_prefix_is_used(server, tmp_path):
    torch.manual_seed(0)
    base = make_rig_model()
    adapter = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS))

    def save(folder):
        adapter.save_pretrained(str(folder), save_embedding_layers=False)
        make_tokenizer().save_pretrained(folder)

    made = engine([server], save, tmp_path / "weights")
    rig = Rig(made, base, lambda: None, "")
    ids, sampling = prompt(100), SamplingParams(max_tokens=12)
    seen = []
    for version in range(3):
        if version:
            with torch.no_grad():
                for name, parameter in adapter.named_parameters():
                    if "lora_" in name:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            await made.update_weights(version)
        got = await made.generate(ids, sampling, "session")
        assert got.versions == (version,) * 12
        assert got.cached_tokens == 0
        assert error(rig, ids, got, sampling) < TOLERANCE
        seen.append(got)
    assert all(error(rig, ids, old, sampling) > 0.01 for old in seen[:-1])
