"""`tuner export`: what is written loads as plain scripts load it; the Hub is a local stand-in."""

import base64
import hashlib
import json
import shutil
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.kit import runs
from tests.kit.examples import grid
from tests.kit.models import save_chat_model
from tuner.engines import SamplingParams
from tuner.errors import ConfigError, TunerError
from tuner.loop import run_local
from tuner.runs.stack import build_stack
from tuner.tools.export import export


def logits(model):
    """In float64: what differs is the weights, and not the order of sums."""
    with torch.no_grad():
        return model.double()(torch.arange(5, 25)[None]).logits


def loaded(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def card(folder):
    return huggingface_hub.ModelCard.load(folder / "README.md", ignore_metadata_errors=True)


def test_all_weights_are_what_the_checkpoint_has_and_nothing_of_the_run(trained, tmp_path):
    checkpoint = trained / "whole/checkpoints/step_000002"
    export(trained / "whole", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        *(path.name for path in checkpoint.iterdir()),
    } - {"trainer_state.pt", "manifest.json", "version.json"}
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(loaded(checkpoint)))
    spoken = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert spoken.chat_template == AutoTokenizer.from_pretrained(checkpoint).chat_template


def test_the_card_says_what_was_trained_and_shows_no_path_of_this_machine(
    trained, tmp_path, random_model_path
):
    export(trained / "whole", tmp_path / "mine")
    text = card(tmp_path / "mine").text
    rows = [json.loads(line) for line in (trained / "whole/metrics.jsonl").read_text().splitlines()]
    before, after = (row["eval/held-out/reward"] for row in (rows[0], rows[-1]))
    assert f"| evaluation `held-out` | {before:.3f} | 0 | {after:.3f} | 2 |" in text
    for wanted in (
        "# mine",
        f"All weights of `{random_model_path.name}`",
        "run `whole`, step 2",
        "| algorithm | multi_step_grpo |",
        "| rollouts per task | 3 |",
        "vllm serve FOLDER",
        f"torch {version('torch')}",
    ):
        assert wanted in text
    assert str(trained.parent.parent) not in text
    assert card(tmp_path / "mine").data.base_model is None  # a folder here is nothing there
    assert card(tmp_path / "mine").data.library_name == "transformers"


def test_an_earlier_checkpoint_has_the_rewards_up_to_it(trained, tmp_path):
    run = shutil.copytree(trained / "whole", tmp_path / "whole")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "eval/held-out/reward": 9.0, "reward/mean": 8.0}\n')
    export(run / "checkpoints/step_000002", tmp_path / "out")
    text = card(tmp_path / "out").text
    assert "9.000" not in text
    assert "8.000" not in text
    assert "run `whole`, step 2" in text


def test_an_adapter_stays_one_or_becomes_a_model(trained, tmp_path, random_model_path):
    checkpoint = trained / "adapter/checkpoints/step_000002"
    base = logits(loaded(random_model_path))
    adapted = logits(PeftModel.from_pretrained(loaded(random_model_path), checkpoint))
    assert not torch.allclose(adapted, base, atol=1e-3)

    export(trained / "adapter", tmp_path / "adapter")
    assert not (tmp_path / "adapter/model.safetensors").exists()
    again = PeftModel.from_pretrained(loaded(random_model_path), tmp_path / "adapter")
    assert torch.equal(logits(again), adapted)
    assert card(tmp_path / "adapter").data.library_name == "peft"
    assert "--enable-lora --lora-modules tuned=FOLDER" in card(tmp_path / "adapter").text

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # peft uses names that transformers deprecates
        export(trained / "adapter", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged/adapter_config.json").exists()
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), adapted, atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token_id is not None


@pytest.mark.parametrize(("run", "merge"), [("whole", False), ("adapter", True)])
def test_weights_are_stored_as_asked(trained, tmp_path, run, merge):
    export(trained / run, tmp_path / "half", merge=merge, dtype="bfloat16")
    assert loaded(tmp_path / "half").dtype == torch.bfloat16
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    export(trained / run, tmp_path / "whole", merge=merge)
    half, whole = (loaded(tmp_path / name).state_dict() for name in ("half", "whole"))
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)


def test_the_chat_template_of_the_run_goes_with_it(trained, tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints/step_000002"
    shutil.copytree(trained / "whole/checkpoints/step_000002", checkpoint)
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8-sig")
    (run / "config.yaml").write_text(f"model: {{chat_template_path: {tmp_path / 'own.jinja'}}}")
    export(checkpoint, tmp_path / "out")
    spoken = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "ho"}]
    assert spoken.apply_chat_template(messages, tokenize=False) == "ho!"
    (tmp_path / "own.jinja").unlink()
    with pytest.raises(TunerError, match=r"cannot read .*own.jinja, the chat template of the run"):
        export(checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert not list(tmp_path.glob(".again*"))


def test_a_checkpoint_of_a_run_without_its_manifest_is_damaged(trained, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/step_000002"
    shutil.copytree(trained / "whole", tmp_path / "run")
    (checkpoint / "manifest.json").unlink()
    for given in (checkpoint, tmp_path / "run"):
        with pytest.raises(TunerError, match=r"step_000002 is damaged \(manifest.json is missing"):
            export(given, tmp_path / "out")


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("whole", {"merge": True}, "nothing to merge: omit --merge"),
        ("whole", {"dtype": "int8"}, "dtype is 'int8': give float32, bfloat16, float16"),
        ("adapter", {"dtype": "bfloat16"}, "is an adapter, whose data type cannot be changed"),
        ("adapter", {"push": "me/it"}, "could not be used from the Hub: add --merge"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    trained, tmp_path, run, options, message
):
    with pytest.raises(ConfigError, match=message):
        export(trained / run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(trained, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not empty: name a new folder"):
        export(trained / "whole", tmp_path)
    with pytest.raises(ConfigError, match="not empty: name a new folder"):
        export(trained / "whole", tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    export(trained / "whole", tmp_path / "empty")
    assert (tmp_path / "empty/config.json").is_file()


class Hub(ThreadingHTTPServer):
    """What the Hub does for an upload: one repository, LFS for weights, the rest in the commit."""

    def __init__(self):
        self.files, self.repository, self.tokens, self.refuses = {}, None, set(), False
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        hub, body = self.server, self._body()
        hub.tokens.add(self.headers.get("authorization"))
        if hub.refuses:
            return self._answer({"error": "You have read-only access"}, 403)
        if self.path == "/api/repos/create":
            hub.repository = json.loads(body)
            return self._answer({"url": f"{hub.url}/me/it"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    **{key: one[key] for key in ("oid", "size")},
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}},
                }
                for one in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.files.pop(f"lfs/{value['oid']}")
        return self._answer({"commitUrl": f"{hub.url}/me/it/commit/1", "commitOid": "1"})

    def do_PUT(self):
        content = self._body()
        assert self.path == f"/lfs/{hashlib.sha256(content).hexdigest()}"
        self.server.files[self.path.removeprefix("/")] = content
        self._answer({})

    def _body(self):
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_push_makes_a_private_repository_with_the_very_files(trained, tmp_path, hub, said):
    status, output, errors = said("export", trained / "whole", tmp_path / "out", "--push", "me/it")
    assert not status, errors
    assert f"{hub.url}/me/it/commit/1" in output
    assert (hub.repository["name"], hub.repository["organization"]) == ("it", "me")
    assert hub.repository["visibility"] == "private"
    assert hub.tokens == {"Bearer hf_mine"}
    assert hub.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files["README.md"].count(b"# it\n") == 1


def test_public_is_asked_for(trained, tmp_path, hub):
    export(trained / "adapter", tmp_path / "out", merge=True, push="me/it", public=True)
    assert hub.repository["visibility"] == "public"


def test_a_hub_that_refuses_is_one_sentence_and_the_export_stays(trained, tmp_path, hub, said):
    hub.refuses = True
    status, _, errors = said("export", trained / "whole", tmp_path / "out", "--push", "me/it")
    assert status == 2
    assert errors.startswith("TunerError: --push me/it: ")
    assert "log in with `hf auth login`, or set HF_TOKEN" in errors
    assert (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize(("name", "url"), [("a b", None), ("me/it", "http://127.0.0.1:9")])
def test_a_name_that_is_none_and_a_hub_that_is_not_there_are_one_sentence(
    trained, tmp_path, hub, monkeypatch, name, url
):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url or hub.url)
    with pytest.raises(TunerError, match=f"--push {name}: .*The export is in"):
        export(trained / "whole", tmp_path / "out", push=name)


TINY_MATH = Path(__file__).parents[2] / "models/tiny_math"
TALK = [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "hi"}]


@pytest.fixture
def base_model(tmp_path):
    """A base model with a chat template: text ends with another token than turns."""
    folder = save_chat_model(tmp_path / "base", num_hidden_layers=1, max_position_embeddings=256)
    spoken = AutoTokenizer.from_pretrained(folder)
    spoken.eos_token = "<|endoftext|>"
    spoken.save_pretrained(folder)
    settings = GenerationConfig.from_pretrained(folder)
    settings.eos_token_id = spoken.eos_token_id
    settings.save_pretrained(folder)
    return folder


def stops(model, spoken):
    """Whether plain generation ends with the turn of a model that wants to say nothing."""
    end = spoken.convert_tokens_to_ids("<|im_end|>")
    prompt = torch.tensor([spoken.encode("ho")])
    said = model.generate(prompt, do_sample=False, max_new_tokens=5, sequence_bias=[[[end], 100.0]])
    return said[0, prompt.shape[1] :].tolist() == [end]


async def test_rollouts_stop_where_the_template_ends_a_turn(base_model, tmp_path):
    config = runs.config(base_model, tmp_path)
    stack = build_stack(config, workflow=runs.workflow, judge=runs.judge)
    end = stack.tokenizer.convert_tokens_to_ids("<|im_end|>")
    likely = SamplingParams(max_tokens=5, logit_bias=((end, 100.0),))
    answer = await stack.engine.generate([1, 2], likely, "s")
    (said,) = [one for one in stack.decisions if "ends a turn" in one]
    found = stack.gateway.renderer.parse(answer.completion_ids, tools=[])
    await stack.aclose()
    assert (answer.completion_ids, answer.finish_reason) == ((end,), "stop")
    assert found.content in ("", None)
    assert "'<|im_end|>'" in said
    assert "generation_config names '<|endoftext|>'" in said
    again = build_stack(runs.config(TINY_MATH, tmp_path), workflow=None, judge=None)
    await again.aclose()
    assert not [one for one in again.decisions if "ends a turn" in one]


@grid(
    "overrides, merge",
    [
        ([], False),
        (["model.lora_configs=[{lora_rank: 2}]"], False),
        (["model.lora_configs=[{lora_rank: 2}]"], True),
        (["mode=train", "algorithm.algorithm_type=sft"], False),
        (None, False),  # no run: the model itself
    ],
    quick=2,
)
def test_plain_generation_from_an_export_stops(base_model, tmp_path, overrides, merge):
    source = base_model
    assert not stops(loaded(base_model), AutoTokenizer.from_pretrained(base_model))
    if overrides is not None:
        config = runs.config(base_model, tmp_path, "buffer.total_steps=1", *overrides)
        rollouts = config.mode != "train"
        run_local(
            config,
            workflow=runs.workflow if rollouts else None,
            judge=runs.judge if rollouts else None,
            train_tasks=runs.TRAIN if rollouts else [{"messages": TALK}] * 2,
            eval_tasks={"held-out": runs.EVAL} if rollouts else {},
        )
        source = tmp_path / "p/run"
    export(source, tmp_path / "out", merge=merge)
    adapter = (tmp_path / "out/adapter_config.json").exists()
    model = loaded(base_model if adapter else tmp_path / "out")
    if adapter:
        model = PeftModel.from_pretrained(model, tmp_path / "out")
        model.generation_config = GenerationConfig.from_pretrained(tmp_path / "out")
    assert stops(model, AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert ("--generation-config FOLDER" in card(tmp_path / "out").text) == adapter


def test_an_adapter_whose_model_stops_has_no_generation_settings(trained, tmp_path):
    export(trained / "adapter", tmp_path / "out")
    assert not (tmp_path / "out/generation_config.json").exists()
    assert "generation" not in card(tmp_path / "out").text.replace("text-generation", "")
