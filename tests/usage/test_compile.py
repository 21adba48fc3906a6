"""Units under torch.compile: one graph per unit forward with all its operators, no recompilation, right values."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.conftest import RunRanks
from tests.support.arrangements import FLAT, Arrangement
from tests.support.case import FP32, Recording, Run, Scenario, assert_parity, momentum, outcome_of, reference
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import FEATURES, Layer, Ordered, vector_case

HOWS = ("unit in place", "unit in a box", "unit afterwards", "model in place", "model in a box", "model afterwards")
OPERATORS = ["linear", "tanh", "linear", "add"]


class Graphs:
    """A back end that records the operators of each graph that it is given, and runs the graph as it is."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        calls = (node for node in graph.graph.nodes if node.op.startswith("call"))
        self.operators.append([node.target if isinstance(node.target, str) else node.target.__name__ for node in calls])
        return graph.forward


@dataclass(frozen=True)
class Compiled:
    """A setting whose units, or whole model, are compiled before or after sharding."""

    how: str
    backend: Any
    strategy: int = 3
    arrangement: Arrangement = FLAT

    def shard(self, scenario: Scenario, model: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
        what, _, how = self.how.partition(" ")
        if self.how == "model in a box":
            model = torch.compile(model, backend=self.backend)
        elif self.how == "model in place":
            model.compile(backend=self.backend)
        elif self.how == "unit in a box":
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, fullgraph=True, backend=self.backend)
        elif self.how == "unit in place":
            for layer in model.layers:
                layer.compile(fullgraph=True, backend=self.backend)
        sharded, optimizer = fully_shard(
            model, scenario.optimizer(model), fsdp_unit_modules=[Layer], zero_dp_strategy=self.strategy
        )
        if how == "afterwards":
            for each in [sharded] if what == "model" else sharded.module.layers:  # type: ignore[union-attr]
                each.compile(backend=self.backend)  # type: ignore[operator, union-attr]
        return sharded, optimizer


def steps_and_evaluation(run: Run) -> None:
    run.train(0, 1, 2)
    with torch.no_grad():
        run.loss(3)


SCENARIO = Scenario(steps_and_evaluation, vector_case(Ordered), momentum)


def start() -> None:
    torch._dynamo.reset()
    # The compiler looks at `.grad` of every input, which torch itself warns of.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def train(how: str, strategy: int, backend: str) -> tuple[Recording, list[list[str]]]:
    """What the script noted, and the operators of each graph of a unit."""
    start()
    graphs = Graphs()
    run = Run(SCENARIO, Compiled(how, graphs if backend == "records" else backend, strategy))
    assert set(run.model.state_dict()) == {f"module.{name}" for name in Ordered().state_dict()}
    SCENARIO.script(run)
    return outcome_of(run), [operators for operators in graphs.operators if "tanh" in operators]


@pytest.mark.full(short=["unit in place"])
@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_unit_is_one_graph_that_is_compiled_once(run_ranks: RunRanks, how: str) -> None:
    outcomes, graphs = zip(*run_ranks(2, train, how, 3, "records"), strict=True)
    assert graphs == ([OPERATORS] * 2,) * 2  # layers of one class share it; one with gradients and one without
    assert_parity(outcomes, reference(SCENARIO), FP32)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [1, 3])
def test_graphs_with_a_compiled_backward_are_right(run_ranks: RunRanks, strategy: int) -> None:
    outcomes, _ = zip(*run_ranks(2, train, "unit in place", strategy, "aot_eager"), strict=True)
    assert_parity(outcomes, reference(SCENARIO), FP32)


@pytest.mark.unmerged
@on_ranks(2)
def test_compiling_a_unit_again_after_sharding_is_refused() -> None:
    start()
    model, _ = Compiled("unit in place", "eager").shard(SCENARIO, Ordered())
    model.module.layers[2].compile(backend="eager")  # type: ignore[index, union-attr]
    message = refusal(model, torch.ones(2, FEATURES))
    assert message.startswith("unit layers.2 was compiled before and after the model was sharded")
