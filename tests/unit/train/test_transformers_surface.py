"""Each public name of Transformers' training classes has a counterpart or an error with a hint.

The test walks the installed Transformers. A name is public if it has no leading underscore and
Transformers defines it: a class attribute, a dataclass field, an attribute that a method sets on
``self``, or a name of a module. A counterpart takes the parameters of Transformers, with the same
defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from importlib import import_module

import pytest

import resilient
from resilient import trainer_utils
from resilient.errors import ResilientError
from resilient.train import hf_compat
from resilient.train.arguments import arguments as arguments_module
from resilient.train.callbacks import base
from tests.unit.train.models import make_trainer

transformers = pytest.importorskip("transformers")
trainer_callback = import_module("transformers.trainer_callback")
their_utils = import_module("transformers.trainer_utils")

# Names that differ on purpose, and the reason.
OTHER_SIGNATURES = {
    ("Trainer", "metrics_format"): "a method; in Transformers a function without `self`",
    ("Seq2SeqTrainer", "metrics_format"): "a method; in Transformers a function without `self`",
    ("CallbackHandler", "__init__"): "the trainer makes the handler: `trainer.callback_handler`",
    ("TrainerState", "__init__"): "`train_batch_size` is 0, not None, and lists are empty",
    ("TrainingArguments", "__init__"): "defaults are compared as fields",
    ("Seq2SeqTrainingArguments", "__init__"): "defaults are compared as fields",
}
# Fields with another default, and the reason.
OTHER_DEFAULTS = {
    "log_history": "an empty list",
    "output_dir": "Transformers sets the same folder after the constructor",
    "restore_callback_states_from_checkpoint": "always on",
    "stateful_callbacks": "an empty dict",
    "train_batch_size": "an integer in the checkpoint's format",
}
MODULES = (
    *("hf_argparser", "trainer", "trainer_callback", "trainer_pt_utils", "trainer_seq2seq"),
    *("trainer_utils", "training_args", "training_args_seq2seq"),
)


@pytest.fixture
def seq2seq_trainer(tmp_path):
    args = resilient.Seq2SeqTrainingArguments(str(tmp_path / "seq2seq"), use_cpu=True)
    return resilient.Seq2SeqTrainer(make_trainer(tmp_path / "a").model, args)


@pytest.fixture
def pairs(tmp_path, seq2seq_trainer):
    """Return each class of Transformers, our class and an object of it."""
    trainer = make_trainer(tmp_path)
    objects = [
        (transformers.Trainer, trainer),
        (transformers.Seq2SeqTrainer, seq2seq_trainer),
        (transformers.TrainingArguments, resilient.TrainingArguments(str(tmp_path))),
        (transformers.Seq2SeqTrainingArguments, seq2seq_trainer.args),
        (transformers.TrainerState, trainer.state),
        (transformers.TrainerControl, trainer.control),
        (transformers.TrainerCallback, resilient.TrainerCallback()),
        (transformers.DefaultFlowCallback, resilient.DefaultFlowCallback()),
        (transformers.EarlyStoppingCallback, resilient.EarlyStoppingCallback()),
        (transformers.PrinterCallback, resilient.PrinterCallback()),
        (transformers.ProgressCallback, resilient.ProgressCallback()),
        (trainer_callback.CallbackHandler, trainer.callback_handler),
        (their_utils.EvalPrediction, trainer_utils.EvalPrediction(1, 2)),
        (their_utils.RemoveColumnsCollator, trainer_utils.RemoveColumnsCollator(list, ["a"])),
    ]
    assert [theirs.__name__ for theirs, _ in objects] == [type(x).__name__ for _, x in objects]
    return objects


def is_theirs(kind):
    return kind.__module__.startswith("transformers.")


def set_on_self(kind):
    """Return the names that the methods of a class set on ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stores = (x for x in ast.walk(tree) if isinstance(x, ast.Attribute))
    return {
        x.attr
        for x in stores
        if isinstance(x.ctx, ast.Store) and isinstance(x.value, ast.Name) and x.value.id == "self"
    }


def surface(kind):
    """Return the public names of a class of Transformers."""
    kinds = [one for one in kind.__mro__ if is_theirs(one)]
    names = {name for one in kinds for name in {*vars(one), *set_on_self(one)}}
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    return {name for name in names if not name.startswith("_")}


def refusal(thing, name):
    """Return the error that a name raises; None if the name exists."""
    try:
        getattr(thing, name)
    except ResilientError as error:
        return error
    return None


def takes(theirs, ours):
    """Return what differs: a call that Transformers accepts must mean the same here."""
    mine = list(inspect.signature(ours).parameters.values())
    takes_any = {one.kind for one in mine if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    by_name = {one.name: one for one in mine}
    differences = []
    for place, one in enumerate(inspect.signature(theirs).parameters.values()):
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            if one.kind not in takes_any:
                differences.append(f"no {one}")
            continue
        other = by_name.get(one.name)
        if other is None:
            if one.VAR_KEYWORD not in takes_any:
                differences.append(f"no parameter {one.name}")
            continue
        if one.default != other.default:
            differences.append(f"{one.name}={other.default!r} instead of {one.default!r}")
        is_by_place = one.kind is one.POSITIONAL_OR_KEYWORD
        if is_by_place and other.kind is not one.KEYWORD_ONLY and mine.index(other) != place:
            differences.append(f"{one.name} at place {mine.index(other)} instead of {place}")
    return differences


def is_event(name):
    return name in base.EVENTS


def accepts_event(theirs, ours):
    """Return what differs between two handlers of an event: `args`, `state` and `control` by
    position, everything else by name."""
    try:
        signature = inspect.signature(ours)
        signature.bind("self", "args", "state", "control", metrics={}, logs={}, model=None)
    except TypeError as error:
        return [f"{theirs.__name__}: {error}"]
    return []


def test_every_public_name_exists_or_raises_a_hint(pairs):
    unaccounted = []
    for theirs, ours in pairs:
        names = surface(theirs)
        assert len(names) > 4
        for name in sorted(names):
            try:
                error = refusal(ours, name)
            except AttributeError:
                unaccounted.append(f"{theirs.__name__}.{name}")
                continue
            if error is not None and not (error.hint and f".{name}`" in error.message):
                unaccounted.append(f"{theirs.__name__}.{name}: {error}")
    assert unaccounted == []


def test_every_public_method_takes_the_same_arguments(pairs):
    differences = []
    for theirs, ours in pairs:
        kind = type(ours)
        for name in sorted({*surface(theirs), "__init__"}):
            method, own = getattr(theirs, name, None), getattr(kind, name, None)
            if (theirs.__name__, name) in OTHER_SIGNATURES or not inspect.isroutine(method):
                continue
            if not inspect.isroutine(own):
                assert refusal(ours, name), f"{theirs.__name__}.{name} is no method"
                continue
            compare = accepts_event if is_event(name) else takes
            differences += [
                f"{theirs.__name__}.{name}: {difference}" for difference in compare(method, own)
            ]
    assert differences == []


def test_fields_have_the_same_defaults(pairs):
    differences = []
    for theirs, ours in pairs:
        if not dataclasses.is_dataclass(theirs):
            continue
        mine = {field.name: field for field in dataclasses.fields(ours)}
        for field in dataclasses.fields(theirs):
            own = mine.get(field.name)
            if not field.init or own is None:
                continue
            if default(own) != default(field):
                differences.append(field.name)
    assert set(differences) == set(OTHER_DEFAULTS)


def default(field):
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def public_names(module):
    """Return the public names that a module itself defines, and its constants."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ or name.isupper())
        and not name.endswith("_NAME")
    }


@pytest.mark.parametrize("name", public_names(their_utils))
def test_every_name_of_trainer_utils_exists_or_raises_a_hint(name):
    theirs = getattr(their_utils, name)
    error = refusal(trainer_utils, name)
    if error is not None:
        assert isinstance(error, ImportError)
        assert error.hint
        assert f"`{name}`" in error.message
        return
    ours = getattr(trainer_utils, name)
    if not callable(theirs):
        assert ours == theirs
    elif isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        assert {x.name: x.value for x in theirs} == {x.name: x.value for x in ours}
    elif hasattr(theirs, "_fields"):
        assert (ours._fields, ours._field_defaults) == (theirs._fields, theirs._field_defaults)
    else:
        assert takes(theirs, ours) == []


@pytest.mark.parametrize("name", ["OptimizerNames", "ParallelMode"])
def test_enums_of_arguments_are_there(name):
    theirs = getattr(import_module("transformers.training_args"), name)
    assert set(theirs.__members__) <= set(getattr(trainer_utils, name).__members__)


def test_top_level_names_of_training_are_importable_from_here():
    names = {name for module in MODULES for name in transformers._import_structure[module]}
    assert len(names) > 15
    assert {name for name in names if not hasattr(resilient, name)} == set()
    assert names <= set(resilient.__all__)


def test_refused_names_are_names_of_transformers():
    arguments = surface(transformers.Seq2SeqTrainingArguments)
    assert set(hf_compat.NOT_PROVIDED) <= surface(transformers.Trainer)
    assert set(arguments_module.NOT_PROVIDED) <= arguments
    assert set(trainer_utils.NOT_PROVIDED) <= set(public_names(their_utils))


def test_a_refused_import_shows_the_alternative():
    with pytest.raises(ImportError, match="sort_checkpoints") as caught:
        from resilient.trainer_utils import sort_checkpoints  # noqa: F401
    assert caught.value.hint == "run `resilient ckpt ls REPO`"


def test_an_unknown_name_is_an_ordinary_missing_attribute(tmp_path):
    for thing in (make_trainer(tmp_path), resilient.TrainingArguments()):
        with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
            thing.no_such_name  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="no_such_name"):
        trainer_utils.no_such_name  # noqa: B018 - as above
