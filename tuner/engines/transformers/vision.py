"""How a model reads images: what its processor makes of images, and its decoder's inputs.

The decoder of a vision model is computed with embeddings in place of ids. Only their look-up
differs from a language model's: an id of an image's token (`tuner.engines.images`) stands for a
row of the vision tower's output, any other for a row of the embedding matrix.

    ids          7 8  x  x+1  x+2  x+3  9
    inputs       E7 E8 F0 F1  F2   F3   E9       F: the image's features
    positions    0 1  2,2 2,3 3,2  3,3  4        of height and width, in models with M-RoPE

With M-RoPE an image takes as many positions as its longer side has tokens, so what follows it is
shifted. The shift of a token depends only on what is before it, in a row or on a path of a tree.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tuner.engines.images import ALBUM, IMAGE_IDS, ImageError, ImageLimits, Ints
from tuner.engines.transformers.threads import return_memory
from tuner.errors import ConfigError, MissingDependencyError, pip_install

KEPT = 1 << 28
"""Bytes of features, and of pixels, that are kept for the next pass."""
_LARGE = 1 << 22
"""Bytes of an image's pixels from which returning freed memory to the system pays off."""
# Outputs of image processors that only their processor reads.
_PROMPT_ONLY = ("rows", "cols", "num_patches", "num_crops")


@dataclass(frozen=True)
class _Read:
    """An image as a model's processor reads it.

    Attributes:
        text: What stands for it in a prompt's text.
        tokens: Number of placeholders in it.
        place: Position of each token after that of the first, [3, tokens], and how many positions
            they take together; None without M-RoPE.
    """

    text: str
    tokens: int
    place: tuple[Ints, int] | None


class Vision:
    """A model's processor of images, and the features of those in use.

    Args:
        processor: transformers' processor of the model's family, with its image processor.
        config: The model's configuration.
        files: The files that the processor was loaded from, by their names.

    Attributes:
        image_token, image_token_id: The placeholder.
        trained: Whether the modules that make features are trained.
    """

    def __init__(
        self, processor: Any, config: Any, files: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        self.files = files
        self.processor = processor
        self.image_token: str = processor.image_token
        self.image_token_id = int(processor.image_token_id)
        self.trained = False
        self._merge = int(getattr(config.vision_config, "spatial_merge_size", 1))
        rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
        self._rotates_in_3d = "mrope_section" in rope
        self._read: dict[str, _Read] = {}
        self._pixels: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._features: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self._weights: object = None
        self._lock = threading.Lock()  # prompts are made in several threads

    def __deepcopy__(self, memo: dict[int, Any]) -> Vision:
        """For a copy of the model, whose features are other ones."""
        other = copy.copy(self)
        other._features, other._weights = OrderedDict(), None
        return other

    # Images

    def read(self, sha256: str) -> _Read:
        """An image of the album as the model's processor reads it.

        Raises:
            ImageError: The processor cannot use it.
        """
        if sha256 not in self._read:
            self.pixels(sha256)
        return self._read[sha256]

    def pixels(self, sha256: str) -> dict[str, Any]:
        """The inputs of the vision tower for an image.

        Raises:
            ImageError: The processor cannot use it.
        """
        known = self._pixels.get(sha256)
        if known is None:
            self._read[sha256], known = self.process(sha256)
            if sum(map(tensor_bytes, known.values())) >= _LARGE:
                return_memory()  # of the processor's arrays, in this thread
            with self._lock:
                self._pixels[sha256] = known
                _shorten(self._pixels, lambda one: one.values())
        return known

    def process(self, sha256: str) -> tuple[_Read, dict[str, Any]]:
        """`read` and `pixels` of an image, made now."""
        image = ALBUM.open(sha256)
        try:
            settings = self.processor._merge_kwargs(
                tokenizer_init_kwargs=self.processor.tokenizer.init_kwargs, return_tensors="pt"
            )["images_kwargs"]
            pixels, (text,) = self.processor._process_images([image], **settings)
        except Exception as error:  # a processor may refuse a size in any way
            raise ImageError(
                f"of {image.width} x {image.height} pixels cannot be read by the model's "
                f"processor ({type(error).__name__}: {error})"
            ) from error
        tokens = text.count(self.image_token)
        grid = pixels.get("image_grid_thw")
        place = None
        if self._rotates_in_3d and grid is not None:
            time, height, width = grid[0].tolist()
            sides = (time, height // self._merge, width // self._merge)
            place = np.stack([axis.ravel() for axis in np.indices(sides)]), max(sides[1:])
        return _Read(text, tokens, place), dict(pixels)

    def ids(self, sha256: str) -> range:
        """The ids of the image's tokens."""
        return ALBUM.numbered(sha256, self.read(sha256).tokens)

    # Inputs of the decoder

    def inputs(
        self, model: Any, ids: Tensor, positions: Tensor | None, shift: Tensor | None
    ) -> dict[str, Any]:
        """Arguments of the decoder for ids [B, S] at these positions of their sequences.

        Args:
            model: The model that this vision belongs to.
            positions: [B, S]; None: 0, 1, 2, ... in each row.
            shift: See `shifts`, [B, S]; None if no image precedes any of the tokens.
        """
        here = ids.cpu().numpy()
        seen = here >= IMAGE_IDS
        embedding = model.get_input_embeddings()
        if not seen.any():
            found: dict[str, Any] = {"inputs_embeds": embedding(ids)}
        else:
            found = self._seen_inputs(model, embedding, ids, here, seen)
        if positions is not None or self._rotates_in_3d:
            found["position_ids"] = self._positions(here, seen, positions, shift, ids.device)
        return found

    def _seen_inputs(
        self, model: Any, embedding: nn.Module, ids: Tensor, here: Ints, seen: NDArray[np.bool_]
    ) -> dict[str, Any]:
        seen_BS = torch.from_numpy(seen).to(ids.device)
        embeds = embedding(ids.masked_fill(seen_BS, self.image_token_id))
        images = self._images(here, seen)
        features = self.features(model, [p.sha256 for p in images])
        starts = np.cumsum([0, *(p.tokens for p in images)])[:-1]
        row = np.empty(seen.sum(), dtype=np.int64)
        for image, start in zip(images, starts, strict=True):
            offset = here[seen] - image.first
            mine = (offset >= 0) & (offset < image.tokens)
            row[mine] = start + offset[mine]
        tables = [
            torch.cat([one[level] for one in features])[torch.from_numpy(row).to(ids.device)]
            for level in range(len(features[0]))
        ]
        main, *deeper = (table.to(embeds.dtype) for table in tables)
        found = {"inputs_embeds": embeds.masked_scatter(seen_BS[..., None], main)}
        if deeper:
            found |= {"visual_pos_masks": seen_BS, "deepstack_visual_embeds": deeper}
        return found

    def _positions(
        self,
        ids: Ints,
        seen: NDArray[np.bool_],
        positions: Tensor | None,
        shift: Tensor | None,
        device: torch.device,
    ) -> Tensor:
        """Positions [B, S], or [4, B, S] with M-RoPE: in the sequence, then of time, height and
        width."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=device).expand(ids.shape)
        if not self._rotates_in_3d:
            return positions
        moved = np.zeros((3, *ids.shape), dtype=np.int64)
        for image in self._images(ids, seen):
            offset = ids - image.first
            mine = (offset >= 0) & (offset < image.tokens)
            moved[:, mine] = self._place(image.sha256)[0][:, offset[mine]] - offset[mine]
        rotated = positions + torch.from_numpy(moved).to(device)
        if shift is not None:
            rotated = rotated + shift
        return torch.cat([positions[None], rotated])

    def _place(self, sha256: str) -> tuple[Ints, int]:
        place = self.read(sha256).place
        assert place is not None
        return place

    @staticmethod
    def _images(ids: Ints, seen: NDArray[np.bool_]) -> Sequence[Any]:
        found = {p.first: p for p in map(ALBUM.image_at, np.unique(ids[seen]).tolist())}
        # Gradients add up in this order, which must not depend on that of arrival.
        return sorted(found.values(), key=lambda one: one.sha256)

    def jumps(self, ids: Ints) -> Ints:
        """By how much each token shifts those after it: 0 but for the last ones of images."""
        found = np.zeros(ids.shape, dtype=np.int64)
        if self._rotates_in_3d and (seen := ids >= IMAGE_IDS).any():
            # Few tokens are not followed by the next one of their image.
            seen[..., :-1] &= ids[..., 1:] != ids[..., :-1] + 1
            for image in self._images(ids, seen):
                taken = self._place(image.sha256)[1]
                found[ids == image.first + image.tokens - 1] = taken - image.tokens
        return found

    def shifts(self, ids: Ints) -> Ints:
        """By how much images before each token shift it, for rows of ids [..., S]."""
        jumps = self.jumps(ids)
        shift: Ints = np.cumsum(jumps, axis=-1) - jumps
        return shift

    def tree_shifts(self, token: Ints, end: Ints) -> Ints:
        """`shifts` of the nodes of a tree in depth-first order, whose subtrees end at `end`."""
        jumps = self.jumps(token)
        changes = np.zeros(len(token) + 1, dtype=np.int64)
        at = np.flatnonzero(jumps)
        np.add.at(changes, at + 1, jumps[at])
        np.subtract.at(changes, end[at], jumps[at])
        shift: Ints = np.cumsum(changes)[:-1]
        return shift

    # Comparison with the model's own code

    def probe_ids(self) -> list[int]:
        """The ids of an image of noise."""
        return list(self.ids(ALBUM.add(_noise(), ImageLimits())))

    def check(self, model: Any) -> None:
        """Compare the decoder's inputs with the model's own forward pass over an image.

        Raises:
            ConfigError: They differ, or one of them fails.
        """
        ids = [1, 2, 3, *self.probe_ids(), 4, 5, 6]
        try:
            difference = self._difference(model, ids)
        except Exception as error:  # a model's own code may fail in any way
            raise ConfigError(
                f"{type(model).__name__} cannot be used with images: a forward pass fails "
                f"({type(error).__name__}: {error})"
            ) from error
        if not difference <= (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.25):
            raise ConfigError(
                f"{type(model).__name__} is not supported: it does not attend to images as to "
                f"text, token by token (logits differ by {difference:.2g} standard deviations)"
            )

    @torch.no_grad()
    def _difference(self, model: Any, ids: list[int]) -> float:
        here = np.array([ids])
        shift = torch.from_numpy(self.shifts(here)).to(model.device)
        given = self.inputs(model, torch.from_numpy(here).to(model.device), None, shift)
        states = decoder_of(model)(**given, use_cache=False).last_hidden_state
        got = model.get_output_embeddings()(states)
        wanted = self.own_logits(model, ids)
        return float((got - wanted).float().abs().max() / wanted.float().std())

    def own_logits(self, model: Any, ids: Sequence[int]) -> Tensor:
        """Logits [1, S, V] of the model's own forward pass over one sequence."""
        recorded, spans = ALBUM.recorded(ids, self.image_token_id)
        images = [self.pixels(span.sha256) for span in spans if not span.offset]
        given: dict[str, Any] = {}
        if images:
            # Some have a dimension for prompts before that for tiles.
            first = images[0]
            tiles = 1 if first["pixel_values"].ndim == 5 else 0
            for name in [name for name, value in first.items() if isinstance(value, Tensor)]:
                parts = [one[name] for one in images]
                given[name] = torch.cat(parts, dim=tiles).to(model.device)
        input_ids = torch.tensor([recorded], device=model.device)
        given["mm_token_type_ids"] = (input_ids == self.image_token_id).int()
        given["token_type_ids"] = given["mm_token_type_ids"]
        known = inspect.signature(type(model).forward).parameters
        given = {name: value for name, value in given.items() if name in known}
        logits: Tensor = model(input_ids=input_ids, use_cache=False, **given).logits
        return logits

    # Features

    def features(self, model: Any, images: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Rows [tokens, D] that stand for each image's tokens, and those that are added to the
        first layers, if the model has any."""
        if self.trained and torch.is_grad_enabled():
            return [self.compute(model, sha256) for sha256 in images]
        weights = self._version(model)
        if weights != self._weights:
            self._features.clear()
            self._weights = weights
        found = []
        for sha256 in images:
            if sha256 not in self._features:
                with torch.no_grad():
                    self._features[sha256] = self.compute(model, sha256)
            self._features.move_to_end(sha256)
            found.append(self._features[sha256])
        _shorten(self._features, lambda tables: tables)
        return found

    @staticmethod
    def _version(model: Any) -> object:
        """Equal as long as the features are the same."""
        adapted = (m for m in model.modules() if hasattr(m, "_disable_adapters"))
        switches = [(m._disable_adapters, str(m._active_adapter)) for m in adapted]
        parameters = vision_parameters(model)
        weights = [(id(p), p._version, p.data_ptr()) for p in parameters]
        # A fused optimizer changes values and no version.
        probe = [p.detach().flatten()[:4].tolist() for p in parameters if p.requires_grad]
        return switches, weights, str(probe)  # NaN is not equal to itself

    def compute(self, model: Any, sha256: str) -> tuple[Tensor, ...]:
        """An image's `features`, computed now."""
        read, get = self.read(sha256), model.model.get_image_features
        names = inspect.signature(inspect.unwrap(get)).parameters
        given = {
            name: value.to(model.device) if isinstance(value, Tensor) else value
            for name, value in self.pixels(sha256).items()
            if name in names and name not in _PROMPT_ONLY
        }
        output = get(**given, return_dict=True)
        tables = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        rows = []
        for table in tables:
            whole = torch.cat(list(table)) if isinstance(table, list | tuple) else table
            rows.append(whole.reshape(-1, whole.shape[-1]))
        if len(rows[0]) != read.tokens:
            raise ImageError(
                f"{sha256} has {len(rows[0])} features and {read.tokens} tokens: the model and its "
                "processor do not belong together"
            )
        return tuple(rows)


def _shorten(kept: OrderedDict[str, Any], tensors: Callable[[Any], Iterable[Any]]) -> None:
    """Drop the oldest entries whose tensors are too many bytes, but for the last one."""
    size = sum(tensor_bytes(t) for one in kept.values() for t in tensors(one))
    while size > KEPT and len(kept) > 1:
        _, dropped = kept.popitem(last=False)
        size -= sum(map(tensor_bytes, tensors(dropped)))


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor; 0 for anything else."""
    return int(getattr(value, "nbytes", 0))


def vision_of(model: Any) -> Vision | None:
    """The vision of a model; None if it reads text only."""
    return getattr(model, "vision", None)


def decoder_of(model: Any) -> nn.Module:
    """The part of a vision model which reads embeddings and positions."""
    decoder: nn.Module = model.get_decoder()
    return decoder


def decoder_inputs(
    model: Any, ids: Tensor, positions: Tensor | None, shift: Tensor | None = None
) -> dict[str, Any]:
    """Arguments of a language model, or of the decoder of a vision model, for ids [B, S].

    Args:
        positions: [B, S]; None: 0, 1, 2, ... in each row.
        shift: See `Vision.shifts`, [B, S].
    """
    vision = vision_of(model)
    if vision is not None:
        return vision.inputs(model, ids, positions, shift)
    return (
        {"input_ids": ids} if positions is None else {"input_ids": ids, "position_ids": positions}
    )


def decoder_name(model: Any) -> str:
    """The name of the decoder among the model's modules."""
    decoder = decoder_of(model)
    name: str = next(name for name, module in model.named_modules() if module is decoder)
    return name


def give_vision(model: Any, processor: tuple[Any, Mapping[str, bytes]]) -> None:
    """Let a model read images, and freeze its vision tower.

    Raises:
        ConfigError: What it computes for an image is not what its own code computes.
    """
    model.vision = Vision(processor[0], model.config, processor[1])
    for parameter in vision_parameters(model):
        parameter.requires_grad_(False)
    model.vision.check(model)


def train_vision(model: Any) -> None:
    """Train the vision tower, too."""
    model.vision.trained = True
    for parameter in vision_parameters(model):
        parameter.requires_grad_(True)


def vision_parameters(model: Any) -> list[nn.Parameter]:
    """The parameters that make features of images: all but those of decoder and output."""
    speaking = {id(p) for p in decoder_of(model).parameters()}
    speaking |= {id(p) for p in model.get_output_embeddings().parameters()}
    return [p for p in model.parameters() if id(p) not in speaking]


def _noise() -> bytes:
    """An image for comparisons, wider than high."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


REFUSED = {
    "llava_onevision": "their processor cuts an image into other tiles once another follows it, "
    "so the next request would not begin with the tokens of the one before",
    "gemma3": "they attend to an image's tokens in both directions, and prefixes are computed "
    "causally here",
}
_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def load_processor(folder: str, config: Any, tokenizer: Any) -> tuple[Any, Mapping[str, bytes]]:
    """The processor of a vision model, without what it needs for videos and sound; and the files
    that it was loaded from.

    transformers' `AutoProcessor` asks for torchvision, for videos; images need Pillow alone.

    Raises:
        ConfigError: transformers has no processor of images for the model.
        MissingDependencyError: It is too old.
    """
    import transformers
    from packaging.version import Version
    from transformers import AutoImageProcessor
    from transformers.models.auto import processing_auto
    from transformers.utils.hub import cached_file

    if (why := REFUSED.get(config.model_type)) is not None:
        raise ConfigError(
            f"models of type {config.model_type!r} are not supported with images: {why}"
        )
    if Version(transformers.__version__) < Version("5.23"):
        raise MissingDependencyError(
            f"images need transformers 5.23, and {transformers.__version__} is installed: "
            f"{pip_install('vision')}"
        )
    known: Any = processing_auto
    kind = config.model_type
    name = known.PROCESSOR_MAPPING_NAMES.get(kind)
    try:
        cls = known.processor_class_from_name(name) if name else None
    except ImportError as error:  # some need torchvision
        raise ConfigError(
            f"the processor of models of type {kind!r} cannot be loaded: {error}"
        ) from error
    if cls is None:
        raise ConfigError(f"transformers has no processor for models of type {kind!r}")
    try:
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        found = {
            name: cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
            for name in _FILES
        }
        files = {name: Path(file).read_bytes() for name, file in found.items() if file}
        named = inspect.signature(cls.__init__).parameters
        settings = json.loads(files.get("processor_config.json", b"{}"))
        given = {key: value for key, value in settings.items() if key in named}
        parts = ("image_processor", "video_processor", "tokenizer", "kwargs")
        return processor_of(
            cls, images, tokenizer, **{k: v for k, v in given.items() if k not in parts}
        ), files
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"the processor of the model {folder!r} cannot be loaded: {error}"
        ) from error


def processor_of(cls: Any, image_processor: Any, tokenizer: Any, **settings: Any) -> Any:
    """A processor of images and text alone."""
    # It refuses parts that are missing.
    alone = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
    video = (
        {"video_processor": None} if "video_processor" in inspect.signature(cls).parameters else {}
    )
    return alone(image_processor=image_processor, tokenizer=tokenizer, **video, **settings)
