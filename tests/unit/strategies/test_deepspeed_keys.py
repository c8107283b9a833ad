"""What DeepSpeed would pass over in its config is refused, and the keys are those that it reads."""

from __future__ import annotations

import pytest

from resilient.errors import ConfigError
from resilient.strategies.deepspeed import refusing_config
from resilient.strategies.deepspeed_config import (
    TOP,
    ZERO,
    DeepSpeedInputs,
    complete,
    find_misspelt_keys,
)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"zero_optimizaton": {"stage": 2}},
            "zero_optimizaton is not a key of it; did you mean `z",
        ),
        ({"gradient_cliping": 5.0}, "did you mean `gradient_clipping`"),
        ({"zero_optimization": {"offload_optimiser": {}}}, "did you mean `offload_optimizer`"),
        ({"zero_optimization": {"qqq": 1}}, "zero_optimization.qqq is not a key of it"),
    ],
)
def test_a_misspelt_key_is_named_with_what_was_meant(config, said):
    (found,) = find_misspelt_keys(config)
    assert said in found


def test_keys_that_are_right_and_those_of_other_tools_are_let_be():
    assert list(find_misspelt_keys(dict.fromkeys(TOP))) == []
    assert list(find_misspelt_keys({"zero_optimization": dict.fromkeys(ZERO)})) == []
    assert (
        list(find_misspelt_keys({"my_launcher": 1, "_comment": "", "zero_optimization": None}))
        == []
    )


class Asked(dict):
    """A config that notes which keys DeepSpeed looks for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)

    def keys(self):
        return self


def test_the_keys_are_those_of_the_deepspeed_that_is_installed(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed")
    asked = Asked(
        train_batch_size=4, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1
    )
    deepspeed.DeepSpeedConfig(asked)
    assert "gradient_clipping" in asked.names
    assert asked.names <= TOP
    fields = deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields
    assert {*fields} | {one.alias for one in fields.values() if one.alias} <= ZERO


def test_all_misspelt_keys_are_refused_at_once():
    config = {"gradient_cliping": 5.0, "zero_optimization": {"stag": 2}}
    with pytest.raises(ConfigError, match=r"`gradient_clipping`\?; zero_optimization.stag is no"):
        complete(config, DeepSpeedInputs({}, 1))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"overlap_comm": "much"}}, "overlap_comm: "),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "devise: "),
        ({"nebula": {}}, "Nebula checkpointing has been removed"),
    ],
)
def test_what_deepspeed_refuses_is_an_error_of_the_configuration(monkeypatch, config, said):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed")
    with pytest.raises(ConfigError, match="the config of DeepSpeed: ") as told, refusing_config():
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, **config})
    assert said in told.value.message


def test_what_is_wrong_with_something_else_stays_as_it_is():
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="of the script's own"), refusing_config():
        raise ValueError("of the script's own")
