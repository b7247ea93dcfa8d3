"""vLLM's asynchronous engine with the weights of a training run.

Written against vLLM's public Python API: `AsyncEngineArgs`, `AsyncLLM.generate`, `collective_rpc`
on a worker extension, `LoRARequest`, `reset_prefix_cache`, `sleep` and `wake_up`, and weight
transfer (`init_weight_transfer_engine`, `start_weight_update`, ...). Tested with the version in
constraints-vllm.txt.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.engines.base import (
    FINISH_REASONS,
    EngineError,
    EngineLostError,
    SamplingError,
    SamplingParams,
)
from tuner.engines.grammar_text import with_head
from tuner.engines.sampling import check_sampling
from tuner.engines.servers import SampledTokens, Weights, finite_logprob, most_probable
from tuner.errors import MissingDependencyError, pip_install

if TYPE_CHECKING:
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


# Translation of our sampling settings to vLLM's, and of vLLM's outputs to ours.
#
# vLLM edits logits, scales by temperature, then applies min_p, top_k and top_p, as we do; with
# `logprobs_mode="processed_logprobs"` its log-probs are those of the final distribution. There are
# three differences: it treats a temperature between 0 and 0.01 as 0.01 and accepts none above 2, so
# both are rejected here; and it reports greedy tokens with the log-probs of temperature 1, which
# become 0.
#
# The kept tokens are those with a finite log-prob among the most probable. As many are listed as
# there can be: top_k and a few with the same logit, or `max_logprobs` without top_k.
# (`return_sampling_mask` lists them too, but only on GPUs, and then rejects greedy requests and
# every request without a top_k.)


_LOWEST = 0.01
_HIGHEST = 2.0
_TIES = 8
"""Number of further tokens that may have the logit of the last of the top_k."""


def check_for_vllm(sampling: SamplingParams, *, drafts: bool = False) -> None:
    """Reject settings that define no distribution, or that vLLM would change.

    Args:
        drafts: Whether vLLM decodes speculatively, which excludes two more settings.

    Raises:
        SamplingError: Names the setting, its value and what is allowed.
    """
    check_sampling(sampling)
    if sampling.temperature > _HIGHEST:
        raise SamplingError(
            "temperature", f"is {sampling.temperature!r}, and vLLM takes {_HIGHEST} at most"
        )
    if 0 < sampling.temperature < _LOWEST:
        raise SamplingError(
            "temperature",
            f"is {sampling.temperature!r}, which vLLM would treat as {_LOWEST}; set it to 0, or to "
            f"{_LOWEST} or more",
        )
    for setting in ("min_p", "logit_bias"):
        if drafts and getattr(sampling, setting):
            raise SamplingError(
                setting,
                "is not supported by vLLM with speculative_config "
                "(explorer.rollout_model.extra_engine_args): leave it out, or remove "
                "speculative_config",
            )


def listed(sampling: SamplingParams, longest: int) -> int:
    """Number of most probable tokens that vLLM lists for each sampled one.

    Args:
        longest: Its maximum: `max_logprobs`, or the size of the vocabulary.
    """
    if not sampling.cuts:
        return sampling.top_logprobs
    left = sampling.top_k + _TIES if sampling.top_k > 0 else longest
    return min(max(sampling.top_logprobs, left), longest)


def vllm_sampling(
    sampling: SamplingParams, end_ids: Iterable[int], longest: int
) -> vllm.SamplingParams:
    """vLLM's settings for one part of a completion, without stop strings.

    Args:
        longest: As for `listed`.
    """
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = None
    if sampling.grammar:
        form = StructuredOutputsParams(grammar=with_head(sampling.grammar))
    asked = VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=sampling.seed,
        logprobs=listed(sampling, longest),
        flat_logprobs=True,
        # All end tokens are ours: the model's folder may name others.
        stop_token_ids=sorted({*end_ids, *sampling.stop_token_ids}),
        ignore_eos=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=form,
    )
    if sampling.bad_words:
        # vLLM would tokenize texts itself; these ids are the ones that replay has.
        asked._bad_words_token_ids = [list(word) for word in sampling.bad_words]
    return asked


def sampled(output: vllm.RequestOutput, sampling: SamplingParams, longest: int) -> SampledTokens:
    """The tokens of one of vLLM's outputs.

    Args:
        longest: As for `listed`.

    Raises:
        EngineError: A log-prob is not finite, or vLLM ended the completion for a reason other than
            its end or its length.
    """
    (completion,) = output.outputs
    ids = tuple(completion.token_ids)
    found = _by_place(completion.logprobs)
    if len(found) != len(ids):
        raise EngineError(f"vLLM returned {len(ids)} token ids and {len(found)} log-probs together")
    reason = completion.finish_reason
    if reason is not None and reason not in FINISH_REASONS:
        raise EngineError(f"vLLM ended a completion with {reason}")
    return SampledTokens(
        ids,
        tuple(_logprob(token, at, sampling) for token, at in zip(ids, found, strict=True)),
        tuple(_alternatives(token, at, sampling) for token, at in zip(ids, found, strict=True))
        if sampling.top_logprobs
        else (),
        -1 if output.num_cached_tokens is None else output.num_cached_tokens,
        None if reason is None else FINISH_REASONS[reason],
        tuple(_kept(at, listed(sampling, longest)) for at in found) if sampling.cuts else (),
    )


def _by_place(found: Any) -> list[dict[int, float]]:
    """The listed tokens of each place with their log-probs."""
    if not found:
        return []
    return [
        dict(zip(found.token_ids[start:stop], found.logprobs[start:stop], strict=True))
        for start, stop in zip(found.start_indices, found.end_indices, strict=True)
    ]


def _logprob(token: int, found: Mapping[int, float], sampling: SamplingParams) -> float:
    if sampling.temperature == 0:
        return 0.0
    return finite_logprob("vLLM", token, found[token])


def _alternatives(
    token: int, found: Mapping[int, float], sampling: SamplingParams
) -> tuple[tuple[int, float], ...]:
    if sampling.temperature == 0:
        return ((token, 0.0),)
    return most_probable(found.items(), sampling.top_logprobs)


def _kept(found: Mapping[int, float], asked: int) -> tuple[int, ...]:
    """The tokens that can be sampled; empty if there may be more than are listed."""
    left = tuple(sorted(token for token, logprob in found.items() if logprob > -math.inf))
    return left if len(left) < asked else ()


_POLL = 0.002
_LOOK = 0.5
"""Seconds between checks whether vLLM died during a call."""
_SECONDS_TO_END = 60.0
"""How long cancelled requests may take to end."""
TransferVerb = Literal["connect", "begin", "update", "finish"]
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Upper limits of an adapter's rank that vLLM accepts."""


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started; every field survives JSON.

    Attributes:
        model: Folder or Hub name of the base model of adapters; None if all weights are trained
            and come with the folder that is loaded first.
        dtype: "float32", "bfloat16" or "float16".
        max_model_len: Maximum of prompt and completion tokens of one request.
        max_slots: Maximum of requests computed at once.
        end_ids: Token ids that end a completion.
        tokenizer: Folder or Hub name of the tokenizer, for grammars; None: next to the weights.
        lora_rank: Largest rank of the trained adapters; None if all weights are trained.
        adapters: Where the adapters are in the folder that is loaded, by the names that requests
            give. Empty: the folder is the only adapter, for all requests.
        tensor_parallel_size: Number of GPUs that share the weights.
        gpu_memory_utilization: Share of the GPU's memory; None for vLLM's default.
        enforce_eager: Do not capture CUDA graphs.
        seed: vLLM's own seed; requests have their own.
        transfer: vLLM's transfer engine from GPU to GPU, "ipc" or "nccl"; None if weights come in
            folders.
        sleeps: Whether it can release the GPU's memory.
        extra: Further arguments of vLLM's `AsyncEngineArgs`.
    """

    dtype: str
    max_model_len: int
    max_slots: int
    end_ids: tuple[int, ...]
    model: str | None = None
    tokenizer: str | None = None
    lora_rank: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    seed: int = 0
    transfer: Literal["ipc", "nccl"] | None = None
    sleeps: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether vLLM decodes speculatively."""
        return self.extra.get("speculative_config") is not None


def _ends_with_vllm(
    method: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Make calls fail when vLLM's process dies; vLLM itself leaves them pending forever."""

    @wraps(method)
    async def ending(self: VllmCore, *args: Any) -> None:
        call = asyncio.ensure_future(method(self, *args))
        try:
            while not (await asyncio.wait({call}, timeout=_LOOK))[0]:
                if self.dead:
                    raise EngineLostError(f"vLLM died before it had answered to {method.__name__}")
            call.result()
        finally:
            call.cancel()

    return ending


class VllmCore:
    """vLLM with one version of the weights at a time; belongs to one event loop."""

    def __init__(self, settings: VllmSettings, weights: Weights) -> None:
        self._settings = settings
        self._engine = _start(settings, weights)
        self._numbers = itertools.count()
        self._running = 0
        # By name, with the digest of its files; an only adapter has none.
        self._adapters: dict[str, tuple[bytes, LoRARequest]] = {}
        self._label: str | None = weights.label if settings.lora_rank is None else None
        self._asleep = False

    @property
    def label(self) -> str | None:
        """Label of the current weights; None while they change, or after a failed change."""
        return self._label

    @property
    def _longest(self) -> int:
        """Maximum number of tokens that it lists with their log-probs."""
        config = self._engine.model_config
        size = int(config.get_vocab_size())
        return size if config.max_logprobs < 0 else min(config.max_logprobs, size)

    @property
    def dead(self) -> bool:
        return bool(self._engine.errored)

    @_ends_with_vllm
    async def load(self, weights: Weights) -> None:
        """Serve these weights, without anything cached for others. No request is in flight.

        Raises:
            EngineLostError: vLLM's processes died.
            EngineError: vLLM cannot load them; it then has no label.
        """
        async with self._changing(f"loading {weights.folder}"):
            await self._wake_weights()
            if self._settings.lora_rank is None:
                await self._engine.collective_rpc("tuner_load_weights", args=(str(weights.folder),))
            else:
                await self._change_adapters(weights)
            await self._wake_cache()
        self._label = weights.label

    @_ends_with_vllm
    async def sleep(self) -> None:
        """Release the GPU's memory until the next weights. No request is in flight.

        Fully trained weights are discarded (vLLM's level 2); the base weights of adapters are
        kept in main memory (level 1).

        Raises:
            EngineLostError: vLLM's processes died.
            EngineError: It cannot; it then has no label.
        """
        async with self._changing("going to sleep"):
            await self._engine.sleep(level=2 if self._settings.lora_rank is None else 1)
            self._asleep = True

    @_ends_with_vllm
    async def transfer(self, verb: TransferVerb, info: dict[str, Any]) -> None:
        """One step of a weight transfer from GPU to GPU, driven by `tuner.engines.vllm.client`.

        Args:
            verb: "connect" once; then "begin", "update" once or more and "finish" for each version.
            info: Arguments of vLLM's own methods, as JSON; for "finish" the label.

        Raises:
            EngineLostError: vLLM's processes died.
            EngineError: vLLM cannot; after "begin" it has no label until "finish".
        """
        if verb == "connect":
            from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

            with self._named("joining the transfer of weights"):
                await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(info))
        elif verb == "begin":
            async with self._changing("preparing for new weights"):
                await self._wake_weights()
                await self._engine.start_weight_update()
        elif verb == "update":
            with self._named("receiving weights"):
                await self._engine.collective_rpc("tuner_receive_weights", args=(info,))
        elif verb == "finish":
            async with self._changing("taking over new weights"):
                await self._engine.finish_weight_update()
                await self._wake_cache()
            self._label = info["label"]
        else:
            raise EngineError(f"{verb!r} is not a step of a weight transfer")

    @asynccontextmanager
    async def _changing(self, what: str) -> AsyncIterator[None]:
        """Serve no weights while the block runs, and after it if it fails."""
        self._label = None
        with self._named(what):
            await self._idle()
            yield

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turn failures of the block into errors that name the operation."""
        try:
            yield
        except EngineError:
            raise
        except Exception as error:
            kind = EngineLostError if self.dead else EngineError
            cause = error.__cause__ or error  # vLLM wraps some errors in one without a message
            raise kind(f"vLLM failed while {what}: {type(cause).__name__}: {cause}") from error

    async def _wake_weights(self) -> None:
        """Allocate memory for weights; its content is undefined until they are loaded."""
        if self._asleep:
            await self._engine.wake_up(tags=["weights"])

    async def _wake_cache(self) -> None:
        """Allocate an empty cache of keys and values."""
        if self._asleep:
            await self._engine.wake_up(tags=["kv_cache"])
            self._asleep = False
        await self._forget()

    async def _idle(self) -> None:
        """Wait for requests whose clients have gone and that are being cancelled."""
        async with asyncio.timeout(_SECONDS_TO_END):
            while self._running:  # noqa: ASYNC110  # vLLM has no event for this
                await asyncio.sleep(_POLL)

    async def _forget(self) -> None:
        """Drop every prefix; blocks of cancelled requests become free a moment later."""
        async with asyncio.timeout(_SECONDS_TO_END):
            # vLLM has no event for this.
            while not await self._engine.reset_prefix_cache():  # noqa: ASYNC110
                await asyncio.sleep(_POLL)

    async def _change_adapters(self, weights: Weights) -> None:
        """Exchange the adapters whose files have changed; after sleep all, since it is untested
        whether they survive it."""
        from vllm.lora.request import LoRARequest

        assert weights.folder is not None
        for name, part in (self._settings.adapters or {"": ""}).items():
            folder = weights.folder / part
            digest, before = _digest(folder), self._adapters.get(name)
            if before is not None and before[0] == digest and not self._asleep:
                continue
            # New ones for each: vLLM caches adapters by number, and prefixes by name and path.
            request = LoRARequest(
                lora_name=f"{weights.label}/{part}",
                lora_int_id=1 + next(self._numbers),
                lora_path=str(folder),
            )
            if before is not None:
                del self._adapters[name]
                await self._engine.remove_lora(before[1].lora_int_id)
            await self._engine.add_lora(request)
            self._adapters[name] = digest, request

    def _adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter of a request; None for the model without one."""
        found = self._adapters.get(name or "")
        if found is None and name is not None:
            raise EngineError(f"there is no adapter {name!r}")
        return None if found is None else found[1]

    async def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        label: str,
        adapter: str | None = None,
    ) -> AsyncGenerator[SampledTokens, None]:
        """See `TokenServer.stream`."""
        from vllm.inputs import TokensPrompt

        if label != self._label:
            raise EngineError(
                f"a request wants the weights {label}, but vLLM has {self._label or 'none loaded'}"
            )
        self._running += 1
        try:
            with self._named("generating"):
                longest = self._longest
                outputs = self._engine.generate(
                    TokensPrompt(prompt_token_ids=list(prompt_ids)),
                    vllm_sampling(sampling, self._settings.end_ids, longest),
                    f"tuner-{next(self._numbers)}",
                    lora_request=self._adapter(adapter),
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        yield sampled(output, sampling, longest)
        finally:
            self._running -= 1

    def close(self) -> None:
        self._engine.shutdown()


def _digest(adapter: Path) -> bytes:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return hashlib.sha256(b"".join((adapter / name).read_bytes() for name in names)).digest()


def _start(settings: VllmSettings, weights: Weights) -> AsyncLLM:
    """Start vLLM's processes; blocks until the model is loaded."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise MissingDependencyError(
            f"vLLM cannot be imported ({error}): {pip_install('vllm')}, or set "
            "explorer.rollout_model.engine_type to transformers"
        ) from error
    if settings.drafts and not HAS_TRITON:
        # The kernel for CPUs that hands temperature, top_k and top_p to drafted tokens writes into
        # a copy (0.32.0): a wrong draft is followed by tokens that the model never samples.
        raise EngineError(
            "explorer.rollout_model.extra_engine_args.speculative_config is set, but vLLM without "
            "Triton, as on a CPU, then samples from a wrong distribution: remove it"
        )
    model = settings.model or str(weights.folder)
    arguments: dict[str, Any] = {
        "model": model,
        "tokenizer": settings.tokenizer or model,
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_slots,
        "max_logprobs": 128,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # not the sampling settings of the model's folder
        "structured_outputs_config": {"backend": "guidance"},
        "worker_extension_cls": "tuner.engines.vllm.worker.WeightsExtension",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "disable_log_stats": True,
        "enable_sleep_mode": settings.sleeps,
    }
    if settings.transfer is not None:
        arguments["weight_transfer_config"] = {"backend": settings.transfer}
    if current_platform.is_cpu():
        arguments["block_size"] = 32  # the minimum there; prefixes are reused in whole blocks
        # If a step had no room for all of a prompt it would compute a part and rewind the request's
        # random stream, which CPU generators cannot do: its processes would die.
        arguments["enable_chunked_prefill"] = False
    arguments |= settings.extra
    if settings.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.lora_rank is not None:
        rank = next(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        slots = max(1, len(settings.adapters))  # all of them in one batch
        if settings.adapters and current_platform.is_cpu():
            # There 0.32 computes tokens without an adapter with the last slot, so it stays empty.
            slots += 1
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": slots}
    try:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except Exception as error:
        raise EngineLostError(
            f"vLLM does not start with {weights.folder}: {type(error).__name__}: {error}"
        ) from error
