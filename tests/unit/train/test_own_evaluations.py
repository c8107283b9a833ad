"""Evaluation loaders that a script makes itself: what they give is weighed as it comes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from resilient.distributed.launch_env import World
from resilient.errors import ConfigError
from resilient.train.evaluation.custom_loader import counted, samples_of
from resilient.train.trainer import Trainer
from tests.unit.train.models import Noisy, make_trainer


class Batches:
    """No loader of torch's."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        data, first = Noisy(sum(self.sizes), augment=False), 0
        for size in self.sizes:
            yield {"x": data.x[first : first + size], "labels": data.y[first : first + size]}
            first += size


def own(folder, make, **options):
    class Own(Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return make(self, eval_dataset)

    return make_trainer(folder, kind=Own, per_device_eval_batch_size=8, **options)


def plain(size, **options):
    return lambda self, _: DataLoader(
        Noisy(20, augment=False), batch_size=size, collate_fn=self.data_collator, **options
    )


@pytest.mark.parametrize(
    "make",
    [plain(3), plain(20), plain(8, shuffle=True), lambda *_: Batches([7, 1, 12])],
    ids=["smaller", "whole", "shuffled", "uneven"],
)
def test_the_loss_is_the_mean_over_what_came(tmp_path, repository, make):
    true = make_trainer(tmp_path, eval_size=20).evaluate()["eval_loss"]
    trainer = own(tmp_path, make)
    rows = []
    trainer.compute_metrics = lambda seen: {"rows": rows.append(seen.label_ids) or len(seen[0])}
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(true, rel=1e-6)
    assert metrics["eval_rows"] == len(rows[0]) == 20
    assert sorted(rows[0].tolist()) == sorted(Noisy(20).y.tolist())


def test_a_run_evaluates_by_its_own_loader_without_a_dataset(tmp_path, repository):
    trainer = own(tmp_path, plain(3), max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len([one for one in trainer.state.log_history if "eval_loss" in one]) == 2


def test_prediction_has_a_loader_of_its_own(tmp_path, repository):
    class Own(Trainer):
        def get_test_dataloader(self, test_dataset):
            return DataLoader(test_dataset, batch_size=3, collate_fn=self.data_collator)

        def get_eval_dataloader(self, eval_dataset=None):
            raise AssertionError

    data = Noisy(7, augment=False)
    output = make_trainer(tmp_path, kind=Own).predict(data)
    assert output.label_ids.tolist() == data.y.tolist()
    assert len(output.predictions) == 7


def test_several_ranks_share_a_plain_loader_and_refuse_another():
    data, worlds = Noisy(20, augment=False), [World(rank, 3) for rank in range(3)]
    seen = [
        batch["label"].tolist()
        for world in worlds
        for batch in counted(DataLoader(data, batch_size=6), world, in_step=False)
    ]
    assert sorted(map(len, seen)) == [2, 6, 6, 6]
    assert sorted(one for batch in seen for one in batch) == sorted(data.y.tolist())
    for other in (DataLoader(data, batch_size=6, shuffle=True), Batches([4, 4])):
        with pytest.raises(ConfigError, match="each of 3 ranks the same samples"):
            counted(other, worlds[0], in_step=False)


def test_the_samples_of_a_batch_are_found_in_what_it_is_made_of():
    assert samples_of({"meta": {}, "x": (torch.tensor(1.0), torch.zeros(5, 2))}) == 5
    assert samples_of(["a", "b"]) == 2
    assert samples_of([torch.zeros(4), torch.zeros(4, 2)]) == 4
    assert samples_of({"n": 3, "name": "abc"}) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric_for_best_model": "loss"}, "`metric_for_best_model` is `eval_loss`"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "`metric_for_best_model` is `eval_loss`"),
    ],
)
def test_a_metric_that_no_dataset_of_a_dict_gives_is_refused_at_the_start(
    tmp_path, repository, options, said
):
    given = {"eval_strategy": "epoch", **options}
    trainer = make_trainer(tmp_path, **given)
    trainer.eval_dataset = {"a": Noisy(4), "b": Noisy(6)}
    with pytest.raises(ConfigError, match=said):
        trainer.train()
    assert trainer.state.global_step == 0
    given["metric_for_best_model"] = "b_loss"
    trainer = make_trainer(tmp_path, **given, max_steps=13)
    trainer.eval_dataset = {"a": Noisy(4), "b": Noisy(6)}
    trainer.train()
    assert trainer.state.best_metric == trainer.state.log_history[-2]["eval_b_loss"]
