"""Codecs of the quality harness, and its reading of model folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from quality_world import VOCABULARY, model_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fluxion_quality import SUITES, suite_named
from fluxion_quality.model import Model
from fluxion_sglang.commands import needle
from fluxion_sglang.commands.codec import SymbolicCodec, TokenizerCodec
from fluxion_sglang.scoring import model_files


def text_model(folder: Path, template: str | None = None, bos: str | None = "<s>") -> Path:
    """A folder with a byte-level tokenizer."""
    model_folder(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<user>": 2, "<bot>": 3} | {c: 4 + i for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    more = {"additional_special_tokens": ["<user>", "<bot>"], "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **({"bos_token": bos} if bos else {}), **more)
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def test_symbols_are_tokens(tmp_path: Path) -> None:
    codec = Model.read(model_folder(tmp_path)).codec()
    assert isinstance(codec, SymbolicCodec) and codec.symbolic and codec.positions == 4094
    ids = [needle.BOS, needle.ASK, needle.FIRST_KEY, needle.FIRST_KEY + 1]
    assert codec.chat("Q k0", "k1") == ids
    assert codec.chat("<bos> Q k0 k1") == ids
    assert codec.plain("Q k0 k1") == ids
    assert codec.encode("Q k0") == ids[1:3]
    assert codec.decode([*ids, needle.EOS]) == "Q k0 k1"
    with pytest.raises(ValueError, match="no symbol 'hello'"):
        codec.encode("hello")


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    codec = Model.read(text_model(tmp_path)).codec()
    assert isinstance(codec, TokenizerCodec) and not codec.symbolic and codec.positions == 4094
    assert codec.decode(codec.encode("Grüße, 你好 ")) == "Grüße, 你好 "
    assert codec.chat("hi", " A:") == [0, *codec.encode("hi A:")] == codec.plain("hi A:")
    assert codec.decode([0, *codec.encode("hi"), 1]) == "hi"


def test_a_tokenizer_without_bos(tmp_path: Path) -> None:
    codec = Model.read(text_model(tmp_path, bos=None)).codec()
    assert codec.chat("hi") == codec.encode("hi")


def test_a_chat_template_is_used_and_the_answer_goes_on_after_it(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}<user>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )
    codec = Model.read(text_model(tmp_path, template)).codec()
    assert codec.chat("hi", "A:") == [0, 2, *codec.encode("hi"), 3, *codec.encode("A:")]
    assert codec.plain("hi") == [0, *codec.encode("hi")]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        Model.read(folder).codec()


def digest(files: dict[str, bytes]) -> str:
    return hashlib.sha256(b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))).hexdigest()


def test_what_is_read_of_a_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "some-model")
    model = Model.read(folder)
    assert (model.id, model.vocabulary, model.positions) == ("some-model", VOCABULARY, 4096)
    read = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert model.sha256() == digest(read)
    (folder / "model-2.safetensors").write_bytes(b"more")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}")
    (folder / "training.bin").write_bytes(b"not weights, where there are safetensors")
    (folder / "heads.json").write_bytes(b"what was measured of it")
    read |= {"model-2.safetensors": b"more", "chat_template.jinja": b"{{ messages }}"}
    assert model.sha256() == digest(read)
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7, "max_position_embeddings": 9}}))
    assert (Model.read(folder).vocabulary, Model.read(folder).positions) == (7, 9)
    for text in ("{}", "[]", "no"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match="lacks vocab_size"):
            Model.read(folder)


def test_the_bundled_model_has_a_path_of_the_checkout() -> None:
    assert Model.read(needle.MODEL).id == "models/needle"


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no suite 'glue'; take one of {', '.join(SUITES)}"):
        suite_named("glue")


def test_weights_that_an_index_names_are_the_weights(tmp_path: Path) -> None:
    """Some repositories have a second copy in another layout."""
    for name in ("model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert len(model_files.weights(tmp_path)) == 3
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}))
    assert [file.name for file in model_files.weights(tmp_path)] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]
    index.write_text("{")
    assert len(model_files.weights(tmp_path)) == 3
