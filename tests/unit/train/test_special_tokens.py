"""Special tokens and the tokenizer of the collator, as in Transformers."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorWithPadding,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.trainer_utils import align_special_tokens as their_alignment

from resilient import Trainer, TrainingArguments
from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.local import LocalStore
from resilient.train.model.artifacts import align_special_tokens


def tokenizer(**tokens):
    words = {word: number for number, word in enumerate(["a", "b", "<e>", "<b>", "<p>"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")),  # noqa: S106 - a word
        **tokens,
    )


EVERY = {"eos_token": "<e>", "bos_token": "<b>", "pad_token": "<p>"}


def tiny(**config):
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **small, **config))


def shown(model):
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    both = (model.config, model.generation_config)
    return [getattr(one, name) for one in both if one is not None for name in names]


@pytest.mark.parametrize("tokens", [EVERY, {"eos_token": "<e>"}, {}])
@pytest.mark.parametrize("config", [{}, {"eos_token_id": [0, 1]}, {"eos_token_id": 2}])
@pytest.mark.parametrize("generation", ["own", "several", "none"])
def test_align_special_tokens_equals_transformers(tokens, config, generation):
    ours, theirs = tiny(**config), tiny(**config)
    for model in (ours, theirs):
        if generation == "none":
            model.generation_config = None
        elif generation == "several":
            model.generation_config = GenerationConfig(eos_token_id=[5, 6], pad_token_id=1)
    changed = align_special_tokens(ours, tokenizer(**tokens))
    their_alignment(theirs, tokenizer(**tokens))
    assert shown(ours) == shown(theirs)
    assert align_special_tokens(ours, tokenizer(**tokens)) == {}
    assert set(changed) <= {f"{name}_id" for name in tokens}


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = [0, 1, index % 2]
        return {"input_ids": ids, "labels": ids}


def trained(folder, **how):
    args = TrainingArguments(str(folder), disable_tqdm=True, max_steps=1, learning_rate=0.0)
    trainer = Trainer(tiny(), args, train_dataset=Texts(), **how)
    trainer.train()
    return trainer


def test_processing_class_tokens_reach_checkpoint_and_model(tmp_path):
    trainer = trained(tmp_path / "run", processing_class=tokenizer(**EVERY))
    assert shown(trainer.model)[:3] == [2, 3, 4]
    trainer.save_model(str(tmp_path / "model"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert [config[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id")] == [2, 3, 4]


def test_collator_tokenizer_saved_without_processing_class(tmp_path):
    trainer = trained(tmp_path / "run", data_collator=DataCollatorWithPadding(tokenizer(**EVERY)))
    # Only the processing class is aligned, as in Transformers.
    assert shown(trainer.model)[:3] != [2, 3, 4]
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "tokenizer.json").exists()
    (saved,) = committed(LocalStore(tmp_path / "run"))
    parts = read_manifest(LocalStore(tmp_path / "run"), saved).parts
    assert "processing_class" in {one.name for one in parts}


def test_model_without_config_is_left_alone(tmp_path):
    assert align_special_tokens(torch.nn.Linear(1, 1), tokenizer(**EVERY)) == {}
    assert align_special_tokens(tiny(), object()) == {}
