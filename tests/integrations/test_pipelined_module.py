"""A pipeline as an `nn.Module`: what is asked of it is what the model says."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.integrations.late import LatePipeline
from penstock.integrations.module import PipelinedModule

X = torch.randn(4, 6)


class Net(nn.Sequential):
    """With something of its own."""

    classes = 3

    def layers(self) -> list[nn.Module]:
        return list(self)


def net() -> Net:
    return Net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def module_of(model: nn.Module) -> PipelinedModule:
    return PipelinedModule(model, devices=2, num_microbatches=2, replicas=1, progress=None)


def test_it_has_what_the_model_has() -> None:
    model = net()
    module = module_of(model)
    for of in (
        "named_parameters", "named_buffers", "named_modules", "named_children", "parameters",
        "buffers", "modules", "children",
    ):  # fmt: skip
        pairs = zip(getattr(module, of)(), getattr(model, of)(), strict=True)
        assert all(a is b or (a[1] is b[1] and a[0] == b[0]) for a, b in pairs), of
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.classes == 3
    assert module.layers() == list(model)
    assert module.get_submodule("3") is model[3]
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'classs'"):
        _ = module.classs
    module.eval()
    assert not model.training
    assert not model[1].training
    module.train()
    assert model[1].training
    seen: list[nn.Module] = []
    module.apply(seen.append)
    assert seen == [*model, model]
    module.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    assert "a pipeline that its first call builds" in repr(module)


def test_it_can_be_converted_before_its_first_call() -> None:
    module = module_of(net()).double()
    assert module(X.double()).dtype is torch.float64
    module.to("cpu")
    with pytest.raises(InputError, match="moved or converted after its pipeline was built"):
        module.float()
    state = module.state_dict()
    module.load_state_dict(state)
    with pytest.raises(InputError, match="assign=True"):
        module.load_state_dict(state, assign=True)
    module.close()
    module.float()
    assert module(X).dtype is torch.float32
    module.close()


def test_it_can_not_be_copied_or_nested() -> None:
    module = module_of(net())
    with pytest.raises(TypeError, match=r"copy or save its model, module\.model"):
        copy.deepcopy(module)
    with pytest.raises(InputError, match="called through a pipeline already"):
        module_of(module)


def test_a_closed_one_goes_on_with_the_same_plan() -> None:
    module = module_of(net())
    module(X)
    assert module.late.pipe is not None
    plan, trained = module.late.pipe.plan, module.late.pipe.random_state()
    module.close()
    assert module.late.state()["random_state"] == trained
    module(X)
    assert module.late.pipe.plan == plan
    assert module.late.pipe.random_state()["trained"] == trained["trained"] + 1
    module.close()


def test_a_closed_one_goes_on_with_what_was_asked_for() -> None:
    """Also if another plan is made then."""
    asked = {"schedule": "naive", "num_microbatches": 2, "replicas": 1}
    late = LatePipeline(net(), {"devices": 2, "workers": "threads", "progress": None, **asked})
    for _ in range(2):
        late(X)
        assert late.pipe is not None
        request = late.pipe._running.given.request
        assert {name: getattr(request, name) for name in asked} == asked
        assert late.pipe.plan.schedule == "naive"
        late.close()


def test_calls_are_routed_in_one_thread_only() -> None:
    """In others, such as those of workers, the model is called as it is."""
    model = net()
    late = LatePipeline(model, {"devices": 2, "replicas": 1, "progress": None})
    with late.routed():
        other = threading.Thread(target=model, args=(X,))
        other.start()
        other.join()
        with late.direct():
            model(X)
        assert late.pipe is None
        model(X)
        assert late.pipe is not None
    assert "_compiled_call_impl" not in vars(model)
    late.close()
    model(X)
    assert late.pipe is None
