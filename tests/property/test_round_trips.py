"""What a save accepts, a resume takes: odd objects go on after a resume as their unbroken twins.

A case is an optimizer, a schedule, a wrapper and a container, drawn together. ``--round-trips=N``
compares more cases, and ``SEED`` draws others.
"""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from resilient import Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter
from tests.helpers.round_trip import require_same_state
from tests.helpers.seeds import seed_of

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = Emitter(SystemClock(), ())
STEPS, MORE = 3, 4
SEED = seed_of("round trips")


class Net(nn.Module):
    def __init__(self, *, is_sparse=False, dtype=torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=is_sparse, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(4, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype))
        self.head = nn.Linear(3, 1, dtype=dtype)

    def forward(self, numbers):
        return self.head(self.body(self.words(numbers)).tanh())


class Odd(torch.optim.Optimizer):
    """An optimizer whose state has values of many kinds."""

    def __init__(self, params, lr=0.05) -> None:
        super().__init__(params, {"lr": lr, "bounds": (0.0, float("inf")), "note": None})
        self.state["shared"] = {"calls": 0, "seen": [], 1: (2, "three")}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["shared"]["calls"] += 1
        self.state["shared"]["seen"].append(self.state["shared"]["calls"])
        for group in self.param_groups:
            for one in group["params"]:
                self._update(one, group)

    def _update(self, one, group):
        state = self.state[one]
        if not state:
            state["count"] = torch.zeros(1, dtype=torch.int64)
            state["signs"] = torch.zeros_like(one, dtype=torch.bool)
            state["master"] = one.detach().to(torch.float64)
            state["trace"], state["flag"], state["span"] = [], True, (0, 0.0)
            state["word"], state["more"] = "begun", {"kept": [torch.ones(2, dtype=torch.int8)]}
        if one.grad is None:
            return
        grad = one.grad.to_dense() if one.grad.is_sparse else one.grad
        state["count"] += 1
        state["signs"] = grad > 0
        state["master"] -= group["lr"] * grad.double() / (1 + state["count"].item())
        state["trace"].append(float(grad.sum()))
        state["span"] = (int(state["count"]), state["trace"][-1])
        one.copy_(state["master"])


def of_package(module, name, **options):
    def make(params):
        return getattr(pytest.importorskip(module), name)(params, **options)

    return make


def of_torch(name, **options):
    return lambda params: getattr(torch.optim, name)(params, **options)


OPTIMIZERS = {
    "AdamW": of_torch("AdamW", lr=0.05),
    # A schedule changes a rate in place that is a tensor.
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, torch.tensor(0.05), amsgrad=True),
    "SGD": of_torch("SGD", lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": of_torch("Adagrad", lr=0.05),
    "Adadelta": of_torch("Adadelta"),
    "Adamax": of_torch("Adamax", lr=0.05),
    "ASGD": of_torch("ASGD", lr=0.05),
    "NAdam": of_torch("NAdam", lr=0.05),
    "RAdam": of_torch("RAdam", lr=0.05),
    "RMSprop": of_torch("RMSprop", lr=0.05, centered=True, momentum=0.5),
    "Rprop": of_torch("Rprop", lr=0.05),
    "Adafactor": of_torch("Adafactor", lr=0.05),
    "LBFGS": of_torch("LBFGS", lr=0.05, max_iter=2, line_search_fn="strong_wolfe"),
    "SparseAdam": of_torch("SparseAdam", lr=0.05),
    "Odd": Odd,
    "schedulefree": of_package("schedulefree", "AdamWScheduleFree", lr=0.05, warmup_steps=3),
    "schedulefree SGD": of_package("schedulefree", "SGDScheduleFree", lr=0.05),
    "optimi": of_package("optimi", "AdamW", lr=0.05),
    "optimi Lion": of_package("optimi", "Lion", lr=0.05),
    "lion": of_package("lion_pytorch", "Lion", lr=0.05),
}
SLOW = {"torchao": of_package("torchao.optim", "AdamW8bit", lr=0.05)}
"""Compiles its steps."""


class Ramp:
    """A callable object as a factor of the rate, with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 1.0 / (1 + 0.1 * self.calls)


def sequence(optimizer):
    first = lr_scheduler.ConstantLR(optimizer, 0.5, 2)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 5)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[2])


def chain(optimizer):
    first = lr_scheduler.LinearLR(optimizer, total_iters=4)
    return lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(optimizer, 0.9)])


SCHEDULES = {
    "none": None,
    "step": lambda one: lr_scheduler.StepLR(one, 2, 0.5),
    "several steps": lambda one: lr_scheduler.MultiStepLR(one, [1, 4, 4], 0.5),
    "function": lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.9**step),
    "callable object": lambda one: lr_scheduler.LambdaLR(one, Ramp()),
    "product": lambda one: lr_scheduler.MultiplicativeLR(one, Ramp()),
    "sequence": sequence,
    "chain": chain,
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, cooldown=1),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(
        one, 0.1, total_steps=20, cycle_momentum=False
    ),
    "cyclic": lambda one: lr_scheduler.CyclicLR(
        one, 0.01, 0.1, step_size_up=2, cycle_momentum=False
    ),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "polynomial": lambda one: lr_scheduler.PolynomialLR(one, 10, 2.0),
}
GROUPINGS = ("one", "two", "empty first", "empty last", "each")
WRAPPERS = ("none", "average", "ema", "scaler", "generator")

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.complex_numbers(),
    st.sampled_from(
        [torch.float16, torch.complex128, torch.device("cpu"), torch.Size([2]), torch.zeros(0, 2)]
    ),
    st.sampled_from([np.float32(1.5), np.int8(3), np.array(2.0), np.arange(3)[::-1]]),
    st.integers(0, 5).map(lambda size: torch.arange(float(size))),
)
_KEYS = st.one_of(
    st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.floats(), st.tuples(st.integers())
)
CONTAINERS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), st.integers(0, 9), max_size=3).map(Counter),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=8,
)


def groups_of(parameters, grouping):
    if grouping == "two":
        return [{"params": parameters[:2]}, {"params": parameters[2:]}]
    if grouping == "each":
        return [{"params": [one]} for one in parameters]
    filled, empty = {"params": parameters}, {"params": []}
    return {"empty first": [empty, filled], "empty last": [filled, empty]}.get(grouping, [filled])


class Run:
    """The objects of one training."""

    def __init__(self, case, box) -> None:
        kind, schedule, grouping, wrapper = case
        torch.manual_seed(3)
        self.kind, self.box, self.wrapper = kind, {"value": box, "steps": 0}, wrapper
        self.model = Net(is_sparse=kind == "SparseAdam")
        parameters = list(self.model.parameters())
        parameters = parameters[:1] if kind == "SparseAdam" else parameters
        # It takes one group alone.
        grouping = "one" if kind == "LBFGS" else grouping
        build = {**OPTIMIZERS, **SLOW}[kind]
        self.optimizer = build(groups_of(parameters, grouping))
        self.things = {"model": self.model, "optimizer": self.optimizer, "box": self.box}
        self.schedule = SCHEDULES[schedule](self.optimizer) if SCHEDULES[schedule] else None
        if self.schedule is not None:
            self.things["schedule"] = self.schedule
        self.extra = self._extra()
        if self.extra is not None:
            self.things["extra"] = self.extra
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def _extra(self):
        if self.wrapper in ("average", "ema"):
            told = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if self.wrapper == "ema" else {}
            return AveragedModel(self.model, use_buffers=True, **told)
        if self.wrapper == "scaler":
            return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        return torch.Generator().manual_seed(5) if self.wrapper == "generator" else None

    def train(self, steps):
        for _ in range(steps):
            self.step()

    def step(self):
        told = torch.Generator().manual_seed(self.box["steps"])
        drawn = self.extra if self.wrapper == "generator" else told
        numbers = torch.randint(0, 7, (5,), generator=drawn)

        def closure():
            self.optimizer.zero_grad()
            loss = self.model(numbers).square().mean()
            loss.backward()
            return loss

        loss = closure()
        if self.wrapper == "scaler" and self.kind not in ("LBFGS", "SparseAdam"):
            self.extra.scale(torch.ones(1))
            self.extra.step(self.optimizer)
            self.extra.update()
        else:
            self.optimizer.step(closure) if self.kind == "LBFGS" else self.optimizer.step()
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step(float(loss))
        elif self.schedule is not None:
            self.schedule.step()
        if isinstance(self.extra, AveragedModel):
            self.extra.update_parameters(self.model)
        self.box["steps"] += 1

    def state(self):
        found = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        if self.schedule is not None:
            found["schedule"] = self.schedule.state_dict()
        if isinstance(self.extra, AveragedModel):
            found["extra"] = dict(self.extra.state_dict())
        elif self.wrapper == "scaler":
            found["extra"] = self.extra.state_dict()
        return {**found, "box": self.box}


def require_round_trip(case, box):
    twin, first = Run(case, box), Run(case, box)
    twin.train(STEPS + MORE)
    first.train(STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder, emit=QUIET, rng=False, **first.things) as saving:
            saving.resume()
            saving.save(STEPS)
        second = Run(case, None)
        with Checkpointer(folder, emit=QUIET, rng=False, **second.things) as resuming:
            assert resuming.resume() == STEPS
            second.train(MORE)
            # What was resumed can be saved as well.
            resuming.save(STEPS + MORE)
    require_same_state(twin.state(), second.state())


def drawn_from(kinds):
    return st.tuples(
        st.sampled_from(sorted(kinds)),
        st.sampled_from(sorted(SCHEDULES)),
        st.sampled_from(GROUPINGS),
        st.sampled_from(WRAPPERS),
    )


@pytest.mark.slow
def test_drawn_objects_resume_as_unbroken(request):
    runs = request.config.getoption("--round-trips")
    kinds = OPTIMIZERS if runs <= 100 else OPTIMIZERS | SLOW
    print(f"objects are drawn from seed {SEED}; SEED={SEED} repeats them")  # noqa: T201 - for a failure

    @seed(SEED)
    # A case trains for a while, so a failing one is shown as it was drawn.
    @settings(
        max_examples=runs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_from(kinds), CONTAINERS)
    def compare(case, box):
        require_round_trip(case, box)

    compare()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_resumes_as_unbroken(kind):
    at = list(OPTIMIZERS).index(kind)
    schedule = list(SCHEDULES)[at % len(SCHEDULES)]
    case = (kind, schedule, GROUPINGS[at % len(GROUPINGS)], WRAPPERS[at % len(WRAPPERS)])
    require_round_trip(case, {"at": at})
