"""What clients read from, set on and call of a wrapped model is that of the model inside."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.checkpoint.hf import save_hf
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from tests.clients.test_accelerate import started
from tests.clients.test_fsdp2_trainers import arguments, texts
from tests.support.language_models import build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks
from tests.support.zoo import Holder
from tests.usage.test_hugging_face import UNITS, build_llama

transformers = pytest.importorskip("transformers")


def _models(strategy: int = 3) -> tuple[Any, Any]:
    with fixed_seed(0):
        plain = build_llama()
    with fixed_seed(0):
        return plain.eval(), fully_shard_model(
            build_llama(), fsdp_unit_modules=[UNITS[0]], zero_dp_strategy=strategy
        ).eval()


@on_ranks(1)
def test_attributes_are_those_of_the_model_inside() -> None:
    plain, model = _models()
    assert model.config.to_dict() == plain.config.to_dict()
    assert (model.device, model.dtype, model.num_parameters()) == (plain.device, plain.dtype, plain.num_parameters())
    assert model.get_input_embeddings() is model.module.model.embed_tokens
    assert model.base_model_prefix == "model"
    assert callable(model.generate)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)  # where trainers look for columns
    with pytest.raises(ConfigurationError, match=r"call save_hf\(model, folder\) .* on all ranks, or save_adapter"):
        model.save_pretrained("folder")
    with pytest.raises(AttributeError, match=r"neither MegatronFSDP nor the LlamaForCausalLM .* attribute 'missing'"):
        _ = model.missing
    assert not hasattr(model, "is_last_microbatch")  # absent until it is set, also where the model has one
    model.module.device_of_its_own = model.module.is_last_microbatch = 1
    assert not hasattr(model, "is_last_microbatch")

    model.generation_config = settings = plain.generation_config
    assert model.module.generation_config is settings
    model.device_of_its_own = 2
    assert model.module.device_of_its_own == 2
    model.new_name, model.device = 3, torch.device("cpu")
    assert not hasattr(model.module, "new_name")
    assert isinstance(type(model.module).device, property)
    model.loss_function = own_loss = lambda *_, **__: torch.tensor(5.0)  # a property with a setter
    assert model.module.loss_function is own_loss
    tokens = torch.zeros((1, 4), dtype=torch.int64)
    assert model(input_ids=tokens, labels=tokens).loss.item() == 5.0
    model.base_model_prefix = "other"  # of the class
    assert model.module.base_model_prefix == "other"
    del model.base_model_prefix, model.new_name, model.device_of_its_own
    assert model.base_model_prefix == "model"
    assert not hasattr(model, "new_name")
    assert not hasattr(model, "device_of_its_own")
    model.lm_head = nn.Linear(16, 40)
    assert model.module.lm_head is model.lm_head


@on_ranks(2)
def test_transformers_trainer_takes_it_as_one_process_and_names_the_savers(tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    logs: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        for by_torchrun in (False, True):
            with started(by_torchrun):
                rows = 2 if by_torchrun else 4
                changes = {"fsdp": None, "fsdp_config": None, "save_strategy": "no", "label_names": ["labels"]}
                kind = transformers.TrainingArguments
                given = arguments(kind, f"{folder}/{dist.get_rank()}", per_device_train_batch_size=rows, **changes)
                model = inner = build("llama")
                if by_torchrun:
                    model = fully_shard_model(inner)
                trainer = transformers.Trainer(model, given, train_dataset=texts(), eval_dataset=texts())
                trainer.train()
                logs.append([entry[name] for entry in trainer.state.log_history for name in LOGGED if name in entry])
                logs[-1].append(trainer.evaluate()["eval_loss"])
                savers = [model.save_pretrained, inner.save_pretrained] if by_torchrun else []
                if savers and dist.get_rank() == 0:  # the only rank that would write
                    savers.append(trainer.save_model)
                for save in savers:
                    with pytest.raises((ConfigurationError, ShardOperationError), match=r"save_hf\(model, folder\)"):
                        save(f"{folder}/refused")
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    save_hf(model, f"{folder}/saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float32)
    assert_equal_tensors(dict(again.named_parameters()), model.full_parameters())


LOGGED = ("loss", "grad_norm")


@on_ranks(1)
def test_the_wrapper_keeps_its_own_names() -> None:
    own = dict.fromkeys(("device", "ddp_config", "fsdp_unit_modules", "dist_index"), "own")
    model: Any = fully_shard_model(Holder(up=nn.Linear(2, 2), **own))
    assert {name: getattr(model.module, name) for name in own} == own
    assert model.device == torch.device("cpu")
    assert model.fsdp_unit_modules is None
    model.fsdp_unit_modules = ["a"]
    assert model.module.fsdp_unit_modules == "own"
