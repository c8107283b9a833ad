"""torch_compile: the model runs compiled, keeps its names and resumes to the bit."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._inductor import cpp_builder, exc

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.model import transforms
from tests.unit.train.fakes import equal
from tests.unit.train.models import Net, make_trainer
from tests.unit.train.test_resume import comparable, train_through

OPTIONS = {
    "torch_compile_backend": "aot_eager",
    "max_steps": 6,
    "save_steps": 2,
    "dataloader_drop_last": True,
}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_a_compiled_run_resumes_bit_for_bit_under_its_plain_names(tmp_path):
    _, kept, _ = train_through(tmp_path, [], **OPTIONS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    broken, repaired, _ = train_through(tmp_path, [3], **OPTIONS)
    assert equal(comparable(kept)[1], comparable(repaired)[1])
    assert comparable(kept)[1]["model"].keys() == Net().state_dict().keys()
    assert broken.model._compiled_call_impl is not None


def test_nothing_is_compiled_unless_asked(tmp_path, repository):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    assert trainer.model._compiled_call_impl is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"torch_compile_backend": "inducter"}, "did you mean `inductor`"),
        ({"torch_compile_mode": "max-autotun"}, "did you mean `max-autotune`"),
        (
            {"torch_compile_backend": "eager", "torch_compile_mode": "default"},
            "belongs to inductor",
        ),
    ],
)
def test_what_torch_does_not_have_is_refused_before_training(options, said):
    with pytest.raises(ConfigError, match=said):
        transforms.compile_in_place(TrainingArguments(**options), Net())


def test_inductor_without_a_compiler_is_refused_with_what_to_do(monkeypatch):
    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler"):
        transforms.compile_in_place(TrainingArguments(torch_compile=True), Net())
