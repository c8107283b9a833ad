"""PreTrainedModel, tied weights, tokenizers and PEFT adapters: saved, resumed, loaded elsewhere."""

from __future__ import annotations

import json

import pytest
import torch

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.arguments import TrainingArguments
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.exporter import export_checkpoint
from tests.helpers.hf_runs import BASE, Recorder, Tokens, gpt2, stack
from tests.unit.train.models import DieAfter, Dies, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers and PEFT
WORDS = {"<pad>": 0, "<unk>": 1, "one": 2, "two": 3, "three": 4}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "pad_token": "<pad>"}
    made = Tokenizer(WordLevel(WORDS, unk_token="<unk>"))  # noqa: S106 - no password
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def adapted():
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    torch.manual_seed(5)
    wanted = LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, wanted)


def make(folder, model, *, callbacks=(), kind=Recorder, **options):
    steps = {"max_steps": 8, "save_steps": 4, "output_dir": str(folder)}
    own = {name: options.pop(name) for name in ("processing_class", "tokenizer") if name in options}
    args = TrainingArguments(**{**BASE, **steps, **options})
    return kind(
        model, args, train_dataset=Tokens(40, 1), data_collator=stack, callbacks=callbacks, **own
    )


@pytest.mark.parametrize("model_of", [gpt2, adapted], ids=["tied", "lora"])
def test_a_run_that_dies_ends_as_one_that_did_not(tmp_path, model_of):
    whole = make(tmp_path / "whole", model_of())
    whole.train()
    with pytest.raises(Dies):
        make(tmp_path / "out", model_of(), callbacks=[DieAfter(6)]).train()
    back = make(tmp_path / "out", model_of())
    back.train()
    assert back.seen == whole.seen[4:]
    ended, other = whole.model.state_dict(), back.model.state_dict()
    assert all(torch.equal(one, other[name]) for name, one in ended.items())


def test_tied_weights_are_stored_once_and_stay_one(tmp_path):
    trainer = make(tmp_path, gpt2())
    trainer.train()
    again = make(tmp_path, gpt2(), max_steps=9)
    again.train()
    assert again.model.lm_head.weight is again.model.transformer.wte.weight
    manifest = json.loads((tmp_path / "checkpoint-8-g1" / "manifest.json").read_text())
    named = [one["name"] for one in manifest["tensors"] if one["name"].startswith("model/")]
    assert len([one for one in named if "wte" in one or "lm_head" in one]) == 1


def test_what_save_model_wrote_is_read_by_from_pretrained(tmp_path, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make(tmp_path / "run", gpt2(), processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = trainer.model.state_dict()
    assert all(torch.equal(one, own[name]) for name, one in loaded.state_dict().items())
    read = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert read("one two four")["input_ids"] == [2, 3, 1]
    arguments = json.loads((tmp_path / "model" / "training_args.json").read_text())
    assert arguments["learning_rate"] == BASE["learning_rate"]
    assert not list((tmp_path / "model").glob("*.bin"))


def test_every_checkpoint_holds_the_tokenizer(tmp_path, tokenizer):
    make(tmp_path / "run", gpt2(), processing_class=tokenizer).train()
    export_checkpoint(str(tmp_path / "run"), tmp_path / "out", "step:4")
    read = type(tokenizer).from_pretrained(tmp_path / "out")
    assert read("three two")["input_ids"] == [4, 3]


def test_a_tokenizer_pads_batches_and_has_an_older_name(tmp_path, tokenizer):
    with pytest.warns(FutureWarning, match="now called `processing_class`"):
        trainer = make_trainer(
            tmp_path, kind=lambda *a, **k: Recorder(*a, tokenizer=tokenizer, **k)
        )
    assert trainer.processing_class is tokenizer
    batch = trainer.data_collator([{"input_ids": [2]}, {"input_ids": [2, 3]}])
    assert batch["input_ids"].tolist() == [[2, 0], [2, 3]]
    with pytest.raises(ConfigError, match="use one of them"):
        make(tmp_path, gpt2(), processing_class=tokenizer, tokenizer=tokenizer)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="has no save_pretrained"):
        make(tmp_path, gpt2(), processing_class="gpt2").train()


def test_the_frozen_base_stays_as_it_was(tmp_path):
    before = {name: one.clone() for name, one in gpt2().state_dict().items()}
    trainer = make(tmp_path, adapted())
    trainer.train()
    base = trainer.model.get_base_model().state_dict()
    plain = {name.replace(".base_layer", ""): one for name, one in base.items()}
    assert all(torch.equal(one, plain[name]) for name, one in before.items())
    early, late = (
        {
            one["name"].removeprefix("model/base_model.model."): one["regions"][0]["digest"]
            for one in json.loads((tmp_path / name / "manifest.json").read_text())["tensors"]
        }
        for name in ("checkpoint-4-g1", "checkpoint-8-g1")
    )
    frozen = "transformer.h.0.attn.c_attn.base_layer.weight"
    trained = "transformer.h.0.attn.c_attn.lora_B.default.weight"
    assert early[frozen] == late[frozen]
    assert early[trained] != late[trained]


def test_only_the_adapter_is_exported_and_it_comes_back(tmp_path):
    from peft import PeftModel

    whole = make(tmp_path / "run", adapted(), random_numbers="transformers")
    whole.train()
    out = tmp_path / "checkpoint-4"
    export_checkpoint(str(tmp_path / "run"), out, "step:4")
    assert not (out / "model.safetensors").exists()
    weights = TransformersCheckpoint(out).weights()
    assert all("lora_" in name and "default" not in name for name in weights)
    loaded = PeftModel.from_pretrained(gpt2(), out).state_dict()
    key = next(name for name in loaded if "lora_B" in name)
    assert torch.equal(loaded[key], weights[key.replace(".default", "")])
    back = make(tmp_path / "back", adapted())
    back.train(out)
    assert back.seen == whole.seen[4:]


def test_stock_transformers_goes_on_with_the_adapter(tmp_path):
    from transformers import Trainer as Stock
    from transformers import TrainingArguments as Theirs

    whole = make(tmp_path / "run", adapted(), random_numbers="transformers")
    whole.train()
    out = tmp_path / "there" / "checkpoint-4"
    export_checkpoint(str(tmp_path / "run"), out, "step:4")
    said = {**BASE, "max_steps": 8, "output_dir": str(out.parent), "report_to": "none"}
    model, data = adapted(), Tokens(40, 1)

    def drop_index(samples):
        batch = stack(samples)
        batch.pop("idx")
        return batch

    trainer = Stock(model, Theirs(**said), train_dataset=data, data_collator=drop_index)
    trainer.train(resume_from_checkpoint=str(out))
    ended = model.state_dict()
    assert all(torch.equal(one, ended[name]) for name, one in whole.model.state_dict().items())


def test_what_is_trained_beside_an_adapter_is_not_left_behind(tmp_path):
    model = adapted()
    model.get_base_model().transformer.ln_f.weight.requires_grad_(True)
    make(tmp_path / "run", model, max_steps=2, save_steps=2).train()
    with pytest.raises(IncompatibleCheckpoint, match=r"ln_f\.weight` is trained but not part"):
        export_checkpoint(str(tmp_path / "run"), tmp_path / "out")
