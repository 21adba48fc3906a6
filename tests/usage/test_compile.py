"""Units under torch.compile: one graph per unit forward with all its operators, no recompilation, right values."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.zoo import FEATURES, Layer, Ordered, make_batch, vector_loss

How = Literal[
    "unit in place", "unit in a box", "unit afterwards", "model in place", "model in a box", "model afterwards"
]
HOWS: tuple[How, ...] = (
    "unit in place",
    "unit in a box",
    "unit afterwards",
    "model in place",
    "model in a box",
    "model afterwards",
)
OPERATORS = ["linear", "tanh", "linear", "add"]
LAYERS = 4


class Graphs:
    """A back end that records the operators of each graph that it is given, and runs the graph as it is."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        calls = (node for node in graph.graph.nodes if node.op.startswith("call"))
        self.operators.append([node.target if isinstance(node.target, str) else node.target.__name__ for node in calls])
        return graph.forward


@dataclass
class Found:
    """What a compiled model did.

    Attributes:
        graphs: Operators of each graph, compiled in the first step and afterwards.
        pairs: Gradients and weights of three steps, and what they should be.
        names: Parameter names.
    """

    graphs: tuple[list[list[str]], list[list[str]]]
    pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
    names: set[str]


def _start() -> None:
    torch._dynamo.reset()
    # The compiler looks at `.grad` of every input, which torch itself warns of.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def _compile_before(model: nn.Module, how: How, options: dict[str, Any]) -> nn.Module:
    assert isinstance(model, Ordered)
    if how == "unit in place":
        for layer in model.layers:
            layer.compile(fullgraph=True, **options)
    elif how == "unit in a box":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, fullgraph=True, **options)  # type: ignore[assignment]
    elif how == "model in place":
        model.compile(**options)
    elif how == "model in a box":
        return torch.compile(model, **options)  # type: ignore[return-value]
    return model


def _wrap(how: How, strategy: int, options: dict[str, Any]) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _compile_before(Ordered(), how, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    if how == "unit afterwards":
        for layer in wrapped.module.layers:  # type: ignore[union-attr]
            layer.compile(**options)
    elif how == "model afterwards":
        wrapped.compile(**options)
    return wrapped, optimizer


def train(how: How, strategy: int, backend: str) -> Found:
    """Three steps, compiled and sharded on one side, plain on one process on the other."""
    _start()
    graphs = Graphs()
    model, optimizer = _wrap(how, strategy, {"backend": graphs if backend == "records" else backend})
    torch.manual_seed(0)
    plain = Ordered()
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    pairs, first = [], 0
    for step in range(3):
        batch = make_batch(12, torch.Generator().manual_seed(step))
        vector_loss(model, batch.part(dist.get_rank(), dist.get_world_size())).backward()
        vector_loss(plain, batch).backward()
        gradients = {name: grad for name, grad in model.full_gradients().items() if grad is not None}
        pairs.append((gradients, {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        pairs.append((model.full_parameters(), {name: p.detach().clone() for name, p in plain.named_parameters()}))
        if step == 0:
            first = len(graphs.operators)
    with torch.no_grad():
        x = torch.ones(2, FEATURES)
        pairs.append(({"evaluated": model(x)}, {"evaluated": plain(x)}))
    names = set(model.state_dict())
    assert names == {f"module.{name}" for name in plain.state_dict()}
    return Found((graphs.operators[:first], graphs.operators[first:]), pairs, names)


def _check_values(found: Found) -> None:
    for got, wanted in found.pairs:
        assert_equal_tensors(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full(short=["unit in place"])
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_unit_is_one_graph_that_is_compiled_once(run_ranks: RunRanks, how: How) -> None:
    for found in run_ranks(2, train, how, 3, "records"):
        first, later = found.graphs
        units = [operators for operators in first if "tanh" in operators]
        assert units == [OPERATORS]  # layers of one class share it
        assert [operators for operators in later if "tanh" in operators] == [OPERATORS]  # under no_grad
        _check_values(found)


@pytest.mark.full
@pytest.mark.parametrize(("how", "strategy"), [("unit in place", 3), ("unit afterwards", 3), ("unit in place", 1)])
def test_graphs_with_a_compiled_backward_are_right(run_ranks: RunRanks, how: How, strategy: int) -> None:
    for found in run_ranks(2, train, how, strategy, "aot_eager"):
        _check_values(found)


def compile_twice() -> str:
    _start()
    model, _ = _wrap("unit in place", 3, {"backend": "eager"})
    model.module.layers[2].compile(backend="eager")  # type: ignore[index, union-attr]
    with pytest.raises(ConfigurationError) as raised:
        model(torch.ones(2, FEATURES))
    return str(raised.value)


@pytest.mark.unmerged
def test_compiling_a_unit_again_after_sharding_is_refused(run_ranks: RunRanks) -> None:
    (message,) = set(run_ranks(2, compile_twice))
    assert message.startswith("unit layers.2 was compiled before and after the model was sharded")


class Failing(Layer):
    """Fails while it is told to."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("told to fail")
        return super().forward(x)


@on_ranks(2)
def test_a_compiled_unit_that_fails_leaves_the_model_usable() -> None:
    _start()
    torch.manual_seed(0)
    plain, model = Ordered(), Ordered()
    model.layers[1] = Failing()
    model.load_state_dict(plain.state_dict())
    model.layers[1].compile(backend="eager")
    wrapped = fully_shard_model(model, fsdp_unit_modules=[Layer])
    x = torch.ones(2, FEATURES)
    with pytest.raises(Exception, match="told to fail"):
        wrapped(x)
    wrapped.reset()
    model.layers[1].fails = False  # type: ignore[assignment]
    assert (wrapped(x) - plain(x)).abs().max().item() < 1e-6
