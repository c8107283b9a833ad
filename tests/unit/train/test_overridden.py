"""What scripts override in Transformers' Trainer is called here, or refused."""

import pytest
from models import make_trainer

from resilient import Trainer
from resilient.errors import ConfigError
from resilient.train.surface.theirs import NOT_CALLED


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_nothing_would_call_is_refused(name):
    assert not hasattr(Trainer, name), "or scripts that override it would break ours"
    kind = type("Mine", (Trainer,), {name: lambda *_given, **_named: None})
    with pytest.raises(ConfigError, match=f"Mine.{name}` would never be called") as caught:
        kind(None)
    assert caught.value.hint == NOT_CALLED[name]


def test_an_override_that_is_called_is_none_of_them(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
