"""The README.md beside a model, as huggingface_hub reads it."""

from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from tests.unit.train.models import Noisy, make_trainer

hub = pytest.importorskip("huggingface_hub")


def trained(folder):
    trainer = make_trainer(
        folder / "my-model", max_steps=6, eval_strategy="steps", eval_steps=3, eval_size=9
    )
    trainer.compute_metrics = lambda seen: {
        "accuracy": float((seen[0].argmax(1) == seen[1]).mean())
    }
    trainer.train()
    return trainer


def test_a_card_says_what_was_told_trained_and_measured(tmp_path, repository):
    trainer = trained(tmp_path)
    trainer.create_model_card(
        language="en",
        license="mit",
        tags="mine",
        finetuned_from="org/base",
        tasks="text-classification",
        dataset_tags="imdb",
        dataset="IMDb",
    )
    file = tmp_path / "my-model" / "README.md"
    card = hub.ModelCard.load(file)
    said = card.data.to_dict()
    assert {name: said[name] for name in ("language", "license", "base_model", "datasets")} == {
        "language": ["en"],
        "license": "mit",
        "base_model": "org/base",
        "datasets": ["imdb"],
    }
    assert said["tags"] == ["mine", "generated_from_trainer"]
    last = [one for one in trainer.state.log_history if "eval_loss" in one][-1]
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_type) == ("imdb", "accuracy")
    assert result.metric_value == last["eval_accuracy"]
    assert "# my-model" in card.text
    assert "[org/base](https://huggingface.co/org/base) on the IMDb dataset" in card.text
    assert f"- Loss: {last['eval_loss']:.4f}" in card.text
    assert "- learning_rate: 0.05" in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[2] for row in rows] == ["Step", "---", "3", "6"]


def test_a_card_shows_the_results_of_every_set(tmp_path, repository):
    trainer = make_trainer(tmp_path, optim="sgd", optim_args={"momentum": 0.5}, seed=0)
    trainer.eval_dataset = {"near": Noisy(4), "far": Noisy(6)}
    trainer.evaluate()
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| Training Loss | Epoch | Step | Near Loss | Far Loss |" in card
    assert "- seed: 0" in card
    assert "- Far Loss: " in card


def test_the_tags_of_a_card_that_is_there_stay(tmp_path, repository):
    trainer = make_trainer(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags: [old, generated_from_trainer]\n---\n# Old\n")
    trainer.create_model_card(tags=["new"])
    card = hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["new", "old", "generated_from_trainer"]
    assert "trained from scratch on an unknown dataset" in card.text
    assert "Old" not in card.text


def test_a_card_that_cannot_be_read_is_left_alone(tmp_path, repository):
    (tmp_path / "README.md").write_text("---\n- no mapping\n---\n")
    with pytest.raises(ConfigError, match="is not the YAML of a model card"):
        make_trainer(tmp_path).create_model_card()
    assert (tmp_path / "README.md").read_text() == "---\n- no mapping\n---\n"


def test_only_the_first_of_all_ranks_writes_it(tmp_path, repository):
    trainer = make_trainer(tmp_path)
    trainer.state.is_world_process_zero = False
    trainer.create_model_card()
    assert not (tmp_path / "README.md").exists()
