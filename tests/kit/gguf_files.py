"""Tiny Llama models as GGUF files, and packages that ship them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 32, 64, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("h", "e")]
TOKENS = [*SPECIAL, *LETTERS, *("".join(merge) for merge in MERGES)]
END = 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)

Tensors = dict[str, np.ndarray]


def weights(seed: int = 0) -> Tensors:
    """Random weights by their GGUF names; the output is tied to the embeddings."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    found = {"token_embd.weight": matrix(len(TOKENS), HIDDEN)}
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, shape in shapes.items():
            found[f"blk.{layer}.{name}.weight"] = matrix(*shape)
    found["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    return found


def write(
    path: Path,
    *,
    tensors: Tensors | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A model as SmolLM2's are written: byte-level BPE, padding and end are one token.

    Args:
        kind: How matrices are stored.
        more: Adds what else is in the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    control = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control[token not in SPECIAL] for token in TOKENS])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(END)
    writer.add_chat_template(TEMPLATE)
    more(writer)
    for name, tensor in (weights() if tensors is None else tensors).items():
        own = kind if tensor.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def install(site: Path, name: str, files: Iterable[str]) -> None:
    """The metadata of an installed package; its files are there already, or missing."""
    module = name.replace("-", "_")
    info = site / f"{module}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    package = site / module
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("raise AssertionError('it is imported')\n")
    listed = [f"{module}/__init__.py", f"{info.name}/METADATA", f"{info.name}/RECORD", *files]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in listed))
