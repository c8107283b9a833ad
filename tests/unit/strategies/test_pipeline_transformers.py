"""Models of Transformers and PEFT in stages, as they are: nothing is told of where they are cut."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from resilient.errors import ConfigError
from resilient.strategies.activation_checkpointing import ActivationCheckpointing, recompute
from tests.helpers.stages import run_stages

IDS = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS, "attention_mask": (IDS > 5).long()}


def llama(*, tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=4,
        n_head=2,
        n_positions=16,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def recomputing():
    model = llama().train()
    recompute(model, ActivationCheckpointing(options={"use_reentrant": False}))
    return model


def adapted():
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(llama(), config)


def gradients(model):
    return {n: one.grad for n, one in model.named_parameters() if one.grad is not None}


# PEFT asks a model by a name that Transformers has deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [llama, gpt2, recomputing, adapted])
@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_of_a_model_compute_what_it_computes(make, ranks):
    model = make()
    if make is not recomputing:
        model.eval()
    made, sent = run_stages(model, [], lambda tree: tree(**BATCH), BATCH, ranks)
    assert len(sent) == ranks - 1
    made.loss.backward()
    found = gradients(model)
    model.zero_grad()
    expected = model(**BATCH)
    expected.loss.backward()
    assert torch.equal(made.logits, expected.logits)
    assert found.keys() == gradients(model).keys()
    assert all(torch.equal(found[name], one) for name, one in gradients(model).items())


def test_a_model_whose_head_is_its_embedding_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="tied to a parameter of another stage") as caught:
        run_stages(llama(tied=True), [], lambda tree: tree(**BATCH), BATCH, 2)
    assert "tie_word_embeddings=False" in str(caught.value.hint)
