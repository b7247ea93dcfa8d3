"""How a model's log-probs are computed: on the token tree of the rows, on packed or on padded rows.

Which of these is exact for a model, and whether its layers are compiled, is determined once before
training (`exact_forward`). Here rows are cut into micro-batches that fit the device, and each goes
through the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.config.schema import Checkpointing, Layout, LayoutSetting
from tuner.engines.base import SamplingParams
from tuner.engines.grammar import Grammars
from tuner.engines.transformers.model_shape import layer_windows, length_limit, probe_length
from tuner.engines.transformers.passes import causal_model
from tuner.engines.transformers.threads import return_memory
from tuner.engines.transformers.vision import vision_of
from tuner.errors import ConfigError, TrainingError
from tuner.training.batch import Row
from tuner.training.forward.head import TokenLogprobs, body
from tuner.training.forward.kernels import layers_of, prepared_layers
from tuner.training.forward.rows import (
    completion_logprobs,
    completion_states,
    pack_tokens,
    packed_logprobs,
    packed_states,
    packs,
    padded_cuts,
)
from tuner.training.forward.tree_pass import (
    PassCost,
    causal_pairs,
    cheapest_cuts,
    tree_cuts,
    tree_logprobs,
    tree_states,
)
from tuner.training.forward.varlen import DEVICES, DTYPES, RunsChoice
from tuner.training.memory import Activations, tokens_of_pass

T = TypeVar("T")
_log = logging.getLogger(__name__)

_FEWEST = 256
"""Smaller micro-batches than this hardly take less memory."""
_SURE = 0.9
"""Share of free memory that can be allocated in blocks of the requested size."""
_LARGE = 1 << 28
"""Bytes of weights from which returning freed memory to the system pays off."""


class HasRows(Protocol):
    """Rows of a step, from rollouts or from recorded data."""

    @property
    def rows(self) -> tuple[Row, ...]: ...


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU, including memory that PyTorch holds and does not use; None for other
    devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


HEAP_BLOCK = 32 << 20
"""Bytes of the largest block that glibc keeps when it is freed."""


def memory_return(model: nn.Module) -> Callable[[], None] | None:
    """`return_memory` for a large model on the CPU, or one that reads images; else None.

    Generation and micro-batches of other lengths leave freed memory in fragments, and so do a
    layer's temporary values between those that are kept for the backward pass: without this each
    layer would add to the peak of the process.
    """
    weights = list(model.parameters())
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    large = size >= _LARGE or vision_of(model) is not None
    return return_memory if large and weights[0].device.type == "cpu" else None


class Room:
    """Number of tokens that fit a device, as far as known."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._used = 0
        self._warned = False

    def of(self, tokens: int) -> int:
        """At most `tokens` tokens of a micro-batch."""
        self._used = tokens if self._most is None else min(tokens, self._most)
        return self._used

    def lacks(self, needed: int, tokens: int, device: torch.device) -> bool:
        """Whether a GPU has less memory than a pass over `tokens` tokens needs; warns once."""
        free = free_bytes(device)
        if free is None or needed <= free * _SURE:
            return False
        if not self._warned:
            _log.warning(
                "a pass over %d tokens would keep %.2f GiB for its backward pass, and %.2f are "
                "free: layers keep only their inputs and are recomputed, with the same gradient "
                "(tuner.activation_checkpointing: auto); a smaller "
                "trainer.max_token_len_per_gpu takes less time",
                tokens,
                needed / 2**30,
                free / 2**30,
            )
        self._warned = True
        return True

    def fitting(self, work: Callable[[], T]) -> T:
        """The result of `work`; if it runs out of memory it is repeated with micro-batches of half
        the size, which does not change the gradient.

        Raises:
            TrainingError: Small micro-batches do not fit either.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                said = str(error).split(". ")[0]
            # Outside the handler, which keeps the computed tensors alive.
            if self._used // 2 < _FEWEST:
                raise TrainingError(
                    f"there is no room for {self._used} tokens ({said}): set "
                    "tuner.activation_checkpointing, trainer.optimizer_offload or tuner.dtype: "
                    "bfloat16, or use a smaller model (docs/training.md)"
                )
            self._most = self._used // 2
            _log.warning(
                "there is no room for micro-batches of %d tokens (%s): from now on they have %d, "
                "with the same gradient; set trainer.max_token_len_per_gpu: %d to start with that",
                self._used,
                said,
                self._most,
                self._most,
            )
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Forward:
    """Log-probs of rows, and how rows are cut into micro-batches.

    Attributes:
        layout: The layout of rows.
        grammars: For replaying calls that were sampled with a grammar.
        windows: For a tree: the window of each kind of layer.
        runs: For which trees attention takes the two calls of `varlen`.
        cost: Cost of one pass.
        pack_tokens: Maximum length of a pack, if attention limits it.
        in_parts: Whether the logits of padded rows are computed in parts.
        checkpointing: Whether a pass with a gradient keeps only the inputs of the layers; `auto`:
            if a GPU lacks memory for more.
        compiled: Whether layers and log-probs are compiled.
        limit: Maximum length of a row that is computed exactly, and why; None for any.
        room: Number of tokens that fit.
        others: Other exact layouts, computed instead where they cost less.
    """

    layout: Layout
    grammars: Grammars | None = None
    windows: dict[str, int | None] | None = None
    runs: RunsChoice = "never"
    cost: PassCost | None = None
    pack_tokens: int | None = None
    in_parts: bool = False
    checkpointing: Checkpointing = False
    compiled: bool = False
    limit: tuple[int, str] | None = None
    room: Room = field(default_factory=Room)
    others: tuple[Forward, ...] = ()

    def planned(self, rows: Sequence[Row], max_tokens: int) -> tuple[Forward, list[list[int]]]:
        """The layout that costs least for these rows, and their `micro_batches` in it."""
        if not self.others:
            return self, self.micro_batches(rows, max_tokens)
        plans = [(one, *one._plan(rows, max_tokens)) for one in (self, *self.others)]
        chosen, _, cuts = min(plans, key=lambda plan: plan[1])
        return chosen, cuts

    def _plan(self, rows: Sequence[Row], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Cost of the micro-batches of rows, and these."""
        assert self.cost is not None
        if self.layout == "tree":
            return cheapest_cuts(rows, self.room.of(max_tokens), self.cost)
        cuts = self.micro_batches(rows, max_tokens)
        total = 0.0
        for cut in cuts:
            lengths = [len(rows[i]) for i in cut]
            if self.layout == "padded":
                lengths = [max(lengths)] * len(cut)
            total += self.cost(sum(lengths), sum(map(causal_pairs, lengths)))
        return total, cuts

    def micro_batches(self, rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
        """Cut row indices into micro-batches of at most `max_tokens` tokens of a tree, of packed
        or of padded rows. A longer row is a micro-batch of its own."""
        max_tokens = self.room.of(max_tokens)
        if self.layout == "tree" and self.cost is not None:
            return tree_cuts(rows, max_tokens, self.cost)
        if self.layout == "packed":
            return packs(rows, min(max_tokens, self.pack_tokens or max_tokens))
        return padded_cuts(rows, max_tokens)

    def logprobs(
        self, model: nn.Module, rows: Sequence[Row], *, with_entropy: bool
    ) -> TokenLogprobs:
        """Log-probs of every completion token of `rows`, in row order.

        Args:
            model: The model this was made for, or another of its architecture (the reference).
            with_entropy: Keep the graph of the entropy (otherwise it is detached, for metrics
                only).

        Raises:
            TrainingError: A row has a grammar, and there are no `grammars` to replay it with; or a
                row is longer than the model supports exactly (`length_limit`).
            GrammarError: A row's completion does not follow its grammar.
        """
        self._check_lengths(rows)
        settings: Any = {"with_entropy": with_entropy, "grammars": self.grammars}
        settings["compiled"] = self.compiled
        with self._prepared(model, rows):
            if self.layout == "tree" and self.windows is not None:
                return tree_logprobs(model, rows, windows=self.windows, runs=self.runs, **settings)
            if self.layout == "packed":
                return packed_logprobs(model, rows, **settings)
            return completion_logprobs(model, rows, in_parts=self.in_parts, **settings)

    def states(self, model: nn.Module, rows: Sequence[Row]) -> Tensor:
        """Last hidden states before every completion token of `rows`, in row order, shape [T, D].

        Args:
            model: The model this was made for, without its output embedding.

        Raises:
            TrainingError: A row is longer than the model supports exactly.
        """
        self._check_lengths(rows)
        with self._prepared(model, rows):
            if self.layout == "tree" and self.windows is not None:
                return tree_states(
                    model, rows, windows=self.windows, runs=self.runs, compiled=self.compiled
                )
            if self.layout == "packed":
                return packed_states(model, rows)
            return completion_states(model, rows)

    def _check_lengths(self, rows: Sequence[Row]) -> None:
        longest = max(rows, key=len)
        if self.limit is not None and len(longest) > self.limit[0]:
            raise TrainingError(
                f"call {longest.call_id!r} has {len(longest)} tokens, but {self.limit[1]}: "
                f"set model.max_model_len (max_model_len of the engine) to {self.limit[0]} or "
                "less, and drop longer calls"
            )

    def _prepared(self, model: nn.Module, rows: Sequence[Row]) -> AbstractContextManager[None]:
        graded = torch.is_grad_enabled()
        checkpointed = graded and self._checkpoints(model, rows)
        between = memory_return(model) if graded else None
        if not (checkpointed or self.compiled or between):
            return nullcontext()
        return prepared_layers(
            model, checkpointed=checkpointed, compiled=self.compiled, between=between
        )

    def _checkpoints(self, model: nn.Module, rows: Sequence[Row]) -> bool:
        device, causal = next(model.parameters()).device, causal_model(model)
        if self.checkpointing != "auto":
            return self.checkpointing
        if free_bytes(device) is None or not isinstance(causal, PreTrainedModel):
            return False
        kept = Activations.of(causal, layout=self.layout, compiled=self.compiled)
        tokens = tokens_of_pass(rows, self.layout)
        needed = kept.peak(tokens, checkpointing=False, gradients=0, alone=True)
        return self.room.lacks(needed, tokens, device)

    def all_logprobs(
        self, model: nn.Module, rows: Sequence[Row], max_tokens: int
    ) -> tuple[Tensor, ...]:
        """Log-probs `by_row`."""
        return self.by_row(
            rows,
            max_tokens,
            lambda forward, part: forward.logprobs(model, part, with_entropy=False).logp_T,
        )

    def by_row(
        self, rows: Sequence[Row], max_tokens: int, compute: Callable[[Forward, list[Row]], Tensor]
    ) -> tuple[Tensor, ...]:
        """Results of `compute` for completion tokens, in micro-batches and without a gradient.

        Returns:
            One tensor for each row, of shape [T_row].
        """
        return self.room.fitting(partial(self._by_row, rows, max_tokens, compute))

    @torch.no_grad()
    def _by_row(
        self, rows: Sequence[Row], max_tokens: int, compute: Callable[[Forward, list[Row]], Tensor]
    ) -> tuple[Tensor, ...]:
        result: dict[int, Tensor] = {}
        forward, cuts = self.planned(rows, max_tokens)
        for indices in cuts:
            part = [rows[i] for i in indices]
            pieces = compute(forward, part).split([len(row.completion_ids) for row in part])
            result.update(zip(indices, pieces, strict=True))
        return tuple(result[i] for i in range(len(rows)))


def whole_calls(cuts: Sequence[Sequence[int]], call_N: Sequence[int]) -> list[list[int]]:
    """Merge micro-batches so that the rows of a call stay together; the rows of a divided call
    become a micro-batch of their own.

    Args:
        cuts: Indices of rows.
        call_N: The call of each row.
    """
    found: dict[int, set[int]] = defaultdict(set)
    for place, indices in enumerate(cuts):
        for i in indices:
            found[call_N[i]].add(place)
    divided: dict[int, list[int]] = {call: [] for call, at in found.items() if len(at) > 1}
    whole = [[i for i in indices if call_N[i] not in divided] for indices in cuts]
    for i, call in enumerate(call_N):
        if call in divided:
            divided[call].append(i)
    return [indices for indices in [*whole, *divided.values()] if indices]


# Finding the layout in which a model's log-probs are exact, by comparison before training.
#
# Some models treat positions, masks or logits in their own way (ALiBi, for example) or carry a
# state from one packed row to the next without saying so in their configuration: each layout of a
# few short rows and a long one is compared with one row per pass.


_PROBE = ((3, 10, 17), (24, 31)), ((3, 10, 17), (24, 38, 45)), ((3, 10), (52, 3)), ((24,), (10,))


def exact_forward(
    model: nn.Module,
    grammars: Grammars | None,
    *,
    layout: LayoutSetting = "tree",
    checkpointing: Checkpointing = False,
    compiled: bool | None = None,
) -> Forward:
    """The first of `layout`, token tree, packed rows and padded rows that is exact for `model`;
    logs which one and why. With `auto` it is one of those that are exact, the cheapest for each
    batch.

    Each is compared with one row per call on a few tokens.

    Args:
        checkpointing: Activation checkpointing; `auto`: if a GPU lacks memory without it.
        compiled: Compile if that gives the same results; None: on a GPU.

    Raises:
        ConfigError: `checkpointing`, and the model has no layers for it; or the model is not
            causal, or not exact on padded rows either.
    """
    if checkpointing is True and not any(layers_of(model)):
        raise ConfigError(
            f"tuner.activation_checkpointing is true, but {type(model).__name__} has no layers "
            "that transformers marks for checkpointing; set it to false"
        )
    found = _exact(model, grammars, layout, checkpointing)
    if compiled is None:
        compiled = next(model.parameters()).is_cuda
    return _compiled_if_exact(found, model) if compiled else found


def _exact(
    model: nn.Module,
    grammars: Grammars | None,
    layout: LayoutSetting,
    checkpointing: Checkpointing,
) -> Forward:
    causal = causal_model(model)
    limit = length_limit(causal.config) if isinstance(causal, PreTrainedModel) else None
    common: Any = {
        "grammars": grammars,
        "checkpointing": checkpointing,
        "limit": limit,
        "room": Room(),
    }
    not_tree = None
    if layout in ("auto", "tree"):
        windows = _tree_windows(model)
        if not isinstance(windows, str):
            cost = PassCost.of(causal, dense=causal.config._attn_implementation != "sdpa")
            runs = _runs_choice(model, windows)
            tree = Forward("tree", windows=windows, runs=runs, cost=cost, **common)
            return _with_others(tree, model, common) if layout == "auto" else tree
        not_tree = f"the model cannot be computed on a token tree: {windows}"
    if layout != "padded":
        not_packed = _inexact(model, partial(packed_logprobs, model, with_entropy=False))
        if not_packed is None:
            if not_tree is not None:
                _log.warning(
                    "training computes packed rows, one per call, instead of each distinct "
                    "token once, because %s",
                    not_tree,
                )
            packed = Forward("packed", pack_tokens=pack_tokens(causal), **common)
            return _with_others(packed, model, common) if layout == "auto" else packed
        not_packed = f"packed rows would not be exact: {not_packed}"
        _log.warning(
            "training computes padded rows, one per call, because %s",
            "; and ".join(filter(None, (not_tree, not_packed))),
        )
    not_in_parts = _not_in_parts(model)
    if not_in_parts is not None:
        inexact = _inexact(model, partial(completion_logprobs, model, with_entropy=False))
        if inexact is not None:
            raise ConfigError(
                f"{type(causal).__name__} cannot be trained: padded rows would not be exact "
                f"either: {inexact}"
            )
        _log.warning(
            "training computes the logits of all tokens of a micro-batch at once, because "
            "computing them in parts would not be exact: %s",
            not_in_parts,
        )
    return Forward("padded", in_parts=not_in_parts is None, **common)


def _not_in_parts(model: nn.Module) -> str | None:
    """Why the logits of padded rows cannot be computed in parts; None if they can."""
    padded = partial(completion_logprobs, model, with_entropy=False, in_parts=True)
    return _inexact(model, padded)


_RUN = 0.15
"""Operations of attention over one more run of a tree, as a share of those of a pass, on a CPU."""


def _with_others(first: Forward, model: nn.Module, common: Any) -> Forward:
    """The same with the other exact layouts and the measured costs of all."""
    causal = causal_model(model)
    if not isinstance(causal, PreTrainedModel):
        return first
    on_cpu = causal.device.type == "cpu"
    fixed = pass_tokens(causal)
    cost = replace(PassCost.of(causal), fixed=fixed)
    attention = causal.config._attn_implementation
    others = []
    # On a GPU packs with a mask take longer than either of the others.
    masked = attention in ("sdpa", "eager")
    if first.layout == "packed" or (
        (on_cpu or not masked)
        and _inexact(model, partial(packed_logprobs, model, with_entropy=False)) is None
    ):
        packed_cost, longest = replace(cost, dense=masked), pack_tokens(causal, fixed)
        others.append(Forward("packed", pack_tokens=longest, cost=packed_cost, **common))
    if _not_in_parts(model) is None:
        padded_cost = replace(cost, dense=attention == "eager")
        others.append(Forward("padded", in_parts=True, cost=padded_cost, **common))
    if first.layout == "packed":
        return replace(others[0], others=tuple(others[1:]))
    assert first.cost is not None
    of_tree = replace(first.cost, fixed=fixed, run=_RUN * fixed if on_cpu else 0.0)
    return replace(first, cost=of_tree, others=tuple(others))


@torch.no_grad()
def pass_tokens(model: PreTrainedModel) -> float:
    """Number of tokens over which the layers take as long as a pass over few tokens takes in any
    case, a power of two: measured on a GPU, and on a CPU by the size of a layer, so that a run
    chooses the same layouts whatever else the machine does."""
    device = model.device
    if device.type == "cpu":
        found = _CPU_FIXED / max(1, _layer_weights(model))
        return float(2 ** round(math.log2(min(max(found, _LEAST_ON_CPU), _MOST_ON_CPU))))
    few, many = 1, 512  # rows of 8 tokens

    def seconds(rows: int) -> float:
        ids = torch.zeros((rows, 8), dtype=torch.long, device=device)
        taken: list[float] = []
        # The first pass allocates memory. A pass that takes long varies less.
        while len(taken) < 2 or (len(taken) < 4 and sum(taken) < _MEASURED):
            started = time.perf_counter()
            body(model)(input_ids=ids, use_cache=False)
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
        return min(taken)

    base = seconds(few)
    each = (seconds(many) - base) / (8 * (many - few))
    found = base / each - 8 * few if each > 0 else _MOST_FIXED
    return float(2 ** round(math.log2(min(max(found, _LEAST_FIXED), _MOST_FIXED))))


def _layer_weights(model: PreTrainedModel) -> int:
    """Mean number of weights in the matrices of a layer."""
    config = model.config.get_text_config(decoder=True)
    apart = (model.get_input_embeddings(), model.get_output_embeddings())
    without = {id(one.weight) for one in apart if one is not None}
    matrices = (p.numel() for p in body(model).parameters() if p.ndim > 1 and id(p) not in without)
    return int(sum(matrices) / config.num_hidden_layers)


_CPU_FIXED = 2e7
"""Weights of a layer times the number of tokens that take as long as its operations do in any case.
Measured with two cores: 64 to 128 tokens with layers of 0.1 to 3.5 million weights, 512 with layers
of 3,000 to 9,000."""
_LEAST_ON_CPU, _MOST_ON_CPU = 64.0, 512.0
_MEASURED = 0.1
"""Seconds after which a pass is not repeated for a measurement."""
_LEAST_FIXED, _MOST_FIXED = 8.0, 65_536.0


def _compiled_if_exact(plain: Forward, model: nn.Module) -> Forward:
    """The same with compiled layers, if log-probs and a gradient stay the same."""
    others = tuple(_compiled_if_exact(other, model) for other in plain.others)
    if not all(other.compiled for other in others):
        return replace(plain, others=tuple(replace(o, compiled=False) for o in others))
    found = replace(plain, compiled=True, others=others)
    allowed = _allowed(next(model.parameters()).dtype)
    try:
        wanted = _probed(plain, model)
        # The trees of the probe are so small that only one way would be compiled.
        for runs in ("never", "always") if found.runs == "cheaper" else ("never",):
            got = _probed(replace(found, runs=runs), model)
            for one, other in zip(got, wanted, strict=True):
                difference = float((one - other).norm() / other.norm().clamp(min=1e-30))
                if not difference <= allowed:
                    raise ArithmeticError(f"results would differ by {difference:.2g}")
    except Exception as error:  # compiling a model's own code may fail in any way
        if plain.runs != "never":  # FlexAttention may be compiled where flash attention is not
            _log.warning("compiled layers do not use flash attention: %s", error)
            return _compiled_if_exact(replace(plain, runs="never"), model)
        _log.warning(
            "training takes more time and memory, because the layers cannot be compiled "
            "(%s: %s); tuner.compile: false turns this warning off",
            type(error).__name__,
            error,
        )
        return plain
    return found


def _tree_windows(model: nn.Module) -> dict[str, int | None] | str:
    """The window of each kind of layer, or why the model cannot be computed on a token tree."""
    causal = causal_model(model)
    if not isinstance(causal, PreTrainedModel):
        return f"{type(causal).__name__} is not a transformers model"
    windows = layer_windows(causal)
    if isinstance(windows, str):
        return windows
    attention = causal.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return (
            f"attn_implementation is {attention!r}, which takes no mask; load the model with "
            "attn_implementation='sdpa'"
        )
    tree = partial(tree_logprobs, model, windows=windows, with_entropy=False)
    return _inexact(model, tree) or windows


def _runs_choice(model: nn.Module, windows: dict[str, int | None]) -> RunsChoice:
    """Whether attention over a tree may take the two calls of `varlen`: on a GPU in half precision,
    if they are exact."""
    causal = causal_model(model)
    assert isinstance(causal, PreTrainedModel)
    if causal.device.type not in DEVICES or causal.dtype not in DTYPES:
        return "never"
    if causal.config._attn_implementation != "sdpa":
        return "never"
    calls = partial(tree_logprobs, model, windows=windows, with_entropy=False, runs="always")
    inexact = _inexact(model, calls)
    if inexact is not None:
        _log.warning("attention over a token tree does not use flash attention: %s", inexact)
        return "never"
    return "cheaper"


def _probe_rows(model: nn.Module) -> list[Row]:
    """A few short rows, and one that is longer than the layers' windows."""
    causal = causal_model(model)
    length, known = 6, 53
    if isinstance(causal, PreTrainedModel):
        length = probe_length(causal.config)
        known = causal.config.get_text_config(decoder=True).vocab_size
    long = tuple((3 + 7 * i) % 53 for i in range(max(5, length)))
    rows = []
    for i, parts in enumerate([*_PROBE, (long[:-4], long[-4:])]):
        prompt, completion = (tuple(id_ % known for id_ in part) for part in parts)
        recorded = (0.0,) * len(completion)
        vision = vision_of(causal)
        if vision is not None and i in (0, 1, 4):  # the first two share it
            prompt = prompt[:2] + tuple(vision.probe_ids()) + prompt[2:]
        rows.append(Row(str(i), 0, prompt, completion, recorded, SamplingParams(max_tokens=2)))
    return rows


def _allowed(dtype: torch.dtype) -> float:
    """Tolerance between two ways of computing the same."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.25


def _probed(forward: Forward, model: nn.Module) -> list[Tensor]:
    """Log-probs of a few rows, and the gradient of some weights if the model is trained."""
    logp_T = forward.logprobs(model, _probe_rows(model), with_entropy=False).logp_T
    trained = [p for p in model.parameters() if p.requires_grad][:1]
    gradients = torch.autograd.grad(logp_T.sum(), trained) if trained else ()
    return [logp_T.detach(), *gradients]


@torch.no_grad()
def _inexact(model: nn.Module, layout: Callable[[list[Row]], TokenLogprobs]) -> str | None:
    """Compare a layout of the probe's rows with one row per pass; None if they agree, else the
    difference."""
    causal, rows = causal_model(model), _probe_rows(model)
    alone = [completion_logprobs(model, [row], with_entropy=False).logp_T for row in rows]
    allowed = _allowed(next(model.parameters()).dtype)
    # The first two rows have a common prefix.
    if abs(float(alone[0][0] - alone[1][0])) > allowed:
        raise ConfigError(
            f"{type(causal).__name__} is not causal: its output for a token depends on later "
            "tokens, so it has no log-probs of sampled text. If it is an encoder that can be a "
            "decoder, set is_decoder to true in its config.json"
        )
    try:
        found = layout(rows).logp_T
    except Exception as error:  # a model's own code may do anything with masks and positions
        return f"its forward pass does not support them ({type(error).__name__}: {error})"
    difference = float((found - torch.cat(alone)).abs().max())
    # Written so that NaN counts as a difference.
    if difference <= allowed:
        return None
    return f"its log-probs would differ by {difference:.2g}"
