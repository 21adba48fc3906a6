"""Ranks of a real torchrun, which share nothing and hash strings differently, do what one process does."""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError
from tests.support.models import MODEL_CASES, Block
from tests.support.parity import assert_equal_tensors, fixed_seed, reference_run
from tests.support.real_torchrun import real_torchrun
from tests.support.scripts import adamw_above_noise

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("up_proj", "gate_proj")


def shipped_example(folder: Path) -> None:
    """The first check: the example makes the process group itself."""
    from tests.automodel import test_examples as examples

    shown = examples.run_example(str(folder / "settings.yaml"))
    if dist.get_rank() == 0:
        examples.assert_trained(shown, folder)


def orders_of_sets_differ(_folder: Path) -> None:
    """Or the other checks would prove nothing."""
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, list({*ATTENTION, *MLP}))
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])


def plain_loop(folder: Path) -> None:
    case = MODEL_CASES["transformer"]
    batches = [[case.make_batch(4, torch.Generator().manual_seed(seed))] for seed in range(2)]

    def model_fn() -> nn.Module:
        with fixed_seed(0):
            return case.build()

    def sharded() -> tuple[Any, torch.optim.Optimizer]:
        model = model_fn()
        return fully_shard(model, adamw_above_noise(model), fsdp_unit_modules={Block, nn.Embedding, "torch.nn.Linear"})

    expected = reference_run(model_fn, adamw_above_noise, batches, case.loss)
    model, optimizer = sharded()
    for step, (batch,) in enumerate(batches):
        loss = case.loss(model, batch.part(dist.get_rank(), 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        assert loss.item() / 2 == pytest.approx(expected.losses[step], rel=1e-5)
        assert_equal_tensors(_parameters(model), expected.parameters[step], rtol=1e-4, atol=1e-5)

    extra = {name: nn.Linear(1, 1) for name in {*ATTENTION, *MLP}}  # in another order on the other rank
    save_checkpoint(model, optimizer, folder / "saved", iteration=2, extra=extra)
    again, of_again = sharded()
    load_checkpoint(again, of_again, folder / "saved", extra=extra)
    assert_equal_tensors(_parameters(again), _parameters(model))


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): param.full_tensor().detach()  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    }


def pretrained(name: str, folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel.training import assert_trained_alike, reference, strategy, train

    model = AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=strategy(name), dtype="float32")
    assert_trained_alike(train(model, steps=2), reference("llama", steps=2))


def tensor_parallel_plan(folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel.training import assert_trained_alike, reference, strategy, train

    plan = {f"model.layers.*.self_attn.{layer}": "colwise" for layer in {*ATTENTION}}
    plan |= {f"model.layers.*.mlp.{layer}": "colwise" for layer in {*MLP}}
    plan |= {"model.layers.*.self_attn.o_proj": "rowwise", "model.layers.*.mlp.down_proj": "rowwise"}
    config = strategy("fsdp2", tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=config, tp_size=2)
    assert_trained_alike(train(model, steps=2), reference("llama", steps=2))


def lora(folder: Path) -> None:
    from tests.automodel import test_adapters as adapters

    config = adapters.lora(target_modules={*ATTENTION, *MLP})
    case = ("megatron_fsdp", str(folder / "llama"), config, {}, torch.float32)
    adapters.train_adapters([case], str(folder / "lora"))


def what_differs_is_named(folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel import test_adapters as adapters
    from tests.automodel.training import strategy

    config = adapters.lora(r=2 + dist.get_rank())
    with pytest.raises(ConfigurationError, match=r": peft_config\.r is 2 on rank 0, 3 on rank 1; give"):
        AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=strategy("ddp"), peft_config=config)


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        shipped_example,
        orders_of_sets_differ,
        plain_loop,
        tensor_parallel_plan,
        lora,
        what_differs_is_named,
    )
}
CHECKS |= {f"pretrained {name}": partial(pretrained, name) for name in ("fsdp2", "megatron_fsdp", "ddp")}


def run_checks(folder: Path, names: list[str]) -> None:
    """Be a rank: make some checks and write what each has met, "" for nothing, to a file of this rank."""
    if "shipped_example" not in names:
        dist.init_process_group("gloo")
    met = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                CHECKS[name](folder)
            met[name] = ""
        except Exception:  # noqa: BLE001  the test of this check raises it
            met[name] = traceback.format_exc()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(met), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def met(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What the checks have met, by rank: those that were chosen share one start."""
    from tests.automodel import test_adapters as adapters
    from tests.automodel import test_examples as examples

    folder = tmp_path_factory.mktemp("torchrun")
    examples.write_settings(folder, "fsdp2")
    Path(adapters.save("llama", folder)).rename(folder / "llama")
    chosen = [name for name in CHECKS if any(item.nodeid.endswith(f"does[{name}]") for item in request.session.items)]
    real_torchrun(["-m", "tests.test_torchrun", str(folder), *chosen])
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.full(short=["orders_of_sets_differ", "plain_loop"])
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_of_torchrun_do_what_one_process_does(met: list[dict[str, str]], name: str) -> None:
    assert [of_rank[name] for of_rank in met] == ["", ""]


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), sys.argv[2:])
