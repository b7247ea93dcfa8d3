"""Weights from GPU to GPU: the protocol with real vLLM, and what a CPU has not is stood in for."""

import json
from dataclasses import asdict
from functools import partial

import pytest
import torch

from tests.engines.conformance import (  # noqa: F401  # pytest collects them
    TOLERANCE,
    Rig,
    as_new,
    error,
    make_rig_model,
    test_a_crash_fails_what_is_in_flight_and_the_next_request_is_served,
    test_new_weights_in_the_middle_of_a_completion,
    test_new_weights_serve_their_own_log_probs_and_no_old_prefix,
)
from tests.engines.models import change_weights, prompt
from tests.integration.vllm import cpu_ipc
from tests.integration.vllm.rigs import BLOCK, CORE_DIED, engine, kill_engine_core, saver, settings
from tuner.engines import EngineError, EngineLostError, SamplingParams
from tuner.engines.vllm.client import DirectSender, TrainerWeights, VllmProcess, transfer_backends
from tuner.runs.models import checkpoint_tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts(toy_folder, tmp_path_factory):
    model, extension = make_rig_model(), f"{cpu_ipc.__name__}_worker.CpuExtension"
    server = VllmProcess(
        settings(toy_folder, transfer="ipc", extra={"worker_extension_cls": extension}),
        log=tmp_path_factory.mktemp("vllm") / "log.txt",
        trained=TrainerWeights("ipc", partial(checkpoint_tensors, model), CPU),
    )
    folder = tmp_path_factory.mktemp("weights")
    with pytest.MonkeyPatch.context() as patch:
        cpu_ipc.stand_in(patch.setattr)
        yield engine([server], saver(model), folder, direct=True), model, folder, server
        server.stop()


@pytest.fixture
async def rig(parts):
    made, model, _, server = parts
    # The first tokens take long, longer than the suite waits for a request in flight.
    await made.generate(prompt(5), SamplingParams(max_tokens=1), "first")
    await as_new(made, model)
    return Rig(made, model, lambda: kill_engine_core(server.pid), CORE_DIED, spare=BLOCK)


async def test_no_folder_is_written_and_nothing_is_left_in_shared_memory(rig, parts):
    ids, sampling = prompt(40), SamplingParams(max_tokens=8)
    change_weights(rig.model)
    await rig.engine.update_weights(rig.engine.version + 1)
    got = await rig.engine.generate(ids, sampling, "session")
    assert error(rig, ids, got, sampling) < TOLERANCE
    assert list(parts[2].iterdir()) == []
    assert list(cpu_ipc.FOLDER.glob("tuner-test-*")) == []


class Server:
    """Takes the messages as JSON; what it was asked, in order."""

    def __init__(self, fails=None):
        self.fails = fails or {}
        self.asked = []

    def __call__(self, verb, info):
        if verb in self.fails:
            raise self.fails[verb]
        self.asked.append((verb, json.loads(json.dumps(info))))


class Group:
    """Stands in for the NCCL communicator of the trainer's side."""

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor):
        self.sent.append(tensor.clone())


@pytest.fixture
def group(monkeypatch):
    from vllm.distributed.weight_transfer import nccl_engine

    made = Group()

    def produce(iterator, group, src, post_iter_func, **sizes):
        for item in iterator:
            group.broadcast(post_iter_func(item))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: made)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    return made


def nccl_sender(model, server, workers=2):
    tensors = partial(checkpoint_tensors, model)
    return DirectSender(TrainerWeights("nccl", tensors, CPU, workers), server)


def test_by_nccl_vllms_workers_are_told_what_is_broadcast(group):
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    model, server = make_rig_model(), Server()
    sender = nccl_sender(model, server)
    sender.send("first")
    change_weights(model)
    sender.send("second")
    sender.forget()
    sender.send("third")
    round_ = ["begin", "update", "finish"]
    asked = [verb for verb, _ in server.asked]
    assert asked == ["connect", *round_, *round_, "connect", *round_]
    assert [info["label"] for verb, info in server.asked if verb == "finish"] == [
        "first",
        "second",
        "third",
    ]
    joined = NCCLWeightTransferInitInfo(**server.asked[0][1])  # what vLLM's worker makes of it
    assert (joined.world_size, joined.rank_offset, joined.packed) == (3, 1, True)
    assert joined.master_address == "127.0.0.1"
    told = NCCLWeightTransferUpdateInfo(**server.asked[2][1])
    expected = checkpoint_tensors(model)
    assert told.names == list(expected)
    assert told.shapes == [list(tensor.shape) for tensor in expected.values()]
    assert set(told.dtype_names) == {"float32"}
    assert asdict(told) == server.asked[5][1]
    last = group.sent[-len(expected) :]
    assert all(torch.equal(a, b) for a, b in zip(last, expected.values(), strict=True))


def test_a_server_that_dies_while_gpus_are_joined_ends_the_run(group):
    sender = nccl_sender(make_rig_model(), Server({"update": EngineLostError("it is gone")}))
    with pytest.raises(EngineError, match=r"resume from its checkpoint: it is gone") as caught:
        sender.send("label")
    assert not isinstance(caught.value, EngineLostError)


def test_what_vllm_cannot_take_names_the_setting_that_helps(group):
    sender = nccl_sender(make_rig_model(), Server({"connect": RuntimeError("no NCCL here")}))
    with pytest.raises(EngineError, match=r"by nccl: .*no NCCL here; set tuner.engine.weights"):
        sender.send("label")


def test_the_installed_vllm_has_both_ways():
    assert transfer_backends() == {"ipc", "nccl"}
