"""NEFTune: noise on embeddings, from the random stream that checkpoints hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.errors import ConfigError
from resilient.train import session
from resilient.train.arguments import TrainingArguments
from resilient.train.model.transforms import input_embeddings, noisy_embeddings
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import MemoryRepository, equal
from tests.unit.train.models import DieAfter, Dies
from tests.unit.train.test_losses import trained
from tests.unit.train.test_resume import comparable
from tests.unit.train.token_models import Mean, Sentences


def test_the_noise_equals_that_of_transformers_to_the_bit():
    theirs = pytest.importorskip("transformers.integrations.neftune").neftune_post_forward_hook
    model, ids = Mean(), Sentences(3).ids
    model.embed.neftune_noise_alpha = 5.0
    handle = model.embed.register_forward_hook(theirs)
    torch.manual_seed(0)
    expected = model.embed(ids)
    handle.remove()
    torch.manual_seed(0)
    with noisy_embeddings(model, 5.0):
        assert torch.equal(model.embed(ids), expected)
        model.eval()
        assert torch.equal(model.embed(ids), nn.functional.embedding(ids, model.embed.weight))
    model.train()
    assert torch.equal(model.embed(ids), nn.functional.embedding(ids, model.embed.weight))


def test_training_has_it_and_nothing_of_it_stays(tmp_path, repository):
    plain, _ = trained(tmp_path, Mean(), max_steps=3)
    model = Mean()
    noisy, _ = trained(tmp_path, model, max_steps=3, neftune_noise_alpha=5)
    assert not equal(plain, noisy)
    assert not model.embed._forward_hooks


def through(folder, deaths):
    repository = MemoryRepository()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_engine", repository.open)
        for step in [*deaths, None]:
            callbacks = [] if step is None else [DieAfter(step)]
            args = TrainingArguments(
                str(folder),
                max_steps=8,
                save_steps=2,
                neftune_noise_alpha=5,
                per_device_train_batch_size=2,
                disable_tqdm=True,
            )
            trainer = Trainer(Mean(), args, train_dataset=Sentences(), callbacks=callbacks)
            if step is None:
                trainer.train()
            else:
                with pytest.raises(Dies):
                    trainer.train()
    return comparable(repository)


def test_a_resumed_run_has_the_same_noise(tmp_path):
    assert equal(through(tmp_path, []), through(tmp_path, [3, 5]))


def test_the_hook_is_gone_when_training_fails(tmp_path, repository):
    model = Mean()
    args = TrainingArguments(str(tmp_path), neftune_noise_alpha=5, disable_tqdm=True)
    with pytest.raises(Dies):
        Trainer(model, args, train_dataset=Sentences(), callbacks=[DieAfter(1)]).train()
    assert not model.embed._forward_hooks


def test_a_model_must_say_which_embeddings_are_its_inputs():
    one = nn.Sequential(nn.Embedding(3, 2))
    assert input_embeddings(one) is one[0]
    with pytest.raises(ConfigError, match="which of 2 nn"):
        input_embeddings(nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2)))
    with (
        noisy_embeddings(one, 1.0),
        pytest.raises(ConfigError, match=r"shape \(samples, length, size\)"),
    ):
        one[0](torch.zeros(2, dtype=torch.int64))
